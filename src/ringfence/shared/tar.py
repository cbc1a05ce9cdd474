"""Owns the tar format for both sides of a transfer: headers to write, and a strict reader that is fed bytes.

The reader takes what GNU tar, bsdtar, git and Python write. Anything else is `Refused`, with a word that says why
(K01): nothing is guessed, and no name or number of an archive is used before it was checked.

All headers are read by `Headers`, those of images too. images/tar_reader.py adds to it what only images need: it reads
from a file, seeks over what it does not need, and accepts kinds of entries that a transfer refuses.
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
_ZERO = bytes(BLOCK)
FILE, DIRECTORY, SYMLINK, LINK = "file", "directory", "symlink", "link"
_FLAGS = {FILE: b"0", DIRECTORY: b"5", SYMLINK: b"2", LINK: b"1"}
_KINDS = {b"0": FILE, b"\0": FILE, b"1": LINK, b"2": SYMLINK, b"5": DIRECTORY}
_DEVICES = (b"3", b"4", b"6")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_GNU_KEYS = {_LONG_NAME: b"path", _LONG_LINK: b"linkpath"}
_EXTENSIONS = (*_GNU_KEYS, _PAX, _PAX_GLOBAL)
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


class Headers:
    """Reads the headers of an archive one after the other, for every reader of ours.

    The caller gives `take` as many bytes as `wanted` says, then passes over `padding` bytes of the archive. Names,
    sizes and times of extensions are applied; which kinds and names are accepted is the caller's decision.
    """

    def __init__(self, most_extension: int = _MAX_EXTENSION, total: Callable[[bytes], int] = sum) -> None:
        self.wanted = BLOCK
        self.padding = 0
        self.has_ended = False  # a block of zeros was read
        self.records: dict[bytes, bytes] = {}  # the PAX records of the entry that `take` returned
        self._most_extension = most_extension
        self._total = total
        self._flag: bytes | None = None  # of the extension whose bytes come next
        self._defaults: dict[bytes, bytes] = {}  # of a global PAX header
        self._pax: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] = {}  # of GNU's extensions, by the PAX key of the same meaning
        self._extensions = 0  # before the next entry

    def take(self, data: bytes) -> Fields | None:
        """Return an entry's fields with its extensions applied; None after an extension and at the end.

        Raises Refused.
        """
        if self._flag is not None:
            self._extend(self._flag, data)
            self._flag, self.wanted, self.padding = None, BLOCK, -len(data) % BLOCK
            return None
        self.padding = 0
        if data == _ZERO:
            if self._extensions:
                raise Refused("cut-short")
            self.has_ended = True
            return None
        if self.has_ended:
            raise Refused("after-the-end")
        found = fields(data, self._total)
        if found[0] not in _EXTENSIONS:
            return self._applied(found)
        self._extensions += 1
        if self._extensions > MOST_EXTENSIONS:
            raise Refused("headers", found[1])
        if not 0 < found[3] <= self._most_extension:
            raise Refused("header", found[1])
        self._flag, self.wanted = found[0], found[3]
        return None

    def _extend(self, flag: bytes, data: bytes) -> None:
        if flag in _GNU_KEYS:
            self._names[_GNU_KEYS[flag]] = data.rstrip(b"\0")
            found = self._names
        else:
            found = pax_records(data)
            if flag == _PAX_GLOBAL and found.keys() & {b"path", b"linkpath", b"size"}:
                raise Refused("global")
            (self._pax if flag == _PAX else self._defaults).update(found)
            if flag == _PAX_GLOBAL:
                self._check_defaults()
        for key in found.keys() & {b"path", b"linkpath"}:
            if not found[key] or b"\0" in found[key]:
                raise Refused("name", found[key])

    def _check_defaults(self) -> None:
        """Refuse global headers that are together more than one may be: they are kept until the archive ends."""
        size = sum(len(key) + len(value) for key, value in self._defaults.items())
        if len(self._defaults) > _MAX_RECORDS or size > self._most_extension:
            raise Refused("globals")

    def _applied(self, found: Fields) -> Fields:
        flag, name, mode, size, mtime, link = found
        if not self._extensions and not self._defaults:
            self.records = {}
            return found
        twice = self._names.keys() & self._pax.keys()
        if twice:
            raise Refused("two-names", self._names[min(twice)])
        self.records = {**self._defaults, **self._names, **self._pax}
        self._pax, self._names, self._extensions = {}, {}, 0
        name, link = self.records.get(b"path", name), self.records.get(b"linkpath", link)
        if b"size" in self.records:
            size = decimal(self.records[b"size"])
        if b"mtime" in self.records:
            mtime = pax_time(self.records[b"mtime"])
        return flag, name, mode, size, mtime, link


class TarReader:
    """A reader that is fed with bytes and yields members, and of a file exactly as many bytes as its header says.

    `feed` yields a Member; after the member of a file it yields views of the bytes, and None when they are complete.
    """

    def __init__(self) -> None:
        self._headers = Headers()
        self._held = bytearray()  # bytes of a header or an extension that is not complete
        self._left = 0  # bytes of the file that is being read
        self._skip = 0  # padding

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
                count = min(self._headers.wanted - len(self._held), len(view))
                self._held += view[:count]
                view = view[count:]
                if len(self._held) == self._headers.wanted:
                    held = bytes(self._held)
                    self._held.clear()
                    found = self._headers.take(held)
                    self._skip = self._headers.padding
                    if found is not None:
                        yield from self._member(found)

    def finish(self) -> None:
        """Check, at the end of the stream, that the archive is complete. Raises Refused when it is not."""
        if self._left or self._held or not self._headers.has_ended:
            raise Refused("cut-short")

    def _member(self, found: Fields) -> Iterator[Member | None]:
        flag, name, mode, size, mtime, link = found
        if flag in _DEVICES:
            raise Refused("device", name)
        kind = _KINDS.get(flag)
        if kind is None:
            raise Refused("sparse" if flag == b"S" else "type", name)
        if kind == FILE and name.endswith(b"/"):
            kind = DIRECTORY  # a name with a slash, as the first tar wrote directories
        if kind != FILE and size:
            raise Refused("size", name)
        member = Member(name, kind, size, mode, mtime, link)
        self._left = size
        self._skip = -size % BLOCK
        yield member
        if kind == FILE and not size:
            yield None


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
