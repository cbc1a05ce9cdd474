"""Copies of a sandbox's files: taken by a worker inside, put back by another. What they say is judged in `files`."""

from __future__ import annotations

from ringfence import snapshots
from ringfence._async.waiting import lock
from ringfence._async.worker import STALL_S, AsyncWorker
from ringfence.errors import SnapshotError
from ringfence.files.lineage import Lineage
from ringfence.files.manifest import Manifest, caps_of
from ringfence.files.snapshotting import Taking, orders
from ringfence.files.store import Holder, own_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence._async.process import Place
    from ringfence.files.lineage import Look
    from ringfence.files.store import Store
    from ringfence.snapshots import Snapshot

_PROCESSES = 32  # of limits.processes: with fewer, a worker that stays would take a part of them that matters
_NAMES = 20_000  # that a worker remembers
_ANSWER_S = 3.0  # of one that has stayed: then it was stopped


class AsyncTrees:
    """The files of one sandbox, as they were when the host last looked, so that the next look costs what changed."""

    def __init__(self, bound: str, store: Store | None = None) -> None:
        """`store`: where content goes; without, one that ends with this process."""
        self._bound = bound
        self._store = store
        self._lineage: Lineage | None = None
        self._gate = lock()  # each look begins with what the last one found
        self._stayed: AsyncWorker | None = None  # it took the last look, and remembers what it saw

    def close(self) -> None:
        """Content that only this sandbox held is removed."""
        self._stayed = None
        if self._lineage is not None:
            self._lineage.close()
            self._lineage = None

    async def take(self, place: Place) -> Snapshot:
        """Each file is whole; a file that changed while it was read is read again. Raises SnapshotError."""
        async with self._gate:
            taking, worker = await self._look(place, contents=True)
            try:
                look = taking.finish()
                holder = taking.content(look)
                taking.follow(look)
            except BaseException:
                await worker.end()
                raise
            finally:
                taking.drop()
            if self._may_stay(place, len(look.manifest.entries)):
                await worker.rest()
                self._stayed = worker
            else:
                await worker.let_go()
        return snapshots.make(look.manifest, holder, self._bound, place.policy)

    async def fill(self, place: Place, snapshot: Snapshot) -> None:
        """The files of `snapshot` into a sandbox in which nothing has run yet."""
        if snapshots.copies_workspace(place.policy):  # what the mount's source holds is there already (O25)
            await self.roll_back(place, snapshot)
            return
        manifest, store = snapshots.check(snapshot, self._bound, place.policy)
        await _order(place, orders(Manifest(()), manifest, store))
        self.close()
        self._lineage = Lineage(_holding(manifest, store))

    async def roll_back(self, place: Place, snapshot: Snapshot) -> None:
        """The files as they were, touching only what differs."""
        manifest, store = snapshots.check(snapshot, self._bound, place.policy)
        async with self._gate:
            holder = _holding(manifest, store)
            try:
                seen = await self._seen(place)
                await _order(place, orders(None if seen is None else seen[1].manifest, manifest, store))
            except BaseException:
                holder.close()
                raise
            if seen is None:
                self.close()
                self._lineage = Lineage(holder)
            else:
                seen[0].follow(seen[1], holder)

    async def _seen(self, place: Place) -> tuple[Taking, Look] | None:
        """What is there now, by digests alone. None: a guest has made what no look can tell."""
        try:
            looking, worker = await self._look(place, contents=False)
            looking.drop()
            await worker.let_go()
            return looking, looking.finish()
        except SnapshotError:
            return None

    async def _look(self, place: Place, *, contents: bool) -> tuple[Taking, AsyncWorker]:
        """What a worker told, and the worker, which is the caller's to end."""
        stayed, self._stayed = self._stayed, None
        if stayed is not None and contents:
            taking = self._taking(place, contents=contents)
            if await _goes_on(stayed, taking):
                return taking, stayed
            taking.drop()  # a guest has killed or stopped it: another one is told what is known
        elif stayed is not None:
            await stayed.end()
        taking = self._taking(place, contents=contents)
        stays = contents and self._may_stay(place, 0)
        worker = AsyncWorker(place, "keep", taking.args(stays=stays), feeds=True)
        try:
            await worker.start()
            if not await _told(worker, taking, stayed=False):
                await _ended(worker)
                raise SnapshotError("the worker inside ended early", code="snapshot-failed", fix="try again")
        except BaseException:
            taking.drop()
            await worker.end()
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


async def copy_files(source: Place, of: AsyncTrees, target: Place, to: AsyncTrees) -> None:
    """All files of one running sandbox into another of the same policy in which nothing has run yet."""
    snapshot = await of.take(source)
    try:
        await to.fill(target, snapshot)
    finally:
        snapshot.delete()


def _holding(manifest: Manifest, store: Store) -> Holder:
    """Everything of a snapshot that is there, held once more."""
    holder = Holder(store)
    holder.hold_all(manifest.digests)
    return holder


async def _goes_on(worker: AsyncWorker, taking: Taking) -> bool:
    """One more look by a worker that has stayed. False when it does not answer; then it is gone."""
    worker.stall_s = _ANSWER_S
    try:
        if not worker.ended:
            await worker.go_on()
            if await _told(worker, taking, stayed=True):
                return True
    except TimeoutError:
        return False
    except BaseException:
        taking.drop()
        await worker.end()
        raise
    await worker.end()
    return False


async def _told(worker: AsyncWorker, taking: Taking, *, stayed: bool) -> bool:
    """All that it tells. False when it ended before."""
    await worker.write(taking.known(stayed=stayed))
    taking.prepare()
    while not taking.done and (pieces := await worker.read()):
        worker.stall_s = STALL_S
        for piece in pieces:
            taking.feed(piece)
    return taking.done


async def _order(place: Place, pieces: Iterator[bytes]) -> None:
    worker = await AsyncWorker(place, "restore", {}, feeds=True).start()
    try:
        for piece in pieces:
            if not await worker.write(piece):
                break  # it ended early: its answer says why
        await worker.close_stdin()
        await _ended(worker)
    finally:
        await worker.end()


async def _ended(worker: AsyncWorker) -> None:
    """Raises when the worker did not do all of its work."""
    try:
        await worker.answer("/workspace")
    except OSError as error:
        raise SnapshotError(
            f"the files could not be copied: {error}",
            code="snapshot-failed",
            fix="look at the file inside, then try again",
        ) from None
