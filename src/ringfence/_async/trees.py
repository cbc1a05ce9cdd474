"""Copies of a sandbox's files: taken by a worker inside, put back by another. What they say is judged in `files`."""

from __future__ import annotations

from ringfence import snapshots
from ringfence._async.worker import AsyncWorker
from ringfence.errors import SnapshotError
from ringfence.files.manifest import Manifest, caps_of
from ringfence.files.snapshotting import Lineage, Taking, orders, problem
from ringfence.files.store import Holder, own_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence._async.process import Place
    from ringfence.files.store import Store
    from ringfence.snapshots import Snapshot


class AsyncTrees:
    """The files of one sandbox, as they were when the host last looked, so that the next look costs what changed."""

    def __init__(self, bound: str, store: Store | None = None) -> None:
        """`store`: where content goes; without, one that ends with this process."""
        self._bound = bound
        self._store = store
        self._lineage: Lineage | None = None

    def close(self) -> None:
        """Content that only this sandbox held is removed."""
        if self._lineage is not None:
            self._lineage.close()
            self._lineage = None

    async def take(self, place: Place) -> Snapshot:
        """Each file is whole; a file that changed while it was read is read again. Raises SnapshotError."""
        taking = self._taking(place, contents=True)
        try:
            await _look(place, taking)
            manifest, lineage = taking.finish()
        except BaseException:
            taking.drop()
            raise
        self._follow(lineage)
        return snapshots.make(manifest, taking.holder, self._bound, place.policy)

    async def fill(self, place: Place, snapshot: Snapshot) -> None:
        """The files of `snapshot` into a workspace in which nothing is yet."""
        manifest, store = snapshots.check(snapshot, self._bound, place.policy)
        await _order(place, orders(Manifest(()), manifest, store))
        self._follow(Lineage(_holding(manifest, store)))

    async def roll_back(self, place: Place, snapshot: Snapshot) -> None:
        """The files as they were, touching only what differs."""
        manifest, store = snapshots.check(snapshot, self._bound, place.policy)
        holder = _holding(manifest, store)
        looking = self._taking(place, contents=False)
        try:
            await _look(place, looking)
            now, seen = looking.finish()
            seen.close()
            await _order(place, orders(now, manifest, store))
        except BaseException:
            holder.close()
            raise
        finally:
            looking.drop()
        self._follow(Lineage(holder, seen.rows))

    def _taking(self, place: Place, *, contents: bool) -> Taking:
        store = self._store or own_store()
        lineage = self._lineage if self._lineage is not None and self._lineage.holder.store is store else None
        return Taking(store, caps_of(place.policy.limits), lineage, contents=contents)

    def _follow(self, lineage: Lineage) -> None:
        before, self._lineage = self._lineage, lineage
        if before is not None:
            before.close()


async def copy_files(source: Place, of: AsyncTrees, target: Place, to: AsyncTrees) -> None:
    """All files of one running sandbox into another of the same policy in which nothing is yet."""
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


async def _look(place: Place, taking: Taking) -> None:
    worker = await AsyncWorker(place, "keep", taking.args(), feeds=True).start()
    try:
        if await worker.write(taking.known()):
            await worker.close_stdin()
        while pieces := await worker.read():
            for piece in pieces:
                taking.feed(piece)
        await _ended(worker)
    finally:
        await worker.end()


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
        report = await worker.answer("/workspace")
    except OSError as error:
        raise SnapshotError(
            f"the files could not be copied: {error}",
            code="snapshot-failed",
            fix="look at the file inside, then try again",
        ) from None
    found = problem(report)
    if found is not None:
        raise found
