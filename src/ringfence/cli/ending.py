"""Owns the exit code of run and exec: what a result from outside the guest becomes, as `ringfence help exit` says."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.results import Result

_BY_REASON = {
    "wall-clock": 124,
    "cpu-time": 124,
    "guest-lost": 125,
    "protection-lost": 125,
    "not-executable": 126,
    "not-found": 127,
    "caller": 130,
    "interrupted": 130,
    "memory": 137,
}


def exit_code(result: Result) -> int:
    """The code for `result`. One of ours may also be a guest's own; --json and --report tell which."""
    if result.reason in _BY_REASON:
        return _BY_REASON[result.reason]
    if result.reason == "signal" and result.signal is not None:
        return 128 + result.signal
    if result.exit_code is not None:
        return result.exit_code
    return 0 if result.status == "ok" else 1


def has_notes(result: Result) -> bool:
    """Whether there may be something to say besides the guest's output."""
    return bool(result.status != "ok" or result.denials or result.enforcement.weaker)
