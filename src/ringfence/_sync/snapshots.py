# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Copies of a sandbox's files: taken by a worker inside, put back by another. What they say is judged in `files`."""

from __future__ import annotations

import time

from ringfence._sync.compat import blocking, lock
from ringfence._sync.worker import STALL_S, Worker
from ringfence.errors import SandboxLostError, SnapshotError, UnsupportedError
from ringfence.snapshots import model
from ringfence.snapshots.content import Holder, own_store
from ringfence.snapshots.manifest import Manifest, caps_of
from ringfence.snapshots.model import SessionImage, outlet_of, shares_workspace, with_memory
from ringfence.snapshots.take import Lineage, Taking, orders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ringfence._sync.process import Place
    from ringfence._sync.sandbox import Sandbox
    from ringfence._sync.session import Session
    from ringfence.backends.contract import Outlet
    from ringfence.snapshots.content import Store
    from ringfence.snapshots.model import Snapshot
    from ringfence.snapshots.take import Look


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
                taking.close()
            if self._may_stay(place, len(look.manifest.entries)):
                worker.rest()
                self._stayed = worker
            else:
                worker.let_go()
        return model.make(look.manifest, holder, self._bound, place.policy)

    def fill(self, place: Place, snapshot: Snapshot) -> None:
        """The files of `snapshot` into a sandbox in which nothing has run yet."""
        if model.copies_workspace(place.policy):  # what the mount's source holds is there already (O25)
            self.roll_back(place, snapshot)
            return
        manifest, store = model.check(snapshot, self._bound, place.policy)
        _order(place, orders(Manifest(()), manifest, store))
        self.close()
        self._lineage = Lineage(_holding(manifest, store))

    def roll_back(self, place: Place, snapshot: Snapshot) -> None:
        """The files as they were, touching only what differs."""
        manifest, store = model.check(snapshot, self._bound, place.policy)
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
            looking.close()
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
            taking.close()  # a guest has killed or stopped it: another one is told what is known
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
            taking.close()
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
        others = model.copies_workspace(place.policy)
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
        taking.close()
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


# MERGED: Sessions as images: taken from one sandbox, put into another.


_START_S = 10.0
FIX = "fork(memory=False) copies the files alone"


def take(sandbox: Sandbox) -> tuple[SessionImage, ...]:
    """Every session that has run something. Raises UnsupportedError, with the reason, when one cannot be copied."""
    taken: list[SessionImage] = []
    try:
        for session in sandbox.sessions():
            image = _image(session, sum(each.memory.size_bytes for each in taken))
            if image is not None:
                taken.append(image)
    except BaseException:
        close(taken)
        raise
    return tuple(taken)


def close(images: Iterable[SessionImage]) -> None:
    for image in images:
        image.memory.close()


def _image(session: Session, held: int) -> SessionImage | None:
    """`held`: bytes in the images of its sandbox's other sessions. All of them are in one limit, as the guest is."""
    with session._gate:
        place = session._running_place()
        inbox = session._inbox
        place.link.poll()
        if inbox is None or inbox.end is not None:
            return None
        if session.language != "python":
            raise refused(session.name, f"it speaks {session.language}")
        if place.box.backend != "process" or place.box.python["fresh"]:
            raise refused(session.name, "only a session that the process backend forked can be")
        if session._cell is not None and session._cell.running:
            raise refused(session.name, "a cell runs in it")
        from ringfence.backends.process.memory.capture import take as take_memory

        pid = _pid(session)
        # One that was paused because it was idle: on cgroup v1 a frozen process neither stops for us nor dies (D18).
        place.link.say(op="resume")
        place.link.say(op="idle", id=inbox.id, n=0)  # idle from now on: it is not paused again meanwhile
        if not place.link.wait(lambda: not place.link.paused, time.monotonic() + _START_S):
            raise SandboxLostError(f"the sandbox of session {session.name} does not go on", fix="try again")
        try:
            box, room = place.box, place.box.memory_bytes - held
            memory = blocking(take_memory, pid, box.owns, box.generation, room, session._copy_of)
        except UnsupportedError as error:
            raise refused(session.name, str(error)) from None
        memory.had |= session._had
        return SessionImage(session.name, session._count, memory, box.outlet)


def refused(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"session {name} cannot be copied: {why}", code="fork", fix=FIX)


def _pid(session: Session) -> int:
    """Of its interpreter. It is known once guestd has started it."""
    inbox = session._inbox
    assert inbox is not None
    link = session._running_place().link
    if not link.wait(lambda: inbox.pid > 0 or inbox.end is not None, time.monotonic() + _START_S) or not inbox.pid:
        raise SandboxLostError(f"session {session.name} did not start", fix="try again")
    return inbox.pid


def put(images: Iterable[SessionImage], sandbox: Sandbox) -> None:
    """Sessions of these names in `sandbox`, which go on from where the originals stood. Those there are end."""
    for image in images:
        session = sandbox.session(image.name)
        session.restart()
        _put(image, session)


def _put(image: SessionImage, session: Session) -> None:
    from ringfence.backends.process.memory.restore import put as put_memory

    with session._gate:
        place = session._running_place()
        if place.box.generation is not image.memory.generation:
            raise refused(image.name, "the zygote it came from is gone, and a new one has other addresses")
        place.box.give_image(image.memory.fd)
        session._start(apart_from=image.memory.had)
        session._ask({"m": "ping"})  # it waits for its first cell: every right is gone
        pid = _pid(session)
        blocking(put_memory, image.memory, pid, place.box.owns)
        session._count = image.count
        session._copy_of, session._had = image.memory.identity, image.memory.had
        session._ask({"m": "copied"})


def snapshot(sandbox: Sandbox) -> Snapshot:
    """Its files, and its sessions with them."""
    sessions = take(sandbox)
    try:
        return with_memory(sandbox._trees_kept().take(sandbox._running_place()), sessions)
    except BaseException:
        close(sessions)
        raise


def fork(sandbox: Sandbox) -> Sandbox:
    """A copy with its sessions; none at all when one cannot be copied."""
    sessions = take(sandbox)
    try:
        twin = fork_files(sandbox)
        try:
            put(sessions, twin)
        except BaseException:
            twin.close()
            raise
        return twin
    finally:
        close(sessions)


def fork_files(sandbox: Sandbox) -> Sandbox:
    """A fresh sandbox of the same policy, image, workspace and labels, with the same files in it."""
    twin = sandbox._another()
    twin._launcher.twin_of = sandbox._running_place().box.outlet  # copied memory holds its placeholders
    twin.start()
    try:
        twin.network._as(sandbox.network)
        if shares_workspace(sandbox.policy):
            return twin  # both see the same folder of the host
        copy_files(sandbox._running_place(), sandbox._trees_kept(), twin._running_place(), twin._trees_kept())
    except BaseException:
        twin.close()
        raise
    return twin


def roll_back(sandbox: Sandbox, snapshot: Snapshot) -> None:
    """Everything in it ends first."""
    place = sandbox._running_place()
    sandbox._check_snapshot(snapshot)
    _check_placeholders(outlet_of(snapshot), place.box.outlet)
    for process, _ in list(sandbox._processes.values()):
        if process.running:
            process.kill()
    for session in sandbox.sessions():
        session.restart()
    place.link.say(op="clear")  # also what nobody holds a handle of; the next worker starts after it
    sandbox._trees_kept().roll_back(place, snapshot)
    sandbox._put_sessions(snapshot)


def _check_placeholders(held: Outlet | None, here: Outlet | None) -> None:
    """Memory holds those of the sandbox that it was taken from: in one that runs already they would mean nothing."""
    if held is not None and here is not None and held.env != here.env:
        raise SnapshotError(
            "the snapshot's memory holds placeholders of secrets that are another sandbox's",
            code="snapshot-secrets",
            fix="Sandbox(snapshot=...) makes one with the same placeholders",
        )
