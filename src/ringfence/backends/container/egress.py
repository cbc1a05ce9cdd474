"""What a container needs besides, when its policy has a network: a resolver's file, a door, an address for loopback."""

from __future__ import annotations

import hashlib
import os

from ringfence.backends.container import door, loopback
from ringfence.backends.process import state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.plan.model import ProcessPlan

RESOLVER = "etc/resolv.conf"


class Egress:
    """For one start of one container. Nothing of it is there when the plan has no network."""

    def __init__(self, plan: ProcessPlan, resolver: str | None) -> None:
        """`resolver` is the text of the file that names it."""
        self.outlets = plan.box["outlets"]
        self._resolver = resolver
        self._door: door.Door | None = None
        if self.outlets is not None:
            door.sweep()
            try:
                self._door = door.Door()
            except OSError:
                self._door = None  # as by a path that is too long: then guestd relays

    @property
    def door(self) -> str | None:
        """Where guestd finds it."""
        return None if self._door is None else door.PATH

    def mounts(self) -> list[Any]:
        if self.outlets is None:
            return []
        from docker.types import Mount

        found = []
        if self._resolver is not None:  # engines put a file of their own over the image's, and it names no resolver
            found.append(Mount(f"/{RESOLVER}", _kept(self._resolver), type="bind", read_only=True))
        if self._door is not None:
            found.append(Mount(door.INSIDE, self._door.folder, type="bind", read_only=True))
        return found

    def listeners(self, pid: int, guestd: str) -> list[int]:
        """That guestd, which is ready, handed over; none where it relays."""
        if self.outlets is None:
            return []
        loopback.give_address(pid, guestd)
        if self._door is None:
            return []
        assert isinstance(self.outlets, dict)
        return self._door.take(pid, len(self.outlets["ports"]) + 3)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()


def _kept(text: str) -> str:
    """A file of ours with that text."""
    path = f"{state.disk_directory('resolver')}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not os.path.exists(path):
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.rename(file.name, path)
    return path
