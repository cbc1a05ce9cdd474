"""Launches a sandbox with host mounts, and holds their protected paths from before its start until after its end."""

from __future__ import annotations

import errno
import os
import select
import threading
import time

from ringfence import import_path, spawn
from ringfence.backends.process.endscan import end_scan, snapshot_before
from ringfence.backends.process.placeholders import Placeholders, is_placeholder
from ringfence.backends.process.protected_watch import Watch
from ringfence.backends.process.refusals import mounts_changed
from ringfence.errors import RingfenceError, warn
from ringfence.plan.process import IMPORTABLE, importable
from ringfence.results import Denial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.process.box import ProcessBox
    from ringfence.backends.process.endscan import Before
    from ringfence.backends.process.pool import Pool
    from ringfence.backends.walled.box import WalledBox
    from ringfence.plan.model import ProcessPlan
    from ringfence.plan.protected import Protected


_QUIET_S = 0.02  # that a guest stands still before what was removed is put back


def launch_guarded(pool: Pool, plan: ProcessPlan) -> ProcessBox:
    """A sandbox whose plan shows host paths. Those of "rw" mounts are looked through at the end.

    Raises as Pool.take does, SandboxLostError for a folder that is none any more, and OSError when a placeholder cannot
    be made; nothing is left then.
    """
    guard = Guard(plan)
    try:
        box = pool.take(plan, stake=guard.stake)
    except BaseException:
        guard.end()
        raise
    guard.begin(box)
    return box


class Guard:
    """Holds the protected paths of one sandbox. `outlives`: its guest is behind an engine (placeholders.py)."""

    def __init__(self, plan: ProcessPlan, *, outlives: bool = False) -> None:
        _keep_imports_out(plan)
        self._held = frozenset(os.path.dirname(one.path) for one in plan.protected)
        self._protected: dict[str, list[Protected]] = {}  # one folder may be mounted in several places
        for one in plan.protected:
            self._protected.setdefault(one.path, []).append(one)
        self._before: dict[str, Before] = {root: snapshot_before(root) for root in plan.writable}
        self._placeholders = Placeholders(plan.protected, outlives=outlives)
        try:
            self._placeholders.make()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # they were folders when the plan was made
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
        """A descriptor that the sandbox's monitor has to keep: while it is open, no placeholder is removed."""
        return self._placeholders.fileno()

    def begin(self, box: ProcessBox | WalledBox) -> None:
        box.on_destroyed.append(lambda: box.add_findings(self.end()))
        if self._watch is not None:
            self._thread = threading.Thread(target=self._keep_watch, args=(box,), name="ringfence-watch", daemon=True)
            self._thread.start()

    def _keep_watch(self, box: ProcessBox | WalledBox) -> None:
        """A path that the host removed is put back; for one that it replaced the sandbox is stopped at once (A33)."""
        try:
            while lost := self._first_lost():
                try:
                    stands = box.hold_still()
                    why = self._put_back(box, lost) if stands else "its guest cannot be made to stand still here"
                    if why:
                        box.stop_unprotected(tuple(_replaced(path, why) for path in lost))  # before it goes on
                        return
                finally:
                    box.let_go_on()
                box.add_findings(tuple(_removed(path) for path in lost))
        except BaseException:
            box.kill()  # nobody watches any more
            raise

    def _put_back(self, box: ProcessBox | WalledBox, lost: list[str]) -> str:
        """Protect them again, and what goes meanwhile, which is added to `lost`. Returns "", or why it cannot be.

        Sound only while the guest stands still, and for what was not there when it came to stand: of a file that was,
        it may have a descriptor by the writable mount already (O_PATH shows nowhere), and no new mount takes that away.
        """
        assert self._watch is not None
        lost += self._watch.check()
        if any(os.path.lexists(path) for path in lost):
            return "what is there now may be open in the guest"
        time.sleep(_QUIET_S)  # a program that removes several, and other sandboxes, which have to stand still too
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
        """Waits for it. Empty: the sandbox has ended before."""
        assert self._watch is not None
        poll = select.poll()  # select() takes no descriptor from 1024 on
        for fd in (self._watch.fileno(), self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            lost = self._watch.check()  # before the wait: what came while one was put back has been read already
            if lost:
                return lost
            if self._stop in dict(poll.poll()):
                return []

    def end(self) -> tuple[Denial, ...]:
        """After the last process of the sandbox is gone. What a look at the writable mounts shows."""
        os.close(self._stopped)
        if self._thread is not None:
            self._thread.join(2)
        os.close(self._stop)
        if self._watch is not None:
            self._watch.close()
        self._placeholders.release()
        found = [one for root, before in self._before.items() for one in end_scan(root, before, known=self._held)]
        return tuple(one for one in found if one.code != "mount.protected-name" or not is_placeholder(one.target))


_warned: set[str] = set()


def _keep_imports_out(plan: ProcessPlan) -> None:
    """Ours, from here on. Of the caller's own it can only be told, once for each folder; a command tells it after the
    run."""
    import_path.shown_writable(plan.writable, [one.path for one in plan.protected if not one.missing])
    folders = [folder for folder in importable(plan) if folder not in _warned]
    _warned.update(folders)
    if folders and not spawn.is_command():
        warn(f"{', '.join(folders)}: {IMPORTABLE}", UserWarning)


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
