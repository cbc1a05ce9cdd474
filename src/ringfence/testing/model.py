"""Defines checks, the capabilities that a check needs, and helpers to write checks. Needs no test framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeAlias, TypeVar, get_args

from ringfence import Policy, Sandbox
from ringfence.values import Struct, final

if TYPE_CHECKING:
    from types import TracebackType

    from ringfence import Result

E = TypeVar("E", bound=BaseException)

# Takes keywords of Sandbox (checks use policy, snapshot and tools); returns a sandbox that is not started.
MakeSandbox: TypeAlias = Callable[..., Sandbox]

Capability: TypeAlias = Literal[
    "commands",
    "cpu-share",
    "cpu-time",
    "disk-quota",
    "memory-limit",
    "node",
    "open-files",
    "pause",
    "process-limit",
    "terminal-signals",
    "usage",
    "watch-overflow",
]
CAPABILITIES: Mapping[Capability, str] = {
    "commands": "policy.commands decides which programs exist",
    "cpu-share": "limits.cpus is a share of CPU time",
    "cpu-time": "limits.cpu_time_s is counted over the whole tree",
    "disk-quota": "limits.disk and limits.disk_files are exact",
    "memory-limit": "limits.memory holds for the whole tree, and exceeding it is reported as oom",
    "node": "the image has node",
    "open-files": "limits.open_files holds",
    "pause": "a paused sandbox uses no CPU time",
    "process-limit": "limits.processes is exact, threads counted",
    "terminal-signals": "Ctrl-C on a terminal is a signal",
    "usage": "CPU time and memory are measured from outside",
    "watch-overflow": "a watch that is not read reports lost events instead of growing",
}
assert set(CAPABILITIES) == set(get_args(Capability))


@final
class Check(Struct):
    """A check of one behaviour. `act` raises when the behaviour is wrong; it starts and ends its own sandboxes."""

    name: str  # "commands.arguments_arrive_as_they_are"
    act: Callable[[MakeSandbox], None]
    needs: tuple[Capability, ...] = ()

    def __str__(self) -> str:
        return self.name


def in_box(act: Callable[[Sandbox], None], *needs: Capability) -> Check:
    """Return a check of a running sandbox with the default policy."""

    def whole(make: MakeSandbox) -> None:
        with make() as box:
            act(box)

    return Check(_name(act), whole, needs)


def with_maker(act: Callable[[MakeSandbox], None], *needs: Capability) -> Check:
    """Return a check that makes its own sandboxes."""
    return Check(_name(act), act, needs)


def _name(act: Callable[..., None]) -> str:
    return f"{act.__module__.rpartition('.')[2]}.{act.__name__}"


def python(make: MakeSandbox, code: str, *, policy: Policy = Policy(), timeout_s: float | None = None) -> Result:  # noqa: B008  # frozen
    """Run a Python program in a new sandbox, and return its result."""
    with make(policy=policy) as box:
        return box.exec(["python3", "-c", code], timeout_s=timeout_s)


class Raises(Generic[E]):
    """The context of `with raises(KeyError) as caught: …`; afterwards `caught.value` is the error."""

    def __init__(self, kinds: tuple[type[E], ...], match: str | None) -> None:
        self._kinds = kinds
        self._match = match
        self._caught: E | None = None

    @property
    def value(self) -> E:
        assert self._caught is not None
        return self._caught

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        wanted = " or ".join(kind.__name__ for kind in self._kinds)
        if exc is None:
            raise AssertionError(f"nothing was raised where {wanted} was expected")
        if not isinstance(exc, self._kinds):
            return False
        if self._match is not None and not re.search(self._match, str(exc)):
            raise AssertionError(f"{exc!r} does not say {self._match!r}")
        self._caught = exc
        return True


def raises(*kinds: type[E], match: str | None = None) -> Raises[E]:
    """Return a context whose block must raise an error of `kinds`, with text that the expression `match` finds."""
    return Raises(kinds, match)
