"""One directory below a top one at a time, held open: moves step by step, no link followed, whatever the depth.

Up goes by `..`, and only where the directory above is the very one we came by: a tree that is moved meanwhile leads
nowhere else (C01). So a walk costs its number of directories, not that times their depth (A27).
"""

from __future__ import annotations

import os

from . import kernel as k
from . import stepwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def enter(directory: int, parts: list[bytes], index: int) -> int:
    """The next directory on a way, open."""
    if not k.has_openat2():
        stepwise.refuse_link(directory, parts[index])
    return os.open(parts[index], _DIRECTORY, dir_fd=directory)


class Folder:
    """A directory below a top: its name, and the one that it is in.

    A walk keeps one of these for each directory that it is still to see. As whole paths they would come to their number
    times their depth, and a guest chooses both (O22).
    """

    __slots__ = ("_above", "_name")

    def __init__(self, above: Folder | None, name: bytes) -> None:
        self._above = above
        self._name = name

    def parts(self) -> list[bytes]:
        found: list[bytes] = []
        here = self
        while here._above is not None:
            found.append(here._name)
            here = here._above
        return found[::-1]


TOP = Folder(None, b"")


class Cursor:
    """`fd` is the directory where it stands, until it moves."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._parts: list[bytes] = []
        self._ids = [_identity(top)]
        self.fd = os.dup(top)

    def close(self) -> None:
        os.close(self.fd)

    def go(self, parts: list[bytes], step: Callable[[int, list[bytes], int], int] = enter) -> int:
        """Stand in the directory `parts` below the top. Raises what `step` raises, and stands where that failed."""
        shared = 0
        for here, there in zip(self._parts, parts, strict=False):
            if here != there:
                break
            shared += 1
        if len(self._parts) - shared > shared:
            self._restart()
        while len(self._parts) > shared:
            self._up()
        for index in range(len(self._parts), len(parts)):
            self._stand(step(self.fd, parts, index))
            self._parts.append(parts[index])
            self._ids.append(_identity(self.fd))
        return self.fd

    def _up(self) -> None:
        try:
            above = os.open(b"..", _DIRECTORY, dir_fd=self.fd)
        except OSError:  # closed to us, or removed under us
            self._restart()
            return
        if _identity(above) != self._ids[-2]:
            os.close(above)
            self._restart()
            return
        self._stand(above)
        self._parts.pop()
        self._ids.pop()

    def _restart(self) -> None:
        self._stand(os.dup(self._top))
        self._parts = []
        del self._ids[1:]

    def _stand(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
