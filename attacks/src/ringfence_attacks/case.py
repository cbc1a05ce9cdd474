"""Define an attack: an id, a sentence that must be true, the control behind that sentence, and a function.

    @attack("A01", "a host file outside the view is not read", READ, off="view")
    def absolute_path(arm: Arm) -> Seen:
        path = arm.host_file()
        report = arm.python("steal(path)", path=path)
        return arm.stolen(report)

    CASES = cases(globals())

The function is called once for each arm, with fixtures of that arm alone, and says whether the attack succeeded there.
The function judges by what can be seen outside: bytes of a random canary, a file's content, a listener's log, a process
that lives or does not. That a guest says it was refused is no evidence; the refusal is written down all the same, to
show which layer refused.
"""

from __future__ import annotations

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal, TypeAlias

    from ringfence.plan.model import LinuxPlan
    from ringfence_attacks.arena import Arm

    Outcome: TypeAlias = Literal["READ", "WRITE", "ESCAPE", "CRASH", "LEAK", "DOS", "SPOOF", "PERSIST"]
    ArmName: TypeAlias = Literal["off", "alone", "on"]
    Change: TypeAlias = Callable[[LinuxPlan, Arm], LinuxPlan]
    Play: TypeAlias = Callable[[Arm], "Seen"]

# What happens when an attack gets through.
READ: Outcome = "READ"
WRITE: Outcome = "WRITE"
ESCAPE: Outcome = "ESCAPE"
CRASH: Outcome = "CRASH"
LEAK: Outcome = "LEAK"
DOS: Outcome = "DOS"
SPOOF: Outcome = "SPOOF"
PERSIST: Outcome = "PERSIST"

BARE = "bare"  # the off arm is a plain process on the host: only for what harms nothing there
# The control is the library's own code; where `arm.off`, the case does itself what a careless program would do.
HOST_CODE = "host code"


class NotApplicable(Exception):  # noqa: N818  # not an error: the case has nothing to try here
    """A case has nothing to try with this host, user or image; the text is the reason."""


@final
class Seen(Struct):
    """The outcome of one arm. `what` is for people: the errno that each attempt met, or what the witness saw."""

    succeeded: bool
    what: str


@final
class Attack(Struct):
    """An entry of the catalogue: an attack, the control against it, and the function that plays an arm."""

    id: str  # letter and number; a variant has a suffix: "J17-signals"
    title: str  # what must be true
    outcome: Outcome
    off: tuple[str, ...]  # controls that the arm "off" leaves out: names of `controls`, or BARE, or HOST_CODE
    play: Play
    change: Change | None = None  # instead of `off`: what the arm "off" does to the plan
    # Controls that would stop the attack before this one does. Where there are any, the arm "alone" leaves out only
    # these and must still fail; "off" leaves out these and `off`; "on" is the whole sandbox.
    behind: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # "root", "user", "cgroup", "landlock", "network"
    label: str = ""  # the control in words, where `off` does not name the control

    @property
    def control(self) -> str:
        """The control that stops the attack, in words."""
        if self.label:
            return self.label
        return " + ".join(self.off) if self.off else getattr(self.change, "__name__", "plan").replace("_", "-")


def attack(
    id: str,  # noqa: A002  # the word of the catalogue
    title: str,
    outcome: Outcome,
    *,
    off: str | tuple[str, ...] | Change,
    behind: str | tuple[str, ...] = (),
    needs: str | tuple[str, ...] = (),
    label: str = "",
) -> Callable[[Play], Attack]:
    """Make the decorated function an Attack."""

    def make(play: Play) -> Attack:
        names, change = ((), off) if callable(off) else (_many(off), None)
        return Attack(id, title, outcome, names, play, change, _many(behind), _many(needs), label)

    return make


def not_applicable(id: str, title: str, outcome: Outcome, reason: str) -> Attack:  # noqa: A002  # as above
    """Return an entry for an id that gives the process backend nothing to try, with the reason."""

    def play(arm: Arm) -> Seen:
        del arm
        raise NotApplicable(reason)

    return Attack(id, title, outcome, (HOST_CODE,), play, label="none")


def cases(module: Mapping[str, object]) -> tuple[Attack, ...]:
    """Return the attacks of a module in source order, with the attacks in lists and tuples."""
    found: list[Attack] = []
    for value in module.values():
        several = value if isinstance(value, list | tuple) else [value]
        found += [each for each in several if isinstance(each, Attack)]
    return tuple(found)


def _many(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
