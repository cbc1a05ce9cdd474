# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Sessions as images: taken from one sandbox, put into another."""

from __future__ import annotations

import time

from ringfence._sync.trees import copy_files
from ringfence._sync.waiting import blocking
from ringfence.errors import SandboxLostError, SnapshotError, UnsupportedError
from ringfence.snapshots import SessionImage, outlet_of, shares_workspace, with_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence._sync.sandbox import Sandbox
    from ringfence._sync.session import Session
    from ringfence.backends.base import Outlet
    from ringfence.snapshots import Snapshot

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
        from ringfence.backends.process.copying.image import take as take_memory

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
    from ringfence.backends.process.copying.transplant import put as put_memory

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
