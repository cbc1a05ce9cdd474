"""A descriptor that nobody else uses: when its number has another file, or none, the caller closed what is ours.

Daemons do that. Then no descriptor of ours can be trusted to be ours.
"""

from __future__ import annotations

import os

_opened: list[tuple[int, int]] = []  # the descriptor and its inode


def open_once() -> None:
    if not _opened:
        fd = os.memfd_create("ringfence", os.MFD_CLOEXEC)
        _opened.append((fd, os.fstat(fd).st_ino))


def is_dead() -> bool:
    """Whether it was opened and is no longer ours."""
    return bool(_opened) and not _lives()


def close() -> None:
    if _opened and _lives():
        os.close(_opened[0][0])
    forget()


def forget() -> None:
    """Without closing: the number may be somebody else's by now."""
    _opened.clear()


def _lives() -> bool:
    fd, inode = _opened[0]
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False
