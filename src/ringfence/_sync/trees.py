# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Copies of a sandbox's files: taken by a worker inside, put back by another. What they say is judged in `files`."""

from __future__ import annotations

from ringfence import snapshots
from ringfence._sync.waiting import lock
from ringfence._sync.worker import STALL_S, Worker
from ringfence.errors import SnapshotError
from ringfence.files.lineage import Lineage
from ringfence.files.manifest import Manifest, caps_of
from ringfence.files.snapshotting import Taking, orders
from ringfence.files.store import Holder, own_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence._sync.process import Place
    from ringfence.files.lineage import Look
    from ringfence.files.store import Store
    from ringfence.snapshots import Snapshot

_PROCESSES = 32  # of limits.processes: with fewer, a worker that stays would take a part of them that matters
_NAMES = 20_000  # that a worker remembers
_ANSWER_S = 3.0  # of one that has stayed: then it was stopped


class Trees:
    """The files of one sandbox, as they were when the host last looked, so that the next look costs what changed."""

    def __init__(self, bound: str, store: Store | None = None) -> None:
        """`store`: where content goes; without, one that ends with this process."""
        self._bound = bound
        self._store = store
        self._lineage: Lineage | None = None
        self._gate = lock()  # each look begins with what the last one found
        self._stayed: Worker | None = None  # it took the last look, and remembers what it saw

    def close(self) -> None:
        """Content that only this sandbox held is removed."""
        self._stayed = None
        if self._lineage is not None:
            self._lineage.close()
            self._lineage = None

    def take(self, place: Place) -> Snapshot:
        """Each file is whole; a file that changed while it was read is read again. Raises SnapshotError."""
        with self._gate:
            taking, worker = self._look(place, contents=True)
            try:
                look = taking.finish()
                holder = taking.content(look)
                taking.follow(look)
            except BaseException:
                worker.end()
                raise
            finally:
                taking.drop()
            if self._may_stay(place, len(look.manifest.entries)):
                worker.rest()
                self._stayed = worker
            else:
                worker.let_go()
        return snapshots.make(look.manifest, holder, self._bound, place.policy)

    def fill(self, place: Place, snapshot: Snapshot) -> None:
        """The files of `snapshot` into a sandbox in which nothing has run yet."""
        if snapshots.copies_workspace(place.policy):  # what the mount's source holds is there already (O25)
            self.roll_back(place, snapshot)
            return
        manifest, store = snapshots.check(snapshot, self._bound, place.policy)
        _order(place, orders(Manifest(()), manifest, store))
        self.close()
        self._lineage = Lineage(_holding(manifest, store))

    def roll_back(self, place: Place, snapshot: Snapshot) -> None:
        """The files as they were, touching only what differs."""
        manifest, store = snapshots.check(snapshot, self._bound, place.policy)
        with self._gate:
            holder = _holding(manifest, store)
            try:
                seen = self._seen(place)
                _order(place, orders(None if seen is None else seen[1].manifest, manifest, store))
            except BaseException:
                holder.close()
                raise
            if seen is None:
                self.close()
                self._lineage = Lineage(holder)
            else:
                seen[0].follow(seen[1], holder)

    def _seen(self, place: Place) -> tuple[Taking, Look] | None:
        """What is there now, by digests alone. None: a guest has made what no look can tell."""
        try:
            looking, worker = self._look(place, contents=False)
            looking.drop()
            worker.let_go()
            return looking, looking.finish()
        except SnapshotError:
            return None

    def _look(self, place: Place, *, contents: bool) -> tuple[Taking, Worker]:
        """What a worker told, and the worker, which is the caller's to end."""
        stayed, self._stayed = self._stayed, None
        if stayed is not None and contents:
            taking = self._taking(place, contents=contents)
            if _goes_on(stayed, taking):
                return taking, stayed
            taking.drop()  # a guest has killed or stopped it: another one is told what is known
        elif stayed is not None:
            stayed.end()
        taking = self._taking(place, contents=contents)
        stays = contents and self._may_stay(place, 0)
        worker = Worker(place, "keep", taking.args(stays=stays), feeds=True)
        try:
            worker.start()
            if not _told(worker, taking, stayed=False):
                _ended(worker)
                raise SnapshotError("the worker inside ended early", code="snapshot-failed", fix="try again")
        except BaseException:
            taking.drop()
            worker.end()
            raise
        return taking, worker

    def _may_stay(self, place: Place, names: int) -> bool:
        """Where one process more and what it remembers do not matter."""
        return place.policy.limits.processes >= _PROCESSES and names <= _NAMES

    def _taking(self, place: Place, *, contents: bool) -> Taking:
        store = self._store or own_store()
        if self._lineage is None or self._lineage.holder.store is not store:
            self._lineage = Lineage(Holder(store))  # the first look, or the first in a fork of its process
        others = snapshots.copies_workspace(place.policy)
        return Taking(store, caps_of(place.policy.limits), self._lineage, contents=contents, others=others)


def copy_files(source: Place, of: Trees, target: Place, to: Trees) -> None:
    """All files of one running sandbox into another of the same policy in which nothing has run yet."""
    snapshot = of.take(source)
    try:
        to.fill(target, snapshot)
    finally:
        snapshot.delete()


def _holding(manifest: Manifest, store: Store) -> Holder:
    """Everything of a snapshot that is there, held once more."""
    holder = Holder(store)
    holder.hold_all(manifest.digests)
    return holder


def _goes_on(worker: Worker, taking: Taking) -> bool:
    """One more look by a worker that has stayed. False when it does not answer; then it is gone."""
    worker.stall_s = _ANSWER_S
    try:
        if not worker.ended:
            worker.go_on()
            if _told(worker, taking, stayed=True):
                return True
    except TimeoutError:
        return False
    except BaseException:
        taking.drop()
        worker.end()
        raise
    worker.end()
    return False


def _told(worker: Worker, taking: Taking, *, stayed: bool) -> bool:
    """All that it tells. False when it ended before."""
    worker.write(taking.known(stayed=stayed))
    taking.prepare()
    while not taking.done and (pieces := worker.read()):
        worker.stall_s = STALL_S
        for piece in pieces:
            taking.feed(piece)
    return taking.done


def _order(place: Place, pieces: Iterator[bytes]) -> None:
    worker = Worker(place, "restore", {}, feeds=True).start()
    try:
        for piece in pieces:
            if not worker.write(piece):
                break  # it ended early: its answer says why
        worker.close_stdin()
        _ended(worker)
    finally:
        worker.end()


def _ended(worker: Worker) -> None:
    """Raises when the worker did not do all of its work."""
    try:
        worker.answer("/workspace")
    except OSError as error:
        raise SnapshotError(
            f"the files could not be copied: {error}",
            code="snapshot-failed",
            fix="look at the file inside, then try again",
        ) from None
