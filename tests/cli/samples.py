"""Results as a backend would make them, for tests of the command's messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ringfence.results import Control, Denial, Enforcement, Result, Usage
from ringfence.values import replace

if TYPE_CHECKING:
    from ringfence.values import Reason, Status

FULL = Control("a mechanism", "full")
ENFORCEMENT = Enforcement(*[FULL] * 10)
OK = Result(
    id="r-1",
    status="ok",
    reason="done",
    exit_code=0,
    signal=None,
    stdout_bytes=b"",
    stderr_bytes=b"",
    truncated=False,
    outputs=(),
    exception=None,
    state_kept=True,
    duration_s=0.1,
    started_at=datetime(2025, 1, 1, tzinfo=UTC),
    usage=Usage(),
    denials=(),
    enforcement=ENFORCEMENT,
    backend="process",
    image="host",
    policy_digest="00",
)


def ended(status: Status, reason: Reason, *, exit_code: int | None = None, signal: int | None = None) -> Result:
    return replace(OK, status=status, reason=reason, exit_code=exit_code, signal=signal)


def denied(target: str, allow: str | None, count: int = 1) -> Denial:
    return Denial("network", target, "net.not-allowed", f"{target} is not permitted", allow, count)
