"""Reads a small host file that a person named: regular files only, once, with a cap on its size."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str, largest: int) -> bytes:
    """The bytes of a regular file of at most `largest`. OSError otherwise; a FIFO or device never blocks (A24)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory", path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return _read_all(descriptor, path, largest)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, path: str, largest: int) -> bytes:
    # Counted while reading: the size that stat gives may be 0 for a file without end (A25).
    data = b""
    while len(data) <= largest:
        part = os.read(descriptor, largest + 1 - len(data))
        if not part:
            return data
        data += part
    raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", path)
