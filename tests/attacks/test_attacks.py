"""Every escape attempt, with and without the control, as this user and as an ordinary user.

How the control could be bypassed is the attack itself; that the test would notice is its arm without the control, which
must succeed for a verdict of "held".
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from accounts import OrdinaryUser
from ringfence_attacks import Attack, Row, arena, catalogue, harness, second_process, tracer
from ringfence_attacks.case import BARE, HOST_CODE, READ, Seen, attack
from ringfence_attacks.controls import PLAN
from ringfence_attacks.guest_prelude import PRELUDE
from ringfence_attacks.harness import run_one

LETTERS = "ABCDEFGHIJKLO"
_AS_USER = """
import json, warnings
warnings.simplefilter("ignore")
from ringfence_attacks import run
print(json.dumps(run().to_dict()))
"""


@pytest.mark.parametrize("case", [pytest.param(a, id=a.id, marks=pytest.mark.attack(a.id)) for a in catalogue()])
def test_an_attack_succeeds_without_its_control_and_fails_with_it(case: Attack) -> None:
    row = run_one(case)
    assert (row.verdict in ("held", "not applicable"), row) == (True, row)


_VENV = "import sys, venv; venv.create(sys.argv[1], system_site_packages=True, symlinks=True)"


def _files(top: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in top.rglob("*")}


@pytest.mark.timeout(240)
@pytest.mark.skipif(os.geteuid() != 0, reason="the test above already runs as an ordinary user")
def test_every_attack_holds_as_an_ordinary_user(ordinary_user: OrdinaryUser) -> None:
    """The user may change the Python that runs, and no arm of any attack changes it."""
    place = ordinary_user.home / f"rf-tests-{os.getpid()}"
    try:
        made = ordinary_user.run(_VENV, str(place))
        assert made.returncode == 0, made.stderr
        before = _files(place)
        done = ordinary_user._replace(python=f"{place}/bin/python").run(_AS_USER, timeout_s=230)
        assert done.returncode == 0, done.stderr
        assert _files(place) == before
    finally:
        shutil.rmtree(place, ignore_errors=True)
    matrix = json.loads(done.stdout)
    open_rows = [row for row in matrix["attacks"] if row["verdict"] not in ("held", "not applicable")]
    assert (matrix["user"], open_rows) == ("user", [])
    assert matrix["counts"]["held"] >= 100


_LIES = """
_true_tell = tell
def tell(**said):
    _true_tell(**{{**said, "met": {lie!r}}} if "met" in said else said)
"""
# What a guest could otherwise claim; the others are judged by a canary, a file, a listener or a process.
_WITNESSED = ["A05", "A09", "A17", "B02", "B12", "B15", "D05", "D05-discipline", "D09", "D12", "D13"]


@pytest.mark.parametrize("lie", ["ok", "EPERM"])
@pytest.mark.parametrize("name", _WITNESSED)
def test_a_guest_that_lies_about_what_it_met_changes_no_verdict(
    name: str, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "PRELUDE", PRELUDE + _LIES.format(lie=lie))
    case = next(each for each in catalogue() if each.id == name)
    assert run_one(case).verdict in ("held", "not applicable")


def test_there_are_a_hundred_attacks_of_every_letter() -> None:
    ids = [each.id for each in catalogue()]
    assert len(ids) == len(set(ids))
    numbered = {name.partition("-")[0] for name in ids}
    assert {name[0] for name in numbered} == set(LETTERS)
    assert len(numbered) >= 100


def test_every_attack_names_a_control_that_can_be_left_out() -> None:
    known = {*PLAN, BARE, HOST_CODE}
    strange = {each.id: each.off + each.behind for each in catalogue() if not known.issuperset(each.off + each.behind)}
    assert strange == {}
    assert [each.id for each in catalogue() if not each.off and each.change is None] == []


@pytest.mark.parametrize(
    ("off", "on", "verdict"),
    [
        (True, False, "held"),
        (True, True, "got through"),
        (False, False, "inconclusive"),
        (False, True, "got through"),
    ],
)
def test_a_verdict_needs_an_arm_that_succeeds_and_one_that_fails(off: bool, on: bool, verdict: str) -> None:
    case = attack("A01", "a made-up one", READ, off=HOST_CODE)(lambda arm: Seen(off if arm.off else on, "seen"))
    assert run_one(case).verdict == verdict


def test_an_arm_that_breaks_is_inconclusive_and_says_why() -> None:
    def play(arm: object) -> Seen:
        raise OSError(5, "broken on purpose")

    row = run_one(attack("A01", "a made-up one", READ, off=HOST_CODE)(play))
    assert (row.verdict, row.arms["off"]) == ("inconclusive", "broken: OSError: [Errno 5] broken on purpose")


def test_a_second_fence_that_does_not_hold_alone_is_inconclusive() -> None:
    case = attack("A01", "a made-up one", READ, off="pin", behind="protect")(lambda arm: Seen(arm.name != "on", "seen"))
    row = run_one(case)
    assert (row.verdict, row.succeeded) == ("inconclusive", ("off", "alone"))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name a few quick attacks, as many as are worth a second process."""
    found = [each.id for each in catalogue() if each.id.startswith(("E0", "A0"))][:16]
    monkeypatch.setattr(harness, "_MANY", len(found))
    return found


def test_two_processes_give_the_rows_that_one_gives(names: list[str]) -> None:
    """The rows are in the catalogue's order, whichever process ran them; cases that measure are run alone."""
    told: list[tuple[int, int, str]] = []
    whole = harness.run(names, progress=lambda *seen: told.append(seen))
    assert [row.id for row in whole.rows] == names
    assert [row for row in whole.rows if row.verdict not in ("held", "not applicable")] == []
    assert {total for _, total, _ in told} == {len(names)}
    assert 0 < len(told) < len(names)


def test_what_a_second_process_owed_when_it_died_is_run_here(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process is killed after its first answer, and may then be in the middle of another attack."""
    before = set(Path("/var/tmp").glob("ringfence-attack-*"))
    whole = second_process.Second.answer

    def answer(self: second_process.Second) -> Row | None:
        row = whole(self)
        self._process.kill()
        self._process.wait()
        return row

    monkeypatch.setattr(second_process.Second, "answer", answer)
    found = harness.run(names)
    assert [row.id for row in found.rows] == names
    assert {row.verdict for row in found.rows} <= {"held", "not applicable"}
    assert set(Path("/var/tmp").glob("ringfence-attack-*")) <= before


def test_a_traced_process_that_does_nothing_is_killed_and_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process left to the tracer would keep its sandbox from ending, and Docker from answering."""
    monkeypatch.setattr(tracer, "_DEADLINE_S", 0.3)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        with pytest.raises(TimeoutError), tracer._Tracer(process.pid) as tracing:
            tracing.follow([])
        assert not os.path.exists(f"/proc/{process.pid}")
