"""E: the kernel's attack surface: system calls that the filter must refuse. Their answers are read from outside.

Each call has arguments that the kernel refuses with another errno than the filter, or that do no harm. No arm reaches
a call that could change the host.
"""

from __future__ import annotations

import errno
import os

from ringfence_attacks.case import DOS, ESCAPE, LEAK, NotApplicable, Seen, attack, cases
from ringfence_attacks.tracer import Attempt, answers, host_pid, reported_pid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm
    from ringfence_attacks.case import Attack, Outcome, Play

_BAD = 1  # a pointer to no mapped memory
_NOBODY = 0x3FFFFFFF  # a pid that no process has
_MINUS = -1
_NEWUSER, _NEWNET, _FS = 0x10000000, 0x40000000, 0x200
_NOSYS = errno.ENOSYS
_FEW = 32


def _word(result: int) -> str:
    return "ok" if result >= 0 else errno.errorcode.get(-result, str(-result))


def _reached(arm: Arm, attempts: list[Attempt], *, each: bool) -> Seen:
    """Judge by the attempts that got past the filter: with the control none may, without the control at least one must.

    `each`: without the control all must.
    """
    got = answers(arm, arm.sandbox(), attempts)
    past = [attempt.name for attempt in attempts if attempt.name in got and got[attempt.name] != -attempt.filtered]
    words = "; ".join(f"{name}: {_word(result)}" for name, result in got.items())
    whole = len(past) == len(attempts) if each and arm.off else bool(past)
    return Seen(whole and len(got) == len(attempts), words or "no call was made")


def _filtered(
    id: str,  # noqa: A002  # the word of the catalogue
    title: str,
    control: str,
    *attempts: Attempt,
    outcome: Outcome = ESCAPE,
    each: bool = True,
) -> Attack:
    def play(arm: Arm) -> Seen:
        return _reached(arm, list(attempts), each=each)

    decorate = attack(id, title, outcome, off=f"seccomp:{control}")
    typed: Play = play
    return decorate(typed)


TABLE = (
    _filtered(
        "E01",
        "unshare and clone make no namespace, whatever other bits are set",
        "namespaces",
        Attempt("unshare NEWUSER", 272, (_NEWUSER,)),
        Attempt("unshare NEWUSER|NEWNET", 272, (_NEWUSER | _NEWNET,)),
        Attempt("clone NEWUSER|FS", 56, (_NEWUSER | _FS | 17, 0, 0, 0, 0)),
        Attempt("clone NEWUSER|FS, bit 33", 56, ((1 << 33) | _NEWUSER | _FS | 17, 0, 0, 0, 0)),
    ),
    _filtered(
        "E01-clone3",
        "clone3, whose flags are in memory, is answered as unknown",
        "clone3",
        Attempt("clone3", 435, (0, 0), _NOSYS),
    ),
    _filtered("E02", "no namespace is entered", "namespaces", Attempt("setns", 308, (_MINUS, 0))),
    _filtered(
        "E03",
        "no call of the old or new mount API reaches the kernel",
        "mounts",
        Attempt("mount", 165, (_BAD, _BAD, _BAD, 0, 0)),
        Attempt("umount2", 166, (_BAD, 0x7FFFFFF0)),
        Attempt("chroot", 161, (_BAD,)),
        Attempt("open_tree", 428, (_MINUS, _BAD, 0x70000000)),
        Attempt("fsconfig", 431, (_MINUS, 0, 0, 0, 0)),
        Attempt("mount_setattr", 442, (_MINUS, _BAD, 0x70000000, 0, 0)),
    ),
    _filtered("E04", "bpf is refused", "bpf", Attempt("bpf", 321, (0, _BAD, 1 << 20))),
    _filtered(
        "E05", "performance counters are refused", "perf", Attempt("perf_event_open", 298, (_BAD, 0, -1, -1, 1 << 40))
    ),
    _filtered("E06", "userfaultfd is refused", "userfaultfd", Attempt("userfaultfd", 323, (1,))),
    _filtered(
        "E07",
        "io_uring, which would run calls past the filter, is answered as unknown",
        "io-uring",
        Attempt("io_uring_setup", 425, (0, _BAD), _NOSYS),
        Attempt("io_uring_enter", 426, (_MINUS, 0, 0, 0, 0, 0), _NOSYS),
        Attempt("io_uring_register", 427, (_MINUS, 0x7FFF, 0, 0), _NOSYS),
    ),
    _filtered(
        "E07-aio",
        "asynchronous I/O, which has one limit for the whole host, is answered as unknown",
        "aio",
        Attempt("io_setup", 206, (0, _BAD), _NOSYS),
        Attempt("io_destroy", 207, (0,), _NOSYS),
        outcome=DOS,
    ),
    _filtered(
        "E08",
        "the kernel's keyrings are out of reach",
        "keyring",
        Attempt("add_key", 248, (_BAD, _BAD, _BAD, 1, 0)),
        Attempt("request_key", 249, (_BAD, _BAD, _BAD, 0)),
        Attempt("keyctl", 250, (9999, 0, 0, 0, 0)),
    ),
    _filtered(
        "E09",
        "no process looks into another by ptrace or its relatives",
        "ptrace",
        Attempt("ptrace", 101, (0x4206, _NOBODY, 0, 0)),
        Attempt("process_vm_readv", 310, (_NOBODY, 0, 0, 0, 0, 1)),
        Attempt("process_vm_writev", 311, (_NOBODY, 0, 0, 0, 0, 1)),
        Attempt("kcmp", 312, (_NOBODY, _NOBODY, 0, 0, 0)),
        Attempt("pidfd_getfd", 438, (_MINUS, 0, 0)),
    ),
    _filtered(
        "E10",
        "calls that load modules or kernels, reboot or swap are refused",
        "modules",
        # Only swapon: it checks its flags before it checks rights, therefore its answer shows whether the filter or the
        # kernel refused. The filter has one rule for all of these calls.
        Attempt("swapon", 167, (_BAD, 0x7FFFFFFF)),
    ),
    _filtered(
        "E11",
        "I/O ports are not opened",
        "admin",
        Attempt("iopl", 172, (9,)),
        Attempt("ioperm", 173, (0x7FFFFFFF, 1, 1)),
    ),
    _filtered("E11-ldt", "the local descriptor table is not written", "memory", Attempt("modify_ldt", 154, (99, 0, 0))),
    _filtered(
        "E12",
        "no handle of a file is given",
        "handles",
        Attempt("name_to_handle_at", 303, (_MINUS, _BAD, _BAD, _BAD, 0x7FFF)),
    ),
    _filtered(
        "E13",
        "calls for quota and file marks are refused",
        "admin",
        Attempt("quotactl", 179, (0x7FFFFFFF, _BAD, 0, 0)),
        Attempt("quotactl_fd", 443, (_MINUS, 0x7FFFFFFF, 0, 0)),
        Attempt("fanotify_mark", 301, (_MINUS, 0x7FFF, 0, _MINUS, 0)),
    ),
    _filtered(
        "E13-unknown",
        "ustat and sysfs, which no program needs, are answered as unknown",
        "unknown",
        Attempt("ustat", 136, (0, _BAD), _NOSYS),
        Attempt("sysfs", 139, (99, 0, 0), _NOSYS),
        each=False,
    ),
    _filtered(
        "E16",
        "memory of other processes is not moved between nodes",
        "numa",
        Attempt("mbind", 237, (0, 4096, 0x7FFF, 0, 0, 0)),
        Attempt("set_mempolicy", 238, (0x7FFF, 0, 0)),
        Attempt("migrate_pages", 256, (_NOBODY, 0, 0, 0)),
        Attempt("move_pages", 279, (_NOBODY, 0, 0, 0, 0, 0x7FFF)),
    ),
    _filtered(
        "E17",
        "setting the clock is refused before the new value is read",
        "clock",
        Attempt("settimeofday", 164, (_BAD, 0)),
        Attempt("clock_settime", 227, (9999, _BAD)),
        Attempt("adjtimex", 159, (_BAD,)),
        Attempt("clock_adjtime", 305, (9999, _BAD)),
    ),
    _filtered(
        "E18",
        "only UNIX, INET, INET6 and route netlink sockets exist",
        "socket-families",
        Attempt("AF_PACKET", 41, (17, 3, 0), errno.EAFNOSUPPORT),
        Attempt("NETLINK_AUDIT", 41, (16, 3, 9), errno.EAFNOSUPPORT),
        Attempt("NETLINK_NETFILTER", 41, (16, 3, 12), errno.EAFNOSUPPORT),
        Attempt("NETLINK_GENERIC", 41, (16, 3, 16), errno.EAFNOSUPPORT),
        Attempt("INET raw", 41, (2, 3, 255), errno.EAFNOSUPPORT),
        Attempt("AF_ALG", 41, (38, 5, 0), errno.EAFNOSUPPORT),
        Attempt("AF_VSOCK", 41, (40, 1, 0), errno.EAFNOSUPPORT),
        Attempt("AF_XDP", 41, (44, 3, 0), errno.EAFNOSUPPORT),
        Attempt("AF_SMC", 41, (43, 1, 0), errno.EAFNOSUPPORT),
        Attempt("AF_KEY", 41, (15, 3, 2), errno.EAFNOSUPPORT),
        Attempt("socketpair INET", 53, (2, 1, 0, _BAD), errno.EAFNOSUPPORT),
        each=False,  # a kernel without a family answers with the same errno as the filter
    ),
    _filtered(
        "E20", "no filter hands its decisions to a guest", "listener", Attempt("seccomp listener", 317, (1, 8, _BAD))
    ),
    _filtered(
        "E21",
        "ioctls that set file flags, freeze, or speak to disks and machines are refused",
        "ioctl",
        Attempt("FS_IOC_SETFLAGS", 16, (_MINUS, 0x40086602, 0)),
        Attempt("FS_IOC_FSSETXATTR", 16, (_MINUS, 0x401C5820, 0)),
        Attempt("FIFREEZE", 16, (_MINUS, 0xC0045877, 0)),
        Attempt("BLKROSET", 16, (_MINUS, 0x125D, 0)),
        Attempt("LOOP_SET_FD", 16, (_MINUS, 0x4C00, 0)),
        Attempt("BTRFS_IOC_SNAP_CREATE", 16, (_MINUS, 0x50009401, 0)),
        Attempt("KVM_CREATE_VM", 16, (_MINUS, 0xAE01, 0)),
        Attempt("KDSETMODE", 16, (_MINUS, 0x4B3A, 0)),
        Attempt("FS_IOC_GETFSUUID", 16, (_MINUS, 0x80111500, 0)),
    ),
    _filtered(
        "E21-leases",
        "no program that opens a file has to wait for a guest with a lease on the file",
        "leases",
        Attempt("F_SETLEASE", 72, (_MINUS, 1024, 0)),
        Attempt("F_NOTIFY", 72, (_MINUS, 1026, 0)),
        outcome=DOS,
    ),
    _filtered(
        "E21-terminal",
        "no byte is pushed into a terminal's input",
        "terminal",
        Attempt("TIOCSTI", 16, (_MINUS, 0x5412, 0)),
        Attempt("TIOCSTI, upper bits", 16, (_MINUS, (1 << 32) | 0x5412, 0)),
        Attempt("TIOCLINUX", 16, (_MINUS, 0x541C, 0)),
        Attempt("TIOCCONS", 16, (_MINUS, 0x541D, 0)),
        Attempt("TIOCSETD", 16, (_MINUS, 0x5423, 0)),
    ),
    _filtered(
        "E22",
        "calls that are new, or that no program needs yet, are answered as unknown",
        "unknown",
        Attempt("mseal", 462, (1, 4096, 1), _NOSYS),
        Attempt("statmount", 457, (_BAD, _BAD, 8, 0x7FFF), _NOSYS),
        Attempt("listmount", 458, (_BAD, _BAD, 8, 0x7FFF), _NOSYS),
        Attempt("cachestat", 451, (_MINUS, _BAD, _BAD, 0), _NOSYS),
        Attempt("remap_file_pages", 216, (1, 0, 0, 0, 0), _NOSYS),
        each=False,  # an older kernel does not have all of these calls
    ),
    _filtered(
        "E22-memory",
        "memory that the host cannot see or count, or that belongs to other processes, is refused",
        "memory",
        Attempt("memfd_secret", 447, (0x7FFF,)),
        Attempt("process_madvise", 440, (_MINUS, 0, 0, 0, 0)),
        Attempt("process_mrelease", 448, (_MINUS, 0)),
        Attempt("vmsplice", 278, (_MINUS, 0, 0, 0x7FFF)),
        Attempt("mmap of huge pages", 9, (0, 0, 3, 0x40022, _MINUS, 0), errno.ENOMEM),
        Attempt("memfd_create of huge pages", 319, (_BAD, 4), errno.ENOMEM),
        Attempt("shmget of huge pages", 29, (0, 0, 0o5600), errno.ENOMEM),
    ),
    _filtered(
        "E23",
        "prctl permits only the options on a list",
        "prctl",
        Attempt("PR_SET_MM", 157, (35, 99, 0, 0, 1)),
        Attempt("PR_SET_SPECULATION enable", 157, (53, 99, 2, 0, 0)),
        Attempt("PR_SET_IO_FLUSHER", 157, (57, 1, 0, 0, 0), errno.EINVAL),
    ),
)


@attack(
    "E01-limit",
    "past the filter, no user namespace can be made",
    ESCAPE,
    off="namespace-limits",
    behind="seccomp:namespaces",
)
def second_fence_of_namespaces(arm: Arm) -> Seen:
    box = arm.sandbox()
    guest = arm.spawn("attempt('unshare', call, 272, 0x10000000)\ntell(pid=os.getpid())\ntime.sleep(8)", box=box)
    pid, said = reported_pid(guest)
    other_pid, _ = reported_pid(arm.spawn("tell(pid=os.getpid())\ntime.sleep(8)", box=box))
    own, other = (os.readlink(f"/proc/{host_pid(box, inner)}/ns/user") for inner in (pid, other_pid))
    return Seen(own != other, f"{said.splitlines()[0]}; namespace {own}, another guest's {other}")


_PERSONALITY = "attempt('personality', call, 135, 0x0440000)\ntell(pid=os.getpid())\ntime.sleep(8)"


@attack("E11-personality", "address randomisation and non-executable memory stay on", ESCAPE, off="seccomp:personality")
def personality(arm: Arm) -> Seen:
    box = arm.sandbox()
    pid, said = reported_pid(arm.spawn(_PERSONALITY, box=box))
    with open(f"/proc/{host_pid(box, pid)}/personality", encoding="ascii") as file:
        seen = int(file.read(), 16)
    return Seen(seen & 0x0440000 != 0, f"{said.splitlines()[0]}; personality {seen:#x}")


_LOG = """
size = attempt("syslog", call, 103, 10, 0, 0)
buffer = ctypes.create_string_buffer(1 << 20)
got = attempt("read all", call, 103, 3, buffer, len(buffer))
loot(buffer.raw[-100000:].rstrip(bytes(1)) if got else b"")
"""


@attack("E14", "the kernel's log is not read", LEAK, off="seccomp:syslog")
def kernel_log(arm: Arm) -> Seen:
    with open("/proc/sys/kernel/dmesg_restrict", encoding="ascii") as file:
        if file.read().strip() != "0":
            raise NotApplicable("the host restricts its log by itself (kernel.dmesg_restrict)")
    report = arm.python(_LOG)
    return Seen(_in_the_log(report.looted), report.words())


def _in_the_log(text: str) -> bool:
    """Return whether a line of the guest's loot is in the kernel's log as the host reads it."""
    import subprocess

    log = subprocess.run(["/bin/dmesg"], capture_output=True, check=False).stdout.decode("utf-8", "replace")
    lines = [line.partition("] ")[2] for line in text.splitlines()]
    return any(len(line) > 20 and line in log for line in lines)


_SEAL = """
import mmap
code = bytes.fromhex({machine!r})
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(code)
function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
tell(tried="machine code", met=str(function()))
"""
_GETPID_32 = "b814000000cd80c3"  # mov eax, 20; int 0x80; ret
_GETPID_X32 = "b8270000400f05c3"  # mov eax, 0x40000027; syscall; ret


@attack("E19", "a system call of the 32-bit ABI kills its process", ESCAPE, off="seccomp:abi")
def old_abi(arm: Arm) -> Seen:
    return _alive_after(arm, _GETPID_32)


@attack("E19-x32", "a system call of the x32 ABI kills its process", ESCAPE, off="seccomp:abi")
def x32_abi(arm: Arm) -> Seen:
    return _alive_after(arm, _GETPID_X32)


def _alive_after(arm: Arm, machine: str) -> Seen:
    report = arm.python(_SEAL.format(machine=machine))
    return Seen(
        report.signal is None and report.exit_code == 0,
        f"exit {report.exit_code}, signal {report.signal}; {report.words()}",
    )


_INOTIFY = """
made = []
try:
    while len(made) < 200:
        made.append(call(294, 0))
except OSError as error:
    tell(tried="inotify_init1", met=errno.errorcode[error.errno])
tell(pid=os.getpid())
time.sleep(8)
"""


@attack("E15", "one guest holds few inotify instances", DOS, off="namespace-limits")
def inotify_flood(arm: Arm) -> Seen:
    box = arm.sandbox()
    pid = host_pid(box, reported_pid(arm.spawn(_INOTIFY, box=box))[0])
    count = sum("inotify" in _link(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return Seen(count > _FEW, f"{count} instances")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


_SYSV = """
made = attempt("shmget", call, 29, key, 4096, 0o600 | 0o1000)
if made is not None:
    attempt("found", call, 29, key, 0, 0)
"""


@attack("E24", "System V objects live in an IPC namespace of the sandbox's own", LEAK, off="ipc-namespace")
def shared_memory_of_the_host(arm: Arm) -> Seen:
    key = 0x52460000 | int(arm.canary[:4], 16)
    report = arm.python(_SYSV, key=key)
    with open("/proc/sysvipc/shm", encoding="ascii") as file:
        mine = [line.split() for line in file if line.split()[0] == str(key)]
    for row in mine:
        _remove_shared_memory(int(row[1]))
    return Seen(bool(mine), report.words())


def _remove_shared_memory(number: int) -> None:
    import ctypes

    ctypes.CDLL(None).shmctl(number, 0, None)


@attack("E25", "from outside: no capability in any set", ESCAPE, off="capabilities")
def no_capabilities(arm: Arm) -> Seen:
    status = _status_of_guest(arm)
    sets = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    return Seen(any(int(value, 16) for value in sets.values()), str(sets))


@attack("E25-nnp", "from outside: no_new_privs is set", ESCAPE, off="no-new-privileges")
def no_new_privileges(arm: Arm) -> Seen:
    status = _status_of_guest(arm)
    return Seen(status["NoNewPrivs"] != "1", f"NoNewPrivs {status['NoNewPrivs']}")


@attack("E25-filter", "from outside: two filters are in force", ESCAPE, off="seccomp")
def filters_in_force(arm: Arm) -> Seen:
    status = _status_of_guest(arm)
    return Seen(status["Seccomp"] != "2", f"Seccomp {status['Seccomp']}, filters {status.get('Seccomp_filters')}")


def _status_of_guest(arm: Arm) -> dict[str, str]:
    """Return the fields of /proc/<pid>/status of a sleeping guest, as the host reads them."""
    box = arm.sandbox()
    guest = arm.spawn("tell(pid=os.getpid())\ntime.sleep(8)", box=box)
    with open(f"/proc/{host_pid(box, reported_pid(guest)[0])}/status", encoding="utf-8") as file:
        lines = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in lines}


CASES = cases(globals())
