"""The backends that behaviour tests are for, and why one of them cannot run here. Nothing is skipped in silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ringfence import Sandbox, UnsupportedError
from ringfence.backends import Container, Gvisor, Process

if TYPE_CHECKING:
    from ringfence.backends import Backend


class Declared(NamedTuple):
    """One way to isolate, and what of the conformance table it declares not applicable."""

    backend: Backend
    without: dict[str, str]  # capability → why
    only: tuple[str, ...] = ("",)  # what checks start with that differ from another row of the same backend

    def make(self) -> Callable[..., Sandbox]:
        return lambda **kwargs: Sandbox(backend=self.backend, **kwargs)


DECLARED: dict[str, Declared] = {
    "process": Declared(Process(), {}),
    "fresh": Declared(Process(fresh=True), {}, only=("code.",)),
    "container": Declared(Container(), {}),
    "gvisor": Declared(Gvisor(), {}),
}


@cache
def missing(name: str) -> str | None:
    """Why this host cannot run it; None when it can."""
    try:
        Sandbox(backend=DECLARED[name].backend).plan()
    except UnsupportedError as error:
        return str(error)
    return None
