"""Undoes compression as a stream, by what the bytes are and not by the file's name. Who reads bounds the output."""

from __future__ import annotations

from ringfence.errors import ImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import BinaryIO, Protocol, TypeAlias

    Read: TypeAlias = Callable[[int], bytes]

    class Decompressor(Protocol):
        @property
        def eof(self) -> bool: ...
        @property
        def unused_data(self) -> bytes: ...
        def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...

    Codec: TypeAlias = tuple[Callable[[], Decompressor], tuple[type[Exception], ...]]

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}
_CHUNK = 1 << 18


def compression(start: bytes) -> str | None:
    """What the first bytes say; None: not compressed as far as we know."""
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


class Unpacked:
    """A stream that reads as if it were not compressed. Close it: zstd may be a program that runs."""

    def __init__(self, read: Read) -> None:
        self._source = read
        self._start = b""
        while len(self._start) < 6 and (more := read(1 << 16)):
            self._start += more
        self.kind = compression(self._start)
        self._tool: subprocess.Popen[bytes] | None = None
        self._read = self._reader()

    def read(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end. ImageError for damaged data."""
        return self._read(count)

    def _raw(self, count: int) -> bytes:
        if self._start:
            found, self._start = self._start[:count], self._start[count:]
            return found
        return self._source(count)

    def _reader(self) -> Read:
        if self.kind is None:
            return self._raw
        if self.kind == "zstd":
            return self._zstd()
        return _Stdlib(self._raw, self.kind, _codec(self.kind)).read

    def _zstd(self) -> Read:
        """By Python's own module where there is one (3.14), else by the program."""
        try:
            from compression import zstd  # type: ignore[import-not-found]  # new in 3.14
        except ImportError:
            return self._by_program()
        return _Stdlib(self._raw, "zstd", (zstd.ZstdDecompressor, (zstd.ZstdError,))).read

    def _by_program(self) -> Read:
        import subprocess
        import threading

        from ringfence.backends import host_programs

        found = host_programs.look_up("zstd")
        if found.path is None:
            raise ImageError(
                f"this archive is compressed with zstd, and there is no zstd that may be used{found.remark}",
                code="zstd",
                fix="install zstd, or compress it with gzip",
            )
        self._tool = subprocess.Popen(
            [found.path, "-dcq"],
            env=host_programs.environment(found.path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        into, out = self._tool.stdin, self._tool.stdout
        assert into is not None
        assert out is not None
        threading.Thread(target=self._feed, args=(into,), daemon=True).start()
        tool = self._tool

        def read(count: int) -> bytes:
            data = out.read(count)
            if not data and tool.wait() != 0:
                raise _damaged("zstd")
            return data

        return read

    def _feed(self, into: BinaryIO) -> None:
        try:
            with into:
                while data := self._raw(_CHUNK):
                    into.write(data)
        except (OSError, ValueError):
            return  # the program ended first, or we were closed; its exit status tells

    def close(self) -> None:
        if self._tool is not None:
            self._tool.kill()
            self._tool.wait()
            for pipe in (self._tool.stdout,):
                if pipe is not None:
                    pipe.close()


class _Stdlib:
    """gzip, xz and bzip2, several streams one after the other. Never more output at once than was asked for (F22)."""

    def __init__(self, read: Read, kind: str, codec: Codec) -> None:
        self._source = read
        self._kind = kind
        self._make, self._errors = codec
        self._current = self._make()
        self._pending = b""

    def read(self, count: int) -> bytes:
        while True:
            if self._current.eof:
                rest = self._current.unused_data.lstrip(b"\0") or self._source(_CHUNK).lstrip(b"\0")
                if not rest:
                    return b""
                self._current, self._pending = self._make(), rest
            hungry = getattr(self._current, "needs_input", True)  # zlib has none: it gives back what it did not take
            data = self._pending or (self._source(_CHUNK) if hungry else b"")
            found = self._step(data, count)
            if found:
                return found
            if not data and hungry and not self._current.eof:
                raise _damaged(self._kind)

    def _step(self, data: bytes, count: int) -> bytes:
        try:
            found = self._current.decompress(data, count)
        except self._errors:
            raise _damaged(self._kind) from None
        self._pending = getattr(self._current, "unconsumed_tail", b"")
        return found


def _codec(kind: str) -> Codec:
    if kind == "gzip":
        import zlib

        return lambda: zlib.decompressobj(31), (zlib.error,)
    if kind == "xz":
        import lzma

        return lambda: lzma.LZMADecompressor(memlimit=256 << 20), (lzma.LZMAError, EOFError)
    import bz2

    return bz2.BZ2Decompressor, (OSError, ValueError, EOFError)


def _damaged(kind: str) -> ImageError:
    return ImageError(
        f"the {kind} data is damaged or cut short", code="archive", fix="make or download the archive again"
    )
