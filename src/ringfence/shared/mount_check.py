"""Checks that what is mounted in a box is what the host meant to show there.

An engine looks the source and the target of every mount up again, by path. A sandbox that writes to the same folder
could meanwhile have replaced a part of such a path by a link out of the folder. And an engine's own settings may show
more of the host, which the engine does not always report: Podman's containers.conf and mounts.conf. Therefore each
place is checked before there is a guest: by guestd, or by the host through /proc.
"""

from __future__ import annotations

import os
import stat

from ringfence.shared import proc
from ringfence.shared.paths import is_below, is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Meant(TypedDict):
        """The mounts that are meant to be at and below the writable mounts of a box, and elsewhere in it."""

        places: list[tuple[str, int, int, bool]]  # target, device and inode of what is shown there, writable
        below: list[tuple[str, str]]  # mounts of the host there, which come along: device, root in it
        flags: bool  # whether the mount itself is read-only; else it is enforced elsewhere
        targets: list[str] | None  # targets of all requested mounts; None: other mounts are not looked for
        brought: list[tuple[str, str]]  # mounts of the host below their sources: device, root in it


def opened(path: str, root: str = "/") -> int:
    """Return a descriptor of `path` below `root`, following no link. Raises OSError."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.split("/"):
        if part:
            above = fd
            try:
                fd = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            finally:
                os.close(above)
    if stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is a link")
    return fd


def wrong(meant: Meant, process: str, root: str) -> str | None:
    """Return what is not mounted as it was meant, in words; None when all is.

    `process`: the folder in /proc of a process with the mounts, `root`: its root. Mounts are compared by their numbers,
    which no process can exchange: every mount at or below a writable mount was checked, or brings what the host has
    there.
    """
    held: dict[str, str] = {}  # number of a mount → its target
    for target, device, inode, _ in meant["places"]:
        try:
            fd = opened(target, root)
        except OSError as error:
            return f"{target} cannot be looked at ({error.strerror or error})"
        try:
            status = os.fstat(fd)
            number = _mount_of(fd)
        finally:
            os.close(fd)
        if (status.st_dev, status.st_ino) != (device, inode) or number in held:
            return f"{target} is not what it was"
        held[number] = target
    return _wrong_mount(meant, held, f"{process}/mountinfo") or stray(meant, process)


# Mounts that an engine makes in every container: its facts about the box, and the kernel's file systems.
_KERNELS = ("proc", "sys", "dev")
_ENGINES = ("/", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv", "/etc/system-fips")
_POLICIES = "/etc/crypto-policies/"  # files of the image, on a host in FIPS mode


def stray(meant: Meant, process: str) -> str | None:
    """Return a mount that was not asked for, in words; None when there is none."""
    if meant["targets"] is None:
        return None
    brought = {(device, root) for device, root in meant["brought"]}
    rows = [(mount.target, (mount.device, mount.root)) for mount in proc.mounts_in(f"{process}/mountinfo")]
    shown = {where for where, _ in rows}
    # /var/tmp leads to /tmp inside, but not where the host's own programs lie below it and are shown there.
    targets = {
        target.removeprefix("/var") if target.startswith("/var/tmp/") and target not in shown else target
        for target in meant["targets"]
    }
    own = {what for where, what in rows if where == "/"}
    again = [where for where, what in rows if what in own and where != "/"]  # places of the engine's folders
    for where, what in rows:
        if where in targets or where in _ENGINES or where.split("/")[1] in _KERNELS or where.startswith(_POLICIES):
            continue
        if what in brought and any(is_below(where, target) for target in targets):
            continue
        if any(is_within(where, root) for root in again):
            continue
        return f"{where} is a mount that was not requested"
    return None


def _mount_of(fd: int) -> str:
    """Return the number of the mount that an open file lies in."""
    number = proc.fields(f"/proc/self/fdinfo/{fd}").get("mnt_id")
    if number is None:
        raise OSError("/proc names no mount")
    return number


def _wrong_mount(meant: Meant, held: dict[str, str], path: str) -> str | None:
    read_only = {target for target, _, _, writable in meant["places"] if not writable}
    mounts = {mount.number: mount for mount in proc.mounts_in(path)}
    for number, target in held.items():
        if number not in mounts:
            return f"{target} is not mounted"
        if target in read_only and meant["flags"] and "ro" not in mounts[number].options:
            return f"{target} is not read-only"
    brought = {(device, root) for device, root in meant["below"]}
    for number, mount in mounts.items():
        above = mount.parent
        while above in mounts and above not in held and mounts[above].parent != above:
            above = mounts[above].parent
        if above in held and number not in held and (mount.device, mount.root) not in brought:
            return f"{mount.target} is a mount that was not requested"
    return None
