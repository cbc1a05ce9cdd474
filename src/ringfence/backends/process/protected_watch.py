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
    """Notices, by inotify, when a protected path, or one of its folders inside the mount, was renamed, removed or made.

    Made after the placeholders, before the guest. `fileno()` is readable when `check()` should be called.
    """

    def __init__(self, protected: tuple[Protected, ...]) -> None:
        folders = sorted({os.path.dirname(path) for path in _inodes(protected)})
        self._fd, self._folders = _inotify(folders)
        self._expected = _inodes(protected)
        self._touched: dict[str, None] = {}  # expected paths of which an event told, in the order of the events

    def fileno(self) -> int:
        return self._fd

    def check(self) -> list[str]:
        """Protected paths that were replaced or removed on the host since the start; each is told once.

        By what happened to the name, not by the inode that has it now: a file system gives the number of a file that
        was removed to the next one that is made, which may be the guest's.
        """
        self._take_in()
        touched, self._touched = self._touched, {}
        for path in touched:
            del self._expected[path]
        return list(touched)

    def expect(self, inodes: dict[str, tuple[int, int]]) -> None:
        """They are protected again, as these inodes, and what was told of them until now was our own doing.

        Not of one that is another or gone by now: somebody removed it in the meantime, and the next check tells it.
        """
        self._expected |= inodes
        self._take_in()
        for path, inode in inodes.items():
            self._touched.pop(path, None)
            if _inode(path) != inode:
                self._touched[path] = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_in(self) -> None:
        if self._drain():  # some events are not told: whatever changed since the start, as far as that can be seen
            self._touched |= dict.fromkeys(path for path, inode in self._expected.items() if _inode(path) != inode)

    def _drain(self) -> bool:
        """Take in what happened. Whether there is more than the events tell."""
        blind = False
        while True:
            try:
                events = os.read(self._fd, 65536)
            except BlockingIOError:
                return blind
            offset = 0
            while offset < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, offset)
                offset += _EVENT.size
                name = os.fsdecode(events[offset : offset + length].rstrip(b"\0"))
                offset += length
                path = f"{self._folders.get(watch)}/{name}"
                if path in self._expected:
                    self._touched[path] = None
                blind = blind or bool(mask & _ALWAYS)


def _inodes(protected: tuple[Protected, ...]) -> dict[str, tuple[int, ...] | None]:
    expected: dict[str, tuple[int, ...] | None] = {}
    for one in protected:
        path = one.path
        while path != one.root and len(path) > len(one.root):
            expected[path] = _inode(path)
            path = os.path.dirname(path)
    return expected


def _inode(path: str) -> tuple[int, ...] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _inotify(directories: list[str]) -> tuple[int, dict[int, str]]:
    """A descriptor, and which folder each number in its events means."""
    import ctypes  # only where something is protected

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"inotify: {os.strerror(ctypes.get_errno())}")
    folders: dict[int, str] = {}
    for directory in directories:
        mask = ctypes.c_uint32(_WATCHED | _IN_ONLYDIR | _IN_DONT_FOLLOW)
        watch = libc.inotify_add_watch(fd, os.fsencode(directory), mask)
        if watch < 0:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, f"{directory} cannot be watched: {os.strerror(number)}")
        folders[watch] = directory
    return fd, folders
