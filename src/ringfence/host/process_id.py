"""The name of a library process, and whether that process is still alive. Owns nothing on disk.

A name is `<pid>-<start time>-<pid namespace>`: a pid alone is given out again, a start time makes it unique until
the next boot, and a pid means nothing in another pid namespace. Everything we leave outside our own memory (cgroups,
records) carries this name, so that a sweep can tell what nobody needs any more.
"""

from __future__ import annotations

import os

from ringfence.shared import proc

_UNKNOWN = 0  # pid namespace


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`; None when there is no such process, or only its zombie."""
    try:
        return _start_time(pid)
    except OSError:
        return None


def _start_time(pid: int) -> int | None:
    found = proc.process(pid)
    return None if found.has_ended else found.started - _offset()


def _offset() -> int:
    """Ticks that this process's time namespace adds to every start time that it reads: without them a name is the same
    in all of them, and who lives in one takes nobody in another for dead."""
    if not _offsets:
        _offsets.append(_ask_offset())
    return _offsets[0]


def _ask_offset() -> int:
    try:
        with open("/proc/self/timens_offsets", "rb") as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:  # a kernel without them
        return 0
    return sum((int(row[1]) * 10**9 + int(row[2])) * _TICKS // 10**9 for row in rows if row[0] == b"boottime")


_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_offsets: list[int] = []  # one: it does not change


def pid_namespace() -> int:
    """The inode number that names the pid namespace of this process; 0 where that cannot be found out, as without a
    /proc of its own: taken for another's, all who live there would look dead."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return _UNKNOWN


def name() -> str:
    """The name of this process, another one after a fork. Raises OSError when it cannot be found out, as without a
    free descriptor: under a wrong one all that it makes would look like a dead process's, and be swept."""
    pid, namespace = os.getpid(), pid_namespace()
    if (pid, namespace) not in _started:
        try:
            _started[pid, namespace] = _start_time(pid) or 0
        except FileNotFoundError:  # no /proc: nobody's start time can be read
            _started[pid, namespace] = 0
    return f"{pid}-{_started[pid, namespace]}-{namespace}"


_started: dict[tuple[int, int], int] = {}  # of this process, and of those that it is a fork of


def parse(text: str) -> tuple[int, int, int] | None:
    """(pid, start time, pid namespace) of a name; None when it is not a name of ours."""
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])


def is_dead(text: str) -> bool:
    """Whether the process of this name is certainly gone.

    False for what is not a name, and for a process that we cannot see: of another pid namespace, or of another user
    where /proc hides those (hidepid).
    """
    found = parse(text)
    if found is None or found[2] != pid_namespace() or found[2] == _UNKNOWN:
        return False
    pid, started = found[0], start_time(found[0])
    if started is not None:
        return started != found[1]
    return _is_gone(pid)


def _is_gone(pid: int) -> bool:
    """For one whose start time is not to be read: no such process, or a zombie that we can see to be one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # not ours to signal: it lives, or its zombie does
        pass
    try:
        return proc.process(pid).has_ended
    except OSError:
        return False
