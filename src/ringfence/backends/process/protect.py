"""Holds protected paths of writable mounts on the host's side: placeholders before, a watch during, a scan afterwards.

The read-only mounts themselves are made by guest/box.py. When a program on the host replaces a protected file by rename
(git and editors do), the kernel takes the mount off in the sandbox too, and only the watch notices (M10). Whoever wants
no such limits takes a mount of mode "copy".
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct

from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.plan.protected import Protected

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 16


@final
class Placeholder(Struct):
    """A file or empty folder of ours on the host, as the state directory keeps it so that a sweep can remove it."""

    path: str
    directory: bool
    content: str
    device: int
    inode: int  # 0: about to be made, number not known yet


class Placeholders:
    """Makes what is missing of `protected`, holds it while the sandbox lives, removes it when nobody else needs it.

    Several sandboxes may share one folder: each holds a shared lock on every placeholder and has it noted; the last one
    out removes it. `note` is called before the name exists, so that SIGKILL at any moment leaves nothing unknown, and
    may come again for that path with the inode; `forget(placeholder)` drops what is noted for its path. `known` says
    whether an inode is noted by any sandbox, which tells another's placeholder from the user's own empty file.
    """

    def __init__(
        self,
        protected: tuple[Protected, ...],
        *,
        note: Callable[[Placeholder], None],
        forget: Callable[[Placeholder], None],
        known: Callable[[int, int], bool],
    ) -> None:
        self._protected = protected
        self._note = note
        self._forget = forget
        self._known = known
        self._held: list[tuple[Placeholder, int]] = []
        self.kept: frozenset[tuple[int, int]] = frozenset()  # (device, inode) that another sandbox still holds

    def make(self) -> None:
        """Before the operations are applied. Raises OSError when one cannot be made; what was made is removed again."""
        for path in self._protected:
            if path.content is None or path.hidden:
                continue
            try:
                self._hold(path)
            except OSError as error:
                self.remove()
                raise OSError(error.errno, f"{path.path} cannot be protected: {error.strerror or error}") from error

    def remove(self) -> None:
        """After the last process of the sandbox is gone. Idempotent. Leaves what is not as we made it."""
        kept = set()
        for placeholder, fd in self._held:
            os.close(fd)
            if not remove(placeholder):
                kept.add((placeholder.device, placeholder.inode))
            self._forget(placeholder)
        self._held = []
        self.kept = frozenset(kept)

    def _hold(self, path: Protected) -> None:
        for _ in range(_TRIES):
            made = not os.path.lexists(path.path) and self._make(path)
            fd = _open(path.path)
            if fd is None:
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)
            status = os.fstat(fd)
            if not _is_at(path.path, status):  # removed by its last holder between our open and our lock
                os.close(fd)
                continue
            if not made and not self._known(status.st_dev, status.st_ino):
                os.close(fd)  # the user's own
                return
            placeholder = Placeholder(path.path, path.directory, path.content or "", status.st_dev, status.st_ino)
            self._held.append((placeholder, fd))
            self._note(placeholder)
            return
        raise OSError("it appears and disappears")

    def _make(self, path: Protected) -> bool:
        """Whether it was made by us; False when somebody was faster."""
        parent, name = os.path.split(path.path)
        coming = Placeholder(path.path, path.directory, path.content or "", 0, 0)
        directory = os.open(parent, _OPEN_DIRECTORY)
        try:
            if path.directory:
                self._note(coming)
                os.mkdir(name, 0o755, dir_fd=directory)
            else:
                self._make_file(coming, directory, name)
        except FileExistsError:
            self._forget(coming)
            return False
        finally:
            os.close(directory)
        return True

    def _make_file(self, coming: Placeholder, directory: int, name: str) -> None:
        """Without a name first: then its inode is noted before it can be seen, and it never appears half written."""
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            fd = os.open(".", flags | os.O_TMPFILE, 0o644, dir_fd=directory)
        except OSError:  # a file system without nameless files
            self._note(coming)
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=directory)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(coming.content)
            return
        with open(fd, "w", encoding="utf-8") as file:
            file.write(coming.content)
            file.flush()
            status = os.fstat(fd)
            self._note(replace(coming, device=status.st_dev, inode=status.st_ino))
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory, follow_symlinks=True)


def remove(placeholder: Placeholder) -> bool:
    """Remove one unless a sandbox still holds it or it is no longer what we made. True when it is gone or not ours."""
    parent, name = os.path.split(placeholder.path)
    try:
        directory = os.open(parent, _OPEN_DIRECTORY)
    except OSError:
        return True
    try:
        return _remove_at(directory, name, placeholder)
    except OSError:
        return True  # gone, replaced by a link, or no longer ours to open
    finally:
        os.close(directory)


def _remove_at(directory: int, name: str, placeholder: Placeholder) -> bool:
    kind = os.O_DIRECTORY if placeholder.directory else os.O_NONBLOCK
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=directory)
    try:
        status = os.fstat(fd)
        if placeholder.inode and (status.st_dev, status.st_ino) != (placeholder.device, placeholder.inode):
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if placeholder.directory:
            if not os.listdir(fd):
                os.rmdir(name, dir_fd=directory)
        elif stat.S_ISREG(status.st_mode) and os.read(fd, 4096) == placeholder.content.encode():
            os.unlink(name, dir_fd=directory)
        return True
    finally:
        os.close(fd)


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None


def _is_at(path: str, status: os.stat_result) -> bool:
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino)


# ── while it runs ────────────────────────────────────────────────────────────────────────────────

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
