"""Take the files of a sandbox: the result of one look, what is remembered for the next look, and the restore.

The worker inside that looks is hostile: `ringfence.wire.snapshot_records` parses what it sends, and here every row is
checked and all content hashed. A digest from inside is accepted only for content that this very sandbox has sent or was
given: a guest that could name any digest could fetch another sandbox's files by it.

What the host remembers of a sandbox between two looks makes the next look cost only what changed. The guest makes the
stamps: they are given back to the next worker inside, and no other code reads them.
"""

from __future__ import annotations

from ringfence.errors import SnapshotError
from ringfence.shared import fast_stdlib, stamps
from ringfence.shared.paths import is_below
from ringfence.shared.stamps import AGAIN, DATA, END, ENTRY, GONE, UNKNOWN, Memory
from ringfence.snapshots.content import Holder, Writer
from ringfence.snapshots.manifest import (
    DIGEST_CHARACTERS,
    Manifest,
    ManifestCaps,
    ManifestEntry,
    entry,
    names_too_long,
    refused,
    text_of,
    too_large,
)
from ringfence.text import in_quotes
from ringfence.wire import snapshot_records as records
from ringfence.wire.frames import WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ringfence.snapshots.content import ContentStore
    from ringfence.snapshots.manifest import ManifestCaps, ManifestEntry

_SMALL = 1 << 16  # a file up to this size is sent again rather than its digest to the worker
_PIECE = 1 << 16  # bytes of orders that are sent at once


class Look:
    """The result of a look: the tree, and the differences from the tree that the look began with."""

    def __init__(
        self, before: Manifest, reported: Mapping[str, ManifestEntry], gone: set[str], caps: ManifestCaps
    ) -> None:
        """Make the tree. Raise SnapshotError when the entries are no tree."""
        self.manifest = before.patched(reported, gone, caps)
        self.gone = gone
        self.stamps: Mapping[str, bytes] = {}  # the stamp of every entry that was reported
        self.top = UNKNOWN
        old = [before.by_path[path] for path in (*gone, *reported) if path in before.by_path]
        self.added = {made.text for made in reported.values() if made.kind == "f" and made.text not in before.digests}
        self.removed = {made.text for made in old if made.kind == "f" and made.text not in self.manifest.digests}

    def content(self, holder: Holder) -> Holder:
        """Change a holder of the content of the tree before into a holder of the content of the tree that was found."""
        holder.change(self.added, self.removed)
        return holder


class Lineage:
    """The files of one sandbox when the host last looked, and the content that this sandbox may name."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.manifest = Manifest(())
        self.exact = False  # whether the sandbox may name exactly the content of that tree
        self._memory = Memory()
        self._top = UNKNOWN

    def close(self) -> None:
        self.holder.close()

    def known(self) -> bytes:
        """Return what a new worker gets on its standard input."""
        return self._packed(self._memory)

    def known_to_stayed_worker(self) -> bytes:
        return self._packed(Memory())

    def _packed(self, memory: Memory) -> bytes:
        return stamps.pack(memory, self._digests_to_report(), links=bool(self.manifest.links), top=self._top)

    def _digests_to_report(self) -> list[str]:
        """Return the digests of content that the worker need not send.

        When few files changed, small ones are sent anyway.
        """
        if not self._memory.groups:
            return self.holder.digests()
        return [digest for digest, size in self.manifest.digests.items() if size > _SMALL and digest in self.holder]

    def follow(self, look: Look, holder: Holder | None = None) -> None:
        """Remember the result of a look that began with what is remembered now; two looks never overlap.

        `holder`: the content that the sandbox may name from now on; without it, that is the content of the tree found.
        """
        self.manifest = look.manifest
        self._top = look.top
        kinds = look.manifest.by_path
        self._memory.follow({path: (kinds[path].kind == "d", s) for path, s in look.stamps.items()}, look.gone)
        if holder is not None:
            self.holder.close()
            self.holder = holder
            self.exact = False
            # A file whose content the sandbox may not name has to be sent again.
            unnamed = [made.path for made in self.manifest.entries if made.kind == "f" and made.text not in holder]
            self._memory.follow(dict.fromkeys(unnamed, (False, UNKNOWN)), ())
        elif self.exact:
            look.content(self.holder)
        else:
            self.holder.become(self.manifest.digests)
            self.exact = True


class Taking:
    """One look at a sandbox's files: `feed` what the worker writes until `done`, then `finish`, and `close` at any end.

    A look begins with what `lineage` remembers, and holds the content that was sent until the look is closed.
    """

    def __init__(
        self, store: ContentStore, caps: ManifestCaps, lineage: Lineage, *, contents: bool, others: bool = False
    ) -> None:
        """Begin a look.

        `others`: the tree began as a copy of a folder of the host, so it has files of other owners too.
        """
        self._caps = caps
        self._contents = contents  # False for digests alone, which only `orders` believes
        self._others = others
        self._lineage = lineage
        self._before = lineage.manifest
        self._own = Holder(store)
        self._copy: Holder | None = None
        self._reported: dict[str, ManifestEntry] = {}
        self._stamps: dict[str, bytes] = {}
        self._gone: set[str] = set()
        self._reader = records.RecordReader()
        self._pending: tuple[ManifestEntry, bytes] | None = None  # a file whose content is being sent
        self._writer: Writer | None = None
        self._bytes = 0
        self._text = 0
        self._top = UNKNOWN
        self._problem: SnapshotError | None = None
        self.done = False

    def args(self, *, stays: bool) -> dict[str, object]:
        return {"contents": self._contents, "bytes": self._caps.bytes, "stays": stays, "others": self._others}

    def known(self, *, stayed: bool) -> bytes:
        """Return the worker's standard input. `stayed`: the worker took the last look too, and remembers the result."""
        return self._lineage.known_to_stayed_worker() if stayed else self._lineage.known()

    def prepare(self) -> None:
        """Do the work that is possible while the worker looks."""
        if self._contents and self._lineage.exact:
            self._copy = self._lineage.holder.copy()

    # what comes from inside

    def feed(self, data: bytes) -> None:
        """Take in what the worker wrote. Raises SnapshotError at the first thing that no honest worker sends."""
        try:
            for kind, payload in self._reader.feed(data):
                self._record(kind, payload)
        except WireError as error:
            raise refused(str(error)) from None

    def _record(self, kind: bytes, payload: bytes) -> None:
        if kind == DATA:
            self._content(payload)
        elif kind == END:
            self._whole_file()
        elif kind == AGAIN:
            self._take_back()
        elif kind == ENTRY:
            self._entry(*self._reader.scanned(payload))
        elif kind == GONE:
            self._names_gone(records.names_gone(payload))
        else:
            self._end(records.report(payload))

    def _entry(self, row: list[object], stamp: bytes, sends: bool) -> None:  # arguments in the reader's order
        made = entry([*row[:-1], "0" * DIGEST_CHARACTERS] if sends else row)
        if sends and not self._contents:
            raise refused("content that was not asked for")
        self._count(made)
        if sends:
            self._pending = (made, stamp)
            self._writer = Writer(self._own.store, made.size)
            return
        if made.kind == "f" and not self._may_name(made.text):
            if self._contents:
                raise refused("content that this sandbox never had")
            stamp = UNKNOWN  # the next worker has to send the file
        elif made.kind == "f" and self._own.store.size_of(made.text) != made.size:
            raise refused(f"{made.path!r} with another size than its content")
        self._add(made, stamp)

    def _may_name(self, digest: str) -> bool:
        return digest in self._lineage.holder or digest in self._own

    def _count(self, made: ManifestEntry) -> None:
        self._bytes += made.size
        if self._bytes > self._caps.bytes:
            raise too_large(f"its files have more than limits.disk = {self._caps.bytes:,} bytes, holes counted")
        if len(self._reported) > 2 * self._caps.files:
            raise too_large(f"it has more than limits.disk_files = {self._caps.files:,} names")
        self._text += text_of(made)
        if self._text > self._caps.text:
            raise names_too_long(self._caps)

    def _content(self, payload: bytes) -> None:
        assert self._pending is not None
        assert self._writer is not None
        if self._writer.size + len(payload) > self._pending[0].size:
            raise refused("more content than the file's size")
        self._writer.write(payload)

    def _whole_file(self) -> None:
        assert self._pending is not None
        assert self._writer is not None
        made, stamp = self._pending
        if self._writer.size != made.size:
            raise refused("less content than the file's size")
        digest = self._own.commit(self._writer)
        self._pending = self._writer = None
        self._add(made._replace(text=digest), stamp)

    def _take_back(self) -> None:
        """Forget a file whose content changed during the worker's read. The worker reports the file again."""
        assert self._pending is not None
        assert self._writer is not None
        self._bytes -= self._pending[0].size
        self._writer.drop()
        self._pending = self._writer = None

    def _add(self, made: ManifestEntry, stamp: bytes) -> None:
        if made.path in self._reported:
            raise refused("a name twice")
        self._reported[made.path] = made
        self._stamps[made.path] = stamp

    def _names_gone(self, names: list[object]) -> None:
        for name in names:
            if not isinstance(name, str) or name not in self._before.by_path:
                raise refused("a name that was not asked for")
            self._gone.add(name)

    def _end(self, said: dict[str, object]) -> None:
        self.done = True
        self._problem = problem(said)
        if self._problem is None:
            self._top = records.stamp(said.get("top"))

    # the end

    def finish(self) -> Look:
        """Return what was reported as a tree. Raises SnapshotError, also for what the worker says it cannot keep."""
        if self._problem is not None:
            raise self._problem
        try:
            self._reader.finish()
        except WireError as error:
            raise refused(str(error)) from None
        if self._gone & self._reported.keys():
            raise refused("a name that is there and gone")
        look = Look(self._before, self._reported, self._gone, self._caps)
        look.stamps = self._stamps
        look.top = self._top
        return look

    def content(self, look: Look) -> Holder:
        """Return a holder of the content that the found tree needs; the caller closes it."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            return look.content(copy)
        holder = Holder(self._own.store)
        holder.hold_all(look.manifest.digests)
        return holder

    def follow(self, look: Look, holder: Holder | None = None) -> None:
        """Have the lineage remember the look: see `Lineage.follow`."""
        self._lineage.follow(look, holder)

    def close(self) -> None:
        """Drop all content that the caller has not taken."""
        if self._writer is not None:
            self._writer.drop()
        if self._copy is not None:
            self._copy.close()
        self._own.close()


PROBLEMS = {
    "moving": ("{} changed each time it was read", "stop what writes it, then take the snapshot again"),
    "large": ("{} is larger than limits.disk, holes counted", "remove it, or raise the limit"),
    "long": ("{}… is a longer path than can be kept", "remove it"),
}


def problem(report: dict[str, object]) -> SnapshotError | None:
    """Return the error for what the worker says it cannot keep, or None."""
    said = report.get("problem")
    if not isinstance(said, str) or said not in PROBLEMS:
        return None
    text, fix = PROBLEMS[said]
    return SnapshotError(text.format(in_quotes(str(report.get("path"))[:300])), code=f"snapshot-{said}", fix=fix)


# ── the way back ─────────────────────────────────────────────────────────────────────────────────


def orders(now: Manifest | None, wanted: Manifest, store: ContentStore) -> Iterator[bytes]:
    """Yield the worker's standard input for turning a tree into another, touching only what differs.

    `now` is None when no look could report the files. Then everything is removed first.
    """
    pending = bytearray()
    if now is None:
        pending += records.order(fast_stdlib.dumps({"do": "clear", "path": ""}))
    for order, content in _steps(now or Manifest(()), wanted):
        pending += records.order(fast_stdlib.dumps(order))
        if content is not None:
            for chunk in store.read(content.text, content.size):
                for record in records.content(chunk):
                    pending += record
                    if len(pending) >= _PIECE:
                        yield bytes(pending)
                        pending.clear()
            pending += records.content_end()
        if len(pending) >= _PIECE:
            yield bytes(pending)
            pending.clear()
    yield bytes(pending)


def _steps(now: Manifest, wanted: Manifest) -> Iterator[tuple[dict[str, object], ManifestEntry | None]]:
    remade = _remade(now, wanted)
    gone = [made for made in now.entries if made.path not in wanted.by_path or made.path in remade]
    touched = _touched([made.path for made in gone], remade)
    for made in now.entries:  # parents first: below a folder without rights nothing can be opened
        if made.kind == "d" and made.path in touched and made.mode & 0o700 != 0o700:
            yield {"do": "open", "path": made.path}, None
    for made in _topmost(gone):
        yield {"do": "remove", "path": made.path}, None
    for made in wanted.entries:
        if made.path in remade and made.kind != "h":
            yield _making(made), made if made.kind == "f" else None
        elif made.kind == "f" and _facts(now.by_path[made.path]) != _facts(made):
            yield {"do": "facts", **_facts(made)}, None
    for made in wanted.entries:
        if made.path in remade and made.kind == "h":
            yield {"do": "link", "path": made.path, "target": made.text}, None
    for made in reversed(wanted.entries):  # the deepest first, after all changes in them
        if made.kind == "d" and (made.path in touched or now.by_path.get(made.path) != made):
            yield {"do": "facts", **_facts(made)}, None


def _making(made: ManifestEntry) -> dict[str, object]:
    if made.kind == "d":
        return {"do": "mkdir", "path": made.path}
    if made.kind == "l":
        return {"do": "symlink", "path": made.path, "target": made.text, "mtime_ns": made.mtime_ns}
    return {"do": "file", **_facts(made)}


def _facts(made: ManifestEntry) -> dict[str, object]:
    return {"path": made.path, "mode": made.mode, "mtime_ns": made.mtime_ns}


def _remade(now: Manifest, wanted: Manifest) -> set[str]:
    """Return the names to make anew: what is missing or has another kind, content or target, and all names of such a
    file."""
    remade: set[str] = set()
    for made in wanted.entries:
        old = now.by_path.get(made.path)
        kept = old is not None and (old.kind, old.text) == (made.kind, made.text)
        if kept and made.kind == "l":
            kept = old == made  # the time of a link cannot be set alone
        if not kept or (made.kind == "h" and made.text in remade):
            remade.add(made.path)
    # A further name may come before the first name.
    return remade | {made.path for made in wanted.entries if made.kind == "h" and made.text in remade}


def _touched(gone: list[str], remade: set[str]) -> set[str]:
    """Return the directories in which a name is removed or made, and all directories above."""
    found: set[str] = set()
    for path in (*gone, *remade):
        parent = path.rpartition("/")[0]
        while parent and parent not in found:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return found


def _topmost(gone: list[ManifestEntry]) -> Iterator[ManifestEntry]:
    """Yield the entries that are not removed together with a directory above."""
    last = "\0"
    for made in gone:
        if not is_below(made.path, last):
            yield made
            if made.kind == "d":
                last = made.path
