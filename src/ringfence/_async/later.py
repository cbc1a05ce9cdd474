"""Surface of what later versions bring: servers. Every use says so."""

from __future__ import annotations

from ringfence.errors import UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence._async.manager import AsyncSandboxManager


def _later(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}: not in this version")


def connect_async(url: str | None = None, key: str | None = None) -> AsyncSandboxManager:
    """A server's sandboxes. Without arguments: RINGFENCE_URL and RINGFENCE_KEY."""
    raise _later("servers")
