"""Errors for a sandbox that cannot be used, with the reason."""

from __future__ import annotations

import errno
import os

from ringfence.errors import Missing, SandboxClosedError, SandboxLostError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.backends.contract import Box
    from ringfence.errors import RingfenceError

HELPER_LOST = "helper-lost"
_NEW = "make a new Sandbox"
_NO_HELPER = (errno.EIO, errno.ESRCH)  # what guestd reports
_ENDS = {
    "closed": "was closed",
    "idle": "ended: it was idle for limits.idle_s",
    "lifetime": "ended: its limits.lifetime_s are over",
}
_KILLED = "a process of Ringfence that was killed, and all inside ended with it"
_LOSSES = {
    "lost": f"its monitor is gone, {_KILLED}",
    "protocol": "it broke the wire's format",
    "init-lost": f"its PID 1 is gone, {_KILLED}",
    "tree-stuck": "a process would not die",
    "protected": "a protected path was replaced or removed from outside",
}


def not_started(name: str, *, closed: bool) -> RingfenceError:
    if closed:
        return SandboxClosedError(f"sandbox {name} was closed", fix=_NEW)
    return SandboxClosedError(f"sandbox {name} has not been started", fix="use `with`, or call start()")


def of_another_process(what: str, pid: int, *, fix: str = f"{_NEW} here") -> RingfenceError:
    text = f"{what} belongs to process {pid}; this is a fork of it, process {os.getpid()}"
    return SandboxClosedError(text, fix=fix)


def ended(name: str, over: str, box: Box) -> RingfenceError:
    """Return the error for a sandbox that has ended, with what the engine knows. `over`: why the link ended."""
    if over in _ENDS:
        return SandboxClosedError(f"sandbox {name} {_ENDS[over]}", fix=_NEW)
    if box.is_unprotected:
        over = "protected"
    known = box.how_it_ended() if over == "lost" else None
    return SandboxLostError(f"sandbox {name} is lost: {known or _LOSSES.get(over, over)}", fix=_NEW)


def lost_during(what: str, end: Mapping[str, object]) -> RingfenceError:
    """Return the error for a sandbox that was lost during a call. `end`: the last event in the call's inbox."""
    why = str(end.get("why")) if end["ev"] == "over" else "init-lost"
    return SandboxLostError(f"the sandbox was lost during {what}: {_LOSSES.get(why, why)}", fix=_NEW)


def refused(end: Mapping[str, object]) -> RingfenceError | OSError:
    """Return the error for a process that guestd could not start; none of its code has run.

    When the guest is at its limits, that is an OSError with the kernel's number. When the process that starts others
    for the guest is gone, which no limit of the guest causes, that is a SandboxLostError.
    """
    number = end["errno"]
    assert isinstance(number, int)
    if number not in _NO_HELPER:
        return OSError(number, f"{os.strerror(number)}: the sandbox cannot start another process")
    return SandboxLostError(
        "the process of Ringfence that starts others in this sandbox was killed or does not answer, and could not be "
        "replaced; what runs inside goes on, and nothing more can be started there",
        code=HELPER_LOST,
        fix=f"{_NEW}, which gets a new one",
    )


def no_freezer(name: str, backend: str) -> RingfenceError:
    return UnsupportedError(
        f"sandbox {name} cannot be paused: it has no freezer of its own",
        code="pause",
        missing=[Missing(backend, "a cgroup with a freezer", "ringfence doctor")],
    )
