"""Sees to it that what somebody else's archive writes leaves some of the disk free."""

from __future__ import annotations

import errno
import os

_STEP = 16 << 20  # bytes between two looks at the disk
_EACH = 4096  # what an entry takes besides: 400 000 files of one byte are 1.6 GB


class Room:
    """Of the file system that `fd` is on; others write to it too."""

    def __init__(self, fd: int, reserve: int) -> None:
        self._fd = fd
        self._reserve = reserve
        self._unseen = 0

    def take(self, size: int) -> None:
        """Before an entry of `size` bytes is written. Raises OSError (ENOSPC), as a disk that is full does."""
        self._unseen += size + _EACH
        if self._unseen < _STEP:
            return
        self._unseen = 0
        found = os.fstatvfs(self._fd)
        if found.f_bavail * found.f_frsize - size < self._reserve:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
