"""Workspaces on disk: as root a file system in an image file without a name, else a folder of the state directory.

The image is mounted on no path. The mount's descriptor goes to the sandbox's PID 1. When the last process that has the
descriptor ends, however it ends, the mount, the loop device and the file are gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from ringfence.errors import Missing, SandboxError, StartTimeoutError, UnsupportedError
from ringfence.host import state
from ringfence.host.kernel_refusals import is_lasting
from ringfence.shared import syscalls

_BLOCK = 4096
_INODE = 256
_GROUP = 8 * _BLOCK  # blocks of a block group
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_TRIES = 64
_FORMAT_S = 60
_FEATURES = (
    "none,ext_attr,extent,filetype,sparse_super,large_file,huge_file,dir_nlink,dir_index,extra_isize,flex_bg,uninit_bg"
)


def make_image(size: int, files: int, owner: int) -> int:
    """Make a file system with room for exactly `size` bytes (whole blocks) and `files` names. Return the mount.

    The mount is a descriptor. It holds `workspace`, which belongs to `owner`, and files of ours that no guest is shown.
    Root only. Raises UnsupportedError when this host lacks something for it, SandboxError for what may pass; nothing is
    left then. Costs tens of milliseconds.
    """
    program = _formatter()
    blocks = -(-size // _BLOCK)
    image = syscalls.open_nameless(state.disk_directory("workspaces"))
    try:
        _check_room(image, blocks)
        os.ftruncate(image, _whole_size(blocks, files))
        _format(program, image, files)
        mount, device = _mounted(image)
        try:
            _fit(mount, device, blocks, files, owner)
        except BaseException:
            os.close(mount)
            raise
    except OSError as error:
        raise _refused(error) from None
    finally:
        os.close(image)
    return mount


def _check_room(image: int, blocks: int) -> None:
    """Raise UnsupportedError when the host's disk has too little room for the image.

    When the disk is full, the kernel loses what the guest wrote, and reports that only to a process that calls fsync.
    """
    info = os.fstatvfs(image)
    free = info.f_bavail * info.f_frsize
    if free < blocks * _BLOCK:
        raise UnsupportedError(
            f"the host's disk has {free:,} bytes free for workspaces, and limits.disk is {blocks * _BLOCK:,}",
            code="disk-room",
            missing=[Missing("process", f"room in {state.disk_root()}", "free some, or set a smaller limits.disk")],
        )


def _formatter() -> str:
    from ringfence.host import programs

    found = programs.look_up("mkfs.ext4", path="")
    if found.path is None:
        raise UnsupportedError(
            f"a workspace on disk needs mkfs.ext4, and it is not installed{found.remark}",
            code="mkfs",
            missing=[Missing("process", "mkfs.ext4", "install the package e2fsprogs")],
        )
    return found.path


def _whole_size(blocks: int, files: int) -> int:
    """Return the size of the image. It is larger than needed: `_fit` takes the surplus away."""
    groups = blocks // _GROUP + 2
    inodes = files + 64 + 32 * groups
    overhead = inodes * _INODE // _BLOCK + inodes // 64 + 16 * groups + blocks // 64 + 1024
    return (blocks + overhead) * _BLOCK


def _format(program: str, image: int, files: int) -> None:
    import subprocess

    path = f"/proc/self/fd/{image}"
    options = ["-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-I", str(_INODE), "-m", "0", "-N", str(files + 32)]
    options += ["-O", _FEATURES, "-E", "lazy_itable_init=1,nodiscard"]
    try:
        done = subprocess.run(
            [program, *options, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"MKE2FS_CONFIG": "/dev/null", "LC_ALL": "C"},  # the host's own defaults are for its own disks
            pass_fds=[image],
            timeout=_FORMAT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartTimeoutError(f"mkfs.ext4 took longer than {_FORMAT_S} s", fix="is the disk overloaded?") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise SandboxError(
            f"mkfs.ext4 could not make a workspace: {''.join(said)[:200]}",
            code="mkfs",
            fix="is the disk full? try a smaller limits.disk",
        )


def _mounted(image: int) -> tuple[int, str]:
    """Return the mount, and the name of its device, which is freed with the mount."""
    loop, name = _attach(image)
    try:
        return syscalls.mount_nowhere("ext4", f"/dev/{name}", ("noinit_itable", "nobarrier")), name
    finally:
        os.close(loop)


def _attach(image: int) -> tuple[int, str]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            name = f"loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
            info = _LOOP_INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _LO_FLAGS_AUTOCLEAR, b"ringfence", b"", b"", 0, 0)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("=II", image, _BLOCK) + info + bytes(64))
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another process was faster
                    raise
            else:
                return loop, name
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device is free")


def _fit(mount: int, device: str, blocks: int, files: int, owner: int) -> None:
    """Take the surplus away: inodes with files of our own, blocks with the file system's reserve."""
    os.mkdir("workspace", 0o755, dir_fd=mount)
    os.chown("workspace", owner, owner, dir_fd=mount)
    os.mkdir("surplus", 0o700, dir_fd=mount)
    for number in range(os.statvfs(mount).f_ffree - files):
        os.mknod(f"surplus/{number}", 0o600, dir_fd=mount)
    with open(f"/sys/fs/ext4/{device}/reserved_clusters", "w") as file:
        file.write(str(os.statvfs(mount).f_bfree - blocks))
    found = os.statvfs(mount)
    if (found.f_bavail, found.f_ffree) != (blocks, files):
        raise UnsupportedError(
            f"a workspace of {blocks} blocks and {files} files came out as {found.f_bavail} and {found.f_ffree}",
            code="disk-size",
            fix='workspace="memory"',
        )


def _refused(error: OSError) -> UnsupportedError | SandboxError:
    message = f"a workspace on disk could not be made: {error}"
    if not is_lasting(error.errno) and error.errno not in (errno.ENOENT, errno.ENXIO):  # no /dev/loop-control
        return SandboxError(message, code="loop", fix='try again, or workspace="memory"', retryable=True)
    return UnsupportedError(
        message,
        code="loop",
        missing=[Missing("process", "loop devices and CAP_SYS_ADMIN", 'workspace="memory", or run on the host itself')],
    )


# ── without root ─────────────────────────────────────────────────────────────────────────────────


def make_folder() -> str:
    """Make a folder for a sandbox noted for the sweep. Return the path, for `remove_folder`."""
    path = f"{state.disk_directory('workspaces')}/{os.urandom(8).hex()}"
    state.owner().note("tree", path=path)
    os.mkdir(path, 0o700)
    os.chmod(path, 0o700)
    return path


def remove_folder(path: str) -> None:
    """Remove a sandbox's folder with all that a guest put there. Idempotent."""
    state.remove_tree(path)
    state.owner().forget("tree", path=path)
