"""Owns the count of guest processes and of their CPU time inside gVisor: its kernel knows no RLIMIT_NPROC, and has
cgroups with the controllers pids and cpuacct.

The hierarchy is mounted, taken descriptors of, and unmounted before there is a guest: nobody inside has a path to it.
"""

from __future__ import annotations

import os

from . import kernel as k

_PLACE = "/sys"  # covered for a moment
_GROUP = f"{_PLACE}/guests"


class Counted:
    """Raises OSError where the kernel has no such controller, or we have no right to it."""

    def __init__(self, most: int) -> None:
        self._most = most
        k.mount("none", _PLACE, "cgroup", k.MS_NOSUID | k.MS_NODEV, "pids,cpuacct")
        try:
            os.mkdir(_GROUP)
            _write(f"{_GROUP}/pids.max", most)
            self.join = _held(f"{_GROUP}/cgroup.procs", os.O_WRONLY)  # who writes 0 there is counted, with its children
            self.cpu = _held(f"{_GROUP}/cpuacct.usage", os.O_RDONLY)  # nanoseconds, of those that have ended too
            self._current = _held(f"{_GROUP}/pids.current", os.O_RDONLY)
        finally:
            k.umount(_PLACE)

    @property
    def full(self) -> bool:
        return int(os.pread(self._current, 32, 0)) >= self._most


def _held(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        return k.high(fd)
    finally:
        os.close(fd)


def _write(path: str, number: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(number).encode())
    finally:
        os.close(fd)
