"""Snapshots: the value that later versions make. Nothing here makes one yet."""

from __future__ import annotations

from ringfence.errors import UnsupportedError
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from typing import Self

    from ringfence.events import Change
    from ringfence.values import HostPath


@final
class Snapshot(Struct):
    """A sandbox's files at one moment and, with `memory`, its sessions. Bound to backend, image and policy.

    Lives as long as its manager or process; `export()` keeps it.
    """

    id: str
    created_at: datetime
    memory: bool
    size_bytes: int
    digest: str
    policy_digest: str

    def diff(self, other: Snapshot) -> tuple[Change, ...]:
        raise _later()

    def export(self, path: HostPath) -> None:
        raise _later()

    def delete(self) -> None:
        raise _later()

    @classmethod
    def load(cls, path: HostPath) -> Self:
        """Raises SnapshotError when a byte differs from the digest."""
        raise _later()


def _later() -> UnsupportedError:
    return UnsupportedError("snapshots: not in this version")
