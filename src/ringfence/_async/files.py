"""Files inside a sandbox, each operation done by a short-lived worker there with the guest's own rights."""

from __future__ import annotations

import os

from ringfence import calls
from ringfence._async.process import AsyncProcess
from ringfence._async.waiting import opening
from ringfence.errors import SandboxError, UnsupportedError
from ringfence.events import DiskUsage, FileInfo
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
    from types import TracebackType
    from typing import Any, BinaryIO, Literal, Self

    from ringfence._async.process import Place
    from ringfence._async.waiting import Opening
    from ringfence.events import FileEvent, Match
    from ringfence.values import GuestPath, HostPath

_MAX_READ = 1 << 30
_CHUNK = 1 << 18


class AsyncWatch:
    """Changes below a path, as they happen."""

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self

    async def __anext__(self) -> FileEvent:
        raise StopAsyncIteration

    async def close(self) -> None:
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.close()


class AsyncFiles:
    """Files inside, through guestd, as the guest's user. Never a host path, except in upload and download."""

    def __init__(self, place: Callable[[], Place]) -> None:
        self._place = place

    async def read(self, path: GuestPath, *, offset: int = 0, size: int | None = None) -> bytes:
        data = bytearray()
        async for chunk in self._chunks(path, offset, size):
            data += chunk
            if len(data) > _MAX_READ:
                raise OSError(27, "the file is larger than 1 GiB; read it in ranges or with chunks()", str(path))
        return bytes(data)

    async def read_text(self, path: GuestPath, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        return (await self.read(path)).decode(encoding, errors)

    def chunks(self, path: GuestPath, *, offset: int = 0) -> AsyncIterator[bytes]:
        return self._chunks(path, offset, None)

    async def _chunks(self, path: GuestPath, offset: int, size: int | None) -> AsyncIterator[bytes]:
        args = {"path": calls.guest_path(path), "offset": _count(offset, "offset"), "size": _optional(size, "size")}
        worker = await self._start(calls.file_call("read", args))
        try:
            async for chunk in _output(worker):
                yield chunk
            await self._answer(worker, path)
        finally:
            await _let_go(worker)

    async def write(
        self,
        path: GuestPath,
        data: bytes | str | BinaryIO | AsyncIterable[bytes],
        *,
        append: bool = False,
        mode: int | None = None,
    ) -> FileInfo:
        """Parents are made. A str is written as UTF-8. Replaces as a whole or not at all."""
        args = {"path": calls.guest_path(path), "append": bool(append), "mode": _mode(mode)}
        worker = await self._start(calls.file_call("write", args, keeps_stdin=True))
        try:
            async for chunk in _pieces(data):
                await worker.write(chunk)
            await worker.close_stdin()
        except BrokenPipeError:
            pass  # the worker ended early: its answer says why
        except BaseException:
            await worker.kill()
            raise
        answer = await self._answer(worker, path)
        return _info(answer.get("info"), str(path))

    async def list(
        self, path: GuestPath = ".", *, recursive: bool = False, pattern: str | None = None
    ) -> AsyncIterator[FileInfo]:
        """Sorted by name, fetched in pages; symlinks are shown, never followed."""
        if pattern is not None and not isinstance(pattern, str):
            raise TypeError(f"pattern is a str or None, not {type(pattern).__name__}")
        args = {"path": calls.guest_path(path), "recursive": bool(recursive), "pattern": pattern}
        worker = await self._start(calls.file_call("list", args))
        rest = b""
        try:
            async for chunk in _output(worker):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield _entry(line)
            await self._answer(worker, path)
        finally:
            await _let_go(worker)

    async def search(
        self, text: str, path: GuestPath = ".", *, regex: bool = False, pattern: str | None = None, limit: int = 1000
    ) -> AsyncIterator[Match]:
        for never in _refused("files.search()", 'exec(["grep", "-rn", …])'):
            yield never

    async def stat(self, path: GuestPath) -> FileInfo:
        answer = await self._do("stat", path, {"path": calls.guest_path(path)})
        return _info(answer.get("info"), str(path))

    async def exists(self, path: GuestPath) -> bool:
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def mkdir(self, path: GuestPath, *, parents: bool = True, exist_ok: bool = True) -> None:
        args = {"path": calls.guest_path(path), "parents": bool(parents), "exist_ok": bool(exist_ok)}
        await self._do("mkdir", path, args)

    async def rename(self, source: GuestPath, target: GuestPath) -> None:
        args = {"source": calls.guest_path(source), "target": calls.guest_path(target)}
        await self._do("rename", source, args)

    async def remove(self, path: GuestPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        args = {"path": calls.guest_path(path), "recursive": bool(recursive), "missing_ok": bool(missing_ok)}
        await self._do("remove", path, args)

    async def chmod(self, path: GuestPath, mode: int) -> None:
        await self._do("chmod", path, {"path": calls.guest_path(path), "mode": _mode(mode)})

    def watch(self, path: GuestPath = ".", *, recursive: bool = False) -> Opening[AsyncWatch]:
        return opening(self._watch())

    async def _watch(self) -> AsyncWatch:
        raise _later("files.watch()", "list() again after each step")

    async def upload(
        self, source: HostPath, target: GuestPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """A host file or folder into the sandbox."""
        raise _later("files.upload()", "files.write() for each file, or a mount")

    async def download(
        self, source: GuestPath, target: HostPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """Out of the sandbox, into a host folder that is held open; a hostile tree cannot leave it."""
        raise _later("files.download()", "files.read() for each file")

    async def pack(self, path: GuestPath = ".", *, format: Literal["tar", "zip"] = "tar") -> AsyncIterator[bytes]:
        for never in _refused("files.pack()", 'exec(["tar", …])'):
            yield never

    async def unpack(
        self,
        data: bytes | BinaryIO | AsyncIterable[bytes],
        path: GuestPath = ".",
        *,
        format: Literal["tar", "zip"] = "tar",
    ) -> None:
        raise _later("files.unpack()", 'exec(["tar", …])')

    async def usage(self) -> DiskUsage:
        answer = await self._do("usage", ".", {})
        numbers = [answer.get(name) for name in ("bytes", "bytes_limit", "files", "files_limit")]
        if not all(type(number) is int for number in numbers):
            raise SandboxError("the file worker gave no answer")
        used, limit, files, files_limit = numbers
        return DiskUsage(used, limit, files, files_limit)  # type: ignore[arg-type]  # checked above

    async def _start(self, call: calls.Call) -> AsyncProcess:
        place = self._place()
        return await AsyncProcess(place, call, place.link.open(), keep_events=True)._begin()

    async def _do(self, call: str, path: GuestPath, args: Mapping[str, object]) -> dict[str, object]:
        return await self._answer(await self._start(calls.file_call(call, args)), path)

    async def _answer(self, worker: AsyncProcess, path: GuestPath) -> dict[str, object]:
        """The worker's outcome; its errors as Python's own."""
        result = await worker.wait()
        answer = calls.report_of(worker._inbox.end or {})
        if result.status == "lost":
            raise SandboxError("the sandbox was lost during a file operation", code="sandbox-lost")
        number = answer.get("errno")
        if isinstance(number, int) and 0 < number < 4096:
            raise OSError(number, os.strerror(number), str(path))
        if not result.ok:
            raise SandboxError(f"the file worker ended early ({result.reason})", fix="is the sandbox out of memory?")
        return answer


async def _let_go(worker: AsyncProcess) -> None:
    """Of a worker whose reader may have stopped early."""
    if worker.running:
        await worker.kill()


async def _output(worker: AsyncProcess) -> AsyncIterator[bytes]:
    from ringfence.events import Gap, Stdout

    async for event in worker:
        if isinstance(event, Stdout):
            yield event.data
        elif isinstance(event, Gap):
            raise SandboxError("output of the file worker was lost")


async def _pieces(data: bytes | str | BinaryIO | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, bytes | str):
        yield data.encode() if isinstance(data, str) else data
    elif isinstance(data, bytearray | memoryview):
        yield bytes(data)
    elif hasattr(data, "read"):
        while chunk := data.read(_CHUNK):
            if not isinstance(chunk, bytes):
                raise TypeError("the file is open as text; open it in binary mode")
            yield chunk
    elif hasattr(data, "__aiter__"):
        async for chunk in data:
            yield chunk
    else:
        raise TypeError(f"data is bytes, str, a binary file or an iterable of bytes, not {type(data).__name__}")


def _entry(line: bytes) -> FileInfo:
    try:
        return _info(frames.strict_json(line), "")
    except frames.WireError as error:
        raise SandboxError(f"the file worker broke its format: {error}") from None


def _info(data: object, path: str) -> FileInfo:
    """One entry as the worker told it: guest-made, so every field is checked."""
    from datetime import UTC, datetime

    if not isinstance(data, dict):
        raise SandboxError("the file worker gave no answer")
    shown, kind, size, mode = data.get("path"), data.get("kind"), data.get("size"), data.get("mode")
    modified, target = data.get("modified"), data.get("target")
    if not isinstance(shown, str) or kind not in ("file", "directory", "symlink", "other"):
        raise SandboxError("the file worker answered with something else than a file")
    if type(size) is not int or type(mode) is not int or not isinstance(modified, int | float):
        raise SandboxError("the file worker answered with something else than numbers")
    stamp = datetime.fromtimestamp(min(max(modified, 0), 253402300799), UTC)
    link = target if isinstance(target, str) else None
    return FileInfo(path or shown, kind, size, mode, stamp, link)


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is a whole number from 0, not {value!r}")
    return value


def _optional(value: object, name: str) -> int | None:
    return None if value is None else _count(value, name)


def _mode(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0o1777:
        raise ValueError(f"mode is a number from 0 to 0o1777 (no set-uid or set-gid bits), not {value!r}")
    return value


def _later(what: str, instead: str) -> UnsupportedError:
    return UnsupportedError(f"{what} is not in this version", fix=f"use {instead}")


def _refused(what: str, instead: str) -> list[Any]:
    """Raises when it is iterated, like the other half of this surface."""
    raise _later(what, instead)
