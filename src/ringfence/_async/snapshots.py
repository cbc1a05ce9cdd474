"""Snapshots and forks of a sandbox: its files and sessions copied out by workers, put back or into another sandbox.

`ringfence.snapshots` judges everything that the workers say.
"""

from __future__ import annotations

import time

from ringfence._async.compat import blocking, lock
from ringfence._async.worker import STALL_S, AsyncWorker
from ringfence.errors import SandboxLostError, SnapshotError, UnsupportedError
from ringfence.snapshots import model
from ringfence.snapshots.content import Holder, own_store
from ringfence.snapshots.manifest import Manifest, caps_of
from ringfence.snapshots.model import SessionImage, outlet_of, shares_workspace, with_memory
from ringfence.snapshots.take import Lineage, Taking, orders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ringfence._async.process import Place
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence._async.session import AsyncSession
    from ringfence.backends.contract import Outlet
    from ringfence.snapshots.content import ContentStore
    from ringfence.snapshots.model import Snapshot
    from ringfence.snapshots.take import Look


_PROCESSES = 32  # with fewer limits.processes, a worker that stays would take too large a part of them
_NAMES = 20_000  # how many names a worker that stays may remember
_ANSWER_S = 3.0  # a worker that stayed and does not answer for so long was stopped


class AsyncTrees:
    """The files of a sandbox as the host last saw them, so that the next look costs only what changed."""

    def __init__(self, bound: str, store: ContentStore | None = None) -> None:
        """Remember nothing yet. `store`: where content goes; without it, the store that ends with this process."""
        self._bound = bound
        self._store = store
        self._lineage: Lineage | None = None
        self._gate = lock()  # each look begins with the result of the last look
        self._stayed: AsyncWorker | None = None  # the worker that took the last look, and remembers its result

    def close(self) -> None:
        """Remove content that only this sandbox held."""
        self._stayed = None
        if self._lineage is not None:
            self._lineage.close()
            self._lineage = None

    async def take(self, place: Place) -> Snapshot:
        """Return a snapshot of whole files: a file that changed while it was read is read again.

        Raise SnapshotError.
        """
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
                taking.close()
            if self._may_stay(place, len(look.manifest.entries)):
                await worker.rest()
                self._stayed = worker
            else:
                await worker.let_go()
        return model.make(look.manifest, holder, self._bound, place.policy)

    async def fill(self, place: Place, snapshot: Snapshot) -> None:
        """Put the files of `snapshot` into a sandbox in which nothing has run yet."""
        if model.copies_workspace(place.policy):  # the files of the mount's source are in the workspace already (O25)
            await self.roll_back(place, snapshot)
            return
        manifest, store = model.check(snapshot, self._bound, place.policy)
        await _send_orders(place, orders(Manifest(()), manifest, store))
        self.close()
        self._lineage = Lineage(_holder_of(manifest, store))

    async def roll_back(self, place: Place, snapshot: Snapshot) -> None:
        """Set the files back to `snapshot`, touching only files that differ."""
        manifest, store = model.check(snapshot, self._bound, place.policy)
        async with self._gate:
            holder = _holder_of(manifest, store)
            try:
                seen = await self._seen(place)
                await _send_orders(place, orders(None if seen is None else seen[1].manifest, manifest, store))
            except BaseException:
                holder.close()
                raise
            if seen is None:
                self.close()
                self._lineage = Lineage(holder)
            else:
                seen[0].follow(seen[1], holder)

    async def _seen(self, place: Place) -> tuple[Taking, Look] | None:
        """Look at the files by digests alone. Return None when a guest has made files that no look can report."""
        try:
            looking, worker = await self._look(place, contents=False)
            looking.close()
            await worker.let_go()
            return looking, looking.finish()
        except SnapshotError:
            return None

    async def _look(self, place: Place, *, contents: bool) -> tuple[Taking, AsyncWorker]:
        """Take a look. Return its result, and the worker, which the caller has to end."""
        stayed, self._stayed = self._stayed, None
        if stayed is not None and contents:
            taking = self._taking(place, contents=contents)
            if await _look_again(stayed, taking):
                return taking, stayed
            taking.close()  # a guest has killed or stopped the worker: another one gets what is known
        elif stayed is not None:
            await stayed.end()
        taking = self._taking(place, contents=contents)
        stays = contents and self._may_stay(place, 0)
        worker = AsyncWorker(place, "keep", taking.args(stays=stays), feeds=True)
        try:
            await worker.start()
            if not await _read_look(worker, taking, stayed=False):
                await _check_done(worker)
                raise SnapshotError("the worker inside ended early", code="snapshot-failed", fix="try again")
        except BaseException:
            taking.close()
            await worker.end()
            raise
        return taking, worker

    def _may_stay(self, place: Place, names: int) -> bool:
        """Return whether the sandbox can afford the process and the memory of a worker that stays."""
        return place.policy.limits.processes >= _PROCESSES and names <= _NAMES

    def _taking(self, place: Place, *, contents: bool) -> Taking:
        store = self._store or own_store()
        if self._lineage is None or self._lineage.holder.store is not store:
            self._lineage = Lineage(Holder(store))  # the first look, or the first in a fork of this process
        others = model.copies_workspace(place.policy)
        return Taking(store, caps_of(place.policy.limits), self._lineage, contents=contents, others=others)


async def copy_files(source: Place, of: AsyncTrees, target: Place, to: AsyncTrees) -> None:
    """Copy all files of a running sandbox into another of the same policy in which nothing has run yet."""
    snapshot = await of.take(source)
    try:
        await to.fill(target, snapshot)
    finally:
        snapshot.delete()


def _holder_of(manifest: Manifest, store: ContentStore) -> Holder:
    """Return a new holder of all content of a snapshot."""
    holder = Holder(store)
    holder.hold_all(manifest.digests)
    return holder


async def _look_again(worker: AsyncWorker, taking: Taking) -> bool:
    """Have a worker that stayed take another look. Return False when it does not answer; the worker is then gone."""
    worker.stall_s = _ANSWER_S
    try:
        if not worker.ended:
            await worker.go_on()
            if await _read_look(worker, taking, stayed=True):
                return True
    except TimeoutError:
        return False
    except BaseException:
        taking.close()
        await worker.end()
        raise
    await worker.end()
    return False


async def _read_look(worker: AsyncWorker, taking: Taking, *, stayed: bool) -> bool:
    """Feed everything that the worker reports to `taking`. Return False when the worker ended too early."""
    await worker.write(taking.known(stayed=stayed))
    taking.prepare()
    while not taking.done and (pieces := await worker.read()):
        worker.stall_s = STALL_S
        for piece in pieces:
            taking.feed(piece)
    return taking.done


async def _send_orders(place: Place, pieces: Iterator[bytes]) -> None:
    worker = await AsyncWorker(place, "restore", {}, feeds=True).start()
    try:
        for piece in pieces:
            if not await worker.write(piece):
                break  # the worker ended early: its answer says why
        await worker.close_stdin()
        await _check_done(worker)
    finally:
        await worker.end()


async def _check_done(worker: AsyncWorker) -> None:
    """Raise an error when the worker did not do all of its work."""
    try:
        await worker.answer("/workspace")
    except OSError as error:
        raise SnapshotError(
            f"the files could not be copied: {error}",
            code="snapshot-failed",
            fix="look at the file inside, then try again",
        ) from None


# ── sessions as images: taken from one sandbox, put into another ─────────────────────────────────


_START_S = 10.0
FIX = "fork(memory=False) copies the files alone"


async def take(sandbox: AsyncSandbox) -> tuple[SessionImage, ...]:
    """Return an image of every session that has run something.

    Raise UnsupportedError, with the reason, when one cannot be copied.
    """
    taken: list[SessionImage] = []
    try:
        for session in await sandbox.sessions():
            image = await _image(session, sum(each.memory.size_bytes for each in taken))
            if image is not None:
                taken.append(image)
    except BaseException:
        close(taken)
        raise
    return tuple(taken)


def close(images: Iterable[SessionImage]) -> None:
    for image in images:
        image.memory.close()


async def _image(session: AsyncSession, held: int) -> SessionImage | None:
    """Return an image of a session, or None when the session has run nothing.

    `held`: bytes in the images of the sandbox's other sessions. All images together are under one limit, as the guest
    is.
    """
    async with session._gate:
        place = session._running_place()
        inbox = session._inbox
        place.link.poll()
        if inbox is None or inbox.end is not None:
            return None
        if session.language != "python":
            raise refused(session.name, f"it runs {session.language}")
        if place.box.backend != "process" or place.box.python["fresh"]:
            raise refused(session.name, "only a session that the process backend forked can be")
        if session._cell is not None and session._cell.running:
            raise refused(session.name, "a cell runs in it")
        from ringfence.backends.process.memory.capture import take as take_memory

        pid = await _pid(session)
        # The sandbox may be paused because it was idle: on cgroup v1 a frozen process neither stops nor dies (D18).
        await place.link.say(op="resume")
        await place.link.say(op="idle", id=inbox.id, n=0)  # idle from now on, so that it is not paused again meanwhile
        if not await place.link.wait(lambda: not place.link.paused, time.monotonic() + _START_S):
            raise SandboxLostError(f"the sandbox of session {session.name} does not go on", fix="try again")
        try:
            box = place.box
            room = box.memory_bytes - held
            memory = await blocking(take_memory, pid, box.owns, box.generation, room, session._copy_of)
        except UnsupportedError as error:
            raise refused(session.name, str(error)) from None
        memory.had |= session._had
        return SessionImage(session.name, session._count, memory, box.outlet)


def refused(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"session {name} cannot be copied: {why}", code="fork", fix=FIX)


async def _pid(session: AsyncSession) -> int:
    """Return the process number of a session's interpreter, which is known once guestd has started the interpreter."""
    inbox = session._inbox
    assert inbox is not None
    link = session._running_place().link
    if (
        not await link.wait(lambda: inbox.pid > 0 or inbox.end is not None, time.monotonic() + _START_S)
        or not inbox.pid
    ):
        raise SandboxLostError(f"session {session.name} did not start", fix="try again")
    return inbox.pid


async def put(images: Iterable[SessionImage], sandbox: AsyncSandbox) -> None:
    """Put sessions into `sandbox`, to go on from where the originals were. Its own sessions of the same names end."""
    for image in images:
        session = await sandbox.session(image.name)
        await session.restart()
        await _put(image, session)


async def _put(image: SessionImage, session: AsyncSession) -> None:
    from ringfence.backends.process.memory.restore import put as put_memory

    async with session._gate:
        place = session._running_place()
        if place.box.generation is not image.memory.generation:
            raise refused(image.name, "the zygote it came from is gone, and a new one has other addresses")
        place.box.give_image(image.memory.fd)
        await session._start(apart_from=image.memory.had)
        await session._ask({"m": "ping"})  # answered when the interpreter waits for a cell, with all rights dropped
        pid = await _pid(session)
        await blocking(put_memory, image.memory, pid, place.box.owns)
        session._count = image.count
        session._copy_of = image.memory.identity
        session._had = image.memory.had
        await session._ask({"m": "copied"})


async def snapshot(sandbox: AsyncSandbox) -> Snapshot:
    """Return a snapshot of a sandbox's files and sessions."""
    sessions = await take(sandbox)
    try:
        return with_memory(await sandbox._trees_kept().take(sandbox._running_place()), sessions)
    except BaseException:
        close(sessions)
        raise


async def fork(sandbox: AsyncSandbox) -> AsyncSandbox:
    """Return a copy of a sandbox with its sessions. No copy is made when a session cannot be copied."""
    sessions = await take(sandbox)
    try:
        twin = await fork_files(sandbox)
        try:
            await put(sessions, twin)
        except BaseException:
            await twin.close()
            raise
        return twin
    finally:
        close(sessions)


async def fork_files(sandbox: AsyncSandbox) -> AsyncSandbox:
    """Return a fresh sandbox of the same policy, image, workspace and labels, with the same files."""
    twin = sandbox._another()
    twin._launcher.twin_of = sandbox._running_place().box.outlet  # copied memory holds the placeholders of that outlet
    await twin.start()
    try:
        await twin.network._take_over_rules(sandbox.network)
        if shares_workspace(sandbox.policy):
            return twin  # both sandboxes see the same folder of the host
        await copy_files(sandbox._running_place(), sandbox._trees_kept(), twin._running_place(), twin._trees_kept())
    except BaseException:
        await twin.close()
        raise
    return twin


async def roll_back(sandbox: AsyncSandbox, snapshot: Snapshot) -> None:
    """End everything in a sandbox, then set its files and sessions back to `snapshot`."""
    place = sandbox._running_place()
    sandbox._check_snapshot(snapshot)
    _check_placeholders(outlet_of(snapshot), place.box.outlet)
    for process, _ in list(sandbox._processes.values()):
        if process.running:
            await process.kill()
    for session in await sandbox.sessions():
        await session.restart()
    await place.link.say(op="clear")  # also ends processes without a handle; the next worker starts after this
    await sandbox._trees_kept().roll_back(place, snapshot)
    await sandbox._put_sessions(snapshot)


def _check_placeholders(held: Outlet | None, here: Outlet | None) -> None:
    """Raise SnapshotError for memory with placeholders of another sandbox, which mean nothing in a running sandbox."""
    if held is not None and here is not None and held.env != here.env:
        raise SnapshotError(
            "the snapshot's memory holds placeholders of secrets that are another sandbox's",
            code="snapshot-secrets",
            fix="Sandbox(snapshot=...) makes one with the same placeholders",
        )
