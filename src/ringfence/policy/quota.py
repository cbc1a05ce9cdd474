"""What one agent or tenant may use up in all its sandboxes together."""

from __future__ import annotations

from ringfence.policy.checks import integer, number
from ringfence.policy.sizes import parse_size
from ringfence.values import Struct, final, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.checks import Check
    from ringfence.values import Size

_COUNT = integer((1 << 31) - 1)

QUOTA_CHECKS: dict[str, Check] = {
    "sandboxes": _COUNT,
    "cpus": number(0.01, 65_536),
    "memory": parse_size,
    "disk": parse_size,
    "upload": parse_size,
    "runs_per_minute": _COUNT,
}


@final
class Quota(Struct):
    """Sums over all sandboxes of one agent (or one tenant of a server)."""

    sandboxes: int = 8
    cpus: float = 4
    memory: Size = "4G"
    disk: Size = "10G"
    upload: Size = "1G"
    runs_per_minute: int = 600

    def __post_init__(self) -> None:
        for name, check in QUOTA_CHECKS.items():
            put(self, name, check(getattr(self, name), f"quota.{name}"))
