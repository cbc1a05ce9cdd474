"""Owns the order in which a process gives up its rights. Each step is data in the plan's `fence`.

Mount rights go first (nothing can be mounted under Landlock), system calls last.
"""

from __future__ import annotations

import os
import struct

from ringfence.guest.launch.syscall_rows import Hole, RowProgram, Slot, room
from ringfence.shared import syscalls as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.guest.guestd.protocols import FenceForm

_NR_WRITE, _NR_OPENAT, _NR_SET_AFFINITY = 1, 257, 203


_filters: dict[str, k.Filter] = {}


def prepare(fence: FenceForm) -> None:
    """Do, before the fork, what every process of this plan would do again."""
    for program in (fence["seccomp"], fence["last_layer"]):
        if program:
            _filter(program)


def _filter(program: str) -> k.Filter:
    if program not in _filters:
        _filters[program] = k.Filter(bytes.fromhex(program))
    return _filters[program]


# Per user namespace: no further user namespaces (E01), few inotify objects (F33). Inotify instances are counted against
# the host's user too, who may have 128 (fs.inotify.max_user_instances) in all.
_KERNEL_OBJECTS = {"max_user_namespaces": "0", "max_inotify_instances": "16", "max_inotify_watches": "16384"}


def open_kernel_limits(program: RowProgram, fence: FenceForm) -> list[int]:
    """Write rows that open kernel limits before /proc/sys becomes read-only. Return the rows."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    count = len(_KERNEL_OBJECTS) if fence["namespace_limits"] else 0
    return [program.call(_NR_OPENAT, k.AT_FDCWD, b"/proc/sys", flags, 0, what="/proc/sys") for _ in range(count)]


def limit_kernel_objects(program: RowProgram, opened: list[int]) -> None:
    """Write the limits, with the capabilities of the user namespace. What is opened here is closed later."""
    for row, (name, value) in zip(opened, _KERNEL_OBJECTS.items(), strict=False):
        flags = os.O_WRONLY | os.O_CLOEXEC
        file = program.call(_NR_OPENAT, 0, f"user/{name}".encode(), flags, 0, what=f"user.{name}")
        program.store(row, Slot(file, 0))
        text = value.encode()
        written = program.call(_NR_WRITE, 0, text, len(text), what=f"user.{name}", least=len(text))
        program.store(file, Slot(written, 0))


_NR_IOPRIO_SET, _NR_IOPRIO_GET = 251, 252
_OF_PROCESS, _REAL_TIME, _CLASS_SHIFT = 1, 1, 13
_FAIR = (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE)


def stand_back(proc: int) -> None:
    """Give up what a caller may have over the host's other programs, and would hand down (D13).

    That is real-time and raised priority, for CPU and disk, and being spared when memory runs out. Values lower than
    usual stay. `proc`: the host's.
    """
    if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK not in _FAIR:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if k.syscall(_NR_IOPRIO_GET, _OF_PROCESS, 0, what="ioprio_get") >> _CLASS_SHIFT == _REAL_TIME:
        k.syscall(_NR_IOPRIO_SET, _OF_PROCESS, 0, 0, what="ioprio_set")
    if int(_read(proc, "self/oom_score_adj")) < 0:
        _write(proc, "self/oom_score_adj", b"0\n")


def _read(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)


def _write(proc: int, path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


_OUR_FILES = 32  # descriptors that the spawner and file workers need, however few the guest may have
_CPU_BYTES = 1024  # a mask of 8192 CPUs, more than any kernel is built for
AFFINITY = "affinity"  # a hole: `cpu_mask` fills it


def write_limits(program: RowProgram, fence: FenceForm) -> None:
    """Write rlimits and CPUs, with holes: policies that differ in numbers alone have the same rows."""
    for name in _early_limits(fence):
        program.call(k.NR_PRLIMIT, 0, k.RLIMITS[name], Hole(f"limit {name}"), 0, what=f"setrlimit {name}")
    program.call(_NR_SET_AFFINITY, 0, _CPU_BYTES, Hole(AFFINITY), what="sched_setaffinity")


def _early_limits(fence: FenceForm) -> list[str]:
    """Return the limits without CPU time: a process that makes guests for hours uses more of that than a guest."""
    return [*(name for name in fence["rlimits"] if name != "CPU"), "NPROC"]


def limits_for(fence: FenceForm, *, processes: int) -> dict[str, bytes]:
    """Return what `fill_limits` fills in. The host's own limits are the limits of the process that calls this."""
    wanted = {**fence["rlimits"], "NPROC": processes}
    if "NOFILE" in wanted:
        wanted["NOFILE"] = max(wanted["NOFILE"], _OUR_FILES)
    return {f"limit {name}": struct.pack("<QQ", *_lowered(name, wanted[name])) for name in _early_limits(fence)}


def fill_limits(program: RowProgram, limits: dict[str, bytes], affinity: list[int]) -> None:
    for hole, packed in limits.items():
        program.fill(hole, packed)
    program.fill(AFFINITY, cpu_mask(affinity))


def cpu_mask(cpus: list[int]) -> bytes:
    """Return the mask of the CPUs that are named; without names, the CPUs of this process."""
    return sum(1 << cpu for cpu in cpus or os.sched_getaffinity(0)).to_bytes(_CPU_BYTES, "little")


def _lowered(name: str, value: int) -> tuple[int, int]:
    """Return a limit, soft and hard. Where the host's own limit is lower already, that stays."""
    hard = k.limits(name)[1]
    value = min(value, hard)
    # The soft limit on CPU time sends SIGXCPU, which says why. The hard limit ends a process that ignores the signal.
    grace = int(name == "CPU" and value != hard)
    return value, value + grace


def set_limits(fence: FenceForm, *, processes: int) -> None:
    program = RowProgram(None)
    write_limits(program, fence)
    program.seal()
    fill_limits(program, limits_for(fence, processes=processes), fence["affinity"])
    program.run_all()


def write_rights(program: RowProgram, fence: FenceForm, *, landlock: bool) -> list[Slot]:
    """Write rows that give up capabilities, privileges, files (Landlock) and system calls. None comes back.

    Return the slots of the descriptors that stay open, for the caller to close.
    """
    opened: list[Slot] = []
    if fence["no_new_privileges"]:
        program.call(k.NR_PRCTL, k.PR_SET_NO_NEW_PRIVS, 1, what="prctl PR_SET_NO_NEW_PRIVS")
    if landlock and fence["landlock_abi"]:
        opened = _write_landlock(
            program, fence["landlock_abi"], scopes=fence["landlock_scopes"], files=fence["landlock_files"]
        )
    if fence["seccomp"] and not fence["no_new_privileges"]:
        _write_filter(program, fence["seccomp"])
    if fence["capabilities"]:
        _write_capabilities(program)
    if fence["seccomp"] and fence["no_new_privileges"]:
        _write_filter(program, fence["seccomp"])
    # A change of uid has cleared the flag. It is set here either way, also where it is to be on.
    program.call(k.NR_PRCTL, k.PR_SET_DUMPABLE, int(not fence["not_dumpable"]), what="prctl PR_SET_DUMPABLE")
    return opened


def give_up_rights(fence: FenceForm, *, landlock: bool) -> None:
    """Do what `write_rights` writes, at once."""
    program = RowProgram(None)
    _run_and_close(program, write_rights(program, fence, landlock=landlock))


def restrict_with_landlock(abi: int, *, scopes: bool, files: bool) -> None:
    program = RowProgram(None)
    _run_and_close(program, _write_landlock(program, abi, scopes=scopes, files=files))


def _run_and_close(program: RowProgram, opened: list[Slot]) -> None:
    program.seal()
    program.run_all()
    for slot in opened:
        os.close(program.value(slot) & 0x7FFFFFFF)


def _write_filter(program: RowProgram, text: str) -> None:
    program.call(k.NR_SECCOMP, 1, 0, _filter(text).header, what="seccomp")


def _write_capabilities(program: RowProgram) -> None:
    for capability in range(k.capabilities()):
        program.optional(k.NR_PRCTL, k.PR_CAPBSET_DROP, capability)
    program.optional(k.NR_PRCTL, k.PR_CAP_AMBIENT, k.PR_CAP_AMBIENT_CLEAR_ALL)
    program.call(k.NR_CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24), what="capset")


def _write_landlock(program: RowProgram, abi: int, *, scopes: bool, files: bool) -> list[Slot]:
    """Write a Landlock domain: all file rights beneath `/`, none elsewhere, no signal or abstract socket out of it.

    The rule belongs to the root's inode, so that a new file system mounted below is covered too. Return the slots of
    the descriptors that stay open.
    """
    asked = k.landlock_attributes(abi, scopes=scopes, files=files)
    if asked is None:
        return []
    attributes, handled = asked
    ruleset = program.call(k.NR_LANDLOCK_CREATE, attributes, len(attributes), 0, what="landlock_create_ruleset")
    into = []
    opened = []
    if handled:
        rule = room(16)
        struct.pack_into("<Q", rule, 0, handled)
        root = program.call(_NR_OPENAT, k.AT_FDCWD, b"/", os.O_PATH | os.O_CLOEXEC, 0, what="/")
        opened.append(Slot(0, 8, rule))
        program.store(root, *opened)
        into.append(Slot(program.call(k.NR_LANDLOCK_ADD, 0, 1, rule, 0, what="landlock_add_rule"), 0))
    into.append(Slot(program.call(k.NR_LANDLOCK_RESTRICT, 0, 0, what="landlock_restrict_self"), 0))
    program.store(ruleset, *into)
    return [into[-1], *opened]


def finish_for_guest(fence: FenceForm, *, processes: int, dumpable: bool, session: bool) -> None:
    """Do the last steps in the process that becomes the guest: own limits, the last filter, dumpable again.

    The kernel counts CPU time over a process's whole life, and a session's limit is for each cell; therefore guestd
    counts there.

    The process is made dumpable because /proc/self must belong to the guest; its siblings have the same rights anyway.
    Before an exec it stays as it is: exec makes it dumpable, and until then a sibling could write to the report that we
    own (J02).
    """
    limits = {"NPROC": processes}
    limits |= {name: value for name, value in fence["rlimits"].items() if name in ("NOFILE", "CPU")}
    if session:
        limits.pop("CPU", None)
    for name, value in limits.items():
        k.set_limits(name, *_lowered(name, value))
    if fence["last_layer"]:
        _filter(fence["last_layer"]).install()
    if dumpable:
        k.set_dumpable(1)


def rehearse(fence: FenceForm, *, dumpable: bool) -> None:
    """Go through `finish_for_guest` without effect.

    Limits stay, no filter is installed, and the process is not dumpable until the job comes.
    """
    for name in ("NPROC", "NOFILE", "CPU"):
        _lowered(name, fence["rlimits"].get(name, 0))
        k.set_limits(name, *k.limits(name))
    if fence["last_layer"]:
        _filter(fence["last_layer"])
    if dumpable:
        k.set_dumpable(int(not fence["not_dumpable"]))
