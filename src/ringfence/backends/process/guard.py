"""Launches a sandbox with host mounts, and holds their protected paths from before its start until after its end."""

from __future__ import annotations

import os
import select
import threading

from ringfence import import_path, spawn
from ringfence.backends.process import record, state
from ringfence.backends.process.endscan import end_scan, snapshot_before
from ringfence.backends.process.protect import Placeholder, Placeholders, Watch
from ringfence.errors import warn
from ringfence.plan.process import IMPORTABLE
from ringfence.results import Denial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.process.box import ProcessBox
    from ringfence.backends.process.endscan import Before
    from ringfence.backends.process.pool import Pool
    from ringfence.backends.walled.box import WalledBox
    from ringfence.plan.model import ProcessPlan


def launch_guarded(pool: Pool, plan: ProcessPlan, writable: tuple[str, ...]) -> ProcessBox:
    """A sandbox whose plan shows host paths. `writable`: sources of "rw" mounts, looked through at the end.

    Raises as Pool.take does, and OSError when a placeholder cannot be made; nothing is left then.
    """
    guard = Guard(plan, writable)
    try:
        box = pool.take(plan)
    except BaseException:
        guard.end()
        raise
    guard.begin(box)
    return box


class Guard:
    """Holds the protected paths of one sandbox."""

    def __init__(self, plan: ProcessPlan, writable: tuple[str, ...]) -> None:
        _keep_imports_out(plan, writable)
        self._writable = writable
        self._held = frozenset(os.path.dirname(one.path) for one in plan.protected)
        self._before: dict[str, Before] = {root: snapshot_before(root) for root in writable}
        self._placeholders = Placeholders(plan.protected, note=_note, forget=_forget, known=state.is_placeholder)
        self._placeholders.make()
        self._watch = Watch(plan.protected) if plan.protected else None
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    def begin(self, box: ProcessBox | WalledBox) -> None:
        box.on_destroyed.append(lambda: box.add_findings(self.end()))
        if self._watch is not None:
            self._thread = threading.Thread(target=self._keep_watch, args=(box,), name="ringfence-watch", daemon=True)
            self._thread.start()

    def _keep_watch(self, box: ProcessBox | WalledBox) -> None:
        """A protected file that the host replaced is no longer held (A33): the sandbox is stopped at once."""
        try:
            lost = self._first_lost()
        except BaseException:
            box.kill()  # nobody watches any more
            raise
        if lost:
            box.kill()
            box.add_findings(tuple(_replaced(path) for path in lost))

    def _first_lost(self) -> list[str]:
        """Waits for it. Empty: the sandbox has ended before."""
        assert self._watch is not None
        poll = select.poll()  # select() takes no descriptor from 1024 on
        for fd in (self._watch.fileno(), self._stop):
            poll.register(fd, select.POLLIN)
        while self._stop not in dict(poll.poll()):
            lost = self._watch.check()
            if lost:
                return lost
        return []

    def end(self) -> tuple[Denial, ...]:
        """After the last process of the sandbox is gone. What a look at the writable mounts shows."""
        os.close(self._stopped)
        if self._thread is not None:
            self._thread.join(2)
        os.close(self._stop)
        if self._watch is not None:
            self._watch.close()
        self._placeholders.remove()
        found: tuple[Denial, ...] = ()
        for root, before in self._before.items():
            found += end_scan(root, before, ignore=self._placeholders.kept, known=self._held)
        return found


_warned: set[str] = set()


def _keep_imports_out(plan: ProcessPlan, writable: tuple[str, ...]) -> None:
    """Ours, from here on. Of the caller's own it can only be told, once for each folder; a command tells it after the
    run."""
    held = read_only(plan)
    import_path.shown_writable(writable, held)
    folders = [folder for folder in import_path.importable(writable, held) if folder not in _warned]
    _warned.update(folders)
    if folders and not spawn.is_command():
        warn(
            f"{', '.join(folders)}: {IMPORTABLE}",
            UserWarning,
        )


def read_only(plan: ProcessPlan) -> tuple[str, ...]:
    """What is there in a writable mount and cannot be written."""
    return tuple(one.path for one in plan.protected if not one.missing)


def _replaced(path: str) -> Denial:
    message = (
        f"{path} was replaced on the host while the sandbox ran; its protection was gone, so the sandbox was stopped"
    )
    return Denial("mount", path, "mount.protected-replaced", message, allow=None)


def _facts(placeholder: Placeholder) -> dict[str, str | int]:
    return {
        "path": placeholder.path,
        "directory": int(placeholder.directory),
        "content": placeholder.content,
        "device": placeholder.device,
        "inode": placeholder.inode,
    }


def _note(placeholder: Placeholder) -> None:
    record.owner().note("placeholder", **_facts(placeholder))


def _forget(placeholder: Placeholder) -> None:
    owner = record.owner()
    owner.forget("placeholder", **_facts(placeholder))
    owner.forget("placeholder", **{**_facts(placeholder), "device": 0, "inode": 0})
