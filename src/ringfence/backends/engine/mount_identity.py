"""What a policy's mounts and those in them are to show, held by descriptors from before an engine looks for it.

Engines take paths, and a guest of another sandbox on the same folder can change what a path below it leads to. So it is
compared once the box stands, before its first job: see guest/standing.py.
"""

from __future__ import annotations

import contextlib
import os

from ringfence.errors import UnsupportedError
from ringfence.guest.guestd import mount_check
from ringfence.host.kernel_refusals import mounts_changed
from ringfence.policy.host_paths import within
from ringfence.shared import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.backends.engine.rootfs import BoxBind
    from ringfence.guest.guestd.protocols import Meant


class Meaning:
    """Of one box that is about to be made. Raises SandboxLostError for a link where there was none in the plan."""

    def __init__(self, binds: Sequence[BoxBind], *, flags: bool = True) -> None:
        """`flags`: as in Meant."""
        self._fds = contextlib.ExitStack()  # held, so that no inode is given out again
        self._binds = tuple(binds)
        self._before = self._brought() if flags else []
        self.meant: Meant | None = None
        asked = [bind for bind in binds if bind.writable or bind.inode is not None]  # read-only ones too: L16
        if not asked:
            return
        looked_at = {bind.target: bind for bind in binds if any(within(bind.target, one.target) for one in asked)}
        below = [
            (mount.device, mount.root)
            for mount in proc.mounts()
            if any(within(mount.target, bind.source) for bind in looked_at.values())
        ]
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            places = [(bind.target, *self._identity(bind), bind.writable) for bind in looked_at.values()]
            undo.pop_all()
        self.meant = {"places": places, "below": below, "flags": flags, "targets": None, "brought": []}

    def expect(self, targets: Sequence[str]) -> None:
        """That nothing is mounted but there, and what an engine mounts of its own making in every box."""
        brought = list(dict.fromkeys((*self._before, *self._brought())))  # others mount and unmount meanwhile
        meant: Meant = self.meant or {"places": [], "below": [], "flags": True, "targets": None, "brought": []}
        self.meant = {**meant, "targets": list(targets), "brought": brought}

    def _brought(self) -> list[tuple[str, str]]:
        """What the host has mounted at and below the sources."""
        return [
            (mount.device, mount.root)
            for mount in proc.mounts()
            if any(within(mount.target, bind.source) for bind in self._binds)
        ]

    def _identity(self, bind: BoxBind) -> tuple[int, int]:
        try:
            fd = mount_check.opened(bind.source)
        except OSError as error:
            raise mounts_changed(f"{bind.source}: {error.strerror or error}") from None
        self._fds.callback(os.close, fd)
        status = os.fstat(fd)
        if bind.inode not in (None, (status.st_dev, status.st_ino)):
            raise mounts_changed(f"{bind.source} is not what it was")
        return status.st_dev, status.st_ino

    def check(self, pid: int) -> None:
        """In the mounts of this process. Raises SandboxLostError; UnsupportedError when they cannot be seen."""
        if self.meant is None:
            return
        try:
            os.stat(f"/proc/{pid}/root/")
            stray = mount_check.stray(self.meant, f"/proc/{pid}")
            found = mount_check.wrong(self.meant, f"/proc/{pid}", f"/proc/{pid}/root")
        except OSError as error:
            raise UnsupportedError(
                f"mounts cannot be looked at before the first job: {error.strerror or error}",
                code="mounts",
                fix='backend="process"',
            ) from None
        if found is not None and found == stray:
            raise UnsupportedError(
                f"the engine shows more of this host than it was asked to: {stray}",
                code="engine-settings",
                fix='take it out of the engine\'s own settings, such as containers.conf, or backend="process"',
            )
        if found is not None:
            raise mounts_changed(found)

    def close(self) -> None:
        self._fds.close()


def gofer_of(identity: str) -> int:
    """The process that shows host files to a sandbox of gVisor's; 0 when there is none to be seen.

    `identity`: of the sandbox, which its bundle's folder is named after.
    """
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue  # a guest's, perhaps, which may call itself anything
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read(1 << 14).decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # it has ended
            if "gofer" in words and any(word.rstrip("/").endswith(f"/{identity}") for word in words):
                return int(name)
    return 0
