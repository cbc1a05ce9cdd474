"""Notices when a protected path of a writable mount is replaced on the host while the sandbox runs.

The read-only mounts themselves are made by guest/box.py. When a program on the host replaces a protected file by rename
(git and editors do), the kernel takes the mount off in the sandbox too, and only the watch notices (M10). Whoever wants
no such limits takes a mount of mode "copy".
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.protected import Protected

_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x1000000, 0x2000000
_WATCHED = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_ALWAYS = _IN_Q_OVERFLOW | _IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF
_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000
_EVENT = struct.Struct("iIII")


class Watch:
    """Notices, by inotify, when a protected path or one of its folders inside the mount is no longer the same inode.

    Made after the placeholders, before the guest. `fileno()` is readable when `check()` should be called.
    """

    def __init__(self, protected: tuple[Protected, ...]) -> None:
        self._expected = _inodes(protected)
        self._names = frozenset(os.path.basename(path) for path in self._expected)
        self._fd = _inotify(sorted({os.path.dirname(path) for path in self._expected}))

    def fileno(self) -> int:
        return self._fd

    def check(self) -> list[str]:
        """Protected paths that were replaced or removed on the host since the start; each is told once."""
        if not self._touched():
            return []
        lost = [path for path, inode in self._expected.items() if _inode(path) != inode]
        for path in lost:
            del self._expected[path]
        return lost

    def expect(self, paths: list[str]) -> None:
        """They are protected again, as they are now."""
        self._expected |= {path: _inode(path) for path in paths}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _touched(self) -> bool:
        """Drain the events; whether one of them is about a name that is held."""
        touched = False
        while True:
            try:
                events = os.read(self._fd, 65536)
            except BlockingIOError:
                return touched
            offset = 0
            while offset < len(events):
                _, mask, _, length = _EVENT.unpack_from(events, offset)
                offset += _EVENT.size
                name = os.fsdecode(events[offset : offset + length].rstrip(b"\0"))
                offset += length
                touched = touched or bool(mask & _ALWAYS) or name in self._names


def _inodes(protected: tuple[Protected, ...]) -> dict[str, tuple[int, int] | None]:
    expected: dict[str, tuple[int, int] | None] = {}
    for one in protected:
        path = one.path
        while path != one.root and len(path) > len(one.root):
            expected[path] = _inode(path)
            path = os.path.dirname(path)
    return expected


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _inotify(directories: list[str]) -> int:
    import ctypes  # only where something is protected

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"inotify: {os.strerror(ctypes.get_errno())}")
    for directory in directories:
        mask = ctypes.c_uint32(_WATCHED | _IN_ONLYDIR | _IN_DONT_FOLLOW)
        if libc.inotify_add_watch(fd, os.fsencode(directory), mask) < 0:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, f"{directory} cannot be watched: {os.strerror(number)}")
    return fd
