"""Opens paths inside the sandbox for file workers: by the kernel, beneath the root, no magic link followed (J18)."""

from __future__ import annotations

import errno
import os
import stat

from . import kernel as k
from . import trees

Args = dict[str, object]

_RESOLVE = k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)  # removed, replaced or closed while we look


def _root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def open_path(path: str, flags: int, mode: int = 0) -> int:
    root = _root()
    if not flags & os.O_PATH:  # openat2 refuses the two beside O_PATH
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    try:
        return k.openat2(root, absolute(path), flags, mode, _RESOLVE)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(root)


def absolute(path: str) -> str:
    return path if path.startswith("/") else f"/workspace/{path}"


def open_parent(path: str, *, make: bool) -> tuple[int, str]:
    """The directory that holds `path`, and its last name."""
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
    """Make what is missing; how many that was. Without recursion: a path of 4000 characters has up to 2000 parts."""
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
            pass  # made meanwhile; what is no folder is refused next
        below = trees.below(directory, name)
        os.close(directory)
        directory = below
    os.close(directory)
    return len(missing)


def remove_made(path: str, count: int) -> None:
    """Take back what `make_directories` made, as far as it is empty."""
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
    """None: it was replaced just now, or the kernel does not tell, as of /proc/1/cwd."""
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
