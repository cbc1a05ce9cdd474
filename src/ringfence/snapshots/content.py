"""Content by digest, on the host: in a file without a name, counted by holders, hashed again at each read.

The file belongs to this process and has no path, so that the kernel frees it however the process ends. Content that
has no holder is given back to the file system at once; the file is closed with the last content.
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
_INLINE = 1 << 18  # collected in memory up to this size: most files are smaller, and the store has many of them already
_BLOCK = 4096  # each piece begins at a block, so that its room can be given back


class ContentStore:
    """Content by digest. Safe from several threads.

    A fork of the process can read it while the parent lives, and no more.
    """

    def __init__(self, directory: str | None = None) -> None:
        """Make an empty store.

        `directory`: on a disk with room for content; without it, the state directory of this user.
        """
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
        """Keep content until `release`. Return the digests that the store has."""
        with self._lock:
            there = self._pieces.keys() & digests
            self._holders.update(there)
            return there

    def release(self, digests: Iterable[str]) -> None:
        """Drop one hold on each digest. Content without a holder is removed."""
        with self._lock:
            for digest in digests:
                self._holders[digest] -= 1
                if not self._holders[digest]:
                    del self._holders[digest]
                    self._give_back(*self._pieces.pop(digest))
            self._close_when_empty()

    def put(self, digest: str, offset: int, size: int) -> bool:
        """Add content that was written at `offset`, held by the caller.

        Return False when the store had the content already; the caller then holds the stored content.
        """
        with self._lock:
            new = digest not in self._pieces
            if new:
                self._pieces[digest] = (offset, size)
            self._holders[digest] += 1
            return new

    def size_of(self, digest: str) -> int | None:
        """Return the size of content, or None when the store does not have it."""
        piece = self._pieces.get(digest)
        return None if piece is None else piece[1]

    def has(self, digest: str) -> bool:
        return digest in self._pieces

    # the file

    def begin(self, size: int) -> int:
        """Reserve room for `size` bytes and return its offset. Call `done` afterwards, whatever happens."""
        with self._lock:
            if os.getpid() != self._pid:
                raise gone()
            if self._fd < 0:
                from ringfence.host import state

                self._fd = syscalls.open_nameless(self._directory or state.disk_directory("snapshots"))
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
        """End what `begin` began. `unused`: offset and size of room that is not needed."""
        with self._lock:
            self._writing -= 1
            if unused is not None:
                self._give_back(*unused)
            self._close_when_empty()

    def read(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the content in pieces.

        Raise SnapshotError when a byte differs; small content is checked before it is yielded.
        """
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
                raise  # a file system without holes in files gets the room back when the file is closed

    def _close_when_empty(self) -> None:
        if not self._pieces and not self._writing and self._fd >= 0:
            self._check_file()
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _check_file(self) -> None:
        """Raise SnapshotError when the descriptor's number is another file's: a caller closed what it did not open.

        That file must never be written.
        """
        try:
            info = os.fstat(self._fd)
        except OSError:
            raise gone() from None
        if (info.st_dev, info.st_ino) != self._inode:
            raise gone()


def gone() -> SnapshotError:
    return SnapshotError("content of the snapshot is gone", code="snapshot-gone", fix="take a new one")


class Writer:
    """One piece of content that is being written into a store. Ends with `commit` or `drop`."""

    def __init__(self, store: ContentStore, size: int) -> None:
        """Begin a piece of content of at most `size` bytes."""
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
            raise ValueError("more content than its declared size")
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
        """Return the digest of the content, which the caller now holds."""
        digest = self._hash.hexdigest()
        if self._offset < 0 and self._store.hold_all([digest]):
            return digest
        self._spill()
        new = self._store.put(digest, self._offset, self.size)
        self._store.done(None if new else (self._offset, self._written))
        return digest

    def drop(self) -> None:
        """Drop what was written."""
        if self._offset >= 0:
            self._store.done((self._offset, self._most))  # a write that failed may have written a part
            self._offset = -1


class Holder:
    """The content that one snapshot or sandbox needs. Content without a holder is removed."""

    def __init__(self, store: ContentStore) -> None:
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
        """Hold all these digests. When the store lacks a digest, hold nothing and raise SnapshotError."""
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
                self.store.release([digest])  # the holder holds each digest once
            self._digests.add(digest)
        return digest

    def change(self, added: set[str], removed: set[str]) -> None:
        """Hold some more digests that the store has, and drop some others."""
        with self._lock:
            new = self.store.hold_all(added - self._digests)
            unneeded = removed & self._digests
            self._digests |= new
            self._digests -= unneeded
        if unneeded:
            self.store.release(unneeded)

    def become(self, digests: Iterable[str]) -> None:
        """Hold exactly `digests`, as far as the store has them."""
        wanted = set(digests)
        with self._lock:
            unneeded = self._digests - wanted
            self._digests = (self._digests & wanted) | self.store.hold_all(wanted - self._digests)
        if unneeded:
            self.store.release(unneeded)

    def close(self) -> None:
        """Drop everything. Idempotent."""
        with self._lock:
            unneeded, self._digests = self._digests, set()
        if unneeded:
            self.store.release(unneeded)


_stores: dict[int, ContentStore] = {}  # the store of this process, by process number: a fork gets another one
_stores_lock = threading.Lock()


def own_store() -> ContentStore:
    """Return the store of this process."""
    with _stores_lock:
        found = _stores.get(os.getpid())
        if found is None:
            _stores.clear()
            found = _stores[os.getpid()] = ContentStore()
        return found
