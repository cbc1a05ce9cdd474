"""A tree of files as a value: names, kinds, modes, times, digests of content. This is the only parser of it.

Rows come from inside a sandbox or from a file that any user may have written: every field is checked, and rows that do
not make a tree are refused as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from hashlib import blake2b
from typing import NamedTuple

from ringfence.errors import SnapshotError
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ringfence.policy.model import Limits

MAX_PATH = 16_384  # bytes
_MAX_NAME = 255
_MAX_TARGET = 4095
_PAGE = 4096
_TEXT, _TEXT_EACH = 1 << 20, 256  # characters that any tree may have, and more for each name that it may have
_KINDS = "fdlh"  # file, directory, symbolic link, further name of a file
_HEX = frozenset("0123456789abcdef")
DIGEST_CHARACTERS = 64


def hasher() -> blake2b:
    """Return the hash of content, of manifests and of exported files."""
    return blake2b(digest_size=DIGEST_CHARACTERS // 2)


class ManifestEntry(NamedTuple):
    """A name in a tree. `text` is a file's digest, a link's target, or for a further name of a file the first name."""

    path: str  # relative to the workspace
    kind: str
    mode: int
    mtime_ns: int
    size: int
    text: str


class ManifestCaps(NamedTuple):
    """The largest allowed tree. Further names of files are counted apart: they take no inode."""

    bytes: int
    files: int

    @property
    def text(self) -> int:
        """Return the most characters of all names and targets.

        They are held several times, and the guest chooses them.
        """
        return _TEXT + _TEXT_EACH * self.files


NO_CAPS = ManifestCaps(
    1 << 50, 1_000_000
)  # for an imported file: a sandbox's own limits are checked when the snapshot is used


def caps_of(limits: Limits) -> ManifestCaps:
    return ManifestCaps(-(-limits.disk // _PAGE) * _PAGE, min(limits.disk_files, NO_CAPS.files))


class Manifest:
    """A tree that has been checked. A folder comes before its contents."""

    __slots__ = ("_keys", "_lines", "_shared", "_text", "by_path", "digests", "entries", "links", "size_bytes")

    def __init__(self, entries: Iterable[ManifestEntry], caps: ManifestCaps = NO_CAPS) -> None:
        """Check the entries. Raise SnapshotError for entries that are no tree, or a tree past `caps`."""
        self.entries = tuple(sorted(entries, key=_order))
        self._keys = [_key(entry.path) for entry in self.entries]
        self._lines: list[str] | None = None
        self.by_path = {entry.path: entry for entry in self.entries}
        self.digests = {entry.text: entry.size for entry in self.entries if entry.kind == "f"}
        self.links = sum([entry.kind == "h" for entry in self.entries])
        self.size_bytes = sum([entry.size for entry in self.entries])
        self._text = sum([text_of(entry) for entry in self.entries])
        if len(self.by_path) != len(self.entries):
            raise refused("a name twice")
        self._check_places()
        self._shared = self._count_shared()
        self.check_caps(caps)

    def _check_places(self) -> None:
        directories = {""} | {entry.path for entry in self.entries if entry.kind == "d"}
        for path, kind, _, _, size, text in self.entries:
            if path.rpartition("/")[0] not in directories:
                raise _out_of_place(path)
            if kind == "h" and (text not in self.by_path or self.by_path[text].kind != "f"):
                raise refused(f"{path!r}, a further name of no file")
            if kind == "f" and self.digests[text] != size:
                raise _other_size(path)

    def _count_shared(self) -> dict[str, int]:
        """Return the digests of content that several files have, with the number of files."""
        texts = [entry.text for entry in self.entries if entry.kind == "f"]
        if len(texts) == len(self.digests):
            return {}
        return {text: count for text, count in Counter(texts).items() if count > 1}

    def patched(self, reported: Mapping[str, ManifestEntry], gone: Collection[str], caps: ManifestCaps) -> Manifest:
        """Return this tree with other entries at some paths and without some others.

        Costs what changed, and some copies.
        """
        few = 4 * (len(reported) + len(gone)) < len(self.entries)
        if not few or self.links or any(made.kind == "h" for made in reported.values()):
            rest = [made for made in self.entries if made.path not in reported and made.path not in gone]
            return Manifest([*rest, *reported.values()], caps)
        made = Manifest.__new__(Manifest)
        made._take_over(self)  # noqa: SLF001  # the same class
        emptied = {path for path in (*gone, *reported) if path in self.by_path and self.by_path[path].kind == "d"}
        entries = list(self.entries)
        for path in (*gone, *reported):
            made._remove(entries, path)  # noqa: SLF001  # as above
        for entry in reported.values():
            made._insert(entries, entry)  # noqa: SLF001  # as above
        made.entries = tuple(entries)
        made._check_changed(reported.values(), emptied)  # noqa: SLF001  # the same class
        made.check_caps(caps)
        return made

    def _take_over(self, other: Manifest) -> None:
        self._keys, self._lines, self._shared = other._keys.copy(), other._all_lines().copy(), other._shared.copy()
        self.by_path, self.digests = other.by_path.copy(), other.digests.copy()
        self.links, self.size_bytes, self._text = other.links, other.size_bytes, other._text

    def _remove(self, entries: list[ManifestEntry], path: str) -> None:
        entry = self.by_path.pop(path, None)
        if entry is None:
            return
        at = bisect_left(self._keys, _key(path))
        del entries[at], self._keys[at], self._all_lines()[at]
        self.size_bytes -= entry.size
        self._text -= text_of(entry)
        if entry.kind == "f":
            users = self._shared.pop(entry.text, 1)
            if users > 2:
                self._shared[entry.text] = users - 1
            elif users == 1:
                del self.digests[entry.text]

    def _insert(self, entries: list[ManifestEntry], entry: ManifestEntry) -> None:
        key = _key(entry.path)
        at = bisect_left(self._keys, key)
        entries.insert(at, entry)
        self._keys.insert(at, key)
        self._all_lines().insert(at, _line(entry))
        self.by_path[entry.path] = entry
        self.size_bytes += entry.size
        self._text += text_of(entry)
        if entry.kind == "f":
            if entry.text in self.digests:
                self._shared[entry.text] = self._shared.get(entry.text, 1) + 1
            if self.digests.setdefault(entry.text, entry.size) != entry.size:
                raise _other_size(entry.path)

    def _check_changed(self, reported: Iterable[ManifestEntry], emptied: Iterable[str]) -> None:
        for entry in reported:
            above = entry.path.rpartition("/")[0]
            if above and (above not in self.by_path or self.by_path[above].kind != "d"):
                raise _out_of_place(entry.path)
        for path in emptied:
            if path in self.by_path and self.by_path[path].kind == "d":
                continue
            start = f"{_key(path)}\0"
            at = bisect_left(self._keys, start)
            if at < len(self._keys) and self._keys[at].startswith(start):
                raise _out_of_place(self.entries[at].path)

    def check_caps(self, caps: ManifestCaps) -> None:
        if max(len(self.entries) - self.links, self.links) > caps.files:
            raise too_large(f"it has more than limits.disk_files = {caps.files:,} names")
        if self.size_bytes > caps.bytes:
            raise too_large(f"its files have more than limits.disk = {caps.bytes:,} bytes, holes counted")
        if self._text > caps.text:
            raise names_too_long(caps)

    def to_json(self) -> bytes:
        return fast_stdlib.dumps({"entries": [list(entry) for entry in self.entries]})

    def _all_lines(self) -> list[str]:
        if self._lines is None:
            self._lines = [_line(entry) for entry in self.entries]
        return self._lines

    def digest(self, bound: str) -> str:
        """Return the digest of the tree and of what the tree is bound to."""
        whole = hasher()
        whole.update(f"{bound}\0".encode())
        whole.update("".join(self._all_lines()).encode("utf-8", "surrogateescape"))  # no field holds a NUL
        return whole.hexdigest()


def _order(entry: ManifestEntry) -> str:
    return _key(entry.path)


def _key(path: str) -> str:
    return path.replace("/", "\0")  # so that a directory comes right before its contents


def _line(entry: ManifestEntry) -> str:
    path, kind, mode, mtime, size, text = entry
    return f"{path}\0{kind}\0{mode}\0{mtime}\0{size}\0{text}\0"


def _out_of_place(path: str) -> SnapshotError:
    return refused(f"{path!r}, which is in no directory")


def _other_size(path: str) -> SnapshotError:
    return refused(f"{path!r} with another size than its content")


def entry(row: object) -> ManifestEntry:
    """Return a row as a ManifestEntry. Raise SnapshotError for a field of another type or out of bounds."""
    if not isinstance(row, list) or len(row) != len(ManifestEntry._fields):
        raise refused("a row with other fields than an entry has")
    path, kind, mode, mtime_ns, size, text = row
    check_path(path)
    if not isinstance(kind, str) or len(kind) != 1 or kind not in _KINDS:
        raise refused("something that is no file, directory or link")
    _check_number(mode, 0o7777, "mode")
    if type(mtime_ns) is not int or not -(1 << 63) <= mtime_ns < 1 << 63:
        raise refused("a time that no clock shows")
    _check_number(size, (1 << 63) - 1 if kind == "f" else 0, "size")
    _check_text(kind, text)
    return ManifestEntry(path, kind, mode, mtime_ns, size, text)


def _check_number(value: object, most: int, what: str) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise refused(f"a {what} that no file can have")


def _check_text(kind: str, text: object) -> None:
    if not isinstance(text, str):
        raise refused("a text field that is no text")
    if kind == "f":
        check_digest(text)
    elif kind == "h":
        check_path(text)
    elif kind == "d" and text:
        raise refused("a directory with a text")
    elif kind == "l" and not 0 < len(_canonical(text)) <= _MAX_TARGET:
        raise refused("a link with a target that no link has")


def check_digest(text: object) -> None:
    if not isinstance(text, str) or len(text) != DIGEST_CHARACTERS or not _HEX.issuperset(text):
        raise refused("a digest field that is no digest")


def check_path(path: object) -> None:
    """Refuse a path that is not relative, or not as the kernel would list the file: each name has one text (K03)."""
    if not isinstance(path, str) or not path or len(_canonical(path)) > MAX_PATH:
        raise refused("a path that is empty, no text, or too long")
    for part in path.split("/"):
        if part in ("", ".", "..") or len(part) > _MAX_NAME or len(_canonical(part)) > _MAX_NAME:
            raise refused(f"the path {path[:200]!r}")


def _canonical(text: str) -> bytes:
    """Return a text's bytes.

    Two texts for the same bytes would be two names of one file: only the usual text is accepted.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        try:
            data = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise refused(f"the name {text[:200]!r}, which no file has") from None
        if data.decode("utf-8", "surrogateescape") != text:
            raise refused(f"the name {text[:200]!r}, which no file has") from None
    if b"\0" in data:
        raise refused(f"the name {text[:200]!r}, which no file has")
    return data


def text_of(made: ManifestEntry) -> int:
    """Return the number of characters in a name and, for a link, in its target."""
    return len(made.path) + (0 if made.kind == "f" else len(made.text))


def names_too_long(caps: ManifestCaps) -> SnapshotError:
    return too_large(f"its names and links have more than {caps.text:,} characters together")


def refused(what: str) -> SnapshotError:
    return SnapshotError(f"the snapshot holds {what}", code="snapshot-refused", fix="do not use it: take a new one")


def too_large(what: str) -> SnapshotError:
    return SnapshotError(
        f"the tree cannot be kept: {what}", code="snapshot-too-large", fix="remove files, or raise the limit"
    )
