"""The files that a policy's mounts are meant to show, held by descriptors from before an engine looks them up.

Engines take paths, and a guest of another sandbox on the same folder can change what a path below it leads to. The
mounts of a new box are therefore compared with these files before its first job: see shared/mount_check.py.
"""

from __future__ import annotations

import contextlib
import os

from ringfence.errors import UnsupportedError
from ringfence.shared import proc
from ringfence.shared.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.backends.engine.rootfs import BoxBind
    from ringfence.errors import SandboxLostError
    from ringfence.shared.mount_check import Meant


class Meaning:
    """The files that one box is meant to show, held open from before the box is made.

    Making a Meaning raises SandboxLostError for a path that is not what the plan looked at, such as a link.
    """

    def __init__(self, binds: Sequence[BoxBind], *, flags: bool = True) -> None:
        """`flags`: as in `Meant`."""
        self._fds = contextlib.ExitStack()  # held, so that the kernel gives no inode to another file
        self._binds = tuple(binds)
        self._before = self._brought() if flags else []
        self.meant: Meant | None = None
        asked = [bind for bind in binds if bind.writable or bind.inode is not None]  # read-only binds too: L16
        if not asked:
            return
        looked_at = {bind.target: bind for bind in binds if any(is_within(bind.target, each.target) for each in asked)}
        below = [
            (mount.device, mount.root)
            for mount in proc.mounts()
            if any(is_within(mount.target, bind.source) for bind in looked_at.values())
        ]
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            places = [(bind.target, *self._identity(bind), bind.writable) for bind in looked_at.values()]
            undo.pop_all()
        self.meant = {"places": places, "below": below, "flags": flags, "targets": None, "brought": []}

    def expect(self, targets: Sequence[str]) -> None:
        """Also require that nothing is mounted but at `targets`, and what the engine itself mounts in every box."""
        brought = list(dict.fromkeys((*self._before, *self._brought())))  # other processes mount and unmount meanwhile
        meant: Meant = self.meant or {"places": [], "below": [], "flags": True, "targets": None, "brought": []}
        self.meant = {**meant, "targets": list(targets), "brought": brought}

    def _brought(self) -> list[tuple[str, str]]:
        """Return device and root of everything that the host has mounted at and below the sources."""
        return [
            (mount.device, mount.root)
            for mount in proc.mounts()
            if any(is_within(mount.target, bind.source) for bind in self._binds)
        ]

    def _identity(self, bind: BoxBind) -> tuple[int, int]:
        from ringfence.shared.mount_check import opened  # for policies with mounts alone

        try:
            fd = opened(bind.source)
        except OSError as error:
            raise _changed(f"{bind.source}: {error.strerror or error}") from None
        self._fds.callback(os.close, fd)
        status = os.fstat(fd)
        if bind.inode not in (None, (status.st_dev, status.st_ino)):
            raise _changed(f"{bind.source} is not what it was")
        return status.st_dev, status.st_ino

    def check(self, pid: int) -> None:
        """Compare with the mounts of process `pid`.

        Raises SandboxLostError for a difference, UnsupportedError when the mounts cannot be read, or when the engine's
        own settings show more of the host.
        """
        if self.meant is None:
            return
        from ringfence.shared import mount_check

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
                fix='remove this from the engine\'s own settings, such as containers.conf, or backend="process"',
            )
        if found is not None:
            raise _changed(found)

    def close(self) -> None:
        self._fds.close()


def _changed(text: str) -> SandboxLostError:
    from ringfence.host.kernel_refusals import mounts_changed

    return mounts_changed(text)


def gofer_of(identity: str) -> int:
    """Return the process that shows host files to a gVisor sandbox; 0 when no such process is visible.

    `identity`: the sandbox's id, which its bundle's folder is named after.
    """
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue  # perhaps a guest's process, which can give itself any name
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read(1 << 14).decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # it has ended
            if "gofer" in words and any(word.rstrip("/").endswith(f"/{identity}") for word in words):
                return int(name)
    return 0
