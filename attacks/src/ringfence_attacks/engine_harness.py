"""Run attacks on sandboxes that an engine makes: which attacks a backend has, their arms, and the score of controls.

Most attacks are the process backend's own, played unchanged in another sandbox; `engine_cases` has the attacks that an
engine adds.
"""

from __future__ import annotations

import os
import time

from ringfence_attacks import controls
from ringfence_attacks.case import NotApplicable, Seen
from ringfence_attacks.engine_arena import EngineArm
from ringfence_attacks.engine_cases import selection
from ringfence_attacks.harness import judged, missing_here, not_here, proven
from ringfence_attacks.report import Matrix, Row

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from ringfence_attacks.case import ArmName, Attack

    Progress: TypeAlias = Callable[[int, int, str], None]


def catalogue(backend: str) -> tuple[Attack, ...]:
    """Return every attack on a backend, sorted by id."""
    from ringfence_attacks.cases import all_cases
    from ringfence_attacks.engine_cases import container, every_engine, gvisor, images

    own_to_it = (*container.CASES, *images.CASES) if backend == "container" else gvisor.CASES
    own = (*every_engine.CASES, *own_to_it)
    left_out = selection.NOT_OWN[backend]
    borrowed = [each for each in all_cases() if each.id in selection.REUSED[backend]]
    return tuple(sorted((*(each for each in own if each.id not in left_out), *borrowed), key=lambda each: each.id))


def in_every_run(backend: str) -> tuple[Attack, ...]:
    """Return the attacks that every test run plays: they take little time and together name every control."""
    chosen = selection.IN_EVERY_RUN[backend]
    return tuple(each for each in catalogue(backend) if each.id in chosen or each.id not in selection.REUSED[backend])


def run(backend: str, ids: list[str], progress: Progress | None) -> Matrix:
    """Run attacks on one backend. Raises LookupError for an unknown id."""
    known = {each.id: each for each in catalogue(backend)}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise LookupError(f"no attack on {backend} is named {', '.join(unknown)}")
    chosen = [known[name] for name in ids] if ids else list(known.values())
    rows = []
    for done, each in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), each.id)
        rows.append(run_one(each, backend))
    user = "root" if os.geteuid() == 0 else "user"
    return Matrix(backend, user, os.uname().release, tuple(rows), score(backend, rows))


def run_one(attack: Attack, backend: str) -> Row:
    """Play all arms of an attack and return the row with the verdict."""
    started = time.monotonic()
    why = missing_here(attack)
    if why is not None:
        return not_here(attack, why, started)
    names: list[ArmName] = ["off", "alone", "on"] if attack.behind else ["off", "on"]
    seen: dict[str, Seen] = {}
    for name in names:
        try:
            seen[name] = proven(lambda: play(attack, "off", backend)) if name == "off" else play(attack, name, backend)
        except NotApplicable as reason:
            return not_here(attack, str(reason), started)
    return judged(attack, seen, started)


def play(attack: Attack, name: ArmName, backend: str) -> Seen:
    """Play an arm. An error of the harness or the library is no success of the attack, and is reported in `Seen`."""
    try:
        with EngineArm(attack, name, backend) as arm:
            return attack.play(arm)
    except NotApplicable:
        raise
    except Exception as error:  # noqa: BLE001  # a broken arm is a result: its row says so and the run goes on
        return Seen(succeeded=False, what=f"broken: {type(error).__name__}: {error}")


def unnoticed(backend: str, rows: Iterable[Row]) -> tuple[dict[str, str], list[str]]:
    """Return, by control, the first attack that succeeded without that control; and the controls no attack noticed.

    The controls are the engine's, and the controls of the plan that these attacks name.
    """
    by_id = {each.id: each for each in catalogue(backend)}
    noticed: dict[str, str] = {}
    named: set[str] = set()
    for row in rows:
        attack = by_id[row.id]
        if row.verdict != "not applicable":
            named |= {control for control in attack.off if control in controls.PLAN}
        if "off" in row.succeeded and row.verdict == "held":
            for control in attack.off:
                noticed.setdefault(controls.equivalents(backend).get(control, control), row.id)
    whole = {*controls.of_engine(backend), *(named - set(controls.equivalents(backend)))}
    return {name: noticed[name] for name in sorted(whole) if name in noticed}, sorted(whole - set(noticed))


def score(backend: str, rows: Iterable[Row]) -> str:
    """Return how many controls were noticed, such as "31 of 31 controls noticed"."""
    noticed, missed = unnoticed(backend, rows)
    return f"{len(noticed)} of {len(noticed) + len(missed)} controls noticed"
