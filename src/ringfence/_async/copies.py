"""Sessions as images: taken from one sandbox, put into another."""

from __future__ import annotations

import time

from ringfence._async.trees import copy_files
from ringfence._async.waiting import blocking
from ringfence.errors import SandboxLostError, SnapshotError, UnsupportedError
from ringfence.snapshots import SessionImage, outlet_of, shares_workspace, with_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence._async.sandbox import AsyncSandbox
    from ringfence._async.session import AsyncSession
    from ringfence.backends.base import Outlet
    from ringfence.snapshots import Snapshot

_START_S = 10.0
FIX = "fork(memory=False) copies the files alone"


async def take(sandbox: AsyncSandbox) -> tuple[SessionImage, ...]:
    """Every session that has run something. Raises UnsupportedError, with the reason, when one cannot be copied."""
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
    """`held`: bytes in the images of its sandbox's other sessions. All of them are in one limit, as the guest is."""
    async with session._gate:
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

        pid = await _pid(session)
        # One that was paused because it was idle: on cgroup v1 a frozen process neither stops for us nor dies (D18).
        await place.link.say(op="resume")
        await place.link.say(op="idle", id=inbox.id, n=0)  # idle from now on: it is not paused again meanwhile
        if not await place.link.wait(lambda: not place.link.paused, time.monotonic() + _START_S):
            raise SandboxLostError(f"the sandbox of session {session.name} does not go on", fix="try again")
        try:
            box, room = place.box, place.box.memory_bytes - held
            memory = await blocking(take_memory, pid, box.owns, box.generation, room, session._copy_of)
        except UnsupportedError as error:
            raise refused(session.name, str(error)) from None
        memory.had |= session._had
        return SessionImage(session.name, session._count, memory, box.outlet)


def refused(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"session {name} cannot be copied: {why}", code="fork", fix=FIX)


async def _pid(session: AsyncSession) -> int:
    """Of its interpreter. It is known once guestd has started it."""
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
    """Sessions of these names in `sandbox`, which go on from where the originals stood. Those there are end."""
    for image in images:
        session = await sandbox.session(image.name)
        await session.restart()
        await _put(image, session)


async def _put(image: SessionImage, session: AsyncSession) -> None:
    from ringfence.backends.process.copying.transplant import put as put_memory

    async with session._gate:
        place = session._running_place()
        if place.box.generation is not image.memory.generation:
            raise refused(image.name, "the zygote it came from is gone, and a new one has other addresses")
        place.box.give_image(image.memory.fd)
        await session._start(apart_from=image.memory.had)
        await session._ask({"m": "ping"})  # it waits for its first cell: every right is gone
        pid = await _pid(session)
        await blocking(put_memory, image.memory, pid, place.box.owns)
        session._count = image.count
        session._copy_of, session._had = image.memory.identity, image.memory.had
        await session._ask({"m": "copied"})


async def snapshot(sandbox: AsyncSandbox) -> Snapshot:
    """Its files, and its sessions with them."""
    sessions = await take(sandbox)
    try:
        return with_memory(await sandbox._trees_kept().take(sandbox._running_place()), sessions)
    except BaseException:
        close(sessions)
        raise


async def fork(sandbox: AsyncSandbox) -> AsyncSandbox:
    """A copy with its sessions; none at all when one cannot be copied."""
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
    """A fresh sandbox of the same policy, image, workspace and labels, with the same files in it."""
    twin = sandbox._another()
    twin._launcher.twin_of = sandbox._running_place().box.outlet  # copied memory holds its placeholders
    await twin.start()
    try:
        await twin.network._as(sandbox.network)
        if shares_workspace(sandbox.policy):
            return twin  # both see the same folder of the host
        await copy_files(sandbox._running_place(), sandbox._trees_kept(), twin._running_place(), twin._trees_kept())
    except BaseException:
        await twin.close()
        raise
    return twin


async def roll_back(sandbox: AsyncSandbox, snapshot: Snapshot) -> None:
    """Everything in it ends first."""
    place = sandbox._running_place()
    sandbox._check_snapshot(snapshot)
    _check_placeholders(outlet_of(snapshot), place.box.outlet)
    for process, _ in list(sandbox._processes.values()):
        if process.running:
            await process.kill()
    for session in await sandbox.sessions():
        await session.restart()
    await place.link.say(op="clear")  # also what nobody holds a handle of; the next worker starts after it
    await sandbox._trees_kept().roll_back(place, snapshot)
    await sandbox._put_sessions(snapshot)


def _check_placeholders(held: Outlet | None, here: Outlet | None) -> None:
    """Memory holds those of the sandbox that it was taken from: in one that runs already they would mean nothing."""
    if held is not None and here is not None and held.env != here.env:
        raise SnapshotError(
            "the snapshot's memory holds placeholders of secrets that are another sandbox's",
            code="snapshot-secrets",
            fix="Sandbox(snapshot=...) makes one with the same placeholders",
        )
