"""What a container needs besides, when its policy has a network: a resolver's file, an address for loopback."""

from __future__ import annotations

import hashlib
import os

from ringfence.backends.container import loopback
from ringfence.backends.process import state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ringfence.guest.shapes import Outlets
    from ringfence.plan.model import ProcessPlan

RESOLVER = "etc/resolv.conf"


class Egress:
    """For one start of one container. Nothing of it is there when the plan has no network."""

    def __init__(self, plan: ProcessPlan, resolver: str | None) -> None:
        """`resolver` is the text of the file that names it."""
        self.outlets: Outlets | None = plan.box["outlets"]  # type: ignore[assignment]  # as the plan makes it
        self._resolver = resolver

    def mounts(self) -> list[Any]:
        """Engines put a file of their own over the image's, and it names no resolver."""
        if self.outlets is None or self._resolver is None:
            return []
        from docker.types import Mount

        return [Mount(f"/{RESOLVER}", _kept(self._resolver), type="bind", read_only=True)]

    def give_address(self, pid: Callable[[], int], guestd: str) -> None:
        if self.outlets is not None:
            loopback.give_address(pid(), guestd)


def _kept(text: str) -> str:
    """A file of ours with that text."""
    path = f"{state.disk_directory('resolver')}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not os.path.exists(path):
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.rename(file.name, path)
    return path
