"""How a sandbox is isolated. A name takes the defaults; an object says more."""

from __future__ import annotations

from ringfence.values import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Protocol
else:
    Protocol = object

__all__ = ["Backend", "Container", "Gvisor", "Process"]


class Backend(Protocol):
    """What every backend object has: the name that results and `--backend` use."""

    @property
    def name(self) -> str: ...


class Process(Struct):
    """Linux namespaces, seccomp and Landlock around a process. Needs nothing but Linux and Python."""

    fresh: bool = False  # a new address space for each run: slower, no shared layout

    @property
    def name(self) -> str:
        return "process"


class Container(Struct):
    """Docker or Podman through the Engine API."""

    engine: Literal["docker", "podman"] | None = None
    socket: str | None = None
    runtime: str | None = None  # "runsc"

    @property
    def name(self) -> str:
        return "container"


class Gvisor(Struct):
    """A user-space kernel: `runsc`, directly on an OCI bundle."""

    platform: Literal["kvm", "systrap", "ptrace"] | None = None

    @property
    def name(self) -> str:
        return "gvisor"
