"""Why a sandbox cannot be used, as the error that its caller gets."""

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
_NO_HELPER = (errno.EIO, errno.ESRCH)  # as guestd tells it
_ENDS = {
    "closed": "was closed",
    "idle": "ended: it was idle for limits.idle_s",
    "lifetime": "ended: its limits.lifetime_s are over",
}
_KILLED = "a process of ours that was killed, and all inside went with it"
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
    """`over`: why its link is. What the engine knows of a lost one is told."""
    if over in _ENDS:
        return SandboxClosedError(f"sandbox {name} {_ENDS[over]}", fix=_NEW)
    if box.is_unprotected:
        over = "protected"
    known = box.how_it_ended() if over == "lost" else None
    return SandboxLostError(f"sandbox {name} is lost: {known or _LOSSES.get(over, over)}", fix=_NEW)


def lost_during(what: str, end: Mapping[str, object]) -> RingfenceError:
    """`end`: the last that its inbox was told."""
    why = str(end.get("why")) if end["ev"] == "over" else "init-lost"
    return SandboxLostError(f"the sandbox was lost during {what}: {_LOSSES.get(why, why)}", fix=_NEW)


def refused(end: Mapping[str, object]) -> RingfenceError | OSError:
    """Nothing of what was asked for has run. The guest is at its limits: OSError, with their number. Or what starts
    processes for it is gone, which no limit of the guest's does: SandboxLostError."""
    number = end["errno"]
    assert isinstance(number, int)
    if number not in _NO_HELPER:
        return OSError(number, f"{os.strerror(number)}: the sandbox cannot start another process")
    return SandboxLostError(
        "the process of ours that starts others in this sandbox was killed or does not answer, and none could take its "
        "place; what runs inside goes on, and nothing more can be started there",
        code=HELPER_LOST,
        fix=f"{_NEW}: it gets new ones",
    )


def no_freezer(name: str, backend: str) -> RingfenceError:
    return UnsupportedError(
        f"sandbox {name} cannot be paused: it has no freezer of its own",
        code="pause",
        missing=[Missing(backend, "a cgroup with a freezer", "ringfence doctor")],
    )
