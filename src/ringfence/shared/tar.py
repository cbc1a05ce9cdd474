"""Owns the tar format for both sides of a transfer: headers to write, and a strict reader that is fed bytes.

The reader takes what GNU tar, bsdtar, git and Python write. Anything else is `Refused`, with a word that says why
(K01): nothing is guessed, and no name or number of an archive is used before it was checked.

Headers of images are parsed here too (`fields`, `pax_records`). The reader of images, images/tar_reader.py, is separate
because it reads from a file, where this reader is fed: it seeks over what it does not need, and undoes compression.
"""

from __future__ import annotations

from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Fields: TypeAlias = tuple[bytes, bytes, int, int, int, bytes]  # flag, name, mode, size, mtime, link

BLOCK = 512
END = bytes(2 * BLOCK)
FILE, DIRECTORY, SYMLINK, LINK = "file", "directory", "symlink", "link"
_FLAGS = {FILE: b"0", DIRECTORY: b"5", SYMLINK: b"2", LINK: b"1"}
_KINDS = {b"0": FILE, b"\0": FILE, b"1": LINK, b"2": SYMLINK, b"5": DIRECTORY}
_DEVICES = (b"3", b"4", b"6")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_EXTENSIONS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)
_MAX_EXTENSION = 1 << 16
_MAX_RECORDS = 1_000  # records of a PAX header
MOST_EXTENSIONS = 8  # headers of headers before an entry, which are held in memory until it comes
_MAX_PARTS = 4096
_MAX_SIZE = 1 << 53
_OCTAL_MOST = 8**11 - 1  # eleven octal digits: 8 GiB less one byte
_HEADER = Struct("<100s8s16x12s12s8sc100s6s82x155s12x")  # name, mode, size, mtime, sum, flag, link, magic, prefix
_NO_SUM = 8 * 0x20  # the sum of a header is made with blanks in place of the sum


class Refused(Exception):  # noqa: N818  # what happened to the archive, and no fault of ours
    """A refused archive. `why` is a word of our own, `name` the archive's bytes."""

    def __init__(self, why: str, name: bytes = b"") -> None:
        super().__init__(why, name)
        self.why = why
        self.name = name


class Member:
    """An entry of an archive. `parts` is the checked name: no `..`, no empty part, not absolute."""

    __slots__ = ("kind", "link", "mode", "mtime", "name", "parts", "size")

    def __init__(self, name: bytes, kind: str, size: int, mode: int, mtime: int, link: bytes) -> None:
        self.name = name
        self.parts = safe_parts(name)
        self.kind = kind
        self.size = size
        self.mode = mode & 0o777  # set-uid, set-gid and sticky bits are not carried (K01)
        self.mtime = min(max(mtime, 0), _OCTAL_MOST)
        self.link = link
        if not self.parts and kind != DIRECTORY:
            raise Refused("name", name)


def safe_parts(name: bytes) -> list[bytes]:
    """Return the parts of a relative name that stays below the folder; [] is the folder."""
    if name.startswith(b"/"):
        raise Refused("absolute", name)
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise Refused("dot-dot", name)
    if not name or b"\0" in name or len(parts) > _MAX_PARTS or any(len(part) > 255 for part in parts):
        raise Refused("name", name)
    return parts


def link_stays(parts: list[bytes], target: bytes) -> bool:
    """Return whether a symbolic link at `parts`, below real directories only, can never lead out of the tree.

    `..` may stand at the start only: behind a name it would climb from wherever a link of that name leads.
    """
    if not target or target.startswith(b"/") or b"\0" in target:
        return False
    steps = [step for step in target.split(b"/") if step not in (b"", b".")]
    up = 0
    while up < len(steps) and steps[up] == b"..":
        up += 1
    return up < len(parts) and b".." not in steps[up:]


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def header(name: bytes, kind: str, *, size: int, mode: int, mtime: int, link: bytes = b"") -> bytes:
    """Return what comes before an entry's bytes, in GNU format, so that any name and any size fits."""
    before = b""
    if len(name) > 100:
        before += _extension(_LONG_NAME, name)
    if len(link) > 100:
        before += _extension(_LONG_LINK, link)
    return before + _block(name[:100], _FLAGS[kind], size, mode, mtime, link[:100])


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _extension(flag: bytes, text: bytes) -> bytes:
    size = len(text) + 1
    return _block(b"././@LongLink", flag, size, 0, 0, b"") + text + b"\0" + padding(size)


def _block(name: bytes, flag: bytes, size: int, mode: int, mtime: int, link: bytes) -> bytes:
    stamp = b"%011o\0" % min(max(mtime, 0), _OCTAL_MOST)
    length = b"%011o\0" % size if size <= _OCTAL_MOST else b"\x80" + size.to_bytes(11, "big")
    owner = b"0000000\0" * 2
    head = name.ljust(100, b"\0") + b"%07o\0" % (mode & 0o777) + owner + length + stamp
    tail = flag + link.ljust(100, b"\0") + b"ustar  \0"
    block = (head + b" " * 8 + tail).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


class Reader:
    """A reader that is fed with bytes and yields members, and of a file exactly as many bytes as its header says.

    `feed` yields a Member; after the member of a file it yields views of the bytes, and None when they are complete.
    """

    def __init__(self) -> None:
        self._held = bytearray()  # bytes of a header or an extension that is not complete
        self._left = 0  # bytes of the file that is being read
        self._skip = 0  # padding
        self._extension: bytes | None = None
        self._wanted = BLOCK
        self._zeros = 0
        self._name: bytes | None = None
        self._link: bytes | None = None
        self._pax: dict[bytes, bytes] = {}
        self._extensions = 0  # extensions before the next entry

    def feed(self, data: bytes) -> Iterator[Member | memoryview | None]:
        view = memoryview(data)
        while view:
            if self._left:
                part, view = view[: self._left], view[self._left :]
                self._left -= len(part)
                yield part
                if not self._left:
                    yield None
            elif self._skip:
                count = min(self._skip, len(view))
                self._skip -= count
                view = view[count:]
            else:
                count = min(self._wanted - len(self._held), len(view))
                self._held += view[:count]
                view = view[count:]
                if len(self._held) == self._wanted:
                    held = bytes(self._held)
                    self._held.clear()
                    yield from self._complete(held)

    def finish(self) -> None:
        """Check, at the end of the stream, that the archive is complete. Raises Refused when it is not."""
        if self._left or self._held or self._extension is not None or not self._zeros:
            raise Refused("cut-short")

    def _complete(self, held: bytes) -> Iterator[Member | None]:
        if self._extension is not None:
            self._take_extension(held)
        elif not any(held):
            self._zeros += 1
        elif self._zeros:
            raise Refused("after-the-end")
        else:
            yield from self._take_header(held)

    def _take_extension(self, held: bytes) -> None:
        flag, self._extension = self._extension, None
        self._skip = -len(held) % BLOCK
        self._wanted = BLOCK
        if flag in (_PAX, _PAX_GLOBAL):
            records = pax_records(held)
            if flag == _PAX:
                self._pax.update(records)
            elif records.keys() & {b"path", b"linkpath", b"size"}:
                raise Refused("pax", held[:100])
            return
        text = held.rstrip(b"\0")
        if b"\0" in text:
            raise Refused("name", text)
        if flag == _LONG_NAME:
            self._name = text
        else:
            self._link = text

    def _take_header(self, block: bytes) -> Iterator[Member | None]:
        flag, name, mode, size, mtime, link = fields(block)
        name, link = self._names(name, link)
        if flag in _EXTENSIONS:
            self._extensions += 1
            if not 0 < size <= _MAX_EXTENSION or self._extensions > MOST_EXTENSIONS:
                raise Refused("header", name)
            self._extension = flag
            self._wanted = size
            return
        if flag in _DEVICES:
            raise Refused("device", name)
        kind = _KINDS.get(flag)
        if kind is None:
            raise Refused("sparse" if flag == b"S" else "type", name)
        size = decimal(self._pax[b"size"]) if b"size" in self._pax else size
        if kind == FILE and name.endswith(b"/"):
            kind = DIRECTORY  # a name with a slash, as the first tar wrote directories
        if kind != FILE and size:
            raise Refused("size", name)
        if b"mtime" in self._pax:
            mtime = pax_time(self._pax[b"mtime"])
        member = Member(name, kind, size, mode, mtime, link)
        self._name = self._link = None
        self._pax = {}
        self._extensions = 0
        self._left = size
        self._skip = -size % BLOCK
        yield member
        if kind == FILE and not size:
            yield None

    def _names(self, name: bytes, link: bytes) -> tuple[bytes, bytes]:
        if (self._name is not None and b"path" in self._pax) or (self._link is not None and b"linkpath" in self._pax):
            raise Refused("two-names", self._name or self._link or b"")
        name = self._pax.get(b"path", self._name if self._name is not None else name)
        return name, self._pax.get(b"linkpath", self._link if self._link is not None else link)


# ── what headers say ─────────────────────────────────────────────────────────────────────────────


def fields(block: bytes, total: Callable[[bytes], int] = sum) -> Fields:
    """Return a header's fields: flag, name, mode, size, mtime, link. `total`: the sum of its bytes. Raises Refused."""
    name, mode, size, mtime, check, flag, link, magic, prefix = _HEADER.unpack(block)
    if check[0] >= 0x80 or number(check) != total(block) - sum(check) + _NO_SUM:
        raise Refused("not-tar")
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:
        name = prefix.partition(b"\0")[0] + b"/" + name
    when = 0 if mtime[0] == 0xFF else number(mtime)  # GNU's binary form of a time before 1970
    return flag, name, number(mode), number(size), when, link.partition(b"\0")[0]


def number(field: bytes) -> int:
    """Return the number in a field.

    Octal digits between blanks and a NUL, or GNU's binary form, marked by the first bit.
    """
    if field[0] >= 0x80:
        value = int.from_bytes(field[1:], "big")
        if field[0] != 0x80 or value > _MAX_SIZE:
            raise Refused("size")
        return value
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    try:
        return int(digits, 8) if digits.isdigit() else _no_number()
    except ValueError:  # an 8 or a 9
        return _no_number()


def _no_number() -> int:
    raise Refused("number")


def decimal(text: bytes) -> int:
    """Return a number of a PAX header."""
    if not text.isdigit() or len(text) > 16 or int(text) > _MAX_SIZE:
        raise Refused("number")
    return int(text)


def pax_time(text: bytes) -> int:
    """Return whole seconds; 0 for a time before 1970."""
    whole = text.partition(b".")[0]
    return 0 if whole.startswith(b"-") else decimal(whole)


def pax_records(data: bytes) -> dict[bytes, bytes]:
    """Return the records `length key=value\\n`, which follow each other; only NULs may come after them."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and (data[at] or data[at:].strip(b"\0")):
        digits, space, _ = data[at : at + 9].partition(b" ")
        if not space or not digits.isdigit() or len(records) >= _MAX_RECORDS:
            raise Refused("pax")
        end = at + int(digits)
        key, equals, value = data[at + len(digits) + 1 : end].partition(b"=")
        if end > len(data) or not key or not equals or not value.endswith(b"\n") or key in records:
            raise Refused("pax")
        if key.startswith(b"GNU.sparse"):
            raise Refused("sparse")
        records[key] = value[:-1]
        at = end
    return records
