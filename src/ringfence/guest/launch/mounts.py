"""Applies a plan's operations: builds the sandbox's root, private file systems and /proc. Decides nothing.

Operations are lists made by the planner (docs/design/process-backend.md). Targets are relative to the new root, which
is the current directory while a template is built and `/` afterwards.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat
import struct

from ringfence.guest.launch.syscall_rows import Hole, Slot, address_of, room
from ringfence.shared import syscalls as k
from ringfence.shared.mount_check import opened
from ringfence.shared.paths import is_below
from ringfence.shared.proc import PROC_SHOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.guest.launch.syscall_rows import RowProgram

MASK = ".mask"  # an empty file and an empty directory, both read-only, to cover things with
SOURCES = ".sources"  # host paths of box operations, bound here by the template while the host's tree is still there
DISK = ".disk"  # mount point of the sandbox's disk when `copy` mounts share it with /workspace
_RO = k.MOUNT_ATTR_RDONLY | k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV
_TMPFS_FLAGS = k.MS_NOSUID | k.MS_NODEV

_WITH_SOURCE = ("bind", "overlay", "symlink")  # operations whose target is the second argument

_NR_CLOSE, _NR_IOCTL, _NR_SOCKET, _NR_CHDIR, _NR_GETDENTS, _NR_OPENAT = 3, 16, 41, 80, 217, 257
_ENTRY = struct.Struct("<QqHB")  # the head of a directory entry; its name follows
_DIRECTORY = 4  # the kind of a directory's entry
_LISTING = 1 << 13  # bytes: twice what a /proc has before the first process

Op = list[object]


class Applier:
    """One pass over operations. `idmap_fd`: user namespace for idmapped mounts, made on first use by `idmap`."""

    def __init__(self, idmap: Callable[[int, int], int] | None = None, owner: int | None = None) -> None:
        self._idmap = idmap
        self._owner = owner  # the owner of what is made for the guest; None: this process
        self._copies = 0
        self._folders: dict[str, int] = {"": 0o755}  # folders that are known to exist, and their modes

    def apply(self, ops: list[Op]) -> None:
        for op in ops:
            name, *args = op
            method = getattr(self, f"_op_{name}", None)
            if method is None:
                raise ValueError(f"unknown operation {name!r}")
            target = str(args[1] if name in _WITH_SOURCE else args[0])
            if target.startswith("/") or ".." in target.split("/"):  # the host's, until the root is pivoted (M10)
                raise ValueError(f"the target {target!r} is not below the new root")
            method(*args)

    def _op_dir(self, target: str, mode: int) -> None:
        self._folder(target)
        if self._folders[target] != mode:
            os.chmod(target, mode)
            self._folders[target] = mode

    def _op_file(self, target: str, text: str, mode: int) -> None:
        self._folder(os.path.dirname(target))
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(fd, mode)
            rest = text.encode()
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    def _op_symlink(self, text: str, target: str) -> None:
        self._folder(os.path.dirname(target))
        os.symlink(text, target)

    def _folder(self, path: str) -> None:
        """Make a folder and all folders above."""
        if path in self._folders:
            return
        self._folder(os.path.dirname(path))
        try:
            os.mkdir(path, 0o755)
            self._folders[path] = 0o755
        except FileExistsError:
            info = os.stat(path)
            if not stat.S_ISDIR(info.st_mode):
                raise
            self._folders[path] = stat.S_IMODE(info.st_mode)

    def _make_point(self, target: str, *, directory: bool) -> None:
        """Make a mount point, unless something is at the target already."""
        if target in self._folders or os.path.lexists(target):
            self._forget_below(target)
        elif directory:
            self._folder(target)
        else:
            self._file(target)

    def _forget_below(self, target: str) -> None:
        """Drop what is known below a target, because a mount covers it."""
        self._folders = {path: mode for path, mode in self._folders.items() if not is_below(path, target)}

    def _file(self, target: str) -> None:
        """Make an empty file."""
        self._folder(os.path.dirname(target))
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    def _op_bind(self, source: str, target: str, options: dict[str, object]) -> None:
        inode = options.get("inode")
        fd = None if inode is None else _opened(source, inode)
        try:
            self._bind(source, target, options, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _bind(self, source: str, target: str, options: dict[str, object], fd: int | None) -> None:
        """Bind a source at a target. `fd`: a descriptor of what is to be shown, opened when it was checked."""
        mode = os.stat(source if fd is None else fd).st_mode
        self._make_point(target, directory=stat.S_ISDIR(mode))
        attributes = k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV
        if not options.get("rw"):
            attributes |= k.MOUNT_ATTR_RDONLY
        if options.get("exec") is False:
            attributes |= k.MOUNT_ATTR_NOEXEC
        if options.get("idmap"):
            self._bind_idmapped(source, target, attributes, fd)
            return
        if fd is None:
            k.mount(source, target, None, k.MS_BIND | k.MS_REC)
            k.mount_setattr(k.AT_FDCWD, target, k.AT_RECURSIVE, add=attributes)
            return
        tree = k.open_tree_clone("", at=fd)
        try:
            k.mount_setattr(tree, "", k.AT_EMPTY_PATH | k.AT_RECURSIVE, add=attributes)
            k.move_mount(tree, target)
        finally:
            os.close(tree)

    def _bind_idmapped(self, source: str, target: str, attributes: int, fd: int | None) -> None:
        tree = k.open_tree_clone(source) if fd is None else k.open_tree_clone("", at=fd)
        try:
            owner = os.fstat(tree)
            if self._idmap is None:
                raise ValueError(f"{target} needs the sandbox's uid")
            idmap_fd = self._idmap(owner.st_uid, owner.st_gid)
            k.mount_setattr(
                tree, "", k.AT_EMPTY_PATH | k.AT_RECURSIVE, add=attributes | k.MOUNT_ATTR_IDMAP, idmap_fd=idmap_fd
            )
            os.close(idmap_fd)
            k.move_mount(tree, target)
        finally:
            os.close(tree)

    def _op_dev(self, name: str) -> None:
        target = f"dev/{name}"
        self._file(target)
        k.mount(f"/dev/{name}", target, None, k.MS_BIND)
        k.mount_setattr(k.AT_FDCWD, target, 0, add=k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NOEXEC)

    def _op_tmpfs(self, target: str, options: str) -> None:
        self._folder(target)
        self._forget_below(target)
        k.mount("tmpfs", target, "tmpfs", _TMPFS_FLAGS, options)

    def _op_hide(self, target: str) -> None:
        cover(target)

    def _op_protect(self, target: str) -> None:
        k.mount(target, target, None, k.MS_BIND | k.MS_REC)
        k.mount_setattr(k.AT_FDCWD, target, k.AT_RECURSIVE, add=_RO)

    def _op_pin(self, target: str) -> None:
        k.mount(target, target, None, k.MS_BIND | k.MS_REC)

    def _op_overlay(self, source: str, target: str, options: dict[str, object]) -> None:
        """Mount the host's files below, without those of `absent`, and the sandbox's disk above; with `ro` no disk."""
        self._copies += 1
        lower = f"{DISK}/lower{self._copies}"
        os.mkdir(lower, 0o700)
        self._op_bind(source, lower, {name: options[name] for name in ("idmap", "inode") if name in options})
        self._folder(target)
        self._forget_below(target)
        layers = f"lowerdir={self._without(lower, options.get('absent'))}"
        flags = _TMPFS_FLAGS
        if options.get("ro"):
            flags |= k.MS_RDONLY
        else:
            layers += self._upper(lower)
        if os.geteuid() != 0 or not options.get("idmap"):
            layers += ",userxattr"
        k.mount("overlay", target, "overlay", flags, layers)

    def _upper(self, lower: str) -> str:
        base = f"{DISK}/copy{self._copies}"
        for path in (base, f"{base}/upper", f"{base}/work"):
            os.mkdir(path, 0o700)
        os.chmod(f"{base}/upper", stat.S_IMODE(os.stat(lower).st_mode))
        if self._owner is not None:
            os.chown(f"{base}/upper", self._owner, self._owner)
        return f",upperdir={base}/upper,workdir={base}/work"

    def _without(self, lower: str, absent: object) -> str:
        """Return `lower` with a layer over it that has a whiteout for each name.

        Inside no process can see the layer.
        """
        if not isinstance(absent, list | tuple):
            return lower
        layer = f"{DISK}/absent{self._copies}"
        folders = {layer: lower}
        os.mkdir(layer, 0o700)
        for name in absent:
            parts = str(name).split("/")
            for end in range(1, len(parts)):
                path = "/".join((layer, *parts[:end]))
                if path not in folders:
                    os.mkdir(path, 0o700)
                    folders[path] = "/".join((lower, *parts[:end]))
            os.mknod(f"{layer}/{name}", stat.S_IFCHR, os.makedev(0, 0))
        for path, like in reversed(folders.items()):  # a folder has the mode and owner of the upper layer
            _look_like(path, like)
        return f"{layer}:{lower}"


def _opened(source: str, inode: object) -> int:
    """Open what the plan looked at. A guest of another sandbox may have put another file there since (L16, O17)."""
    try:
        fd = opened(source)
    except OSError as error:
        raise OSError(errno.ESTALE, f"there is something else at {source} ({error.strerror or error})") from None
    found = os.fstat(fd)
    if [found.st_dev, found.st_ino] == inode:
        return fd
    os.close(fd)
    raise OSError(errno.ESTALE, f"there is something else at {source}")


def _look_like(path: str, other: str) -> None:
    try:
        info = os.lstat(other)
    except FileNotFoundError:
        return  # removed on the host since the plan was made
    try:
        os.chown(path, info.st_uid, info.st_gid)
    except OSError:
        pass  # an owner that this user namespace lacks: it shows as the guest's, who can write nothing there
    os.chmod(path, stat.S_IMODE(info.st_mode))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def protect_again(target: str, device: int, inode: int) -> None:
    """Show `target` read-only once more, in a sandbox that is stopped. Raises OSError when another file is there.

    The folder around the mount may be the guest's, which can move the mount away and put a file of its own there, with
    the same inode number (L02).
    """
    flags = os.O_PATH | os.O_NOFOLLOW
    fd = k.openat2(k.AT_FDCWD, target, flags, 0, k.RESOLVE_NO_SYMLINKS | k.RESOLVE_NO_MAGICLINKS)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), target)
    tree = k.open_tree_clone("", at=fd)
    k.mount_setattr(tree, "", k.AT_EMPTY_PATH | k.AT_RECURSIVE, add=_RO)
    k.move_mount(tree, "", at=fd)


def cover(target: str, *, directory: bool | None = None) -> None:
    """Show nothing at `target`: an empty read-only file or directory of ours. A write is EROFS, never swallowed."""
    kind = "dir" if (os.path.isdir(target) if directory is None else directory) else "file"
    k.mount(f"{MASK}/{kind}", target, None, k.MS_BIND)  # with the flags that `build_template` set


def _cover_makings(*directories: str) -> None:
    """Cover what mounts were made from: whole folders of the host, hidden files included."""
    for directory in directories:
        if os.path.isdir(directory) and os.listdir(directory):
            cover(directory)


def build_template(ops: list[Op], *, keep_outer_proc: bool) -> None:
    """Build the root in this new mount namespace, pivot into the root, make it read-only.

    `keep_outer_proc`: in a user namespace the kernel grants a fresh /proc only where a complete one is already mounted
    (kernel fact 9), so the outer one lies below the mount point until the sandbox covers it; no process inside can
    uncover it.
    """
    k.mount(None, "/", None, k.MS_REC | k.MS_PRIVATE)
    base = "/sys"  # never a source, so covering it in this private namespace hides nothing that is bound below
    k.mount("tmpfs", base, "tmpfs", _TMPFS_FLAGS, "size=4m,nr_inodes=4000,mode=755")
    os.chdir(base)
    os.mkdir(MASK, 0o755)
    os.mkdir(f"{MASK}/dir", 0o555)
    os.close(os.open(f"{MASK}/file", os.O_WRONLY | os.O_CREAT, 0o444))
    k.mount(MASK, MASK, None, k.MS_BIND)
    k.mount_setattr(k.AT_FDCWD, MASK, 0, add=_RO | k.MOUNT_ATTR_NOEXEC)
    for directory in ("proc", "dev", "tmp", "workspace", DISK):
        os.mkdir(directory, 0o755)
    Applier().apply(ops)
    _cover_makings(DISK)
    if keep_outer_proc:
        k.mount("/proc", "proc", None, k.MS_BIND | k.MS_REC)
    k.mount(None, ".", None, k.MS_BIND | k.MS_REMOUNT | k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV)
    k.pivot_root_here()


# File systems of a single sandbox, and their flags; `options_of` has the rest.
_PRIVATE = {
    "tmp": ("tmpfs", _TMPFS_FLAGS),
    "dev/shm": ("tmpfs", _TMPFS_FLAGS | k.MS_NOEXEC),
    "workspace": ("tmpfs", _TMPFS_FLAGS),
    "dev/pts": ("devpts", k.MS_NOSUID | k.MS_NOEXEC),
}


# The host has 4096 terminals (kernel.pty.max), and any devpts can take all but a reserve. Without a limit a guest could
# leave none to other sandboxes and containers (F33).
_TERMINALS = 64


def options_of(sizes: dict[str, str], *, owner: int, as_root: bool) -> dict[str, str]:
    """Return the mount options of a file system of the sandbox."""
    own = f",uid={owner},gid={owner}"
    return {
        "tmp": f"{sizes['tmp']},mode=1777{own}",
        "dev/shm": f"{sizes['shm']},mode=1777{own}",
        "workspace": f"{sizes['disk']},mode=755{own}",
        "dev/pts": f"newinstance,max={_TERMINALS},ptmxmode=0666,mode=620" + (own if as_root and owner else ""),
    }


def options_hole(target: str) -> str:
    return f"options of {target}"


def write_private(program: RowProgram, *, workspace: bool) -> None:
    """Write the mounts of disk in memory, /tmp, /dev/shm and terminals.

    Without `workspace` the disk comes later, by `mount_further`.
    """
    program.call(_NR_CHDIR, b"/", what="chdir /")
    for target, (kind, flags) in _PRIVATE.items():
        if workspace or target != "workspace":
            hole = Hole(options_hole(target))
            where = target.encode()
            program.call(
                k.NR_MOUNT, kind.encode(), where, kind.encode(), flags, hole, what=f"mount {kind} {kind} on {target}"
            )


def needs_further(ops: list[Op], *, disk: bool) -> tuple[bool, bool]:
    """Return whether there is more to mount, and whether /workspace is part of it."""
    return disk or bool(ops), disk or any(op[0] == "overlay" for op in ops)


def mount_further(
    sizes: dict[str, str], *, owner: int, ops: list[Op], idmap: Callable[[int, int], int], disk: int = -1
) -> None:
    """Mount a disk that is shared with /workspace, and the mounts that need the sandbox's uid.

    `disk`: a mount that is on no path yet, with a folder `workspace` of the guest's; without it, the disk is in memory.
    """
    if needs_further(ops, disk=disk >= 0)[1]:
        if disk >= 0:
            k.move_mount(disk, DISK)
            os.close(disk)
        else:
            k.mount("tmpfs", DISK, "tmpfs", _TMPFS_FLAGS, f"{sizes['disk']},mode=755")
            os.mkdir(f"{DISK}/workspace", 0o755)
            os.chown(f"{DISK}/workspace", owner, owner)
        k.mount(f"{DISK}/workspace", "workspace", None, k.MS_BIND)
        k.mount_setattr(k.AT_FDCWD, "workspace", 0, add=k.MOUNT_ATTR_NOSUID | k.MOUNT_ATTR_NODEV)
    Applier(idmap, owner).apply(ops)
    _cover_makings(DISK, SOURCES)


_PROC_FLAGS = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC


def mount_proc() -> None:
    """Mount a fresh /proc of this pid namespace, by a process inside. The outer /proc is never shown (B14)."""
    k.mount("proc", "/proc", "proc", _PROC_FLAGS)


def write_proc(program: RowProgram) -> None:
    """Write what `mount_proc` does as a row."""
    program.call(k.NR_MOUNT, b"proc", b"/proc", b"proc", _PROC_FLAGS, 0, what="mount proc proc on /proc")


def _is_masked(name: str) -> bool:
    return name not in PROC_SHOWN and not name.isdigit()


class Listing:
    """The entries of /proc that are the same in every sandbox, as the kernel lists them.

    These entries come before the processes. The first process is `self`, whose inode number differs in each /proc.
    """

    def __init__(self, proc: int) -> None:
        """`proc`: the host's."""
        self.entries: dict[str, bool] = {}  # name: whether the entry is a directory
        self.head = self.first_process = b""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            content = room(_LISTING)
            size = k.syscall(_NR_GETDENTS, fd, address_of(content), _LISTING, what="getdents64")
        finally:
            os.close(fd)
        self._read(bytes(memoryview(content).cast("B")[:size]))

    def _read(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            _, _, length, kind = _ENTRY.unpack_from(data, at)
            name = data[at + _ENTRY.size : at + length].partition(b"\0")[0].decode()
            if name == "self":
                self.head = data[:at]
                self.first_process = data[at + 8 : at + length]
                return
            if name not in (".", ".."):
                self.entries[name] = kind == _DIRECTORY
            at += length
        self.entries.clear()  # the listing was cut off


def write_restrict_proc(program: RowProgram, *, subset: bool, mask: bool, listing: Listing) -> None:
    """Write rows that show only the guest's processes and little else of /proc; with `subset` not even /proc/sys.

    If there are entries that the forker did not see, Python goes through all entries.
    """
    if subset:
        program.call(k.NR_MOUNT, b"proc", b"/proc", b"proc", _PROC_FLAGS, b"subset=pid", what="mount proc on /proc")
    if subset or not mask:
        return
    if listing.head:
        _write_masks(program, listing)
    else:
        program.stop(_mask_all)
    _write_bind(program, "proc/sys", "proc/sys", k.MS_BIND | k.MS_REC)
    attributes = k.mount_attributes(_RO | k.MOUNT_ATTR_NOEXEC)
    program.call(
        *(k.NR_MOUNT_SETATTR, k.AT_FDCWD, b"proc/sys", k.AT_RECURSIVE, attributes, len(attributes)),
        what="mount_setattr proc/sys",
    )
    write_cover(program, "proc/sys/kernel/random/boot_id", directory=False)


def _write_masks(program: RowProgram, listing: Listing) -> None:
    content = room(_LISTING)
    opened = program.call(
        _NR_OPENAT, k.AT_FDCWD, b"/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, what="/proc"
    )
    listed = program.call(_NR_GETDENTS, 0, content, _LISTING, what="getdents64 /proc", least=1)
    program.store(opened, Slot(listed, 0))
    masked = [name for name in listing.entries if _is_masked(name)]
    # rows: two that compare, the masks, a jump; then Python's way; then what both ways do
    by_hand = program.next + 2 + len(masked) + 1
    program.compare(content, listing.head, len(listing.head), unequal=by_hand)
    beside = address_of(content) + len(listing.head) + 8
    program.compare(beside, listing.first_process, len(listing.first_process), unequal=by_hand)
    for name in masked:
        write_cover(program, f"proc/{name}", directory=listing.entries[name])
    program.jump(by_hand + 1)
    program.stop(_mask_all)


def _mask_all() -> None:
    for entry in os.scandir("/proc"):
        if _is_masked(entry.name):
            cover(f"proc/{entry.name}", directory=entry.is_dir(follow_symlinks=False))


def write_cover(program: RowProgram, target: str, *, directory: bool) -> None:
    """Write what `cover` does as rows."""
    _write_bind(program, f"{MASK}/{'dir' if directory else 'file'}", target, k.MS_BIND)


def _write_bind(program: RowProgram, source: str, target: str, flags: int) -> None:
    what = f"mount bind {source} on {target}"
    program.call(k.NR_MOUNT, source.encode(), target.encode(), 0, flags, 0, what=what)


def write(directory: int, path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


_SIOCSIFFLAGS = 0x8914
_LOOPBACK_UP = struct.pack("16sh22x", b"lo", 0x41)  # IFF_UP, IFF_RUNNING


def bring_up_loopback() -> None:
    from fcntl import ioctl

    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    ioctl(sock, _SIOCSIFFLAGS, _LOOPBACK_UP)
    sock.close()


def write_loopback(program: RowProgram) -> None:
    """Write what `bring_up_loopback` does as rows."""
    made = program.call(_NR_SOCKET, _socket.AF_INET, _socket.SOCK_DGRAM, 0, what="socket")
    used = program.call(_NR_IOCTL, 0, _SIOCSIFFLAGS, _LOOPBACK_UP, what="ioctl SIOCSIFFLAGS")
    program.store(made, Slot(used, 0), Slot(program.call(_NR_CLOSE, 0, what="close"), 0))
