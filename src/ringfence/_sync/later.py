# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Surface of what later versions bring: servers. Every use says so."""

from __future__ import annotations

from ringfence.errors import UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence._sync.manager import SandboxManager


def _later(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}: not in this version")


def connect(url: str | None = None, key: str | None = None) -> SandboxManager:
    """A server's sandboxes. Without arguments: RINGFENCE_URL and RINGFENCE_KEY."""
    raise _later("servers")
