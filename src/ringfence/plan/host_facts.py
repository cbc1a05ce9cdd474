"""Finds out what this host can do, cheaply and without side effects. What must be tried to be known is doctor's."""

from __future__ import annotations

import os

from ringfence.errors import need_linux
from ringfence.plan.model import HostFacts


def host_facts(*, memory_by: str | None, cpu_by: str | None, cpu_time_by: str | None, pids_by: str | None) -> HostFacts:
    """`*_by` name the cgroup file that holds each limit, as the backend found them."""
    need_linux()
    uname = os.uname()
    return HostFacts(
        as_root=os.geteuid() == 0,
        machine=uname.machine,
        kernel=uname.release,
        landlock_abi=landlock_abi(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        memory_by=memory_by,
        cpu_by=cpu_by,
        cpu_time_by=cpu_time_by,
        pids_by=pids_by,
    )


_abi: list[int] = []  # of this kernel: it does not change


def landlock_abi() -> int:
    """The kernel's Landlock ABI, 0 where it has none or it is switched off."""
    if not _abi:
        _abi.append(_ask_landlock())
    return _abi[0]


def _ask_landlock() -> int:
    from ringfence.shared import syscalls

    return syscalls.landlock_abi()
