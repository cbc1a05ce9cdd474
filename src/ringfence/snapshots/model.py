"""A snapshot of a sandbox's files: the object that a caller holds, the differences from another, the file form."""

from __future__ import annotations

import os
import stat
import struct
from typing import Literal, NamedTuple

from ringfence.errors import SnapshotError
from ringfence.policy import host_paths
from ringfence.records import Change
from ringfence.shared import fast_stdlib, syscalls
from ringfence.snapshots.content import Holder, Writer, own_store
from ringfence.snapshots.manifest import Manifest, caps_of, check_digest, entry, hasher
from ringfence.text import bare_or_in_quotes, in_quotes
from ringfence.values import Struct, final, put
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from typing import BinaryIO, Self

    from ringfence.backends.contract import Outlet, SessionMemory
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.snapshots.content import ContentStore
    from ringfence.snapshots.manifest import ManifestEntry
    from ringfence.values import HostPath, MountMode


@final
class Snapshot(Struct):
    """The files of a sandbox at one moment and, with `memory`, the sessions. Bound to backend, image and policy.

    A snapshot lives as long as its manager or process; `export()` keeps it.
    """

    id: str
    created_at: datetime
    memory: bool
    size_bytes: int
    digest: str
    policy_digest: str
    _bound: str = ""
    _manifest: Manifest | None = None
    _holder: Holder | None = None
    _sessions: tuple[SessionImage, ...] = ()

    def diff(self, other: Snapshot) -> tuple[Change, ...]:
        """Return what changed from this snapshot to `other`.

        A different time is no change; text has a unified diff, up to a cap.
        """
        if not isinstance(other, Snapshot):
            raise TypeError(f"other is a Snapshot, not {type(other).__name__}")
        return changes(self._tree(), other._tree())

    def export(self, path: HostPath) -> None:
        """Write the whole snapshot to one file. A file at `path` is replaced as a whole or not at all."""
        if self.memory:
            raise SnapshotError(
                f"snapshot {self.id} holds memory, which belongs to this process and cannot leave it",
                code="snapshot-memory",
                fix="box.snapshot() keeps the files alone, and can be exported",
            )
        manifest, store = self._tree()
        header: dict[str, object] = {
            "id": self.id,
            "created_us": round(self.created_at.timestamp() * 1_000_000),
            "policy_digest": self.policy_digest,
            "bound": self._bound,
            "digest": self.digest,
        }
        write_file(os.fspath(path), header, manifest, store)

    def delete(self) -> None:
        """Remove content that nothing else needs from the host. Idempotent."""
        if self._holder is not None:
            self._holder.close()
            put(self, "_manifest", None)
        for session in self._sessions:
            session.memory.close()

    @classmethod
    def load(cls, path: HostPath) -> Self:
        """Return the snapshot in a file. Raise SnapshotError when a byte differs from the digest."""
        header, manifest, holder = read_file(os.fspath(path), own_store())
        stamp = header["created_us"]
        assert isinstance(stamp, int)
        return _new_snapshot(
            cls, str(header["id"]), stamp, str(header["bound"]), str(header["policy_digest"]), manifest, holder
        )

    def _tree(self) -> SnapshotTree:
        if self._manifest is None or self._holder is None:
            raise SnapshotError(
                f"snapshot {self.id} was deleted, or belongs to another process",
                code="snapshot-gone",
                fix="take a new one; export() keeps one beyond its process",
            )
        return SnapshotTree(self._manifest, self._holder.store)


def make(manifest: Manifest, holder: Holder, bound: str, policy: Policy) -> Snapshot:
    """Return a snapshot of the tree, which owns `holder` from now on."""
    import time

    stamp = time.time_ns() // 1000
    return _new_snapshot(Snapshot, f"n-{os.urandom(8).hex()}", stamp, bound, policy.digest, manifest, holder)


def with_memory(snapshot: Snapshot, sessions: tuple[SessionImage, ...]) -> Snapshot:
    """Add sessions to a snapshot and return it. The snapshot owns `sessions` from now on."""
    put(snapshot, "memory", True)
    put(snapshot, "size_bytes", snapshot.size_bytes + sum(session.memory.size_bytes for session in sessions))
    put(snapshot, "_sessions", sessions)
    return snapshot


def sessions_of(snapshot: Snapshot) -> tuple[SessionImage, ...]:
    return snapshot._sessions  # noqa: SLF001  # of this module's own class


def outlet_of(snapshot: Snapshot) -> Outlet | None:
    """Return the outlet of the sandbox whose memory a snapshot holds, or None."""
    return next((session.outlet for session in sessions_of(snapshot)), None)


@final
class SessionImage(Struct):
    """A session at one moment."""

    name: str
    count: int  # cells so far: the next cell has the next number
    memory: SessionMemory
    outlet: Outlet | None  # the outlet whose placeholders and trusted roots are in that memory


def _new_snapshot(
    cls: type[Snapshot], number: str, stamp: int, bound: str, policy: str, manifest: Manifest, holder: Holder
) -> Snapshot:
    from datetime import UTC, datetime, timedelta

    made = cls(
        id=number,
        created_at=datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=stamp),
        memory=False,
        size_bytes=manifest.size_bytes,
        digest=manifest.digest(bound),
        policy_digest=policy,
    )
    put(made, "_bound", bound)
    put(made, "_manifest", manifest)
    put(made, "_holder", holder)
    return made


def bound_to(backend: str, image: Image, policy: Policy) -> str:
    """Return the line that binds a snapshot to its backend, image and policy."""
    parts = (image.name, list(image.pip), list(image.apt), list(image.npm), sorted(image.env.items()))
    return fast_stdlib.dumps({"backend": backend, "image": parts, "policy": policy.digest}).decode()


def shares_workspace(policy: Policy) -> bool:
    """Return whether /workspace itself is the host's. No sandbox may keep, set back or copy that workspace."""
    return _workspace_mode(policy) in ("ro", "rw")


def copies_workspace(policy: Policy) -> bool:
    """Return whether /workspace starts as a copy of a folder, and so is not empty in a new sandbox."""
    return _workspace_mode(policy) == "copy"


def _workspace_mode(policy: Policy) -> MountMode | None:
    """Return the mode of the mount at /workspace, or None without such a mount."""
    for mount in policy.mounts:
        target = os.path.normpath(os.fspath(mount.source if mount.target is None else mount.target))
        if target.lstrip("/") == "workspace":
            return mount.mode
    return None


def check_workspace(policy: Policy) -> None:
    """Raise SnapshotError where a rollback would change files of the host."""
    if shares_workspace(policy):
        raise SnapshotError(
            "/workspace is a mount of the host's files, which a snapshot leaves out",
            code="snapshot-mounted",
            fix='mount them with mode "copy", or below /workspace',
        )


def check(snapshot: Snapshot, bound: str, policy: Policy) -> tuple[Manifest, ContentStore]:
    """Return a snapshot's tree and store. Raise SnapshotError when it may not be used under `policy` (K06)."""
    manifest, store = snapshot._tree()  # noqa: SLF001  # of this module's own class
    if snapshot._bound != bound or snapshot.policy_digest != policy.digest:  # noqa: SLF001  # as above
        what = "policy" if snapshot.policy_digest != policy.digest else "backend or image"
        raise SnapshotError(
            f"snapshot {snapshot.id} was taken under another {what}",
            code="snapshot-bound",
            fix=f"use the {what} of the sandbox that it was taken from",
        )
    manifest.check_caps(caps_of(policy.limits))
    return manifest, store


# ── changes from one tree to another; a guest made both, so all work is capped ───────────────────

_MAX_TEXT = 1 << 18  # bytes of one side
_MAX_LINES = 20_000
_MAX_EDITS = 400  # with more edits, all lines from the first to the last difference are shown as replaced
_MAX_DIFFS = 8 << 20  # characters of all diffs together; later changes have no diff
_MAX_STEPS = 5_000_000  # steps over all diffs, some seconds; after that, lines are shown as replaced
_CONTEXT = 3


class SnapshotTree(NamedTuple):
    manifest: Manifest
    store: ContentStore


def changes(before: SnapshotTree, after: SnapshotTree) -> tuple[Change, ...]:
    """Return the changes from one tree to another, sorted by path. A different time is no change.

    Diffs end when they come to 8 Mi characters together.
    """
    found: list[Change] = []
    room, work = _MAX_DIFFS, DiffBudget()
    for path in sorted({*before.manifest.by_path, *after.manifest.by_path}):
        old, new = before.manifest.by_path.get(path), after.manifest.by_path.get(path)
        if old is not None and new is not None and _content(old, before) == _content(new, after):
            continue
        text = _diff(path, (old, before), (new, after), work) if room > 0 else None
        room -= len(text or "")
        kind: Literal["added", "changed", "removed"] = (
            "added" if old is None else "removed" if new is None else "changed"
        )
        found.append(Change(path, kind, _size(old, before), _size(new, after), text))
    return tuple(found)


def _first(made: ManifestEntry, tree: SnapshotTree) -> ManifestEntry:
    """Return the entry that has the content: for a further name of a file, the first name."""
    return tree.manifest.by_path[made.text] if made.kind == "h" else made


def _content(made: ManifestEntry, tree: SnapshotTree) -> tuple[str, int, str]:
    first = _first(made, tree)
    return first.kind, 0 if first.kind == "l" else first.mode, first.text


def _size(made: ManifestEntry | None, tree: SnapshotTree) -> int | None:
    return None if made is None else _first(made, tree).size


def _diff(
    path: str,
    old: tuple[ManifestEntry | None, SnapshotTree],
    new: tuple[ManifestEntry | None, SnapshotTree],
    work: DiffBudget,
) -> str | None:
    """Return the modes where they differ, then the text; None when there is nothing to show as text."""
    lines = _modes(old, new)
    sides = _lines(*old), _lines(*new)
    if sides[0] is None or sides[1] is None:
        return "".join(lines) or None
    if sides[0] != sides[1]:
        lines.append(f"--- {bare_or_in_quotes(f'a/{path}') if old[0] else '/dev/null'}\n")
        lines.append(f"+++ {bare_or_in_quotes(f'b/{path}') if new[0] else '/dev/null'}\n")
        lines += unified(sides[0], sides[1], work)
    return "".join(lines) or None


def _modes(old: tuple[ManifestEntry | None, SnapshotTree], new: tuple[ManifestEntry | None, SnapshotTree]) -> list[str]:
    if old[0] is None or new[0] is None:
        return []
    was, now = _content(old[0], old[1]), _content(new[0], new[1])
    return [] if was[:2] == now[:2] else [f"old mode {_mode(was)}\n", f"new mode {_mode(now)}\n"]


def _mode(content: tuple[str, int, str]) -> str:
    """Return kind and rights as git shows them."""
    return f"{ {'f': 0o100000, 'd': 0o040000, 'l': 0o120000}[content[0]] | content[1]:06o}"


def _lines(made: ManifestEntry | None, tree: SnapshotTree) -> list[str] | None:
    """Return the lines of an entry, or None when it is no text or too large."""
    if made is None:
        return []
    first = _first(made, tree)
    if first.kind == "d":
        return []
    if first.kind == "l":
        return [in_quotes(first.text)[1:-1]]
    if first.size > _MAX_TEXT:
        return None
    data = b"".join(tree.store.read(first.text, first.size))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    lines = _split(text)
    return lines if "\0" not in text and len(lines) <= _MAX_LINES else None


def _split(text: str) -> list[str]:
    """Split at newlines alone: splitlines() also splits at characters that other programs do not take for line ends."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


# ── unified diffs ────────────────────────────────────────────────────────────────────────────────

Edit = tuple[str, str]  # " ", "-" or "+", and the line


class DiffBudget:
    """The steps that are left to find short diffs. A guest chooses how many files there are, and how hard each is."""

    def __init__(self) -> None:
        self.left = _MAX_STEPS


def unified(old: list[str], new: list[str], work: DiffBudget) -> list[str]:
    """Return hunks with three lines around each change. The cost is lines times edits, and edits are capped."""
    edits = _edits(old, new, work)
    out: list[str] = []
    at = 0
    before = {"-": 0, "+": 0}  # lines of either side before the edit `at`
    for start, end in _ranges(edits):
        for mark, _ in edits[at:start]:
            before["-"] += mark != "+"
            before["+"] += mark != "-"
        at = start
        out += _hunk(edits[start:end], before)
    return out


def _ranges(edits: list[Edit]) -> Iterator[tuple[int, int]]:
    """Yield where hunks begin and end: changes with the lines around them; hunks that would touch are joined."""
    start = end = -1
    for number, (mark, _) in enumerate(edits):
        if mark == " ":
            continue
        if end < 0 or number - _CONTEXT > end:
            if end >= 0:
                yield start, end
            start = max(0, number - _CONTEXT)
        end = min(number + _CONTEXT + 1, len(edits))
    if end >= 0:
        yield start, end


def _hunk(inside: list[Edit], before: dict[str, int]) -> list[str]:
    ranges = []
    for side, absent in ("-+", "+-"):
        count = sum(mark != absent for mark, _ in inside)
        ranges.append(f"{before[side] + (count > 0)}" + (f",{count}" if count != 1 else ""))
    lines = [f"@@ -{ranges[0]} +{ranges[1]} @@\n"]
    for mark, line in inside:
        lines.append(f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n")
    return lines


def _edits(old: list[str], new: list[str], work: DiffBudget) -> list[Edit]:
    """Return all edits: equal lines at both ends, between them the shortest edits, or all old then all new lines."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    middle = _shortest(a, b, work)
    if middle is None:
        middle = [("-", line) for line in a] + [("+", line) for line in b]
    same = [(" ", line) for line in old]
    return [*same[:head], *middle, *same[len(old) - tail :]]


def _shortest(a: list[str], b: list[str], work: DiffBudget) -> list[Edit] | None:
    """Return the shortest edits by Myers' greedy algorithm, forward, or None when they are too many.

    The furthest point of each diagonal is kept, to find the way back.
    """
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    for distance in range(min(len(a) + len(b), _MAX_EDITS) + 1):
        if work.left <= 0:
            return None
        trace.append(dict(reach))
        for diagonal in range(-distance, distance + 1, 2):
            down = diagonal == -distance or (diagonal != distance and reach[diagonal - 1] < reach[diagonal + 1])
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y, first = x - diagonal, x
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            work.left -= 1 + x - first
            reach[diagonal] = x
            if x >= len(a) and y >= len(b):
                return _way_back(a, b, trace)
    return None


def _way_back(a: list[str], b: list[str], trace: list[dict[int, int]]) -> list[Edit]:
    x, y = len(a), len(b)
    edits: list[Edit] = []
    for distance in range(len(trace) - 1, -1, -1):
        reach, diagonal = trace[distance], x - y
        down = diagonal == -distance or (diagonal != distance and reach[diagonal - 1] < reach[diagonal + 1])
        from_x = reach[diagonal + 1] if down else reach[diagonal - 1]
        from_y = from_x - (diagonal + 1 if down else diagonal - 1)
        while x > max(from_x, 0) and y > max(from_y, 0) and (x, y) != (from_x + (not down), from_y + down):
            x, y = x - 1, y - 1
            edits.append((" ", a[x]))
        if distance:
            edits.append(("+", b[y - 1]) if down else ("-", a[x - 1]))
            x, y = from_x, from_y
    return edits[::-1]


# ── the file form: a header, the manifest, the content, and a digest of all three ────────────────

# The reader trusts nothing in such a file: it checks first the digest, then each field, then each piece of content
# by its own digest.

MAGIC = b"ringfence snapshot 1\n"
_SIZE = struct.Struct(">Q")
_MAX_HEADER = 1 << 16
_MAX_MANIFEST = 1 << 28
_CHUNK = 1 << 18
_TRAILER = 32
_FIELDS = {"id": str, "created_us": int, "policy_digest": str, "bound": str, "digest": str}


def write_file(path: str, header: dict[str, object], manifest: Manifest, store: ContentStore) -> None:
    """Write a snapshot beside `path`, then rename it: a file that was there is replaced as a whole or not at all.

    The folder is opened once and held open, and no link that a guest could have made leads there (L15).
    """
    folder, name = host_paths.open_parent(path)
    try:
        _write_beside(folder, name, path, _pieces(header, manifest, store))
    finally:
        os.close(folder)


def _write_beside(folder: int, name: str, path: str, pieces: Iterator[bytes]) -> None:
    temporary = f".{name[:50]}.{os.urandom(8).hex()}.part"
    try:
        fd, named = syscalls.open_unnamed_yet(folder, temporary)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    try:
        with open(fd, "wb", buffering=_CHUNK) as file:
            whole = hasher()
            for piece in pieces:
                whole.update(piece)
                file.write(piece)
            file.write(whole.digest())
            file.flush()
            os.fsync(file.fileno())
            if not named:
                os.link(f"/proc/self/fd/{fd}", temporary, dst_dir_fd=folder, follow_symlinks=True)
                named = True
        _put(temporary, name, folder, path)
    except BaseException:
        if named:
            os.unlink(temporary, dir_fd=folder)
        raise


def _put(temporary: str, name: str, folder: int, path: str) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _pieces(header: dict[str, object], manifest: Manifest, store: ContentStore) -> Iterator[bytes]:
    yield MAGIC
    for part in (fast_stdlib.dumps(header), manifest.to_json()):
        yield _SIZE.pack(len(part))
        yield part
    for digest in sorted(manifest.digests):
        yield from store.read(digest, manifest.digests[digest])


def read_file(path: str, store: ContentStore) -> tuple[dict[str, object], Manifest, Holder]:
    """Return header and tree, with the content in `store`.

    When a byte differs, raise SnapshotError and keep nothing.
    """
    fd = host_paths.open_itself(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise _damaged(path, "it is no regular file")
    with open(fd, "rb", buffering=_CHUNK) as file:
        _check_whole(file, info.st_size, path)
        holder = Holder(store)
        try:
            return *_parts(file, info.st_size - _TRAILER, path, holder), holder
        except BaseException:
            holder.close()
            raise


def _check_whole(file: BinaryIO, size: int, path: str) -> None:
    if file.read(len(MAGIC)) != MAGIC:
        raise _damaged(path, "it does not begin like a snapshot")
    whole = hasher()
    whole.update(MAGIC)
    left = size - len(MAGIC) - _TRAILER
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        whole.update(chunk)
        left -= len(chunk)
    if left or file.read(_TRAILER + 1) != whole.digest():
        raise _damaged(path, "its bytes do not match its digest: it was cut short or altered")


def _parts(file: BinaryIO, end: int, path: str, holder: Holder) -> tuple[dict[str, object], Manifest]:
    file.seek(len(MAGIC))
    header = _header(_json(_part(file, _MAX_HEADER, path), path), path)
    said = _json(_part(file, _MAX_MANIFEST, path), path).get("entries")
    if not isinstance(said, list):
        raise _damaged(path, "it has no list of files")
    manifest = Manifest(entry(row) for row in said)
    if manifest.digest(str(header["bound"])) != header["digest"]:
        raise _damaged(path, "its list of files does not match its digest")
    if file.tell() + sum(manifest.digests.values()) != end:
        raise _damaged(path, "it has more or less content than its files")
    for digest in sorted(manifest.digests):
        left = manifest.digests[digest]
        writer = Writer(holder.store, left)
        try:
            while left and (chunk := file.read(min(left, _CHUNK))):
                writer.write(chunk)
                left -= len(chunk)
            found = holder.commit(writer)
        except BaseException:
            writer.drop()
            raise
        if found != digest:
            raise _damaged(path, "content does not match its digest")
    return header, manifest


def _part(file: BinaryIO, most: int, path: str) -> bytes:
    said = file.read(_SIZE.size)
    size = _SIZE.unpack(said)[0] if len(said) == _SIZE.size else most + 1
    if size > most:
        raise _damaged(path, "a part of it is too long")
    return file.read(size)


def _json(data: bytes, path: str) -> dict[str, object]:
    try:
        said = frames.strict_json(data)
    except frames.WireError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(said, dict):
        raise _damaged(path, "a part of it is no JSON object")
    return said


def _header(said: dict[str, object], path: str) -> dict[str, object]:
    if set(said) != set(_FIELDS) or any(type(said[name]) is not kind for name, kind in _FIELDS.items()):
        raise _damaged(path, "its header has other fields than a snapshot's")
    number, stamp = str(said["id"]), said["created_us"]
    assert isinstance(stamp, int)
    if not number.startswith("n-") or not number[2:].isalnum() or len(number) > 40 or not 0 <= stamp < 1 << 52:
        raise _damaged(path, "its header has an id or a time that no snapshot has")
    try:
        f"{said['bound']}{said['policy_digest']}".encode()
    except UnicodeEncodeError:  # JSON can hold lone surrogates
        raise _damaged(path, "its header has a text that is not Unicode") from None
    check_digest(said["digest"])
    return said


def _damaged(path: str, why: str) -> SnapshotError:
    return SnapshotError(
        f"{path} is no snapshot that can be used: {why}", code="snapshot-damaged", fix="export it again"
    )
