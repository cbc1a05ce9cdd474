"""Content by its digest, on the host: in one file without a name, counted by holders, hashed again whenever it is read.

The file belongs to this process and is on no path, so that nothing is left of it however the process ends. What nobody
holds is given back to the file system at once; with the last of it the file goes too.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter

from ringfence.errors import SnapshotError
from ringfence.shared import syscalls
from ringfence.snapshots.manifest import hasher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    Piece: TypeAlias = tuple[int, int]  # offset, size

_CHUNK = 1 << 18
_INLINE = 1 << 18  # collected in memory: most files are smaller, and many are there already
_BLOCK = 4096  # each piece begins at one, so that what is released can be given back


class Store:
    """Safe from several threads. In a fork of its process it can be read while the parent lives, and no more."""

    def __init__(self, directory: str | None = None) -> None:
        """`directory`: on a disk with room for content; without, the state directory of this user."""
        self._directory = directory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pieces: dict[str, Piece] = {}
        self._holders: Counter[str] = Counter()
        self._writing = 0
        self._fd = -1
        self._inode = (0, 0)
        self._end = 0

    def hold_all(self, digests: Iterable[str]) -> set[str]:
        """Keep these until `release`. Returns those that are there."""
        with self._lock:
            there = self._pieces.keys() & digests
            self._holders.update(there)
            return there

    def release(self, digests: Iterable[str]) -> None:
        """Whoever lets go last removes it."""
        with self._lock:
            for digest in digests:
                self._holders[digest] -= 1
                if not self._holders[digest]:
                    del self._holders[digest]
                    self._give_back(*self._pieces.pop(digest))
            self._close_when_empty()

    def put(self, digest: str, offset: int, size: int) -> bool:
        """What was written there. It is held by the caller. False: it is there already, and that one is held."""
        with self._lock:
            new = digest not in self._pieces
            if new:
                self._pieces[digest] = (offset, size)
            self._holders[digest] += 1
            return new

    def size_of(self, digest: str) -> int | None:
        """None: it is not there."""
        piece = self._pieces.get(digest)
        return None if piece is None else piece[1]

    def has(self, digest: str) -> bool:
        return digest in self._pieces

    # the file

    def begin(self, size: int) -> int:
        """Room for so many bytes: its offset. To be ended with `done`, whatever comes of it."""
        with self._lock:
            self._check_owner()
            if self._fd < 0:
                self._fd = syscalls.open_nameless(self._directory or _state_directory())
                info = os.fstat(self._fd)
                self._inode, self._end = (info.st_dev, info.st_ino), 0
            offset, self._end = self._end, self._end + -(-size // _BLOCK) * _BLOCK
            self._writing += 1
            return offset

    def write(self, data: bytes | bytearray, offset: int) -> None:
        self._check_file()
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def done(self, unused: tuple[int, int] | None) -> None:
        """After `begin`. `unused`: offset and size of what was written in vain."""
        with self._lock:
            self._writing -= 1
            if unused is not None:
                self._give_back(*unused)
            self._close_when_empty()

    def read(self, digest: str, size: int) -> Iterator[bytes]:
        """The content, in pieces. Raises SnapshotError when a byte of it differs; small content is looked at first."""
        piece = self._pieces.get(digest)
        if piece is None or piece[1] != size:
            raise gone()
        whole = hasher()
        for start in range(0, size, _CHUNK):
            self._check_file()
            chunk = os.pread(self._fd, min(_CHUNK, size - start), piece[0] + start)
            whole.update(chunk)
            if start + _CHUNK >= size and whole.hexdigest() != digest:
                raise SnapshotError(
                    "content of the snapshot was changed on the host's disk",
                    code="snapshot-damaged",
                    fix="take a new one",
                )
            yield chunk

    def _give_back(self, offset: int, size: int) -> None:
        if self._fd < 0 or not size or os.getpid() != self._pid:
            return
        self._check_file()
        try:
            syscalls.punch_hole(self._fd, offset, -(-size // _BLOCK) * _BLOCK)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise  # without holes in files the room comes back with the end of all content

    def _close_when_empty(self) -> None:
        if not self._pieces and not self._writing and self._fd >= 0:
            self._check_file()
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise gone()

    def _check_file(self) -> None:
        """A caller that closes what it did not open gave our number to another file: never write there."""
        try:
            info = os.fstat(self._fd)
        except OSError:
            raise gone() from None
        if (info.st_dev, info.st_ino) != self._inode:
            raise gone()


def gone() -> SnapshotError:
    return SnapshotError("content of the snapshot is gone", code="snapshot-gone", fix="take a new one")


def _state_directory() -> str:
    from ringfence.host import state

    return state.disk_directory("snapshots")


class Writer:
    """One piece of content on its way into a store. Ends with `commit` or `drop`."""

    def __init__(self, store: Store, size: int) -> None:
        """`size`: what it will have, at most."""
        self._store = store
        self._most = size
        self._hash = hasher()
        self._data = bytearray()
        self._offset = -1
        self._written = 0
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > self._most:
            raise ValueError("more content than was said")
        self._hash.update(data)
        self._data += data
        if len(self._data) > _INLINE:
            self._spill()

    def _spill(self) -> None:
        if self._offset < 0:
            self._offset = self._store.begin(self._most)
        self._store.write(self._data, self._offset + self._written)
        self._written += len(self._data)
        self._data = bytearray()

    def commit(self) -> str:
        """Its digest. It is held by the caller."""
        digest = self._hash.hexdigest()
        if self._offset < 0 and self._store.hold_all([digest]):
            return digest
        self._spill()
        new = self._store.put(digest, self._offset, self.size)
        self._store.done(None if new else (self._offset, self._written))
        return digest

    def drop(self) -> None:
        """Forget it."""
        if self._offset >= 0:
            self._store.done((self._offset, self._most))  # a write that failed may have written a part
            self._offset = -1


class Holder:
    """Content that one snapshot or sandbox needs. What nobody holds is removed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._digests: set[str] = set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def digests(self) -> list[str]:
        with self._lock:
            return list(self._digests)

    def copy(self) -> Holder:
        other = Holder(self.store)
        with self._lock:
            other._digests = self.store.hold_all(self._digests)
        return other

    def hold_all(self, digests: Iterable[str]) -> None:
        """Raises SnapshotError when one is not there; then it holds none of them."""
        wanted = set(digests)
        with self._lock:
            wanted -= self._digests
            there = self.store.hold_all(wanted)
            if there != wanted:
                self.store.release(there)
                raise gone()
            self._digests |= there

    def commit(self, writer: Writer) -> str:
        digest = writer.commit()
        with self._lock:
            if digest in self._digests:
                self.store.release([digest])  # once is enough
            self._digests.add(digest)
        return digest

    def change(self, added: set[str], removed: set[str]) -> None:
        """Hold some more, which are there, and some no longer."""
        with self._lock:
            new = self.store.hold_all(added - self._digests)
            unneeded = removed & self._digests
            self._digests |= new
            self._digests -= unneeded
        if unneeded:
            self.store.release(unneeded)

    def become(self, digests: Iterable[str]) -> None:
        """Hold these, as far as they are there, and no others."""
        wanted = set(digests)
        with self._lock:
            unneeded = self._digests - wanted
            self._digests = (self._digests & wanted) | self.store.hold_all(wanted - self._digests)
        if unneeded:
            self.store.release(unneeded)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        with self._lock:
            unneeded, self._digests = self._digests, set()
        if unneeded:
            self.store.release(unneeded)


_stores: dict[int, Store] = {}  # of this process; after a fork another one
_stores_lock = threading.Lock()


def own_store() -> Store:
    """The store of this process."""
    with _stores_lock:
        found = _stores.get(os.getpid())
        if found is None:
            _stores.clear()
            found = _stores[os.getpid()] = Store()
        return found
