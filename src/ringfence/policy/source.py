"""Reads a small host file that a person named, or a guest may have put there: regular files only, once, with a cap."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str, largest: int) -> bytes:
    """The bytes of a regular file of at most `largest`. OSError otherwise; a FIFO or device never blocks (A24)."""
    descriptor = _open(path)
    try:
        data = _read(descriptor, largest + 1)
    finally:
        os.close(descriptor)
    if len(data) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", path)
    return data


def read_head(path: str, most: int) -> bytes:
    """The first `most` bytes of a regular file, whatever its size; OSError as `read_regular`."""
    descriptor = _open(path)
    try:
        return _read(descriptor, most)
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    _check(os.stat(path), path)  # before it is opened: a device may act on that alone
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)


def _read(descriptor: int, most: int) -> bytes:
    # Counted while reading: the size that stat gives may be 0 for a file without end (A25).
    data = b""
    while len(data) < most:
        part = os.read(descriptor, most - len(data))
        if not part:
            break
        data += part
    return data
