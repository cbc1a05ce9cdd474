"""Reads a tar stream strictly: every header checked, every number capped, nothing opened, nothing written.

The one reader of tars on the host, for images and for what comes out of sandboxes. It yields what the archive says;
where an entry may go is for whoever applies it, who asks `parts` for the only spelling of a name that is safe to use.
Knows ustar, the GNU forms of long names, and PAX. Sparse files, volumes and other rare types are refused (K01).
"""

from __future__ import annotations

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal, TypeAlias

    Kind: TypeAlias = Literal["file", "dir", "symlink", "hardlink", "char", "block", "fifo"]
    Read: TypeAlias = Callable[[int], bytes]

BLOCK = 512
_CHUNK = 1 << 20
_ZERO = bytes(BLOCK)
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
_LATEST = 1 << 33  # seconds: the year 2242; later ones are nonsense and overflow somewhere
_MOST_EXTENSIONS = 8  # headers of headers before one entry
_MOST_RECORDS = 1_000  # of one PAX header
_LONGEST = 4095  # bytes of a path


class TarError(ValueError):
    """The stream is no tar that we accept. The text says why, and at which entry; names in it are `repr`s."""


class TooLargeError(TarError):
    """The files are larger than the caps allow."""


@final
class Caps(Struct):
    """What is too much. Checked before anything is kept."""

    entries: int = 400_000
    size: int = 32 << 30  # bytes of all files together
    name: int = 4095  # bytes, as the kernel's PATH_MAX without its NUL
    depth: int = 100
    extension: int = 1 << 20  # bytes of one PAX or GNU header


class Entry:
    """What one header says, with its extensions applied. `name` and `link` are as written, bytes kept as surrogates."""

    __slots__ = ("extended", "kind", "link", "mode", "mtime", "name", "size")

    def __init__(self, name: str, kind: Kind, *, mode: int, size: int, mtime: int, link: str, extended: bool) -> None:
        self.name = name
        self.kind = kind
        self.mode = mode  # permission bits, set-uid and sticky among them
        self.size = size  # 0 but for files
        self.mtime = mtime
        self.link = link  # of symlink and hardlink
        self.extended = extended  # had extended attributes or capabilities; they are not read

    def __repr__(self) -> str:
        return f"Entry({self.name!r}, {self.kind!r}, mode={self.mode:o}, size={self.size}, link={self.link!r})"


def parts(name: str, caps: Caps) -> tuple[str, ...]:
    """The components of a relative name, without "." and empty ones; () is the root itself. Raises TarError.

    Refused: absolute names, "..", and names longer or deeper than a kernel takes.
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
    """A name for a message: its `repr`, cut."""
    return repr(name if len(name) <= 120 else f"{name[:80]}…{name[-30:]}")


class TarStream:
    """One pass over a tar. Iterate entries; `data` yields the bytes of the file just met, what is not read is skipped.

    `skip` moves the source forward without reading, where it can. Raises TarError, and what `read` raises.
    """

    def __init__(self, read: Read, caps: Caps | None = None, *, skip: Callable[[int], None] | None = None) -> None:
        self.caps = caps or Caps()
        self.offset = 0  # of the next byte to be read, from the start of the stream
        self._read = read
        self._skip_source = skip
        self._buffer = b""
        self._at = 0
        self._left = 0  # of the current file's data
        self._padding = 0
        self._entries = 0
        self.size = 0  # bytes of the files met so far
        self._defaults: dict[str, str] = {}  # of a global PAX header

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self._next()) is not None:
            yield entry

    def data(self) -> Iterator[bytes | memoryview]:
        """The current file's bytes, in pieces. TarError when the stream ends before them."""
        while self._left:
            if self._at == len(self._buffer):
                self._fill()
            piece = memoryview(self._buffer)[self._at : self._at + self._left]
            self._at += len(piece)
            self.offset += len(piece)
            self._left -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read to the end of the source, so that a digest over all of it can be made."""
        self._buffer, self._at = b"", 0
        while self._read(_CHUNK):
            pass

    # bytes

    def _fill(self) -> None:
        self._buffer, self._at = self._read(_CHUNK), 0
        if not self._buffer:
            raise TarError(f"the archive is cut short after {self.offset:,} bytes")

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

    def _next(self) -> Entry | None:
        self._discard(self._left + self._padding)
        self._left = self._padding = 0
        extra: dict[str, str] = dict(self._defaults) if self._defaults else {}
        for _ in range(_MOST_EXTENSIONS):
            block = self._exactly(BLOCK)
            if block == _ZERO:
                if extra != self._defaults:
                    raise TarError("the archive ends after a header that belongs to the next entry")
                return None
            _check_sum(block)
            flag = block[156:157]
            if flag in (b"x", b"L", b"K", b"g"):
                self._extend(flag, self._extension(block), extra)
                continue
            return self._entry(block, flag, extra)
        raise TarError("too many extension headers before one entry")

    def _extension(self, block: bytes) -> bytes:
        size = _number(block[124:136])
        if size > self.caps.extension:
            raise TarError(f"an extension header of {size:,} bytes; the most is {self.caps.extension:,}")
        body = self._exactly(size)
        self._discard(-size % BLOCK)
        return body

    def _extend(self, flag: bytes, body: bytes, extra: dict[str, str]) -> None:
        if flag == b"L":
            extra["path"] = _text(body.partition(b"\0")[0])
        elif flag == b"K":
            extra["linkpath"] = _text(body.partition(b"\0")[0])
        elif flag == b"x":
            extra.update(_pax(body))
        else:
            found = _pax(body)
            if found.keys() & {"path", "linkpath", "size"}:
                raise TarError("a global PAX header names a path, a link or a size")
            self._defaults.update(found)
            extra.update(found)

    def _entry(self, block: bytes, flag: bytes, extra: dict[str, str]) -> Entry:
        self._entries += 1
        if self._entries > self.caps.entries:
            raise TarError(f"more than {self.caps.entries:,} entries")
        name = extra.get("path") or _name(block)
        kind = _KINDS.get(flag)
        if kind is None:
            raise TarError(f"{short(name)} is of the type {flag!r}, which is not supported")
        if any(key.startswith("GNU.sparse") for key in extra):
            raise TarError(f"{short(name)} is a sparse file, which is not supported")
        size = _decimal(extra["size"]) if "size" in extra else _number(block[124:136])
        if kind == "file" and name.endswith("/"):
            kind = "dir"
        if kind == "file":
            self.size += size
            if self.size > self.caps.size:
                raise TooLargeError(f"the files are larger than {self.caps.size:,} bytes together")
            self._left, self._padding = size, -size % BLOCK
        elif size:
            raise TarError(f"{short(name)} is a {kind} with {size:,} bytes of data")
        link = extra.get("linkpath") or _text(block[157:257].partition(b"\0")[0])
        if kind in ("symlink", "hardlink") and (not link or "\0" in link or len(link) > self.caps.name):
            raise TarError(f"{short(name)} links to {short(link)}")
        return Entry(
            name,
            kind,
            mode=_number(block[100:108]) & 0o7777,
            size=size if kind == "file" else 0,
            mtime=_time(extra.get("mtime"), block[136:148]),
            link=link if kind in ("symlink", "hardlink") else "",
            extended=any(key.startswith(("SCHILY.", "LIBARCHIVE.", "RHT.")) for key in extra),
        )


def _check_sum(block: bytes) -> None:
    said = _number(block[148:156])
    if said != sum(block) - sum(block[148:156]) + 8 * 32:
        raise TarError("a header's checksum is wrong: no tar, or damaged")


def _number(field: bytes) -> int:
    """Octal digits in blanks or NULs, or GNU's binary form. Never negative."""
    if field[0] == 0x80:
        value = int.from_bytes(field[1:], "big")
        if value >= 1 << 62:
            raise TarError("a number in a header is too large")
        return value
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    try:
        if not digits.isdigit():
            raise ValueError
        return int(digits, 8)
    except ValueError:
        raise TarError(f"{field!r} in a header is no number") from None


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise TarError(f"the size {text[:40]!r} in a PAX header is no number")
    return int(text)


def _time(extended: str | None, field: bytes) -> int:
    """Whole seconds from 1970 to 2242; what lies outside, or is negative (K01), is the nearest of these."""
    if extended is not None:
        whole = extended.partition(".")[0]
        if whole.startswith("-"):
            return 0
        if not whole.isascii() or not whole.isdigit() or len(whole) > 18:
            raise TarError(f"the time {extended[:40]!r} in a PAX header is no number")
        return min(int(whole), _LATEST)
    if field[0] == 0xFF:  # GNU's binary form of a negative number
        return 0
    return min(_number(field), _LATEST)


def _name(block: bytes) -> str:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].partition(b"\0")[0]
        if prefix:
            name = prefix + b"/" + name
    if not name:
        raise TarError("an entry has no name")
    return _text(name)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(body: bytes) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n". Every byte must belong to one."""
    found: dict[str, str] = {}
    at = 0
    for _ in range(_MOST_RECORDS):
        if at == len(body) or (body[at] == 0 and not body[at:].strip(b"\0")):
            return found
        digits, blank, _rest = body[at : at + 20].partition(b" ")
        if not blank or not digits.isdigit() or len(digits) > 9:
            raise TarError("a PAX header has a record without a length")
        end = at + int(digits)
        record = body[at + len(digits) + 1 : end]
        if end > len(body) or end <= at + len(digits) + 1 or not record.endswith(b"\n"):
            raise TarError("a PAX header has a record with a wrong length")
        key, equals, value = record[:-1].partition(b"=")
        if not equals or not key:
            raise TarError("a PAX header has a record without a key")
        name = _text(key)
        if name in ("path", "linkpath") and (b"\0" in value or not value or len(value) > _LONGEST):
            raise TarError(f"a PAX header has a {name} that is empty, too long or holds a NUL")
        found[name] = _text(value)
        at = end
    raise TarError("a PAX header has too many records")
