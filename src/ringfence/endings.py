"""Why a sandbox cannot be used, as the error that its caller gets."""

from __future__ import annotations

import os

from ringfence.errors import Missing, SandboxClosedError, SandboxLostError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.base import Box
    from ringfence.errors import RingfenceError

_NEW = "make a new Sandbox"
_ENDS = {
    "closed": "was closed",
    "idle": "ended: it was idle for limits.idle_s",
    "lifetime": "ended: its limits.lifetime_s are over",
}
_LOSSES = {
    "lost": "its monitor is gone",
    "protocol": "it broke the wire's format",
    "init-lost": "its PID 1 is gone",
    "tree-stuck": "a process would not die",
    "protected": "a protected path was replaced on the host",
}


def not_started(name: str, *, closed: bool) -> RingfenceError:
    if closed:
        return SandboxClosedError(f"sandbox {name} was closed", fix=_NEW)
    return SandboxClosedError(f"sandbox {name} has not been started", fix="use `with`, or call start()")


def of_another_process(what: str, pid: int, *, fix: str = f"{_NEW} here") -> RingfenceError:
    text = f"{what} belongs to process {pid}; this is a fork of it, process {os.getpid()}"
    return SandboxClosedError(text, fix=fix)


def ended(name: str, over: str, box: Box) -> RingfenceError:
    """`over`: why its link is. What the engine knows of a lost one is told."""
    if over in _ENDS:
        return SandboxClosedError(f"sandbox {name} {_ENDS[over]}", fix=_NEW)
    if box.is_unprotected:
        over = "protected"
    known = box.how_it_ended() if over == "lost" else None
    return SandboxLostError(f"sandbox {name} is lost: {known or _LOSSES.get(over, over)}", fix=_NEW)


def no_freezer(name: str, backend: str) -> RingfenceError:
    return UnsupportedError(
        f"sandbox {name} cannot be paused: it has no freezer of its own",
        code="pause",
        missing=[Missing(backend, "a cgroup with a freezer", "ringfence doctor")],
    )
