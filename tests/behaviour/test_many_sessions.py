"""Many sessions at once, each with a state, in little memory; nothing is left when the host process is killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import leftovers
import weaker
from behaviour import host
from behaviour.host import Host
from programs import read_program
from ringfence import Limits, Policy, Sandbox

MANY = 200
MOST_MIB = 6.0


def pss_kib(pid: int) -> int:
    for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if row.startswith("Pss:"):
            return int(row.split()[1])
    return 0


def ours() -> set[int]:
    """Return the library processes below this process."""
    return {process.pid for process in leftovers.descendants()}


def test_two_hundred_sessions_hold_their_state_in_six_mebibytes_each() -> None:
    limits = Limits(processes=300, memory="2G", timeout_s=30)
    with Sandbox(policy=Policy(limits=limits)) as box:
        box.run("1").check()
        before = ours()
        sessions = [box.session(f"s{n}") for n in range(MANY)]
        for n, session in enumerate(sessions):
            session.run(f"x = {n}; data = list(range(100))").check()
        new = ours() - before
        used = sum(pss_kib(pid) for pid in new) / 1024 / MANY
        assert [session.run("x").value for session in sessions] == [str(n) for n in range(MANY)]
        assert len(new) >= MANY
        assert used <= MOST_MIB, f"{used:.1f} MiB each"


LIVE = read_program("behaviour/many_sessions_live.py")


@weaker.needs_node
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_the_host_is_killed_with_live_sessions_and_terminals_and_nothing_is_left(delay_s: float) -> None:
    with Host(LIVE) as process:
        assert process.line() == "go"
        time.sleep(delay_s)
        mine = host.belongings(process.pid)
        assert len(mine.processes) >= 10
        process.kill()
    guests = host.Belongings(mine.processes, frozenset(), frozenset())
    assert host.wait_until_gone(guests) == []
    host.sweep()
    assert host.wait_until_gone(host.Belongings(frozenset(), mine.groups, mine.uids), within_s=1) == []
