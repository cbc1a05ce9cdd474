"""Run attacks: every arm of every case, then the verdict. An attack that fails without its control proves nothing."""

from __future__ import annotations

import os
import time
from collections import deque

from ringfence.errors import UnsupportedError
from ringfence_attacks.arena import Arm
from ringfence_attacks.case import NotApplicable, Seen
from ringfence_attacks.cases import all_cases
from ringfence_attacks.report import Matrix, Row
from ringfence_attacks.witnesses import remove_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ringfence_attacks.case import ArmName, Attack
    from ringfence_attacks.report import Verdict

    Progress = Callable[[int, int, str], None]


ENGINES = ("container", "gvisor")  # backends whose sandboxes an engine makes
_MANY = 40  # from this number of attacks on, a second process saves time


def catalogue(backend: str | None = None) -> tuple[Attack, ...]:
    """Return every attack on a backend, sorted by id; without a name, on the process backend."""
    if backend in ENGINES:
        from ringfence_attacks import engine_harness

        return engine_harness.catalogue(backend)
    return tuple(sorted(all_cases(), key=lambda each: each.id))


def run(ids: Iterable[str] = (), *, backend: str | None = None, progress: Progress | None = None) -> Matrix:
    """Run the named attacks, or all. `progress` gets the number done, the number chosen, and the next attack's id.

    Raises UnsupportedError for a backend that has no attacks here, LookupError for an unknown id.
    """
    try:
        if backend in ENGINES:
            from ringfence_attacks import engine_harness

            return engine_harness.run(backend, list(ids), progress)
        if backend not in (None, "auto", "process"):
            raise UnsupportedError(f"there are no attacks for the {backend} backend yet", fix="--backend process")
        return _run_on_processes(list(ids), progress)
    finally:
        remove_folders(os.getpid())  # a signal may have come after a folder was made and before its arm began


def _run_on_processes(ids: list[str], progress: Progress | None) -> Matrix:
    chosen = _chosen(ids)
    rows: dict[str, Row] = {}
    for attack in _run_in_two_processes(chosen, rows, progress) if len(chosen) >= _MANY else chosen:
        if progress is not None:
            progress(len(rows), len(chosen), attack.id)
        rows[attack.id] = run_one(attack)
    in_order = tuple(rows[attack.id] for attack in chosen)
    return Matrix("process", "root" if os.geteuid() == 0 else "user", os.uname().release, in_order)


def _run_in_two_processes(chosen: list[Attack], rows: dict[str, Row], progress: Progress | None) -> list[Attack]:
    """Run the attacks that need not run alone, and add a row for each to `rows`. Returns the attacks still to run:
    those that must run alone, and those that the second process left when it died."""
    from ringfence_attacks.second_process import ALONE, Second

    todo = deque(attack for attack in chosen if attack.id not in ALONE)
    with Second() as second:
        while todo:
            while todo and second.has_room:
                second.ask(todo.popleft())
            if todo:
                attack = todo.popleft()
                if progress is not None:
                    progress(len(rows), len(chosen), attack.id)
                rows[attack.id] = run_one(attack)
            while second.answered() and (row := second.answer()) is not None:
                rows[row.id] = row
        while second.owed and (row := second.answer()) is not None:
            rows[row.id] = row
    return [attack for attack in chosen if attack.id not in rows]


def _chosen(ids: list[str]) -> list[Attack]:
    known = {each.id: each for each in catalogue()}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise LookupError(f"no attack is named {', '.join(unknown)}")
    return [known[name] for name in ids] if ids else list(known.values())


def run_one(attack: Attack) -> Row:
    """Play all arms of an attack and return the row with the verdict."""
    started = time.monotonic()
    missing = missing_here(attack)
    if missing is not None:
        return _row(attack, "not applicable", {}, missing, started)
    names: list[ArmName] = ["off", "alone", "on"] if attack.behind else ["off", "on"]
    seen: dict[str, Seen] = {}
    for name in names:
        try:
            seen[name] = proven(lambda: play(attack, "off")) if name == "off" else play(attack, name)
        except NotApplicable as reason:
            return _row(attack, "not applicable", {}, str(reason), started)
    return judged(attack, seen, started)


def proven(off_arm: Callable[[], Seen], tries: int = 3) -> Seen:
    """Play the arm without the control until the attack succeeds there, at most `tries` times.

    One success proves that the attack works; a race that was lost on a busy machine proves nothing. An arm with the
    control is never played again.
    """
    seen = off_arm()
    while not seen.succeeded and tries > 1:
        tries -= 1
        seen = off_arm()
    return seen


def judged(attack: Attack, seen: dict[str, Seen], started: float) -> Row:
    """Return the row of an attack, with the verdict that follows from what was seen in its arms."""
    return _row(attack, _verdict(seen), seen, _detail(seen), started)


def not_here(attack: Attack, why: str, started: float) -> Row:
    """Return the row of an attack that has nothing to try with this host, user or backend."""
    return _row(attack, "not applicable", {}, why, started)


def play(attack: Attack, name: ArmName) -> Seen:
    """Play an arm. An error of the harness or the library is no success of the attack, and is reported in `Seen`."""
    with Arm(attack, name) as arm:
        try:
            return attack.play(arm)
        except NotApplicable:
            raise
        except Exception as error:  # noqa: BLE001  # a broken arm is a result: its row says so and the run goes on
            return Seen(succeeded=False, what=f"broken: {type(error).__name__}: {error}")


def _verdict(seen: dict[str, Seen]) -> Verdict:
    if seen["on"].succeeded:
        return "got through"
    broken = any(arm.what.startswith("broken: ") for arm in seen.values())
    if broken or not seen["off"].succeeded:
        return "inconclusive"
    if "alone" in seen and seen["alone"].succeeded:
        return "inconclusive"  # with the first controls missing the attack succeeds: this control stops nothing
    return "held"


def _detail(seen: dict[str, Seen]) -> str:
    if not seen["off"].succeeded and not seen["on"].succeeded:
        return "the attack failed without the control too"
    if "alone" in seen and seen["alone"].succeeded:
        return "the attack succeeded with only the first controls missing"
    return seen["on"].what


def _row(attack: Attack, verdict: Verdict, seen: dict[str, Seen], detail: str, started: float) -> Row:
    return Row(
        id=attack.id,
        title=attack.title,
        outcome=attack.outcome,
        control=attack.control,
        verdict=verdict,
        arms={name: arm.what for name, arm in seen.items()},
        detail=detail,
        seconds=time.monotonic() - started,
        succeeded=tuple(name for name, arm in seen.items() if arm.succeeded),
    )


def missing_here(attack: Attack) -> str | None:
    """Return what an attack needs and this host or user lacks, in words; None when nothing is lacking."""
    as_root = os.geteuid() == 0
    for need in attack.needs:
        if need == "root" and not as_root:
            return "only as root"
        if need == "user" and as_root:
            return "only as an ordinary user"
        if need == "cgroup" and not has_cgroup():
            return "no cgroup can be had here"
        if need == "network" and (lacking := _missing_packages()):
            return f"the host's Python has no {lacking}"
        if need == "landlock" and not _landlock():
            return "this kernel has no Landlock with scopes"
    return None


def has_cgroup() -> bool:
    """Return whether the process backend can limit memory by a cgroup here."""
    from ringfence.backends.auto import prepare
    from ringfence_attacks.arena import POLICY

    return "memory" not in prepare("process", "host", POLICY).plan().enforcement.weaker


def _missing_packages() -> str:
    """Return the names of the packages that the gateway needs to read requests and that are not installed."""
    from ringfence.gateway.secrets.trust import check_packages

    try:
        check_packages()
    except UnsupportedError as error:
        return ", ".join(part.what for part in error.missing)
    return ""


def _landlock() -> bool:
    from ringfence.shared.syscalls import landlock_abi

    return landlock_abi() >= 6
