"""Reads the tar of an image from a file: yields what the archive says, with every number capped; writes nothing.

The headers are read by `shared.tar.Headers`, as those of transfers are. This reader asks for bytes, skips by seeking
where it can, and accepts devices and set-uid bits in order to count what is left out. The caller that applies an entry
decides where the entry may go, and gets the only safe spelling of a name from `parts`.
Knows ustar, the GNU forms of long names, and PAX. Sparse files, volumes and other rare types are refused (K01).
"""

from __future__ import annotations

from zlib import adler32

from ringfence.shared.tar import BLOCK, Headers, Refused
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal, TypeAlias

    from ringfence.shared.tar import Fields

    Kind: TypeAlias = Literal["file", "dir", "symlink", "hardlink", "char", "block", "fifo"]
    Read: TypeAlias = Callable[[int], bytes]

_CHUNK = 1 << 20
_MOST_AFTER = 16 << 20  # bytes behind the last entry: tar fills a record, of 10 KiB or a little more
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "char",
    b"4": "block",
    b"5": "dir",
    b"6": "fifo",
}
_LATEST = 1 << 33  # seconds: the year 2242; a later time is nonsense and overflows somewhere
_LONGEST = 4095  # bytes of a path
_ATTRIBUTES = (b"SCHILY.", b"LIBARCHIVE.", b"RHT.")
_WHY = {
    "not-tar": "a header's checksum is wrong: no tar, or damaged",
    "number": "a header has a field that is no number: no tar, or damaged",
    "size": "a number in a header is too large",
    "pax": "a PAX header has a malformed record",
    "sparse": "a sparse file, which is not supported",
    "global": "a global PAX header names a path, a link or a size",
    "globals": "the global PAX headers are too large together",
    "name": "a header has a path that is empty or holds a NUL",
    "two-names": "an entry has a path in a GNU header and another in a PAX header",
    "headers": "too many extension headers before one entry",
    "header": "an extension header of no bytes, or of more than {most:,}",
    "cut-short": "the archive ends after a header that belongs to the next entry",
}


class TarError(ValueError):
    """The stream is no acceptable tar. The text says why, and at which entry, with the name as its `repr`."""


class TooLargeError(TarError):
    """The files are larger than the caps allow."""


class CutShortError(TarError):
    """The stream ends too early."""


@final
class ArchiveCaps(Struct):
    """The limits of an archive. Checked before anything is kept."""

    entries: int = 400_000
    size: int = 32 << 30  # bytes of all files together
    reserve: int = 0  # bytes of the disk that stay free
    name: int = 3072  # bytes: the kernel still takes the name with the store's own path before it
    link: int = 4095  # bytes of a link's text, as the kernel's PATH_MAX without its NUL
    text: int = 128 << 20  # characters of all names and links together, which are in memory several times
    depth: int = 100
    extension: int = 1 << 20  # bytes of one PAX or GNU header


class ArchiveEntry:
    """The content of a header with extensions applied. `name` and `link` are as written, odd bytes as surrogates."""

    __slots__ = ("extended", "kind", "link", "mode", "mtime", "name", "size")

    def __init__(self, name: str, kind: Kind, *, mode: int, size: int, mtime: int, link: str, extended: bool) -> None:
        self.name = name
        self.kind = kind
        self.mode = mode  # permission bits, set-uid and sticky among them
        self.size = size  # 0 but for files
        self.mtime = mtime
        self.link = link  # of symlink and hardlink
        self.extended = extended  # the entry had extended attributes or capabilities, which are not read

    def __repr__(self) -> str:
        return f"ArchiveEntry({self.name!r}, {self.kind!r}, mode={self.mode:o}, size={self.size}, link={self.link!r})"


def parts(name: str, caps: ArchiveCaps) -> tuple[str, ...]:
    """Return the components of a relative name, without "." and empty components; () is the root itself.

    Raises TarError for an absolute name, for "..", and for a name longer or deeper than a kernel takes.
    """
    if name.startswith("/"):
        raise TarError(f"the name {short(name)} is absolute")
    found = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in found:
        raise TarError(f"the name {short(name)} leads out by '..'")
    if "\0" in name:
        raise TarError(f"the name {short(name)} holds a NUL")
    if len(found) > caps.depth:
        raise TarError(f"the name {short(name)} is deeper than {caps.depth}")
    if len(name) > 255:
        if len(name.encode("utf-8", "surrogateescape")) > caps.name:
            raise TarError(f"the name {short(name)} is longer than {caps.name} bytes")
        if any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in found):
            raise TarError(f"a part of the name {short(name)} is longer than 255 bytes")
    elif not name.isascii() and any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in found):
        raise TarError(f"a part of the name {short(name)} is longer than 255 bytes")
    return found


def short(name: str) -> str:
    """Return a name for a message: its `repr`, cut."""
    return repr(name if len(name) <= 120 else f"{name[:80]}…{name[-30:]}")


class TarStream:
    """One pass over a tar. Iteration yields entries; `data` yields the bytes of the current file.

    Bytes that are not read are skipped; `skip` moves the source forward without reading, where the source can.
    Raises TarError, and what `read` raises.
    """

    def __init__(
        self, read: Read, caps: ArchiveCaps | None = None, *, skip: Callable[[int], None] | None = None
    ) -> None:
        self.caps = caps or ArchiveCaps()
        self.offset = 0  # of the next byte to be read, from the start of the stream
        self._read = read
        self._skip_source = skip
        self._buffer = b""
        self._at = 0
        self._left = 0  # bytes of the current file that were not read yet
        self._padding = 0
        self._entries = 0
        self.size = 0  # bytes of all files so far
        self._headers = Headers(self.caps.extension, _total)

    def __iter__(self) -> Iterator[ArchiveEntry]:
        while (entry := self._next()) is not None:
            yield entry

    def data(self) -> Iterator[bytes | memoryview]:
        """Yield the current file's bytes, in pieces. Raises CutShortError when the stream ends too early."""
        while self._left:
            if self._at == len(self._buffer):
                self._fill()
            piece = memoryview(self._buffer)[self._at : self._at + self._left]
            self._at += len(piece)
            self.offset += len(piece)
            self._left -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read to the end of the source, so that the caller can digest all of it.

        Raises TarError when much comes after the archive's end: 70 GiB of zeros are 60 kB when packed.
        """
        after = len(self._buffer) - self._at
        self._buffer, self._at = b"", 0
        while piece := self._read(_CHUNK):
            after += len(piece)
            if after > _MOST_AFTER:
                raise TarError(f"the archive goes on for more than {_MOST_AFTER:,} bytes after its end")

    # bytes

    def _fill(self) -> None:
        self._buffer, self._at = self._read(_CHUNK), 0
        if not self._buffer:
            raise CutShortError(f"the archive is cut short after {self.offset:,} bytes")

    def _exactly(self, count: int) -> bytes:
        found = self._buffer[self._at : self._at + count]
        self._at += len(found)
        while len(found) < count:
            self._fill()
            piece = self._buffer[: count - len(found)]
            self._at = len(piece)
            found += piece
        self.offset += count
        return found

    def _discard(self, count: int) -> None:
        here = min(count, len(self._buffer) - self._at)
        self._at += here
        self.offset += here
        count -= here
        if count and self._skip_source is not None:
            self._skip_source(count)
            self.offset += count
            return
        while count:
            self._fill()
            here = min(count, len(self._buffer))
            self._at = here
            self.offset += here
            count -= here

    # entries

    def _next(self) -> ArchiveEntry | None:
        rest = self._left + self._padding
        if rest:
            self._discard(rest)
            self._left = self._padding = 0
        try:
            while not self._headers.has_ended:
                found = self._headers.take(self._exactly(self._headers.wanted))
                self._discard(self._headers.padding)
                if found is not None:
                    return self._entry(found)
        except Refused as error:
            raise TarError(_WHY[error.why].format(most=self.caps.extension)) from None
        return None

    def _entry(self, found: Fields) -> ArchiveEntry:
        self._entries += 1
        if self._entries > self.caps.entries:
            raise TarError(f"more than {self.caps.entries:,} entries")
        flag, raw, mode, size, mtime, target = found
        extended = any(key.startswith(_ATTRIBUTES) for key in self._headers.records)
        if len(raw) > _LONGEST:
            raise TarError(f"the name {short(raw.decode('utf-8', 'surrogateescape'))} is too long")
        name = raw.decode("utf-8", "surrogateescape")
        if not name:
            raise TarError("an entry has no name")
        kind = _KINDS.get(flag)
        if kind is None:
            raise TarError(f"{short(name)} is of the type {flag!r}, which is not supported")
        if kind == "file" and name.endswith("/"):
            kind = "dir"
        link = ""
        if kind == "file":
            self.size += size
            if self.size > self.caps.size:
                raise TooLargeError(f"the files are larger than {self.caps.size:,} bytes together")
            self._left, self._padding = size, -size % BLOCK
        elif size:
            raise TarError(f"{short(name)} is a {kind} with {size:,} bytes of data")
        elif kind in ("symlink", "hardlink"):
            link = target.decode("utf-8", "surrogateescape")
            if not link or "\0" in link or len(target) > self.caps.link:
                raise TarError(f"{short(name)} links to {short(link)}")
        return ArchiveEntry(
            name, kind, mode=mode & 0o7777, size=size, mtime=min(mtime, _LATEST), link=link, extended=extended
        )


def _total(block: bytes) -> int:
    """Return the sum of a header's bytes, five times as fast as `sum`.

    The lower half of an Adler-32 is 1 + the sum, modulo 65521, which 256 bytes do not reach.
    """
    return (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF) - 2
