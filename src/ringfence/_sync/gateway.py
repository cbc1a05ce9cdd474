# Generated from ringfence/_async by scripts/unasync: do not edit.
"""The gateway as the caller of one sandbox sees it: what it decided, and live rules."""

from __future__ import annotations

from ringfence._sync.compat import blocking
from ringfence.errors import SandboxClosedError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.contract import Box
    from ringfence.policy.model import Network
    from ringfence.records import HostSummary, Request


class Gateway:
    """The only way out: what it decided, and live rules."""

    def __init__(self, box: Callable[[], Box | None]) -> None:
        self._box = box
        self._live: Network | None = None  # rules that replaced those of the policy

    def log(self, *, after: int = 0) -> tuple[Request, ...]:
        """Each connection or request that has ended, oldest first, but the first `after`. The last 10,000 are kept."""
        box = self._box()
        return () if box is None or box.outlet is None else box.outlet.requests(after)

    def summary(self) -> tuple[HostSummary, ...]:
        box = self._box()
        return () if box is None or box.outlet is None else box.outlet.summary()

    def set(self, network: Network) -> None:
        """Replace the rules; connections no longer permitted are cut. Never beyond a manager's policy."""
        from ringfence.policy.model import Network as Kind

        if not isinstance(network, Kind):
            raise TypeError(f"network is a Network, not {type(network).__name__}")
        box = self._box()
        if box is None:
            raise SandboxClosedError("the sandbox has not been started", fix="use `with`, or call start()")
        if box.outlet is None:
            raise UnsupportedError(
                "the sandbox was started without a network, and has no way to the gateway",
                code="network",
                fix="start it with a Network that permits something",
            )
        blocking(box.outlet.set, network)
        self._live = network

    def _as(self, other: Gateway) -> None:
        """For a copy of a sandbox: the rules that hold there now."""
        if other._live is not None:
            self.set(other._live)
