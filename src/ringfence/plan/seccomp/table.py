"""Lists, as data, which system calls a guest of the process backend may make; `compiler.py` compiles the table.

Numbers are x86_64's. A rule is a tuple of clauses, tried in order; the first clause whose checks all hold decides.
Every refusal names its control: an attack is tried with a table that lacks exactly one control.
"""

from __future__ import annotations

# (operation, byte offset in struct seccomp_data, mask, values). The masked word must be "in" or "not-in" the values;
# "any-bit" asks that it is not zero.
Check = tuple[str, int, int, tuple[int, ...]]
# (action for the kernel, name of the control that refuses; "" when it is allowed)
Verdict = tuple[int, str]
Clause = tuple[tuple[Check, ...], Verdict]
Rule = tuple[Clause, ...]

KILL_PROCESS = 0x80000000
RET_ERRNO = 0x00050000
RET_ALLOW = 0x7FFF0000
EPERM, ENOMEM, EINVAL, ENOSYS, EPROTONOSUPPORT, EAFNOSUPPORT = 1, 12, 22, 38, 93, 97
ERRNO_NAMES = {
    0: "no error",
    EPERM: "EPERM",
    ENOMEM: "ENOMEM",
    EINVAL: "EINVAL",
    ENOSYS: "ENOSYS",
    EPROTONOSUPPORT: "EPROTONOSUPPORT",
    EAFNOSUPPORT: "EAFNOSUPPORT",
}
FULL = 0xFFFFFFFF

# Each line starts with the number of its first name; a dash is a number without a call.
_NUMBERS = """
0 read write open close stat fstat lstat poll lseek mmap
10 mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn ioctl pread64 pwrite64 readv
20 writev access pipe select sched_yield mremap msync mincore madvise shmget
30 shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid
40 sendfile socket connect accept sendto recvfrom sendmsg recvmsg shutdown bind
50 listen getsockname getpeername socketpair setsockopt getsockopt clone fork vfork execve
60 exit wait4 kill uname semget semop semctl shmdt msgget msgsnd
70 msgrcv msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd
80 chdir fchdir rename mkdir rmdir creat link unlink symlink readlink
90 chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo
100 times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid
110 getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid
120 getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo
130 rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs sysfs
140 getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
146 sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock
150 munlock mlockall munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex
160 setrlimit chroot sync acct settimeofday mount umount2 swapon swapoff reboot
170 sethostname setdomainname iopl ioperm create_module init_module delete_module get_kernel_syms query_module quotactl
180 nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead setxattr lsetxattr
190 fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
200 tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit
210 io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64
218 set_tid_address restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun
226 timer_delete clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes
236 vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
246 kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch
256 migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat unlinkat renameat linkat
266 symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list get_robust_list splice
276 tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create eventfd fallocate
286 timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv
296 pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at
304 open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev kcmp finit_module
314 sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create kexec_file_load bpf execveat userfaultfd
324 membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents
334 rseq uretprobe uprobe
424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
433 fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
443 quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
449 futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue
457 statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat
466 removexattrat open_tree_attr file_getattr file_setattr listns rseq_slice_yield
"""

# Passed whatever the arguments. Left out, and therefore ENOSYS: calls that no kernel has any more, and mseal,
# cachestat, statmount, listmount, listns, lsm_*, *xattrat, file_setattr, remap_file_pages, rseq_slice_yield, which no
# program needs (E13, E22).
_ALLOWED = """
read write close stat fstat lstat poll lseek mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise shmat shmctl dup dup2
pause nanosleep getitimer alarm setitimer getpid sendfile connect accept sendto recvfrom sendmsg recvmsg shutdown bind
listen getsockname getpeername getsockopt fork vfork execve exit wait4 kill uname semget semop semctl shmdt
msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename rmdir
link unlink symlink readlink chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times getuid getgid
setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid
setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo
rt_sigsuspend sigaltstack utime statfs fstatfs getpriority setpriority sched_setparam sched_getparam
sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall
munlockall arch_prctl setrlimit sync gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity
sched_getaffinity epoll_create getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
timer_settime timer_gettime timer_getoverrun timer_delete clock_gettime clock_getres clock_nanosleep exit_group
epoll_wait epoll_ctl tgkill utimes get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
waitid ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch fchownat futimesat newfstatat unlinkat
renameat linkat symlinkat readlinkat faccessat pselect6 ppoll set_robust_list get_robust_list splice tee
sync_file_range utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4
signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo recvmmsg syncfs sendmmsg
getcpu sched_getattr getrandom execveat membarrier mlock2 copy_file_range preadv2 pwritev2
pkey_mprotect pkey_alloc pkey_free statx rseq pidfd_send_signal pidfd_open close_range openat2 faccessat2 epoll_pwait2
landlock_create_ruleset landlock_add_rule landlock_restrict_self futex_waitv map_shadow_stack futex_wake futex_wait
futex_requeue
"""

# Refused whatever the arguments: (control, errno, calls).
_REFUSED: tuple[tuple[str, int, str], ...] = (
    ("namespaces", EPERM, "unshare setns"),
    (
        "mounts",
        EPERM,
        """mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
        open_tree_attr""",
    ),
    # ENOSYS sends libc back to clone, whose flags are not in memory but in a register (E01).
    ("clone3", ENOSYS, "clone3"),
    # A ring runs calls that no filter sees (E07). ENOSYS reads as a kernel without rings, and is not the EPERM that the
    # kernel's own switch gives.
    ("io-uring", ENOSYS, "io_uring_setup io_uring_enter io_uring_register"),
    # fs.aio-max-nr is one number for the whole host: a guest could take it all (F15).
    ("aio", ENOSYS, "io_setup io_destroy io_getevents io_submit io_cancel io_pgetevents"),
    ("keyring", EPERM, "add_key request_key keyctl"),
    ("bpf", EPERM, "bpf"),
    ("perf", EPERM, "perf_event_open"),
    ("userfaultfd", EPERM, "userfaultfd"),
    ("ptrace", EPERM, "ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd"),
    (
        "modules",
        EPERM,
        "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff",
    ),
    ("handles", EPERM, "open_by_handle_at name_to_handle_at"),
    ("clock", EPERM, "settimeofday clock_settime adjtimex clock_adjtime"),
    ("syslog", EPERM, "syslog"),
    ("numa", EPERM, "mbind set_mempolicy set_mempolicy_home_node move_pages migrate_pages"),
    ("memory", EPERM, "memfd_secret process_madvise process_mrelease vmsplice modify_ldt"),
    (
        "admin",
        EPERM,
        "acct quotactl quotactl_fd sethostname setdomainname vhangup iopl ioperm fanotify_init fanotify_mark",
    ),
    # The scheduling policy of this call is in memory; D13.
    ("realtime", EPERM, "sched_setattr"),
)

CONTROLS: tuple[str, ...] = (
    "abi",
    "namespaces",
    "mounts",
    "clone3",
    "io-uring",
    "aio",
    "keyring",
    "bpf",
    "perf",
    "userfaultfd",
    "ptrace",
    "modules",
    "handles",
    "clock",
    "syslog",
    "numa",
    "memory",
    "admin",
    "realtime",
    "socket-families",
    "terminal",
    "ioctl",
    "prctl",
    "listener",
    "personality",
    "prlimit",
    "setid-bits",
    "devices",
    "openat2",
    "leases",
    "core",
    "clone-parent",
    "unknown",
)

# What calls with conditions refuse, for people: (control, words).
CONDITIONS: tuple[tuple[str, str], ...] = (
    ("bpf", "setsockopt that attaches a program to a socket"),
    ("memory", "mmap, memfd_create and shmget of huge pages"),
    ("namespaces", "clone with a CLONE_NEW* flag or a bit above 31"),
    ("realtime", "sched_setscheduler but for SCHED_OTHER, BATCH and IDLE"),
    (
        "socket-families",
        "socket but for UNIX, TCP, UDP, ping and NETLINK_ROUTE; socketpair but for UNIX; setsockopt TCP_ULP",
    ),
    ("terminal", "ioctl TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD"),
    (
        "ioctl",
        "ioctl that sets file flags, names or freezes a file system, or for disks, loop devices, consoles, btrfs, KVM",
    ),
    ("ioctl", "ioctl for bridges and VLANs"),
    ("prctl", "prctl PR_SET_MM, PR_SET_PTRACER, PR_SPEC_ENABLE and every option not on a list"),
    ("listener", "seccomp with SECCOMP_FILTER_FLAG_NEW_LISTENER"),
    ("personality", "personality but for PER_LINUX and the query"),
    ("prlimit", "prlimit64 but for pid 0"),
    ("setid-bits", "chmod, open, creat, mknod and mkdir families with a set-user-id or set-group-id bit"),
    ("devices", "mknod, mknodat of a character or block device, renameat2 that leaves one behind"),
    ("openat2", "openat2 (mode in memory), for guest code"),
    ("leases", "fcntl F_SETLEASE, F_SETDELEG, F_NOTIFY, for guest code"),
    ("core", "setrlimit and prlimit64 of RLIMIT_CORE, which change nothing, for guest code"),
    ("clone-parent", "clone with CLONE_PARENT, for guest code"),
)

ALLOW: Verdict = (RET_ALLOW, "")
UNKNOWN: Rule = (((), (RET_ERRNO | ENOSYS, "unknown")),)

CLONE_NEW = (
    0x7E020000  # NS, CGROUP, UTS, IPC, USER, PID, NET. CLONE_NEWTIME (0x80) is in clone's signal byte: no flag there.
)
CLONE_PARENT = 0x8000
_SETID = 0o6000
_CREATES = 0o20000100  # O_CREAT, __O_TMPFILE: without one of them the mode argument is not read
_FORMAT, _CHARACTER, _BLOCK = 0o170000, 0o020000, 0o060000
_SOCKET_TYPE = FULL & ~0o2004000  # without SOCK_CLOEXEC, SOCK_NONBLOCK
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DGRAM, _RAW, _SEQPACKET = 1, 2, 3, 5
# Default, TCP, UDP, ICMP echo, ICMPv6 echo, each with its type of socket. Not SCTP, SMC, MPTCP: a guest could make the
# kernel load their modules. For a protocol that the kernel does not know, a datagram by TCP too, the kernel starts
# modprobe as root, outside of all limits.
_STREAM_PROTOCOLS, _DGRAM_PROTOCOLS, _DGRAM6_PROTOCOLS = (0, 6), (0, 1, 17), (0, 17, 58)
# SIOCGIFBR, SIOCSIFBR, SIOCADDDLCI, SIOCDELDLCI, SIOCGIFVLAN, SIOCSIFVLAN, and SIOCBRADDBR to SIOCBRDELIF: the kernel
# loads the modules bridge, dlci and 8021q before it asks for rights.
_LOADING = (0x8940, 0x8941, *range(0x8980, 0x8984), *range(0x89A0, 0x89A4))
# SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF. The machine code that the kernel makes of these programs has
# one limit for all users of the host (net.core.bpf_jit_limit), which some 3000 sockets of one guest would fill: no user
# but root could install a filter then, not even for seccomp (F15).
_SOL_SOCKET, _ATTACH = 1, (26, 50, 51, 52)
_SOL_TCP, _TCP_ULP = 6, 31  # TLS in the kernel, and every other layer over TCP
_TERMINAL = (0x5412, 0x541C, 0x541D, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD
# By the type byte: block devices 0x12, queries of a file system's id and disk 0x15, console 'K', loop 'L', virtual
# terminals 'V', 'X' and 'f' of file systems (FIFREEZE, FS_IOC_SETFLAGS, encryption keys), btrfs 0x94, KVM 0xAE; E21.
_IOCTL_TYPES = (0x1200, 0x1500, 0x4B00, 0x4C00, 0x5600, 0x5800, 0x6600, 0x9400, 0xAE00)
# FS_IOC_GETFLAGS, FS_IOC_FIEMAP, FS_IOC_FSGETXATTR, FICLONE, FICLONERANGE
_IOCTL_HARMLESS = (0x80086601, 0xC020660B, 0x801C581F, 0x40049409, 0x4020940D)
_PR_SET_MM, _PR_SET_SPECULATION, _PR_SET_PTRACER = 35, 53, 0x59616D61
_SPEC_SAFER = (4, 8, 16)  # DISABLE, FORCE_DISABLE, DISABLE_NOEXEC
# PDEATHSIG, DUMPABLE, KEEPCAPS, NAME, SECCOMP, CAPBSET, TSC, SECUREBITS, TIMERSLACK, MCE_KILL_GET, CHILD_SUBREAPER,
# NO_NEW_PRIVS, GET_TID_ADDRESS, THP_DISABLE, CAP_AMBIENT, GET_SPECULATION, MDWE, SET_VMA. All other options are EINVAL,
# as on a kernel without the option.
_PRCTL = (*range(1, 5), 7, 8, 15, 16, *range(21, 31), 34, *range(36, 43), 47, 52, 65, 66, 0x53564D41)
_SCHED_POLICY = FULL & ~0x40000000  # without SCHED_RESET_ON_FORK
_SCHED_FAIR = (0, 3, 5)  # OTHER, BATCH, IDLE
_NEW_LISTENER = 8
_RLIMIT_CORE = 4
# Huge pages come from the host's own pool, which no limit of memory counts (F01).
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 4, 0o4000
# A process that opens a file on which a guest has a lease waits for the guest, up to 45 s: also a process of the host,
# and also where the guest has the file by a read-only mount.
_LEASES = (1024, 1026, 1040)  # F_SETLEASE, F_NOTIFY, F_SETDELEG
_RENAME_WHITEOUT = 4


def _low(argument: int) -> int:
    return 16 + 8 * argument


def _is(argument: int, *values: int, mask: int = FULL) -> Check:
    return ("in", _low(argument), mask, values)


def _is_not(argument: int, *values: int, mask: int = FULL) -> Check:
    return ("not-in", _low(argument), mask, values)


def _has(argument: int, bits: int) -> Check:
    return ("any-bit", _low(argument), bits, ())


def _high(argument: int) -> Check:
    """Check for any bit in the upper half of the register."""
    return ("any-bit", _low(argument) + 4, FULL, ())


def _refuse(errno: int, control: str, *checks: Check) -> Clause:
    return (checks, (RET_ERRNO | errno, control))


def _allow(*checks: Check) -> Clause:
    return (checks, ALLOW)


def _no_setid(mode: int, *when: Check) -> Rule:
    """Return the rule that refuses a set-uid or set-gid bit in the argument `mode`, where `when` holds.

    A31: set-uid files made in a writable host mount are live on the host. The kernel reads 16 bits of the mode.
    """
    return (_refuse(EPERM, "setid-bits", *when, _has(mode, _SETID)), _allow())


def _node(mode: int) -> Rule:
    device = _refuse(EPERM, "devices", _is(mode, _CHARACTER, _BLOCK, mask=_FORMAT))
    return (*_no_setid(mode)[:-1], device, _allow())


def _socket() -> Rule:
    stream, dgram = _is(1, _STREAM, mask=_SOCKET_TYPE), _is(1, _DGRAM, mask=_SOCKET_TYPE)
    return (
        _allow(_is(0, _UNIX), _is(1, _STREAM, _DGRAM, _SEQPACKET, mask=_SOCKET_TYPE)),
        _allow(_is(0, _INET, _INET6), stream, _is(2, *_STREAM_PROTOCOLS)),
        _allow(_is(0, _INET), dgram, _is(2, *_DGRAM_PROTOCOLS)),
        _allow(_is(0, _INET6), dgram, _is(2, *_DGRAM6_PROTOCOLS)),
        # SEQPACKET is left out for INET: with protocol 0 it is SCTP where the module is loaded (E18).
        _refuse(EPROTONOSUPPORT, "socket-families", _is(0, _INET, _INET6), stream),
        _refuse(EPROTONOSUPPORT, "socket-families", _is(0, _INET, _INET6), dgram),
        _allow(_is(0, _NETLINK), _is(1, _RAW, _DGRAM, mask=_SOCKET_TYPE), _is(2, 0)),
        _refuse(EAFNOSUPPORT, "socket-families"),
    )


def _ioctl() -> Rule:
    # The kernel cuts the command to 32 bits and musl sign-extends it: the upper half is not looked at.
    return (
        _refuse(EPERM, "terminal", _is(1, *_TERMINAL)),
        _allow(_is(1, *_IOCTL_HARMLESS)),
        _refuse(EPERM, "ioctl", _is(1, *_IOCTL_TYPES, mask=0xFF00)),
        _refuse(EPERM, "ioctl", _is(1, *_LOADING)),
        _allow(),
    )


def _prctl() -> Rule:
    return (
        _allow(_is(0, *_PRCTL)),
        _allow(_is(0, _PR_SET_SPECULATION), _is(2, *_SPEC_SAFER)),
        _refuse(EPERM, "prctl", _is(0, _PR_SET_MM, _PR_SET_PTRACER, _PR_SET_SPECULATION)),
        _refuse(EINVAL, "prctl"),
    )


def _clone() -> Rule:
    # Since 5.7 the kernel cuts clone's flags to 32 bits; before, bits above reached clone3's features (E01).
    return (
        _refuse(EPERM, "namespaces", _has(0, CLONE_NEW)),
        _refuse(EPERM, "namespaces", _high(0)),
        _allow(),
    )


def _conditional() -> dict[str, Rule]:
    return {
        "clone": _clone(),
        "socket": _socket(),
        "socketpair": (_allow(_is(0, _UNIX)), _refuse(EAFNOSUPPORT, "socket-families")),
        "setsockopt": (
            _refuse(EPERM, "bpf", _is(1, _SOL_SOCKET), _is(2, *_ATTACH)),
            _refuse(EPROTONOSUPPORT, "socket-families", _is(1, _SOL_TCP), _is(2, _TCP_ULP)),
            _allow(),
        ),
        "ioctl": _ioctl(),
        "prctl": _prctl(),
        "mmap": (_refuse(ENOMEM, "memory", _has(3, _MAP_HUGETLB)), _allow()),
        "memfd_create": (_refuse(ENOMEM, "memory", _has(1, _MFD_HUGETLB)), _allow()),
        "shmget": (_refuse(ENOMEM, "memory", _has(2, _SHM_HUGETLB)), _allow()),
        # RENAME_WHITEOUT leaves a character device under the old name (A15).
        "renameat2": (_refuse(EPERM, "devices", _has(4, _RENAME_WHITEOUT)), _allow()),
        "seccomp": (_refuse(EPERM, "listener", _is(0, 1), _has(1, _NEW_LISTENER)), _allow()),
        "personality": (_allow(_is(0, 0, FULL)), _refuse(EPERM, "personality")),
        # J17: limits of PID 1 or a neighbour.
        "prlimit64": (_refuse(EPERM, "prlimit", _is_not(0, 0)), _refuse(EPERM, "prlimit", _high(0)), _allow()),
        "sched_setscheduler": (
            _refuse(EPERM, "realtime", _is_not(1, *_SCHED_FAIR, mask=_SCHED_POLICY)),
            _allow(),
        ),
        "open": _no_setid(2, _has(1, _CREATES)),
        "openat": _no_setid(3, _has(2, _CREATES)),
        "creat": _no_setid(1),
        "chmod": _no_setid(1),
        "fchmod": _no_setid(1),
        "fchmodat": _no_setid(2),
        "fchmodat2": _no_setid(2),
        "mkdir": _no_setid(1),
        "mkdirat": _no_setid(2),
        "mknod": _node(1),
        "mknodat": _node(2),
    }


def numbers() -> dict[str, int]:
    """Return the number of every x86_64 call that this table knows, by name."""
    found: dict[str, int] = {}
    for line in _NUMBERS.split("\n"):
        first, *names = line.split() or ("0",)
        found.update(zip(names, range(int(first), int(first) + len(names)), strict=True))
    return found


def guest_rules() -> dict[str, Rule]:
    """Return the rule of each call that has a rule, by name; every other call is `UNKNOWN`."""
    rules: dict[str, Rule] = dict.fromkeys(_ALLOWED.split(), (_allow(),))
    for control, errno, names in _REFUSED:
        rules.update(dict.fromkeys(names.split(), (_refuse(errno, control),)))
    rules.update(_conditional())
    return rules


def last_rules() -> dict[str, Rule]:
    """Return the rules that guest code has besides `guest_rules`; all other calls pass here.

    The spawner needs the refused calls until guest code starts: openat2 and leases for its file workers, CLONE_PARENT
    so that the monitor is the parent of each process that the spawner starts. openat2 carries its mode in memory, where
    no filter can look (A31).
    """
    return {
        "openat2": (_refuse(ENOSYS, "openat2"),),
        "fcntl": (_refuse(EPERM, "leases", _is(1, *_LEASES)), _allow()),
        # D14: a limit of 0 lets the kernel start a program of the host for a core. Many programs ask for that limit.
        "setrlimit": (_refuse(0, "core", _is(0, _RLIMIT_CORE)), _allow()),
        "prlimit64": (
            _refuse(0, "core", _is(1, _RLIMIT_CORE), _has(2, FULL)),
            _refuse(0, "core", _is(1, _RLIMIT_CORE), _high(2)),
            _allow(),
        ),
        "clone": (_refuse(EPERM, "clone-parent", _has(0, CLONE_PARENT)), _allow()),
    }
