"""Owns the system calls Python lacks, by ctypes: namespaces, mounts, capabilities, Landlock, seccomp, raw clone.

Every integer goes as a 64-bit word: a bare Python int would be passed as a 32-bit C int with rubbish above it.
x86-64 numbers; the planner refuses other machines before this module is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
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

_NR_CLONE = 56
_NR_FALLOCATE = 285
_NR_CAPSET = 126
_NR_PIVOT_ROOT = 155
_NR_SECCOMP = 317
_NR_OPEN_TREE = 428
_NR_MOVE_MOUNT = 429
_NR_FSOPEN = 430
_NR_FSCONFIG = 431
_NR_FSMOUNT = 432
_NR_CLOSE_RANGE = 436
_NR_OPENAT2 = 437
_NR_MOUNT_SETATTR = 442
_NR_LANDLOCK_CREATE = 444
_NR_LANDLOCK_ADD = 445
_NR_LANDLOCK_RESTRICT = 446
_NR_KEYCTL = 250

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_TID_ADDRESS = 40
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_with_gil = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL over the call: a clone must not happen without it
_with_gil.syscall.restype = ctypes.c_long
_after_fork_in_child = ctypes.pythonapi.PyOS_AfterFork_Child


def _words(args: tuple[object, ...]) -> list[object]:
    return [ctypes.c_long(a) if isinstance(a, int) else a for a in args]


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} [{what}]")
    return result


def syscall(number: int, *args: object, what: str) -> int:
    return _checked(int(_libc.syscall(ctypes.c_long(number), *_words(args))), what)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(fd: int, flags: int) -> None:
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), f"setns {flags:#x}")


def _path(value: str | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    result = _libc.mount(_path(source), _path(target), _path(kind), ctypes.c_ulong(flags), _path(options))
    _checked(result, f"mount {kind or 'bind'} {source or ''} on {target} {options or ''}".rstrip())


def umount(target: str) -> None:
    _checked(_libc.umount2(_path(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def mount_setattr(fd: int, path: str, flags: int, *, add: int, idmap_fd: int = 0) -> None:
    attributes = struct.pack("QQQQ", add, 0, 0, idmap_fd)
    syscall(_NR_MOUNT_SETATTR, fd, _path(path), flags, attributes, len(attributes), what=f"mount_setattr {path}")


def open_tree_clone(path: str) -> int:
    """A detached copy of the mounts at `path`, with everything below it."""
    flags = 1 | AT_RECURSIVE | os.O_CLOEXEC
    return syscall(_NR_OPEN_TREE, AT_FDCWD, _path(path), flags, what=f"open_tree {path}")


def move_mount(fd: int, target: str) -> None:
    syscall(_NR_MOVE_MOUNT, fd, b"", AT_FDCWD, _path(target), 4, what=f"move_mount {target}")


def mount_nowhere(kind: str, source: str, flags: tuple[str, ...]) -> int:
    """A new file system of `source` as a mount on no path: nosuid, nodev. It goes with its last descriptor."""
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
    from .stepwise import open_below

    return open_below(directory, path, flags, mode, resolve)


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the blocks there back to the file system; the file keeps its size."""
    syscall(_NR_FALLOCATE, fd, 3, offset, size, what="fallocate")


def close_all_but(kept: list[int]) -> None:
    """Close every descriptor that a clone got along, but these and the standard streams."""
    first = 3
    for fd in sorted({fd for fd in kept if fd >= first}):
        if fd > first:
            syscall(_NR_CLOSE_RANGE, first, fd - 1, 0, what="close_range")
        first = fd + 1
    close_from(first)


def close_from(first: int) -> None:
    syscall(_NR_CLOSE_RANGE, first, 0x7FFFFFFF, 0, what="close_range")  # gVisor takes it for signed


def prctl(option: int, *args: int) -> int:
    padded = (*args, 0, 0, 0, 0)[:4]
    return _checked(_libc.prctl(option, *[ctypes.c_ulong(a) for a in padded]), f"prctl {option}")


def set_name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def set_dumpable(value: int) -> None:
    prctl(_PR_SET_DUMPABLE, value)


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, 9)


def become_subreaper() -> None:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def new_session_keyring() -> None:
    """An empty session keyring, so that the caller's keys stay with the caller (I07). ENOSYS: there are no keys."""
    try:
        syscall(_NR_KEYCTL, 1, 0, what="keyctl join session keyring")
    except OSError:
        return


def drop_capabilities() -> None:
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # EINVAL: past the last capability of this kernel
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    syscall(_NR_CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24), what="capset")


_MONITOR_KEEPS = (0, 5)  # CAP_CHOWN, CAP_KILL


def keep_monitor_capabilities() -> None:
    """For the monitor as root: to signal the sandboxes' processes, and to give them the pipes it makes."""
    for capability in range(64):
        if capability in _MONITOR_KEEPS:
            continue
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    bits = sum(1 << capability for capability in _MONITOR_KEEPS)
    kept = struct.pack("III", bits, bits, 0) + bytes(12)
    syscall(_NR_CAPSET, struct.pack("Ii", 0x20080522, 0), kept, what="capset")


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_seccomp(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    syscall(_NR_SECCOMP, 1, 0, header, what="seccomp")


_LANDLOCK_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights by ABI; later ones have 16
_LANDLOCK_SCOPES = 3  # abstract unix sockets, signals: from ABI 6


def landlock_abi() -> int:
    """0: this kernel has no Landlock."""
    try:
        return syscall(_NR_LANDLOCK_CREATE, 0, 0, 1, what="landlock_create_ruleset")
    except OSError:
        return 0


def restrict_with_landlock(abi: int, *, scopes: bool, files: bool) -> None:
    """One domain: all file rights beneath `/`, none elsewhere; no signal and no abstract socket leaves it.

    The rule hangs on the root's inode, so that a new file system mounted below it is covered too.
    """
    handled = (1 << _LANDLOCK_FS_RIGHTS.get(abi, 16)) - 1 if files else 0
    scoped = _LANDLOCK_SCOPES if abi >= 6 and scopes else 0
    if not handled and not scoped:
        return
    if abi >= 6:
        attributes = struct.pack("QQQ", handled, 0, scoped)
    elif abi >= 4:
        attributes = struct.pack("QQ", handled, 0)
    else:
        attributes = struct.pack("Q", handled)
    ruleset = syscall(_NR_LANDLOCK_CREATE, attributes, len(attributes), 0, what="landlock_create_ruleset")
    if handled:
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        syscall(_NR_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", handled, root), 0, what="landlock_add_rule")
        os.close(root)
    syscall(_NR_LANDLOCK_RESTRICT, ruleset, 0, what="landlock_restrict_self")
    os.close(ruleset)


def _thread_id_address() -> int:
    address = ctypes.c_ulong()
    _checked(_libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0), "prctl PR_GET_TID_ADDRESS")
    return address.value


def _raw_clone(flags: int, pidfd: ctypes.c_int) -> int:
    return int(
        _with_gil.syscall(
            ctypes.c_long(_NR_CLONE),
            ctypes.c_long(flags),
            ctypes.c_long(0),
            ctypes.byref(pidfd),
            ctypes.c_ulong(_thread_id_address()),
            ctypes.c_long(0),
        )
    )


def clone(flags: int) -> tuple[int, int]:
    """fork() with clone flags. Returns (pid as we see it, pidfd) here and (0, -1) in the child.

    Raw clone skips glibc's fork: the thread id that glibc keeps is set by the kernel at its address, and Python's own
    part of a fork is called by hand. The caller has one thread.
    """
    pidfd = ctypes.c_int(-1)
    flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | 17
    pid = _raw_clone(flags | CLONE_PIDFD, pidfd)
    if pid < 0 and ctypes.get_errno() == errno.EINVAL:
        pid = _raw_clone(flags, pidfd)  # gVisor of 2022 knows no pidfd
    _checked(pid, "clone")
    if pid == 0:
        _after_fork_in_child()
        return 0, -1
    return pid, pidfd.value
