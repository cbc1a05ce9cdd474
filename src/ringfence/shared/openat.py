"""Opens paths inside the sandbox for file workers: by the kernel, beneath the root, no magic link followed (J18)."""

from __future__ import annotations

import errno
import os
import stat

from ringfence.shared import syscalls, tree_walk

Args = dict[str, object]

_RESOLVE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)  # removed, replaced or closed while we look


def _root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def open_path(path: str, flags: int, mode: int = 0) -> int:
    root = _root()
    if not flags & os.O_PATH:  # openat2 refuses both flags beside O_PATH
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    try:
        return syscalls.openat2(root, absolute(path), flags, mode, _RESOLVE)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(root)


def absolute(path: str) -> str:
    return path if path.startswith("/") else f"/workspace/{path}"


def open_parent(path: str, *, make: bool) -> tuple[int, str]:
    """Open the directory that holds `path`. Return its descriptor and the last name."""
    whole = absolute(path).rstrip("/")
    parent, name = os.path.split(whole)
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    if make:
        make_directories(parent)
    try:
        return open_path(parent, os.O_PATH | os.O_DIRECTORY), name
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def make_directories(path: str) -> int:
    """Make what is missing. Return how many. Without recursion: a path of 4000 characters has up to 2000 parts."""
    missing: list[str] = []
    directory = -1
    while directory < 0:
        try:
            directory = open_path(path or "/", os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            path, name = os.path.split(path.rstrip("/"))
            missing.append(name)
    for name in reversed(missing):
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
        except FileExistsError:
            pass  # made meanwhile; a file that is no folder is refused next
        below = tree_walk.below(directory, name)
        os.close(directory)
        directory = below
    os.close(directory)
    return len(missing)


def remove_made(path: str, count: int) -> None:
    """Remove what `make_directories` made, as far as it is empty."""
    whole = absolute(path).rstrip("/")
    for _ in range(count):
        try:
            parent, name = open_parent(whole, make=False)
            os.rmdir(name, dir_fd=parent)
        except OSError:
            return
        os.close(parent)
        whole = os.path.dirname(whole)


def regular(fd: int, path: str) -> os.stat_result:
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return info


def write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def flush(lines: list[bytes]) -> None:
    if lines:
        write_all(1, b"\n".join(lines) + b"\n")
        lines.clear()


def _target(directory: int, name: str) -> str | None:
    """Return where a link leads; None for a link that was replaced just now or that the kernel hides (/proc/1/cwd)."""
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError:
        return None


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def info_at(directory: int, name: str, shown: str) -> dict[str, object]:
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    target = _target(directory, name) if kind == "symlink" else None
    return {
        "path": shown,
        "kind": kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "modified": info.st_mtime,
        "target": target,
    }


# ── openat2 for kernels that lack it (gVisor of 2022) ─────────────────────────────────────────────
#
# A path is walked name by name, and each link is read and followed here. A walk may race with a guest that swaps names,
# as every walk does; the worker has the guest's own rights, and such a race reaches what the guest can reach anyway.
# Links of /proc, which lead to descriptors, are refused as openat2 would (J18).

_MOST_LINKS = 40


def refuse_link(directory: int, name: bytes) -> None:
    """Refuse a link before it is opened with O_DIRECTORY | O_NOFOLLOW, which follow a link in /proc all the same."""
    if _link(directory, os.fsdecode(name)) is not None:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def open_below(directory: int, path: str, flags: int, mode: int, resolve: int) -> int:
    """Open a path as openat2 does with RESOLVE_IN_ROOT or syscalls.RESOLVE_BENEATH. `directory`: the walk's root."""
    walk = _PathWalk(directory, path, resolve)
    try:
        return walk.open(flags, mode)
    finally:
        os.close(walk.at)


class _PathWalk:
    """A walk along a path, with one directory open however long the path is."""

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
        self.at = fd
        self._depth = depth

    def _up(self) -> None:
        if self._depth:
            self._go(os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.at), self._depth - 1)
        elif self._resolve & syscalls.RESOLVE_BENEATH:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), self._path)

    def _follow(self, link: str) -> None:
        self._links += 1
        if self._resolve & syscalls.RESOLVE_NO_SYMLINKS or self._links > _MOST_LINKS or _in_proc(self.at):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._path)
        if link.startswith("/"):
            if self._resolve & syscalls.RESOLVE_BENEATH:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), self._path)
            self._go(os.dup(self._root), 0)
        self._waiting += _parts(link)


def _parts(path: str) -> list[str]:
    """Return the names in a path, the first name last."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _link(directory: int, name: str) -> str | None:
    """Return where a link leads; None for a name that is no link."""
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
