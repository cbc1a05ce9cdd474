"""Leave out one control after another and look whether an attack succeeds. A control that none notices is a finding."""

from __future__ import annotations

from ringfence.values import Struct, final
from ringfence_attacks import controls
from ringfence_attacks.case import NotApplicable
from ringfence_attacks.harness import catalogue, missing_here, play

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence_attacks.case import Attack


@final
class Mutation(Struct):
    """A control left out. `noticed_by`: the first attack that succeeded; `unseen`: why no attack can on this host."""

    control: str
    noticed_by: str | None
    unseen: str | None


def mutate(control: str) -> Mutation:
    """Run the arm "off" of the attacks that name `control`, until one succeeds.

    For a second control the arm leaves out the controls before it too (`Attack.behind`). Whether the attack fails with
    only the first controls missing is seen in the arm "alone", which the matrix judges.
    """
    reasons: list[str] = []
    failed = False
    for attack in _naming(control):
        why = missing_here(attack)
        try:
            if why is None:
                if play(attack, "off").succeeded:
                    return Mutation(control, attack.id, None)
                failed = True
        except NotApplicable as reason:
            why = str(reason)
        reasons += [f"{attack.id}: {why}"] if why is not None else []
    return Mutation(control, None, None if failed else "; ".join(reasons) or None)


def _naming(control: str) -> list[Attack]:
    """Return the attacks that name a control, first the attacks that leave out nothing else: they prove most."""
    named = [attack for attack in catalogue() if control in attack.off]
    return sorted(named, key=lambda attack: (len(attack.off), len(attack.behind)))


def mutate_all(progress: Callable[[str], None] | None = None) -> tuple[Mutation, ...]:
    """Leave out every control of the plan, one at a time, in the order of `controls.PLAN`."""
    found: list[Mutation] = []
    for control in controls.PLAN:
        if progress is not None:
            progress(control)
        found.append(mutate(control))
    return tuple(found)


def score(mutations: tuple[Mutation, ...]) -> str:
    """Return how many of the controls that an attack can notice on this host were noticed, as in "57/57"."""
    seen = [mutation for mutation in mutations if mutation.unseen is None]
    return f"{sum(mutation.noticed_by is not None for mutation in seen)}/{len(seen)}"
