"""Owns how a tree is walked and put into a tar stream, on either side: by descriptors, no link followed.

No function here opens an absolute path: the caller has the top directory open.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.shared.tar import DIRECTORY, END, FILE, SYMLINK, Refused, header, padding
from ringfence.shared.tree_walk import TOP, Cursor, WalkedFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MOST_IN_FOLDER = 1 << 26  # bytes of names: half a million names of sixty characters
_BESIDE = 64  # the charge for a name besides its bytes
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # removed or replaced during the walk


class Found:
    """An entry of a walk. `directory` is open until the next entry is read."""

    __slots__ = ("directory", "info", "name", "path")

    def __init__(self, directory: int, name: bytes, path: bytes, info: os.stat_result) -> None:
        self.directory = directory
        self.name = name
        self.path = path
        self.info = info


class Body:
    """The bytes of a file: the receiver copies the bytes, and the giver closes `fd` afterwards."""

    __slots__ = ("fd", "path", "size")

    def __init__(self, fd: int, size: int, path: bytes) -> None:
        self.fd = fd
        self.size = size
        self.path = path


class TransferCaps:
    """The most that a transfer may hold. None: as much as the file system takes."""

    def __init__(self, most_bytes: int | None, most_files: int | None) -> None:
        self._bytes = most_bytes
        self._files = most_files
        self.bytes = 0
        self.files = 0

    def count(self, size: int, path: bytes) -> None:
        """Count an entry before any byte of it is taken. Raises Refused (F21, A26)."""
        self.bytes += size
        self.files += 1
        if self._bytes is not None and self.bytes > self._bytes:
            raise Refused("bytes", path)
        if self._files is not None and self.files > self._files:
            raise Refused("files", path)


def descend(top: int, path: bytes) -> int:
    """Open a directory below another, step by step, following no link."""
    cursor = Cursor(top)
    try:
        return os.dup(cursor.go([part for part in path.split(b"/") if part]))
    finally:
        cursor.close()


def walk(top: int, *, skip_closed: bool = False) -> Iterator[Found]:
    """Yield everything below an open directory, sorted, parents first. Links are reported and not followed.

    Works without recursion and with few descriptors, whatever the tree (A27). What is removed meanwhile is left out.
    `skip_closed`: folders that may not be read are left out too.
    """
    passed = (*_GONE, errno.EACCES) if skip_closed else _GONE
    cursor = Cursor(top)
    pending = [TOP]
    try:
        while pending:
            folder = pending.pop()
            parts = folder.parts()
            try:
                directory = cursor.go(parts)
            except OSError as error:
                if parts and error.errno in passed:
                    continue
                raise _named(error, b"/".join(parts)) from None
            inner = []
            prefix = b"".join(part + b"/" for part in parts)
            for name in sorted(_names(directory, prefix)):
                try:
                    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                except OSError as error:
                    if error.errno in passed:
                        continue
                    raise _named(error, prefix + name) from None
                if stat.S_ISDIR(info.st_mode):
                    inner.append(WalkedFolder(folder, name))
                yield Found(directory, name, prefix + name, info)
            pending += reversed(inner)
    finally:
        cursor.close()


def _names(directory: int, prefix: bytes) -> list[bytes]:
    """Return the sorted names in a folder. Raise Refused for very many: all names are held in memory (O22)."""
    names = []
    left = _MOST_IN_FOLDER
    with os.scandir(directory) as entries:
        for name in map(os.fsencode, (entry.name for entry in entries)):
            names.append(name)
            left -= len(name) + _BESIDE
            if left < 0:
                raise Refused("files", prefix)
    return names


def _named(error: OSError, path: bytes) -> OSError:
    return OSError(error.errno, os.strerror(error.errno or 0), os.fsdecode(path))


def tar(top: int, caps: TransferCaps) -> Iterator[bytes | Body]:
    """Yield a folder as a tar stream. An entry that is no file, folder or link is refused."""
    info = os.fstat(top)
    yield header(b"./", DIRECTORY, size=0, mode=info.st_mode, mtime=int(info.st_mtime))
    for found in walk(top):
        yield from _entry(found, caps)
    yield END


def tar_file(fd: int, name: bytes, caps: TransferCaps) -> Iterator[bytes | Body]:
    """Yield an open regular file as a tar stream."""
    yield from _file(fd, name, caps)
    yield END


def _entry(found: Found, caps: TransferCaps) -> Iterator[bytes | Body]:
    mode = found.info.st_mode
    mtime = int(found.info.st_mtime)
    if stat.S_ISDIR(mode):
        caps.count(0, found.path)
        yield header(found.path + b"/", DIRECTORY, size=0, mode=mode, mtime=mtime)
    elif stat.S_ISLNK(mode):
        caps.count(0, found.path)
        link = os.readlink(found.name, dir_fd=found.directory)
        yield header(found.path, SYMLINK, size=0, mode=0o777, mtime=mtime, link=link)
    elif stat.S_ISREG(mode):
        fd = opened(found)
        if fd is None:
            return
        try:
            yield from _file(fd, found.path, caps)
        finally:
            os.close(fd)
    else:
        raise Refused("special", found.path)


def opened(found: Found) -> int | None:
    """Open a found file for reading; None when the file is gone. Raises when it is no regular file now (A24, C02)."""
    try:
        fd = os.open(found.name, _FILE, dir_fd=found.directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _named(error, found.path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused("changed", found.path)
    return fd


def _file(fd: int, name: bytes, caps: TransferCaps) -> Iterator[bytes | Body]:
    info = os.fstat(fd)
    size = info.st_size
    caps.count(size, name)
    yield header(name, FILE, size=size, mode=info.st_mode, mtime=int(info.st_mtime))
    if size:
        yield Body(fd, size, name)
        yield padding(size)


def measure(top: int, caps: TransferCaps) -> None:
    """What a transfer of this folder will hold, counted in `caps`. Raises as the transfer would."""
    for found in walk(top):
        mode = found.info.st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode) or stat.S_ISREG(mode)):
            raise Refused("special", found.path)
        caps.count(found.info.st_size if stat.S_ISREG(mode) else 0, found.path)
