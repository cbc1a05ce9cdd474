"""Which processes PID 1 kills with the tree of a job."""

from __future__ import annotations

import pytest

from ringfence.guest.launch import pid1
from ringfence.shared.proc import ProcessStat

SPAWNER, SERVER, NEIGHBOUR, JOB = 2, 10, 20, 30
TICK = 5000


def process(parent: int, session: int, started: int) -> ProcessStat:
    fields = ["S", str(parent), "0", str(session), *["0"] * 2, "0", *["0"] * 10, "1", "0", str(started)]
    return ProcessStat(f"1 (name) {' '.join(fields)}".encode())


LIVING = {
    1: process(0, 1, 1),
    SPAWNER: process(1, SPAWNER, 2),
    SERVER: process(1, 9, TICK),  # an earlier job, session 9, left it running; it began in the job's tick
    SERVER + 1: process(SERVER, 9, TICK + 3),
    NEIGHBOUR: process(SPAWNER, NEIGHBOUR, TICK + 1),
    JOB: process(SPAWNER, JOB, TICK),
    JOB + 1: process(1, JOB, TICK),  # a daemon of the job
    JOB + 2: process(1, JOB + 2, TICK),  # a daemon with a session of its own
}


@pytest.fixture(autouse=True)
def living(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pid1, "_living", lambda: LIVING)


def victims(*sessions: int) -> set[int]:
    return pid1._victims({"alone": [SPAWNER], "trees": [NEIGHBOUR], "since": TICK, "sessions": list(sessions)})


def test_a_process_of_a_job_that_ended_in_the_same_tick_is_spared() -> None:
    assert victims(9) == {JOB, JOB + 1, JOB + 2}


def test_without_that_session_it_is_taken_for_the_jobs_own() -> None:
    assert victims() == {SERVER, SERVER + 1, JOB, JOB + 1, JOB + 2}


def test_the_number_of_an_ended_session_spares_no_process_that_began_later() -> None:
    """A guest may fork until one of its processes gets the number of a session that has no process left (D11)."""
    LIVING[SERVER].started += 1
    try:
        assert victims(9) == {SERVER, SERVER + 1, JOB, JOB + 1, JOB + 2}
    finally:
        LIVING[SERVER].started -= 1
