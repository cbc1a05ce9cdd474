"""Guards the host mounts of a sandbox: protected paths stay protected from before the start until the end."""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
import time

from ringfence.errors import RingfenceError, warn
from ringfence.host import import_path, zygote_start
from ringfence.host.kernel_refusals import mounts_changed
from ringfence.host.mount_scan import end_scan, snapshot_before
from ringfence.host.placeholders import Placeholders, is_placeholder
from ringfence.results import Denial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from ringfence.host.mount_scan import Before
    from ringfence.plan.model import LinuxPlan
    from ringfence.plan.rootfs.protected import Protected

    class GuardedBox(Protocol):
        """What a guard needs of a sandbox with watched mounts."""

        @property
        def on_destroyed(self) -> list[Callable[[], None]]:
            """Return the functions that are called after the last process of the sandbox is gone."""
            ...

        def hold_still(self) -> bool:
            """Stop every process inside until `let_go_on`. Return whether all are stopped."""
            ...

        def let_go_on(self) -> None:
            """Let the guest go on, after `hold_still`, whatever that returned or raised."""
            ...

        def protect_again(self, paths: list[tuple[str, int, int]]) -> str:
            """Make paths inside read-only once more. Return "", or why that failed."""
            ...

        def stop_unprotected(self, found: tuple[Denial, ...]) -> None:
            """End every process inside, because a protected path is no longer protected."""
            ...

        def add_findings(self, found: tuple[Denial, ...]) -> None: ...

        def kill(self) -> None: ...


# ── noticing that a protected path of a writable mount is replaced on the host ────────────────────

# The read-only mounts themselves are made by `guest.launch.mounts`. When a program on the host replaces a protected
# file by rename, as git and editors do, the kernel takes the mount off in the sandbox too, and only the watch
# notices (kernel fact 10). A caller that wants no such limits takes a mount of mode "copy".

_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x1000000, 0x2000000
_WATCHED = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_ALWAYS = _IN_Q_OVERFLOW | _IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF
_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000
_EVENT = struct.Struct("iIII")


class Watch:
    """An inotify watch on protected paths and the folders around them in the mount: renamed, removed or made.

    Made after the placeholders, before the guest. `fileno()` is readable when `check()` should be called.
    """

    def __init__(self, protected: tuple[Protected, ...]) -> None:
        folders = sorted({os.path.dirname(path) for path in _inodes(protected)})
        self._fd, self._folders = _inotify(folders)
        self._expected = _inodes(protected)
        self._touched: dict[str, None] = {}  # expected paths that had an event, in the order of the events

    def fileno(self) -> int:
        return self._fd

    def check(self) -> list[str]:
        """Return protected paths that were replaced or removed on the host since the start. Each is reported once.

        What happened to the name counts, not the inode that has the name now: a file system gives the number of a
        removed file to the next file that is made, which may be the guest's.
        """
        self._take_in()
        touched, self._touched = self._touched, {}
        for path in touched:
            del self._expected[path]
        return list(touched)

    def expect(self, inodes: dict[str, tuple[int, int]]) -> None:
        """Expect the paths to stay as these inodes, and drop earlier events, which we caused ourselves.

        A path that has another inode or is gone by now was removed in the meantime; the next `check` reports it.
        """
        self._expected |= inodes
        self._take_in()
        for path, inode in inodes.items():
            self._touched.pop(path, None)
            if _inode(path) != inode:
                self._touched[path] = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_in(self) -> None:
        if self._drain():  # some events are lost: compare the inodes of all paths instead
            self._touched |= dict.fromkeys(path for path, inode in self._expected.items() if _inode(path) != inode)

    def _drain(self) -> bool:
        """Read all events. Return whether more may have happened than the events say."""
        blind = False
        while True:
            try:
                events = os.read(self._fd, 65536)
            except BlockingIOError:
                return blind
            offset = 0
            while offset < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, offset)
                offset += _EVENT.size
                name = os.fsdecode(events[offset : offset + length].rstrip(b"\0"))
                offset += length
                path = f"{self._folders.get(watch)}/{name}"
                if path in self._expected:
                    self._touched[path] = None
                blind = blind or bool(mask & _ALWAYS)


def _inodes(protected: tuple[Protected, ...]) -> dict[str, tuple[int, ...] | None]:
    expected: dict[str, tuple[int, ...] | None] = {}
    for one in protected:
        path = one.path
        while path != one.root and len(path) > len(one.root):
            expected[path] = _inode(path)
            path = os.path.dirname(path)
    return expected


def _inode(path: str) -> tuple[int, ...] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _inotify(directories: list[str]) -> tuple[int, dict[int, str]]:
    """Return an inotify descriptor, and the folder that each number in the events means. Raises OSError."""
    import ctypes  # only where something is protected

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"inotify: {os.strerror(ctypes.get_errno())}")
    folders: dict[int, str] = {}
    for directory in directories:
        mask = ctypes.c_uint32(_WATCHED | _IN_ONLYDIR | _IN_DONT_FOLLOW)
        watch = libc.inotify_add_watch(fd, os.fsencode(directory), mask)
        if watch < 0:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, f"{directory} cannot be watched: {os.strerror(number)}")
        folders[watch] = directory
    return fd, folders


_QUIET_S = 0.02  # how long a guest is stopped before removed paths are put back


class Guard:
    """The guard of a sandbox's protected paths. `outlives`: the guest is behind an engine, as `Placeholders` says."""

    def __init__(self, plan: LinuxPlan, *, outlives: bool = False) -> None:
        _keep_imports_out(plan)
        self._known = frozenset(os.path.dirname(one.path) for one in plan.protected)
        self._protected: dict[str, list[Protected]] = {}  # one folder may be mounted in several places
        for one in plan.protected:
            self._protected.setdefault(one.path, []).append(one)
        self._before: dict[str, Before] = {root: snapshot_before(root) for root in plan.writable}
        self._placeholders = Placeholders(plan.protected, outlives=outlives)
        try:
            self._placeholders.make()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # the plan saw folders there
                raise mounts_changed(str(error.strerror)) from None
            raise
        try:
            self._watch = Watch(plan.protected) if plan.protected else None
            self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        except BaseException:
            self._placeholders.release()
            raise
        self._thread: threading.Thread | None = None

    @property
    def stake(self) -> int:
        """Return a descriptor that the sandbox's monitor has to keep: while it is open, no placeholder is removed."""
        return self._placeholders.fileno()

    def begin(self, box: GuardedBox) -> None:
        """Watch the protected paths of a sandbox that has started, until its end."""
        box.on_destroyed.append(lambda: box.add_findings(self.end()))
        if self._watch is not None:
            self._thread = threading.Thread(target=self._keep_watch, args=(box,), name="ringfence-watch", daemon=True)
            self._thread.start()

    def _keep_watch(self, box: GuardedBox) -> None:
        """Put a path back that the host removed; stop the sandbox at once when the host replaced a path (A33)."""
        try:
            while lost := self._first_lost():
                try:
                    is_still = box.hold_still()
                    why = self._put_back(box, lost) if is_still else "its guest cannot be stopped here"
                    if why:
                        box.stop_unprotected(tuple(_replaced(path, why) for path in lost))  # before the guest goes on
                        return
                finally:
                    box.let_go_on()
                box.add_findings(tuple(_removed(path) for path in lost))
        except BaseException:
            box.kill()  # its paths are no longer watched
            raise

    def _put_back(self, box: GuardedBox, lost: list[str]) -> str:
        """Protect the lost paths again, and paths that are removed meanwhile, which are added to `lost`.

        Returns "", or why that is not possible. Sound only while the guest is stopped, and for paths that did not exist
        when the guest was stopped. Of an existing file the guest may have a descriptor by the writable mount already
        (O_PATH, which nothing shows), and no new mount takes that descriptor away.
        """
        assert self._watch is not None
        lost += self._watch.check()
        if any(os.path.lexists(path) for path in lost):
            return "the file that is there now may be open in the guest"
        time.sleep(_QUIET_S)  # a program may remove more paths, and other sandboxes have to stop too
        lost += [path for path in self._watch.check() if path not in lost]
        again = [one for path in lost for one in self._protected.get(path, ())]
        if any(path not in self._protected for path in lost) or any(one.content is None or one.hidden for one in again):
            return "it is a folder above a protected path, or a hidden path"
        try:
            self._placeholders.make_again(again)
            found = {path: os.lstat(path) for path in lost}
            inodes = {path: (info.st_dev, info.st_ino) for path, info in found.items()}
            why = box.protect_again([(one.target, *inodes[one.path]) for one in again])
        except (OSError, RingfenceError) as error:
            return str(error)
        if not why:
            self._watch.expect(inodes)
        return why

    def _first_lost(self) -> list[str]:
        """Wait until protected paths are lost and return them; an empty list when the sandbox ends first."""
        assert self._watch is not None
        poll = select.poll()  # select() takes no descriptor from 1024 on
        for fd in (self._watch.fileno(), self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            lost = self._watch.check()  # before the wait: `_put_back` has read later events already
            if lost:
                return lost
            if self._stop in dict(poll.poll()):
                return []

    def end(self) -> tuple[Denial, ...]:
        """Release everything after the last process is gone. Return what a scan of the writable mounts finds."""
        os.close(self._stopped)
        if self._thread is not None:
            self._thread.join(2)
        os.close(self._stop)
        if self._watch is not None:
            self._watch.close()
        self._placeholders.release()
        found = [one for root, before in self._before.items() for one in end_scan(root, before, known=self._known)]
        return tuple(one for one in found if one.code != "mount.protected-name" or not is_placeholder(one.target))


_warned: set[str] = set()


def _keep_imports_out(plan: LinuxPlan) -> None:
    """Keep Ringfence's own imports out of the plan's writable folders, from here on.

    The caller's own imports cannot be kept out: the caller gets a warning, once for each folder. A command says it
    after the run instead.
    """
    read_only = [one.path for one in plan.protected if not one.missing]
    import_path.shown_writable(plan.writable, read_only)
    folders = [folder for folder in import_path.importable(plan.writable, read_only) if folder not in _warned]
    _warned.update(folders)
    if folders and not zygote_start.is_command():
        warn(f"{', '.join(folders)}: {import_path.IMPORTABLE}", UserWarning)


def _replaced(path: str, why: str) -> Denial:
    message = (
        f"{path} was replaced or removed from outside while the sandbox ran (by a program on the host, or by another "
        "sandbox that may write there), and its protection with it; "
        f"it could not be put back ({why}), so the sandbox was stopped"
    )
    return Denial("mount", path, "mount.protected-replaced", message, allow=None)


def _removed(path: str) -> Denial:
    message = f"{path} was removed from outside while the sandbox ran; it is protected again, and the sandbox goes on"
    return Denial("mount", path, "mount.protected-removed", message, allow=None)
