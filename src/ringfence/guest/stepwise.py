"""openat2 for kernels that lack it (gVisor of 2022): a path is walked name by name, each link read and followed by us.

It may race with a guest that swaps names, as every walk does; the worker has the guest's own rights, so such a race
reaches what the guest can reach anyway. Links of /proc, which lead to descriptors, are refused as openat2 would (J18).
"""

from __future__ import annotations

import errno
import os

RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x04, 0x08
_MOST_LINKS = 40


def refuse_link(directory: int, name: bytes) -> None:
    """Before it is opened with O_DIRECTORY | O_NOFOLLOW, which follow a link there all the same."""
    if _link(directory, os.fsdecode(name)) is not None:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def open_below(directory: int, path: str, flags: int, mode: int, resolve: int) -> int:
    """As openat2 with RESOLVE_IN_ROOT or RESOLVE_BENEATH: `directory` is the root of the walk."""
    walk = _Walk(directory, path, resolve)
    try:
        return walk.open(flags, mode)
    finally:
        os.close(walk.at)


class _Walk:
    """Holds one directory open, however long the path is."""

    def __init__(self, root: int, path: str, resolve: int) -> None:
        self._root = root
        self._path = path
        self._resolve = resolve
        self._waiting = _parts(path)
        self._depth = 0
        self._links = 0
        self.at = os.dup(root)

    def open(self, flags: int, mode: int) -> int:
        while self._waiting:
            name = self._waiting.pop()
            if name == "..":
                self._up()
                continue
            last = not self._waiting
            link = None if last and flags & os.O_NOFOLLOW else _link(self.at, name)
            if link is not None:
                self._follow(link)
                continue
            wanted = flags if last else os.O_PATH | os.O_DIRECTORY
            fd = os.open(name, wanted | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self.at)
            if last:
                return fd
            self._go(fd, self._depth + 1)
        return os.open(".", flags | os.O_CLOEXEC, mode, dir_fd=self.at)

    def _go(self, fd: int, depth: int) -> None:
        os.close(self.at)
        self.at, self._depth = fd, depth

    def _up(self) -> None:
        if self._depth:
            self._go(os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.at), self._depth - 1)
        elif self._resolve & RESOLVE_BENEATH:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), self._path)

    def _follow(self, link: str) -> None:
        self._links += 1
        if self._resolve & RESOLVE_NO_SYMLINKS or self._links > _MOST_LINKS or _in_proc(self.at):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._path)
        if link.startswith("/"):
            if self._resolve & RESOLVE_BENEATH:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), self._path)
            self._go(os.dup(self._root), 0)
        self._waiting += _parts(link)


def _parts(path: str) -> list[str]:
    """Its names, the first one last."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _link(directory: int, name: str) -> str | None:
    """Where it leads, None when it is no link."""
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _in_proc(directory: int) -> bool:
    try:
        return os.fstat(directory).st_dev == os.stat("/proc").st_dev
    except OSError:
        return True
