"""Owns the order in which a process gives up its rights. Each step is data in the plan's `fence`.

Mount rights go first (nothing can be mounted under Landlock), system calls last.
"""

from __future__ import annotations

import binascii
import os
import resource

from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shapes import Fence


_filters: dict[str, k.Filter] = {}


def prepare(fence: Fence) -> None:
    """What every process of this plan would do again, done before they are forked."""
    for program in (fence["seccomp"], fence["last_layer"]):
        if program:
            _filter(program)


def _filter(program: str) -> k.Filter:
    if program not in _filters:
        _filters[program] = k.Filter(binascii.a2b_base64(program))
    return _filters[program]


def limit_kernel_objects(sys_directory: int, fence: Fence) -> None:
    """Per user namespace: no further user namespaces (E01), few inotify objects (F33). Needs its capabilities."""
    if not fence["namespace_limits"]:
        return
    values = {
        "max_user_namespaces": "0",
        # Counted against the host's user too, who may have 128 (fs.inotify.max_user_instances) in all.
        "max_inotify_instances": "16",
        "max_inotify_watches": "16384",
    }
    for name, value in values.items():
        fd = os.open(f"user/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=sys_directory)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


_OUR_FILES = 32  # what the spawner and file workers need open, however few the guest may


def set_limits(fence: Fence, *, processes: int) -> None:
    for name, value in fence["rlimits"].items():
        _lower(getattr(resource, f"RLIMIT_{name}"), max(value, _OUR_FILES) if name == "NOFILE" else value)
    _lower(resource.RLIMIT_NPROC, processes)
    if fence["affinity"]:
        os.sched_setaffinity(0, fence["affinity"])


def _lower(which: int, value: int) -> None:
    """Set a limit, hard and soft. Where the host's own is tighter already, that one stays."""
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY and hard < value:
        value = hard
    # Of CPU time the soft limit sends SIGXCPU, which tells why; the hard one, a second later, is for who ignores it.
    grace = int(which == resource.RLIMIT_CPU and value != hard)
    resource.setrlimit(which, (value, value + grace))


def give_up_rights(fence: Fence, *, landlock: bool) -> None:
    """Capabilities, privileges, Landlock, system calls. What follows can only lose more."""
    if fence["no_new_privileges"]:
        k.no_new_privileges()
    if landlock and fence["landlock_abi"]:
        k.restrict_with_landlock(
            fence["landlock_abi"],
            scopes=fence["landlock_scopes"],
            files=fence["landlock_files"],
        )
    if fence["seccomp"] and not fence["no_new_privileges"]:
        _filter(fence["seccomp"]).install()
    if fence["capabilities"]:
        k.drop_capabilities()
    if fence["seccomp"] and fence["no_new_privileges"]:
        _filter(fence["seccomp"]).install()
    k.set_dumpable(0 if fence["not_dumpable"] else 1)  # a change of uid has cleared it: the other case is said too


def finish_for_guest(fence: Fence, *, processes: int, dumpable: bool) -> None:
    """The last steps, in the process that becomes the guest: its own limits, the last filter, dumpable again.

    Dumpable, because /proc/self must belong to the guest; its siblings have the same rights anyway. Before an exec it
    stays as it is: exec makes it dumpable, and until then a sibling could write to the report that we own (J02).
    """
    _lower(resource.RLIMIT_NPROC, processes)
    if "NOFILE" in fence["rlimits"]:
        _lower(resource.RLIMIT_NOFILE, fence["rlimits"]["NOFILE"])
    if fence["last_layer"]:
        _filter(fence["last_layer"]).install()
    if dumpable:
        k.set_dumpable(1)
