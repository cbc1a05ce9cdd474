"""Owns the system calls Python lacks: namespaces, mounts, capabilities, Landlock, seccomp, raw clone.

They use the C module below `ctypes`, because `ctypes` takes 4 ms of every cold start. All go through libc's `syscall`,
with every argument as a 64-bit word: a bare Python int would be passed as a 32-bit C int with rubbish above it.
x86-64 numbers; the planner refuses other machines before this module is used.
"""

from __future__ import annotations

import _ctypes
import errno
import os
import struct

TYPE_CHECKING = False

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_VM = 0x00000100
CLONE_VFORK = 0x00004000
CLONE_PARENT = 0x00008000
CLONE_PIDFD = 0x00001000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_IDMAP = 0x00100000

AT_FDCWD = -100
AT_RECURSIVE = 0x8000
AT_EMPTY_PATH = 0x1000

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

NR_CLONE = 56
_NR_FCNTL = 72
NR_PRCTL = 157
NR_MOUNT = 165
_NR_UMOUNT2 = 166
NR_UNSHARE = 272
NR_SETNS = 308
_NR_FALLOCATE = 285
NR_CAPSET = 126
_NR_PIVOT_ROOT = 155
NR_SECCOMP = 317
_NR_OPEN_TREE = 428
_NR_MOVE_MOUNT = 429
_NR_FSOPEN = 430
_NR_FSCONFIG = 431
_NR_FSMOUNT = 432
NR_CLOSE_RANGE = 436
_NR_OPENAT2 = 437
NR_MOUNT_SETATTR = 442
NR_LANDLOCK_CREATE = 444
NR_LANDLOCK_ADD = 445
NR_LANDLOCK_RESTRICT = 446
_NR_KEYCTL = 250
NR_PRLIMIT = 302

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
_PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_PR_GET_TID_ADDRESS = 40
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_WORDS = 6
_F_DUPFD_CLOEXEC = 1030
_MOST_CAPABILITIES = 64


if TYPE_CHECKING:
    Integer = _ctypes._SimpleCData[int]  # noqa: SLF001  # as below
    _Bytes = _ctypes._SimpleCData[bytes]  # noqa: SLF001  # as below
else:
    Integer = _Bytes = _ctypes._SimpleCData  # noqa: SLF001  # what the types of ctypes derive from


class _Long(Integer):
    _type_ = "l"


class _Int(Integer):
    _type_ = "i"


class _Pointer(Integer):  # bytes and None are accepted as arguments too
    _type_ = "P"


class _Unsigned(Integer):
    _type_ = "Q"


class _Text(_Bytes):  # the address of bytes
    _type_ = "z"


class _Call(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Long


class _CallWithGil(_ctypes.CFuncPtr):
    """A function that keeps the GIL over the call: a clone must not happen without the GIL."""

    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO | _ctypes.FUNCFLAG_PYTHONAPI
    _restype_ = _Long


class _Notice(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_PYTHONAPI
    _restype_ = None


_process = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: what is loaded already
_syscall = _Call(_ctypes.dlsym(_process, "syscall"))
_syscall.argtypes = [_Long, *[_Pointer] * _WORDS]
_syscall_with_gil = _CallWithGil(_ctypes.dlsym(_process, "syscall"))
_syscall_with_gil.argtypes = _syscall.argtypes
before_fork = _Notice(_ctypes.dlsym(_process, "PyOS_BeforeFork"))
after_fork_in_parent = _Notice(_ctypes.dlsym(_process, "PyOS_AfterFork_Parent"))
after_fork_in_child = _Notice(_ctypes.dlsym(_process, "PyOS_AfterFork_Child"))


def with_gil(address: int) -> _CallWithGil:
    """Return the machine code at an address as a function, which is called as `syscall` is."""
    made = _CallWithGil(address)
    made.argtypes = _syscall.argtypes
    return made


def address_of(data: bytes) -> int:
    """Return the address of `data`, which is valid as long as `data` lives."""
    return int.from_bytes(memoryview(_Text(data)), "little")


def raw_syscall(number: int, *words: int) -> int:
    """Make a system call of six arguments, keeping the GIL. Return the kernel's result: an error is negative."""
    result: int = _syscall_with_gil(number, *words)
    return result if result >= 0 else -_ctypes.get_errno()


def _failed(what: str) -> OSError:
    number = _ctypes.get_errno()
    return OSError(number, f"{os.strerror(number)} [{what}]")


def syscall(number: int, *args: object, what: str) -> int:
    """Make a system call. `args`: integers, bytes (the address is passed) and None. Raises OSError."""
    result: int = _syscall(number, *args, *(0,) * (_WORDS - len(args)))
    if result < 0:
        raise _failed(what)
    return result


def high(fd: int) -> int:
    """Return a copy of `fd` with a number above the fixed descriptors, which no dup2 onto those overwrites."""
    return syscall(_NR_FCNTL, fd, _F_DUPFD_CLOEXEC, 16, what="fcntl F_DUPFD_CLOEXEC")


# Limits by their numbers: loading the module `resource` takes 4 ms under gVisor.
_NAMES = ("CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS", "LOCKS", "SIGPENDING")
RLIMITS = {name: number for number, name in enumerate((*_NAMES, "MSGQUEUE", "NICE", "RTPRIO", "RTTIME"))}


def limits(name: str) -> tuple[int, int]:
    """Return this process's own limit, soft and hard."""
    found = bytearray(16)
    syscall(NR_PRLIMIT, 0, RLIMITS[name], None, _ctypes.byref(_Unsigned.from_buffer(found)), what=f"getrlimit {name}")
    return int.from_bytes(found[:8], "little"), int.from_bytes(found[8:], "little")


def set_limits(name: str, soft: int, hard: int) -> None:
    asked = soft.to_bytes(8, "little") + hard.to_bytes(8, "little")
    syscall(NR_PRLIMIT, 0, RLIMITS[name], asked, what=f"setrlimit {name}")


def unshare(flags: int) -> None:
    if _syscall(NR_UNSHARE, flags, 0, 0, 0, 0, 0) < 0:
        raise _failed(f"unshare {flags:#x}")


def setns(fd: int, flags: int) -> None:
    if _syscall(NR_SETNS, fd, flags, 0, 0, 0, 0) < 0:
        raise _failed(f"setns {flags:#x}")


def _path(value: str | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    if _syscall(NR_MOUNT, _path(source), _path(target), _path(kind), flags, _path(options), 0) < 0:
        raise _failed(f"mount {kind or 'bind'} {source or ''} on {target} {options or ''}".rstrip())


def umount(target: str) -> None:
    syscall(_NR_UMOUNT2, _path(target), MNT_DETACH, what=f"umount {target}")


def mount_attributes(add: int, idmap_fd: int = 0) -> bytes:
    return struct.pack("QQQQ", add, 0, 0, idmap_fd)


def mount_setattr(fd: int, path: str, flags: int, *, add: int, idmap_fd: int = 0) -> None:
    attributes = mount_attributes(add, idmap_fd)
    syscall(NR_MOUNT_SETATTR, fd, _path(path), flags, attributes, len(attributes), what=f"mount_setattr {path}")


def open_tree_clone(path: str, *, at: int = AT_FDCWD) -> int:
    """Return a detached copy of the mounts at `path` and below. An empty path means the file that `at` is open on."""
    flags = 1 | AT_RECURSIVE | os.O_CLOEXEC | (0 if path else AT_EMPTY_PATH)
    return syscall(_NR_OPEN_TREE, at, _path(path), flags, what=f"open_tree {path}")


def move_mount(fd: int, target: str, *, at: int = AT_FDCWD) -> None:
    """Move a mount to a target. An empty target means the file that `at` is open on."""
    flags = 4 if target else 4 | 0x40
    syscall(_NR_MOVE_MOUNT, fd, b"", at, _path(target), flags, what=f"move_mount {target}")


def mount_nowhere(kind: str, source: str, flags: tuple[str, ...]) -> int:
    """Mount a new file system of `source` on no path: nosuid, nodev. The mount goes with its last descriptor."""
    context = syscall(_NR_FSOPEN, kind.encode(), 1, what=f"fsopen {kind}")
    try:
        syscall(_NR_FSCONFIG, context, 1, b"source", _path(source), 0, what=f"fsconfig source {source}")
        for flag in flags:
            syscall(_NR_FSCONFIG, context, 0, flag.encode(), None, 0, what=f"fsconfig {flag}")
        syscall(_NR_FSCONFIG, context, 6, None, None, 0, what=f"fsconfig create {kind} of {source}")
        return syscall(_NR_FSMOUNT, context, 1, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, what=f"fsmount {kind}")
    finally:
        os.close(context)


def pivot_root_here() -> None:
    """Make the current directory the root and drop the old one."""
    syscall(_NR_PIVOT_ROOT, b".", b".", what="pivot_root")
    umount(".")
    os.chdir("/")


def openat2(directory: int, path: str, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    try:
        return syscall(_NR_OPENAT2, directory, _path(path), how, len(how), what=path)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    from ringfence.shared import openat

    return openat.open_below(directory, path, flags, mode, resolve)


class _Kernel:
    """What this process has found out about its kernel."""

    has_openat2: bool | None = None


_kernel = _Kernel()


def has_openat2() -> bool:
    """Return whether this kernel has openat2: a gVisor of 2022 has not. The kernel is asked once."""
    found = _kernel.has_openat2
    if found is None:
        try:
            syscall(_NR_OPENAT2, -1, b"", b"", 0, what="openat2")
            found = True
        except OSError as error:
            found = error.errno != errno.ENOSYS
        _kernel.has_openat2 = found
    return found


def open_nameless(directory: str) -> int:
    """Open a new file in `directory` without a name: nothing of the file outlives the descriptors."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    path = f"{directory}/.{os.urandom(8).hex()}"  # a file system without nameless files
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def open_unnamed_yet(folder: int, temporary: str) -> tuple[int, bool]:
    """Open a new file to be written and then named in `folder`.

    Return its descriptor and whether `temporary` is its name.

    The file has a temporary name only where the file system has no nameless files: elsewhere a kill leaves nothing.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    return os.open(temporary, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder), True


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give a range of blocks back to the file system; the file keeps its size."""
    syscall(_NR_FALLOCATE, fd, 3, offset, size, what="fallocate")


def close_all_but(kept: list[int]) -> None:
    """Close every descriptor that a clone inherited, except these and the standard streams."""
    first = 3
    for fd in sorted({fd for fd in kept if fd >= first}):
        if fd > first:
            syscall(NR_CLOSE_RANGE, first, fd - 1, 0, what="close_range")
        first = fd + 1
    close_from(first)


def close_from(first: int) -> None:
    syscall(NR_CLOSE_RANGE, first, 0x7FFFFFFF, 0, what="close_range")  # gVisor reads the number as signed


def prctl(option: int, value: int) -> None:
    if _syscall(NR_PRCTL, option, value, 0, 0, 0, 0) < 0:
        raise _failed(f"prctl {option}")


def set_name(name: str) -> None:
    syscall(NR_PRCTL, PR_SET_NAME, name.encode()[:15], what="prctl PR_SET_NAME")


def set_dumpable(value: int) -> None:
    prctl(PR_SET_DUMPABLE, value)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, 9)


def become_subreaper() -> None:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def new_session_keyring() -> None:
    """Start an empty session keyring, so that no key of the caller is inside (I07). ENOSYS: there are no keys."""
    try:
        syscall(_NR_KEYCTL, 1, 0, what="keyctl join session keyring")
    except OSError:
        return


def capabilities() -> int:
    """Return how many capabilities this kernel knows."""
    for capability in range(_MOST_CAPABILITIES):
        if _syscall(NR_PRCTL, _PR_CAPBSET_READ, capability, 0, 0, 0, 0) < 0:
            return capability or _MOST_CAPABILITIES  # none at all: this kernel does not know the call
    return _MOST_CAPABILITIES


def drop_capabilities() -> None:
    for capability in range(64):
        if _syscall(NR_PRCTL, PR_CAPBSET_DROP, capability, 0, 0, 0, 0) < 0:
            break  # EINVAL: past the last capability of this kernel
    _syscall(NR_PRCTL, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0)
    syscall(NR_CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24), what="capset")


_MONITOR_KEEPS = (0, 5)  # CAP_CHOWN, CAP_KILL


def keep_monitor_capabilities() -> None:
    """Keep what the monitor needs as root: signalling sandboxes' processes, giving pipes to their users."""
    for capability in range(64):
        if capability in _MONITOR_KEEPS:
            continue
        if _syscall(NR_PRCTL, PR_CAPBSET_DROP, capability, 0, 0, 0, 0) < 0:
            break
    bits = sum(1 << capability for capability in _MONITOR_KEEPS)
    kept = struct.pack("III", bits, bits, 0) + bytes(12)
    syscall(NR_CAPSET, struct.pack("Ii", 0x20080522, 0), kept, what="capset")


def no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)


class Filter:
    """A seccomp program as the kernel takes it, made before a fork for the children to install."""

    def __init__(self, program: bytes) -> None:
        self._program = program  # kept as long as its address is in use
        self.header = struct.pack("HxxxxxxQ", len(program) // 8, address_of(program))

    def install(self) -> None:
        syscall(NR_SECCOMP, 1, 0, self.header, what="seccomp")


_LANDLOCK_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights by ABI; later ones have 16
_LANDLOCK_SCOPES = 3  # abstract unix sockets, signals: from ABI 6


def landlock_abi() -> int:
    """Return the version of this kernel's Landlock; 0: none."""
    try:
        return syscall(NR_LANDLOCK_CREATE, 0, 0, 1, what="landlock_create_ruleset")
    except OSError:
        return 0


def landlock_attributes(abi: int, *, scopes: bool, files: bool) -> tuple[bytes, int] | None:
    """Return what a ruleset is made of, with its file rights; None when nothing is asked of a ruleset."""
    handled = (1 << _LANDLOCK_FS_RIGHTS.get(abi, 16)) - 1 if files else 0
    scoped = _LANDLOCK_SCOPES if abi >= 6 and scopes else 0
    if not handled and not scoped:
        return None
    if abi >= 6:
        return struct.pack("QQQ", handled, 0, scoped), handled
    return struct.pack("QQ", handled, 0) if abi >= 4 else struct.pack("Q", handled), handled


def thread_id_address() -> int:
    address = _Pointer()
    syscall(NR_PRCTL, _PR_GET_TID_ADDRESS, _ctypes.byref(address), what="prctl PR_GET_TID_ADDRESS")
    return address.value


def clone(flags: int, *, hooks: bool) -> tuple[int, int]:
    """Fork with clone flags. Return (pid as we see it, pidfd) here and (0, -1) in the child.

    Raw clone skips glibc's fork: the thread id that glibc keeps is set by the kernel at its address. The caller has one
    thread, so of Python's own part of a fork only `hooks` are left: functions that modules registered, such as
    `threading` and `random`. Calling these touches a hundred pages; it is for children in which a guest's code may run.
    """
    pidfd = _Int(-1)
    flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | 17
    address = thread_id_address()
    if hooks:
        before_fork()
    pid: int = _syscall_with_gil(NR_CLONE, flags | CLONE_PIDFD, 0, _ctypes.byref(pidfd), address, 0, 0)
    if pid < 0 and _ctypes.get_errno() == errno.EINVAL:
        pid = _syscall_with_gil(NR_CLONE, flags, 0, 0, address, 0, 0)  # gVisor of 2022 knows no pidfd
    if hooks:
        after_fork_in_parent() if pid else after_fork_in_child()
    if pid < 0:
        raise _failed("clone")
    if pid == 0:
        return 0, -1
    return pid, pidfd.value
