"""Keeps a process that holds secrets out of core files (I01): it writes none, and a tool that does finds no memory.

Not by PR_SET_DUMPABLE: the caller's process is not ours to hide from its own user, and could start no sandbox any more.
"""

from __future__ import annotations

import contextlib
import os
import resource

_FILTER = "/proc/self/coredump_filter"
_NOTHING = b"0"  # no private, no shared, no mapped memory; also what gcore goes by


def leave_no_core() -> None:
    """From now on, for this process and what it starts. Idempotent.

    A limit of 1 is too small for a core file, and tells the kernel to hand none to a program (`core_pattern` with a
    pipe), which a limit of 0 does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    least = 1 if hard == resource.RLIM_INFINITY or hard >= 1 else 0
    if soft != least:
        resource.setrlimit(resource.RLIMIT_CORE, (least, hard))
    with contextlib.suppress(FileNotFoundError):  # not on this system
        fd = os.open(_FILTER, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _NOTHING)
        finally:
            os.close(fd)
