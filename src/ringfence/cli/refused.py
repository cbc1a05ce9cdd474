"""Owns the file of --report where the line was refused before it could be judged who else may write there."""

from __future__ import annotations

import os
import stat

from ringfence.policy.host_paths import open_parent


def open_report(path: str) -> int | None:
    """New, or in place of an earlier report; None for all else, which stays as it is.

    No link is followed that a guest could have made in an earlier run (A04, L15). And a line that lacks a word may name
    here what was to be run.
    """
    try:
        parent, name = open_parent(path)
    except (OSError, ValueError):
        return None
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=parent)
    except OSError:
        return None
    finally:
        os.close(parent)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and os.pread(fd, 1, 0) in (b"", b"{"):
        os.ftruncate(fd, 0)
        return fd
    os.close(fd)
    return None
