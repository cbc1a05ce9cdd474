"""The backends that behaviour tests run on, and why a backend cannot run here. Nothing is skipped in silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import engines
import weaker
from ringfence import Sandbox, UnsupportedError
from ringfence.backends import Container, Gvisor, Process

if TYPE_CHECKING:
    from ringfence.backends import Backend


class Declared(NamedTuple):
    """A backend, and the rows of the conformance table that do not apply to this backend."""

    backend: Callable[[], Backend]  # raises UnsupportedError where there is none
    without: dict[str, str]  # capability → why
    only: tuple[str, ...] = ("",)  # what checks start with that differ from another row of the same backend

    def make(self) -> Callable[..., Sandbox]:
        backend = self.backend()
        return lambda **kwargs: Sandbox(backend=backend, **kwargs)


def _contained(name: Literal["docker", "podman"]) -> Backend:
    """Return a backend on an engine that the tests started."""
    engine = engines.running(name)
    if isinstance(engine, str):
        raise UnsupportedError(engine)
    return Container(engine=name, socket=engine.socket)


DECLARED: dict[str, Declared] = {
    "process": Declared(Process, weaker.LACKING),
    "fresh": Declared(lambda: Process(fresh=True), weaker.LACKING, only=("code.",)),
    "container": Declared(lambda: _contained("docker"), {}),
    "podman": Declared(lambda: _contained("podman"), {}),
    "gvisor": Declared(
        Gvisor,
        {
            **weaker.LACKING,
            "cpu-share": "held from outside; its own clock of CPU time runs as if it had the whole of one",
            "memory-limit": "held from outside: the limit is told as oom, and the sandbox ends with its kernel",
            "disk-quota": "its file systems in memory count bytes; a strict policy has files counted, on other ones",
            "watch-overflow": "its inotify has no bound but the memory limit",
            "terminal-signals": "its terminals make no signals of Ctrl-C",
        },
    ),
}


# PID 1 and, where siblings can be made, the spawner: the least numbers inside, and all of ours.
OURS = {"process": 2, "container": 2, "podman": 2, "gvisor": 1}


@cache
def missing(name: str) -> str | None:
    """Return why this host cannot run the backend; None when it can."""
    try:
        Sandbox(backend=DECLARED[name].backend()).plan()
    except UnsupportedError as error:
        return str(error)
    return None
