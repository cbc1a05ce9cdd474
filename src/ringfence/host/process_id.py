"""Names of library processes, and whether the process of a name is still alive. Owns nothing on disk.

A name is `<pid>-<start time>-<pid namespace>`. A pid alone is used again, the start time makes the name unique until
the next boot, and a pid means nothing in another pid namespace. Everything we leave outside our own memory (cgroups,
records) carries such a name, so that a sweep can see which of it has no living owner.
"""

from __future__ import annotations

import os

from ringfence.shared import proc

_UNKNOWN = 0  # pid namespace


def start_time(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of `pid`; None for a process that does not exist or is a zombie."""
    try:
        return _start_time(pid)
    except OSError:
        return None


def _start_time(pid: int) -> int | None:
    found = proc.process(pid)
    return None if found.has_ended else found.started - _offset()


def _offset() -> int:
    """Return the ticks that this process's time namespace adds to every start time that it reads.

    Without these ticks a process has the same name in all time namespaces, and no living process is taken for dead.
    """
    if _boot_time.offset is None:
        _boot_time.offset = _read_offset()
    return _boot_time.offset


def _read_offset() -> int:
    try:
        with open("/proc/self/timens_offsets", "rb") as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:  # a kernel without time namespaces
        return 0
    return sum((int(row[1]) * 10**9 + int(row[2])) * _TICKS // 10**9 for row in rows if row[0] == b"boottime")


_TICKS = os.sysconf("SC_CLK_TCK")  # a second


class _BootTime:
    """The offset of this process's time namespace, once it was read: it does not change."""

    offset: int | None = None


_boot_time = _BootTime()


def pid_namespace() -> int:
    """Return the inode number that identifies the pid namespace of this process; 0 where that cannot be read.

    It cannot be read without a /proc of this namespace. The number of another namespace would make the living processes
    of that namespace look dead.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return _UNKNOWN


def name() -> str:
    """Return the name of this process. A fork has another name.

    Raises OSError when the name cannot be found out, as without a free descriptor. Under a wrong name, all that this
    process makes would look like a dead process's, and be swept.
    """
    pid = os.getpid()
    namespace = pid_namespace()
    if (pid, namespace) not in _started:
        try:
            _started[pid, namespace] = _start_time(pid) or 0
        except FileNotFoundError:  # no /proc: the start time of no process can be read
            _started[pid, namespace] = 0
    return f"{pid}-{_started[pid, namespace]}-{namespace}"


_started: dict[tuple[int, int], int] = {}  # of this process, and of the processes that it was forked from


def parse(text: str) -> tuple[int, int, int] | None:
    """Return (pid, start time, pid namespace) of a name, or None when `text` is no such name."""
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])


def is_dead(text: str) -> bool:
    """Return whether the process of this name is certainly gone.

    Returns False for a text that is no name, and for a process that we cannot see: of another pid namespace, or of
    another user where /proc hides other users' processes (hidepid).
    """
    found = parse(text)
    if found is None or found[2] != pid_namespace() or found[2] == _UNKNOWN:
        return False
    pid = found[0]
    started = start_time(found[0])
    if started is not None:
        return started != found[1]
    return _is_gone(pid)


def _is_gone(pid: int) -> bool:
    """Return whether a process without a readable start time does not exist or is a visible zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # not ours to signal: the process is there, alive or as a zombie
        pass
    try:
        return proc.process(pid).has_ended
    except OSError:
        return False
