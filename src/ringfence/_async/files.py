"""Files inside a sandbox, each operation done by a short-lived worker there with the guest's own rights."""

from __future__ import annotations

import errno
import os
from io import BytesIO

from ringfence._async.compat import blocking, opening
from ringfence._async.worker import AsyncWorker
from ringfence.core import arguments
from ringfence.errors import SandboxError
from ringfence.records import DiskUsage
from ringfence.wire import file_replies

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
    from types import TracebackType
    from typing import BinaryIO, Literal, Self, TypeAlias

    from ringfence._async.compat import Opening
    from ringfence._async.process import Place
    from ringfence.events import FileEvent
    from ringfence.records import FileInfo, Match
    from ringfence.transfer.download import Landing
    from ringfence.transfer.upload import Leaving
    from ringfence.values import GuestPath, HostPath

    Progress: TypeAlias = Callable[[int, int | None], None]

_PAGE = 4096  # the unit in which a file system in memory counts
# The guest chooses the size of a file, and a read takes that much of the host's memory, as text six times that (O22).
_MAX_READ, _MAX_TEXT = 1 << 26, 1 << 24
_MAX_PART = 1 << 30  # the largest `size` that a caller may read
_MOST = (1 << 63) - 1  # the largest offset in a file
_CHUNK = 1 << 18
_MAX_EXPRESSION = 4000
# An archive or tree may hold more than the sandbox's own limits: its files may come from the image or a mount.
_MORE_BYTES, _MORE_FILES = 1 << 30, 100_000


class AsyncWatch:
    """Changes below a path, as they happen. A guest can stop the watcher: silence is no proof that nothing changed."""

    def __init__(self, worker: AsyncWorker, path: GuestPath) -> None:
        self._worker = worker
        self._path = path
        from collections import deque

        self._lines = file_replies.Lines()
        self._events: deque[FileEvent] = deque()
        self._closed = False

    async def _ready(self) -> AsyncWatch:
        """Wait until the watch works, and return it: changes from then on are reported."""
        try:
            for data in await _batch(self._worker, self._lines):
                if data.get("kind") != "ready":
                    self._events.append(file_replies.event(data))
                elif len(data) == 3:
                    return self
            await self._worker.answer(self._path)
        except BaseException:
            await self._worker.end()
            raise
        raise SandboxError("the file worker ended before the watch began", fix="try again")

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self

    async def __anext__(self) -> FileEvent:
        while not self._events and not self._closed:
            found = await _batch(self._worker, self._lines, patient=True)
            self._events.extend([file_replies.event(data) for data in found])
            if not found and not self._closed:
                self._closed = True
                await self._worker.answer(self._path)
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def close(self) -> None:
        self._closed = True
        self._events.clear()
        await self._worker.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.close()


class AsyncFiles:
    """Files inside, read and written through guestd as the guest's user. Only upload and download take host paths."""

    def __init__(self, place: Callable[[], Place]) -> None:
        self._place = place

    async def read(self, path: GuestPath, *, offset: int = 0, size: int | None = None) -> bytes:
        """Return at most 64 MiB, or `size` bytes up to 1 GiB.

        A larger file is refused before any of its bytes is read.
        """
        wanted = _optional(size, "size")
        return await self._whole(path, offset, wanted, _MAX_READ if wanted is None else _MAX_PART)

    async def _whole(self, path: GuestPath, offset: int, wanted: int | None, most: int) -> bytes:
        data = BytesIO()  # returns its bytes without another copy
        async for chunk in self._chunks(path, offset, wanted, most):
            if data.tell() + len(chunk) > min(most, most if wanted is None else wanted):
                raise OSError(errno.EFBIG, file_replies.TOO_LONG_TO_READ, str(path))
            data.write(chunk)
        return data.getvalue()

    async def read_text(self, path: GuestPath, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the text of a file of at most 16 MiB."""
        return (await self._whole(path, 0, None, _MAX_TEXT)).decode(encoding, errors)

    def chunks(self, path: GuestPath, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the file in pieces, however large it is; the worker reads no faster than the caller."""
        return self._chunks(path, offset, None, None)

    async def _chunks(self, path: GuestPath, offset: int, size: int | None, most: int | None) -> AsyncIterator[bytes]:
        args = {"path": arguments.guest_path(path), "offset": _count(offset, "offset"), "size": _optional(size, "size")}
        worker = await self._start("read", {**args, "most": most})
        try:
            while pieces := await worker.read():
                for piece in pieces:
                    yield piece
            await worker.answer(path)
        finally:
            await worker.end()

    async def write(
        self,
        path: GuestPath,
        data: bytes | str | BinaryIO | AsyncIterable[bytes],
        *,
        append: bool = False,
        mode: int | None = None,
    ) -> FileInfo:
        """Write a file and return its info.

        Parent folders are made, a str is written as UTF-8, and the file is replaced as a whole or not at all.
        """
        args = {"append": bool(append), "mode": _mode(mode), "into": None, **_staged(arguments.guest_path(path))}
        _check_data(data, text=True)
        answer = await self._fed("write", path, args, _pieces(data))
        return file_replies.info(answer.get("info"), str(path))

    async def list(
        self, path: GuestPath = ".", *, recursive: bool = False, pattern: str | None = None
    ) -> AsyncIterator[FileInfo]:
        """Yield the files below `path`, sorted by name, fetched in pages. Symlinks are listed, never followed."""
        args = {"path": arguments.guest_path(path), "recursive": bool(recursive), "pattern": _pattern(pattern)}
        worker = await self._start("list", args)
        lines = file_replies.Lines()
        try:
            while found := await _batch(worker, lines):
                for data in found:
                    yield file_replies.info(data, "")
            await worker.answer(path)
        finally:
            await worker.end()

    async def search(
        self, text: str, path: GuestPath = ".", *, regex: bool = False, pattern: str | None = None, limit: int = 1000
    ) -> AsyncIterator[Match]:
        """Yield lines of text files that hold `text`, or match it as a Python regular expression. At most `limit`.

        `pattern` is a glob over file names. Binary files are left out, links are not followed, long lines are cut. The
        search ends with TimeoutError after limits.timeout_s, so that no expression runs away.
        """
        args = {
            "path": arguments.guest_path(path),
            "text": _expression(text, regex=regex),
            "regex": bool(regex),
            "pattern": _pattern(pattern),
            "limit": _limit(limit),
        }
        worker = await self._start("search", args, total=True)
        lines, left = file_replies.Lines(), limit
        try:
            while left and (found := await _batch(worker, lines)):
                for data in found[:left]:
                    yield file_replies.match(data)
                left -= len(found[:left])
            await worker.answer(path)
        finally:
            await worker.end()

    async def stat(self, path: GuestPath) -> FileInfo:
        answer = await self._do("stat", path, {"path": arguments.guest_path(path)})
        return file_replies.info(answer.get("info"), str(path))

    async def exists(self, path: GuestPath) -> bool:
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def mkdir(self, path: GuestPath, *, parents: bool = True, exist_ok: bool = True) -> None:
        args = {"path": arguments.guest_path(path), "parents": bool(parents), "exist_ok": bool(exist_ok)}
        await self._do("mkdir", path, args)

    async def rename(self, source: GuestPath, target: GuestPath) -> None:
        args = {"source": arguments.guest_path(source), "target": arguments.guest_path(target)}
        await self._do("rename", source, args)

    async def remove(self, path: GuestPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        args = {"path": arguments.guest_path(path), "recursive": bool(recursive), "missing_ok": bool(missing_ok)}
        await self._do("remove", path, args)

    async def chmod(self, path: GuestPath, mode: int) -> None:
        if mode is None:
            raise TypeError("mode is a number, not None")
        await self._do("chmod", path, {"path": arguments.guest_path(path), "mode": _mode(mode)})

    def watch(self, path: GuestPath = ".", *, recursive: bool = False) -> Opening[AsyncWatch]:
        """Report changes from the moment that the watch is made.

        `overflow`: some events were lost, list the files again.
        """
        return opening(self._watch(path, recursive=recursive))

    async def _watch(self, path: GuestPath, *, recursive: bool) -> AsyncWatch:
        args = {"path": arguments.guest_path(path), "recursive": bool(recursive)}
        return await AsyncWatch(await self._start("watch", args), path)._ready()

    async def upload(
        self, source: HostPath, target: GuestPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """Copy a host file or folder into the sandbox.

        A file becomes `target`, or goes into `target` under its own name when that is a folder. The contents of a
        folder go into `target`, which is made: folders are joined and files replaced. When the upload fails, none of
        its files is left.
        """
        from ringfence.transfer.upload import Leaving

        path = arguments.guest_path(target)
        leavings: list[Leaving] = []  # filled by a thread: a task that is cancelled meanwhile has to close it too
        try:
            await blocking(lambda: leavings.append(Leaving(source)))
            leaving = leavings[0]
            if leaving.folder:
                await blocking(leaving.measure)
                args = {"format": "tar", "any_link": True, "most_bytes": None, "most_files": None, **_staged(path)}
                await self._fed("unpack", target, args, _leaving(leaving, on_progress))
            else:
                args = {"append": False, "mode": leaving.mode, "into": leaving.name, **_staged(path)}
                await self._fed("write", target, args, _leaving(leaving, on_progress))
        finally:
            for made in leavings:
                made.close()

    async def download(
        self, source: GuestPath, target: HostPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """Copy a file or folder out of the sandbox.

        The host folder is held open, and a hostile tree cannot leave it. A file becomes `target`, or goes into `target`
        under its own name when that is a folder. The contents of a folder go into `target`, which is made when its
        parent exists. When the download fails, none of its files is left.
        """
        from ringfence.shared.tree_pack import TransferCaps
        from ringfence.transfer.download import Landing

        path, caps = arguments.guest_path(source), self._caps()
        measured = await self._do("measure", source, {"path": path, **caps})
        (total,) = file_replies.numbers(measured, "bytes")
        folder = measured.get("folder") is True
        landings: list[Landing] = []  # as in `upload`

        def land() -> None:
            landings.append(Landing(target, str(source), folder=folder, caps=TransferCaps(**caps)))

        try:
            await blocking(land)
            await self._land(path, source, landings[0], (total, on_progress))
        finally:
            for made in landings:
                await blocking(made.give_up)

    async def _land(
        self, path: str, source: GuestPath, landing: Landing, progress: tuple[int, Progress | None]
    ) -> None:
        total, tell = progress
        worker = await self._start("pack", {"path": path, "format": "tar", **self._caps()})
        try:
            while pieces := await worker.read():
                await blocking(landing.feed, pieces)
                if tell is not None:
                    tell(landing.written, max(total, landing.written))
            await worker.answer(source)
        finally:
            await worker.end()
        await blocking(landing.finish)

    async def pack(self, path: GuestPath = ".", *, format: Literal["tar", "zip"] = "tar") -> AsyncIterator[bytes]:
        """Yield a file or folder as an archive, in pieces.

        Links are kept as links; devices, pipes and sockets are refused.
        """
        args = {"path": arguments.guest_path(path), "format": _format(format), **self._caps()}
        worker = await self._start("pack", args)
        try:
            while pieces := await worker.read():
                for piece in pieces:
                    yield piece
            await worker.answer(path)
        finally:
            await worker.end()

    async def unpack(
        self,
        data: bytes | BinaryIO | AsyncIterable[bytes],
        path: GuestPath = ".",
        *,
        format: Literal["tar", "zip"] = "tar",
    ) -> None:
        """Unpack an archive into a folder inside, which is made.

        When anything in the archive is refused, nothing is unpacked. Names that are absolute or hold `..`, links that
        lead out of the folder, devices, and a name that comes twice are refused. The caller decompresses a compressed
        tar.
        """
        args = {"format": _format(format), "any_link": False, **_staged(arguments.guest_path(path)), **self._caps()}
        _check_data(data, text=False)
        await self._fed("unpack", path, args, _pieces(data))

    async def usage(self) -> DiskUsage:
        """Return what the workspace holds, by the count of a file system with a quota, else by counting the files."""
        place = self._place()
        limits = place.policy.limits
        whole = -(-limits.disk // _PAGE) * _PAGE
        counted = place.box.enforcement.disk.level == "weaker"
        answer = await self._do("usage", ".", {"bytes": whole, "files": limits.disk_files, "count": counted})
        return DiskUsage(*file_replies.numbers(answer, "bytes", "bytes_limit", "files", "files_limit"))

    # workers

    def _caps(self) -> dict[str, int]:
        limits = self._place().policy.limits
        return {"most_bytes": limits.disk + _MORE_BYTES, "most_files": limits.disk_files + _MORE_FILES}

    async def _start(
        self, call: str, args: Mapping[str, object], *, feeds: bool = False, total: bool = False
    ) -> AsyncWorker:
        return await AsyncWorker(self._place(), call, args, feeds=feeds, total=total).start()

    async def _do(self, call: str, path: GuestPath, args: Mapping[str, object]) -> dict[str, object]:
        worker = await self._start(call, args, total=True)
        try:
            return await worker.answer(path)
        finally:
            await worker.end()

    async def _fed(
        self, call: str, path: GuestPath, args: Mapping[str, object], pieces: AsyncIterator[bytes]
    ) -> dict[str, object]:
        """Run a worker that takes bytes. When the bytes do not all arrive, let the worker undo its work."""
        worker = await self._start(call, args, feeds=True)
        try:
            async for piece in pieces:
                if not await worker.write(piece):
                    break  # the worker ended early: its answer says why
            await worker.close_stdin()
            return await worker.answer(path)
        except BaseException:
            if not await worker.stop():
                await self._sweep(args)
            raise

    async def _sweep(self, args: Mapping[str, object]) -> None:
        """Remove what a killed worker left: in the folder, or beside the file."""
        path, stage = str(args["path"]), str(args["stage"])
        for place in (path, os.path.dirname(path)):
            try:
                await self._do("remove", path, {"path": f"{place}/{stage}", "recursive": True, "missing_ok": True})
            except (OSError, SandboxError):
                continue  # a guest that stops our workers may keep the rest; the caller gets the first error, not this


def _staged(path: str) -> dict[str, object]:
    """Return the path, and the name under which a worker puts unfinished files: the host knows it if the worker is
    killed."""
    return {"path": path, "stage": f".ringfence-{os.urandom(8).hex()}.part"}


async def _batch(worker: AsyncWorker, lines: file_replies.Lines, *, patient: bool = False) -> list[dict[str, object]]:
    """Return some objects of a worker's output; return [] after its end."""
    while pieces := await worker.read(patient=patient):
        found = [data for piece in pieces for data in lines.feed(piece)]
        if found:
            return found
    return []


async def _leaving(leaving: Leaving, on_progress: Progress | None) -> AsyncIterator[bytes]:
    done = 0
    while True:
        data, counted = await blocking(leaving.read)
        if not data:
            return
        yield data
        done += counted
        if on_progress is not None:
            on_progress(done, max(leaving.total, done))


def _check_data(data: object, *, text: bool) -> None:
    """Raise TypeError for data of another type, before anything starts."""
    if isinstance(data, bytes | bytearray | memoryview) or (text and isinstance(data, str)):
        return
    if isinstance(data, str) or not (hasattr(data, "read") or hasattr(data, "__aiter__")):
        kinds = "bytes, str, a binary file or an iterable of bytes" if text else "bytes, a binary file or an iterable"
        raise TypeError(f"data is {kinds}, not {type(data).__name__}")


async def _pieces(data: bytes | str | BinaryIO | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, str):
        yield data.encode()
    elif isinstance(data, bytes | bytearray | memoryview):
        yield bytes(data)
    elif hasattr(data, "read"):
        while chunk := await blocking(data.read, _CHUNK):
            if not isinstance(chunk, bytes):
                raise TypeError("the file is open as text; open it in binary mode")
            yield chunk
    else:
        async for chunk in data:
            if not isinstance(chunk, bytes | bytearray | memoryview):
                raise TypeError(f"the pieces of data are bytes, not {type(chunk).__name__}")
            yield bytes(chunk)


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is a whole number from 0 to 2**63 - 1, not {value!r}")
    return value


def _optional(value: object, name: str) -> int | None:
    return None if value is None else _count(value, name)


def _limit(value: object) -> int:
    if _count(value, "limit") == 0:
        raise ValueError("limit is a whole number from 1, not 0")
    return _count(value, "limit")


def _pattern(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"pattern is a str or None, not {type(value).__name__}")
    return value


def _format(value: object) -> str:
    if value not in ("tar", "zip"):
        raise ValueError(f"format is 'tar' or 'zip', not {value!r}")
    return str(value)


def _expression(text: object, *, regex: bool) -> str:
    if not isinstance(text, str):
        raise TypeError(f"text is a str, not {type(text).__name__}")
    if not text or len(text) > _MAX_EXPRESSION:
        raise ValueError(f"text has 1 to {_MAX_EXPRESSION} characters, not {len(text)}")
    if regex:
        import re

        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"text is no regular expression: {error}") from None
    return text


def _mode(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0o1777:
        raise ValueError(f"mode is a number from 0 to 0o1777 (no set-uid or set-gid bits), not {value!r}")
    return value
