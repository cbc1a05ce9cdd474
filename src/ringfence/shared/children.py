"""Handles of child processes: pidfds, or eventfds on a kernel without pidfds.

gVisor of 2022 has no pidfd. There `look`, called after each SIGCHLD, makes the eventfd of an ended child readable. A
child is not reaped before its handle was read, so that its number stays its own.
"""

from __future__ import annotations

import os

from ringfence.shared import fast_stdlib, proc

_EVENT_CLOEXEC = os.EFD_CLOEXEC | os.EFD_NONBLOCK
_numbers: dict[int, int] = {}  # handle → process, for handles that are no pidfds


def adopt(pid: int) -> int:
    """Return a handle for a child: a descriptor that is readable when the child has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        handle = os.eventfd(0, _EVENT_CLOEXEC)
        _numbers[handle] = pid
        look()
        return handle


def signal(handle: int, number: int) -> bool:
    """Send a signal. Return False when the process has ended."""
    if handle not in _numbers:
        return fast_stdlib.signal_pidfd(handle, number)
    try:
        os.kill(_numbers[handle], number)
    except ProcessLookupError:
        return False
    return True


def wait(handle: int, options: int) -> os.waitid_result | None:
    """Do what os.waitid does, for the child behind a handle."""
    if handle in _numbers:
        return os.waitid(os.P_PID, _numbers[handle], options)
    return os.waitid(os.P_PIDFD, handle, options)


def has_ended(handle: int) -> bool:
    """Return whether the child has ended. The child is left to be waited for."""
    try:
        return wait(handle, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def close(handle: int) -> None:
    _numbers.pop(handle, None)
    os.close(handle)


def number_of(handle: int) -> int:
    """Return the number of the process behind a handle, in this process's pid namespace."""
    if handle in _numbers:
        return _numbers[handle]
    return int(proc.fields(f"/proc/self/fdinfo/{handle}").get("Pid", 0))


def look() -> None:
    """Make the descriptors of ended children readable."""
    for handle, pid in _numbers.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            ended = True
        if ended:
            os.eventfd_write(handle, 1)
