"""The memory of the last look at /workspace, kept by the host and by a worker that stays for the next look.

It holds names by directory, and for each name a stamp: inode and change time, packed, or zeros when no stamp is known
that could still hold. A single comparison of bytes then shows that a whole directory is unchanged.
"""

from __future__ import annotations

import os
import struct
from _operator import attrgetter
from itertools import chain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# Records between a worker and the host: their kind, the bytes of their payload, then the payload.
RECORD = struct.Struct(">cI")
# From the worker: an existing name, its content, the end of the content, that the content changed while it was read,
# names that are gone, the end of the report.
ENTRY, DATA, END, AGAIN, GONE, DONE = b"E", b"D", b"F", b"R", b"G", b"Z"
ORDER = b"O"  # to the worker: a change, after which DATA and END may come
CHUNK = 1 << 16  # bytes of a DATA record

STAMP = struct.Struct(">QQ")  # every change of a file sets its change time, and no guest can
UNKNOWN = bytes(STAMP.size)
DIGEST = 64  # characters
SIZE = struct.Struct(">I")  # the size of a message
_HEAD = struct.Struct(f">I?{STAMP.size}s")  # directories, whether files have several names, the top's stamp
_GROUP = struct.Struct(">III")  # bytes of the path, bytes of the names, names
_AT_ONCE = 4096
_TOGETHER = 32
_FEW = 64
_facts = attrgetter("st_ino", "st_ctime_ns")


class NameGroup:
    """A directory's names in the order of their bytes, with a stamp for each."""

    __slots__ = ("_names", "_stamps")

    def __init__(self, names: list[bytes], stamps: bytes) -> None:
        self._names = names
        self._stamps = bytearray(stamps)

    def pack(self, path: bytes) -> list[bytes]:
        text = b"\0".join(self._names)
        return [_GROUP.pack(len(path), len(text), len(self._names)), path, text, bytes(self._stamps)]

    def names(self) -> list[str]:
        return [os.fsdecode(name) for name in self._names]

    def of_all(self) -> dict[str, bytes | None]:
        """Return the names with their stamps."""
        return dict(zip(self.names(), cut(self._stamps), strict=True))

    def changed_here(self) -> dict[str, bytes | None]:
        """Return the names whose stamp in the working directory differs, each with the stamp that was known."""
        now = stamps_here(self._names)
        return {os.fsdecode(self._names[at]): _stamp_at(self._stamps, at) for at in _differing(self._stamps, now)}

    def changed_among(self, names: list[str]) -> dict[str, bytes | None]:
        """Return which of `names`, all existing now, have changed, as `changed_here` does."""
        known = self.of_all()
        found = zip(names, cut(stamps_here([os.fsencode(name) for name in names])), strict=True)
        return {name: known.get(name) for name, stamp in found if known.get(name) != stamp}

    def change(self, changes: Mapping[str, bytes | None]) -> None:
        """Take new stamps of some names; None means that the name is gone."""
        if len(changes) > _FEW:
            whole = {os.fsencode(name): stamp for name, stamp in (self.of_all() | dict(changes)).items()}
            self._names = sorted([name for name, stamp in whole.items() if stamp is not None])
            self._stamps = bytearray(b"".join([whole[name] or b"" for name in self._names]))
            return
        for name, stamp in changes.items():
            self._change(os.fsencode(name), stamp)

    def _change(self, name: bytes, stamp: bytes | None) -> None:
        at = _place(self._names, name)
        there = at < len(self._names) and self._names[at] == name
        if there and stamp is None:
            del self._names[at]
        elif not there and stamp is not None:
            self._names.insert(at, name)
        self._stamps[at * STAMP.size : (at + there) * STAMP.size] = stamp or b""


def _place(names: list[bytes], name: bytes) -> int:
    """Return where a name is or would be. Not by `bisect`: this code also runs where few modules are."""
    low = 0
    high = len(names)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if names[middle] < name else (low, middle)
    return low


def _stamp_at(stamps: bytes | bytearray, at: int) -> bytes:
    return bytes(stamps[at * STAMP.size : (at + 1) * STAMP.size])


def _differing(old: bytes | bytearray, new: bytes) -> Iterator[int]:
    """Return the positions of stamps that differ. Mostly few do, so many are compared at once."""
    block = _TOGETHER * STAMP.size
    for start in range(0, len(old), block):
        if old[start : start + block] != new[start : start + block]:
            first = start // STAMP.size
            for at in range(first, min(first + _TOGETHER, len(old) // STAMP.size)):
                if _stamp_at(old, at) != _stamp_at(new, at):
                    yield at


class Memory:
    """The groups of all directories, by their paths below the workspace; None before the first look."""

    def __init__(self, groups: dict[str, NameGroup] | None = None) -> None:
        self.groups = groups if groups is not None else {}

    def follow(self, told: Mapping[str, tuple[bool, bytes]], gone: Iterable[str]) -> None:
        """Take in what the next look found.

        That is, for each path, whether it is a directory, and its stamp; and the paths that are gone.
        """
        changes: dict[str, dict[str, bytes | None]] = {}
        self.groups.setdefault("", NameGroup([], b""))
        for path in gone:
            self.groups.pop(path, None)
            above, _, name = path.rpartition("/")
            changes.setdefault(above, {})[name] = None
        for path, (is_directory, stamp) in told.items():
            if is_directory:
                self.groups.setdefault(path, NameGroup([], b""))
            else:
                self.groups.pop(path, None)
            above, _, name = path.rpartition("/")
            changes.setdefault(above, {})[name] = stamp
        for path, some in changes.items():
            if path in self.groups:  # otherwise it went with the directory around it
                self.groups[path].change(some)

    def directories(self) -> dict[str, list[str]]:
        """Return for each directory the names of its subdirectories."""
        found: dict[str, list[str]] = {path: [] for path in self.groups}
        for path in self.groups:
            above, _, name = path.rpartition("/")
            if name:
                found[above].append(name)
        return found


def pack(memory: Memory, digests: list[str], *, links: bool, top: bytes) -> bytes:
    """Return a message to the worker. A worker that stayed remembers, and gets an empty `memory`."""
    parts = [b"", _HEAD.pack(len(memory.groups), links, top)]
    for path, group in memory.groups.items():
        parts += group.pack(os.fsencode(path))
    parts.append("".join(digests).encode())
    parts[0] = SIZE.pack(sum([len(part) for part in parts]))
    return b"".join(parts)


class StampsMessage:
    """A message to the worker, as the worker reads it."""

    def __init__(self, data: bytes) -> None:
        count, self.links, self.top = _HEAD.unpack_from(data)
        at = _HEAD.size
        groups: dict[str, NameGroup] = {}
        for _ in range(count):
            path, names, entries = _GROUP.unpack_from(data, at)
            at += _GROUP.size
            ends = [at + path, at + path + names, at + path + names + entries * STAMP.size]
            text = data[ends[0] : ends[1]]
            groups[os.fsdecode(data[at : ends[0]])] = NameGroup(
                text.split(b"\0") if entries else [], data[ends[1] : ends[2]]
            )
            at = ends[2]
        self.memory = Memory(groups)
        self._digests = data[at:]
        self._set: frozenset[str] | None = None

    @property
    def holds_any(self) -> bool:
        return bool(self._digests)

    def holds(self, digest: str) -> bool:
        """Return whether the host has that content."""
        if self._set is None:
            text = self._digests.decode()
            self._set = frozenset([text[at : at + DIGEST] for at in range(0, len(text), DIGEST)])
        return digest in self._set


def cut(stamps: bytes | bytearray) -> list[bytes]:
    whole = bytes(stamps)
    return [whole[at : at + STAMP.size] for at in range(0, len(whole), STAMP.size)]


def stamp(info: os.stat_result) -> bytes:
    return STAMP.pack(*_facts(info))


def stamps_here(names: list[bytes]) -> bytes:
    """Return the stamps of names in the working directory, which is the fastest way.

    Raise OSError when a name is gone.
    """
    parts = []
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]
        parts.append(struct.pack(f">{2 * len(some)}Q", *chain.from_iterable(map(_facts, map(os.lstat, some)))))
    return b"".join(parts)
