"""Reports to the host what /workspace holds, with the guest's rights: every name, and content that the host lacks.

The host sends on standard input what it knows (see `shared.stamps`): a stamp for each name of its last look, and the
digests of content that it has. A name whose stamp is still the same is not reported again, and its file neither opened
nor read. A directory whose own stamp is the same is not even listed. Records go to standard output; the host believes
none of them and hashes every byte that it gets.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import time
from _blake2 import blake2b

from ringfence.shared import fast_stdlib, proc, stamps, tree_walk
from ringfence.shared.paths import is_below
from ringfence.shared.stamps import AGAIN, CHUNK, DATA, DONE, END, ENTRY, GONE, RECORD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SMALL = 1 << 20  # a smaller file is read as a whole, so that one that changes is read again before a byte is sent
_TRIES = 5
_RACY_NS = 50_000_000  # some clock ticks: a second change in the same tick shows in no time stamp
_MAX_PATH = 16_384
_SIGIO = 29  # the signal of a broken lease
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
WORKSPACE = "/workspace"
_KIND, _FILE, _DIRECTORY, _LINK = 0o170000, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


class UnkeptTree(Exception):  # noqa: N818  # not an error: an answer to the host
    """The reason why this tree cannot be kept: a code that the host knows, and the path."""


def keep(args: dict[str, Any]) -> dict[str, object]:
    """Report the workspace. `contents`: send what the host lacks, else digests alone. `bytes`: the most for a file.

    `stays`: wait for the next message afterwards. A process that stays saves the host a start, and its memory saves the
    host sending what it knows. `others`: files of other owners are kept as well, where they can be read.
    """
    fast_stdlib.ignore_signals(_SIGIO)
    gc.disable()  # a collection would visit all objects again and again
    memory = None
    while data := _message():
        known = stamps.StampsMessage(data)
        if memory is not None:
            known.memory = memory
        keeper = _Keeper(known, contents=bool(args["contents"]), most=int(args["bytes"]), others=bool(args["others"]))
        try:
            keeper.walk()
        except UnkeptTree as problem:
            keeper.end({"problem": problem.args[0], "path": problem.args[1]})
            break
        keeper.end({"top": keeper.top.hex()})
        if not args["stays"]:
            break
        memory = keeper.remember()
    return {}


def _message() -> bytes:
    """Return the host's next message; b"" when there is none."""
    head = _exactly(stamps.SIZE.size)
    return _exactly(stamps.SIZE.unpack(head)[0]) if head else b""


def _exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := os.read(0, min(CHUNK, size - len(data)))):
        data += chunk
    return bytes(data) if len(data) == size else b""


def open_workspace() -> int:
    """Open the workspace. A guest that took its own rights away gets them back."""
    held = os.open(WORKSPACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        if mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{held}", mode | 0o700)
    finally:
        os.close(held)
    return os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def mount_points() -> set[str]:
    """Return what is mounted below /workspace, relative to it: what lies there is the policy's, not the sandbox's."""
    targets = (mount.target for mount in proc.mounts())
    return {target.removeprefix(f"{WORKSPACE}/") for target in targets if is_below(target, WORKSPACE)}


class _Keeper:
    def __init__(self, known: stamps.StampsMessage, *, contents: bool, most: int, others: bool) -> None:
        self._known = known
        self._contents = contents
        self._most = most
        self._others = others
        self._mounts: set[str] | None = None
        self._uid = os.geteuid()
        self._links: dict[int, str] = {}  # inodes with several names → the first
        self._reported: dict[str, tuple[bool, bytes]] = {}
        self._gone: list[str] = []
        self._directories = known.memory.directories()
        self._left = dict(known.memory.groups)  # directories that the walk has not seen yet
        self._out = bytearray()
        self._shut: list[tuple[str, int]] = []  # directories that had to be opened, and their mode
        top = open_workspace()
        info = os.fstat(top)
        self._top_is_same = stamps.stamp(info) == known.top
        self.top = stamps.stamp(info) if _is_old(info) else stamps.UNKNOWN
        self._chain = tree_walk.Chain(top)

    def walk(self) -> None:
        """Walk depth first, keeping names and no descriptors: a tree may be deeper than a process may open files."""
        pending = [("", self._top_is_same)]
        try:
            while pending:
                path, same = pending.pop()
                directory = self._enter(path)
                if directory >= 0:
                    pending += reversed(self._directory(directory, path, same=same))
        finally:
            self._shut_again()
        for path, group in self._left.items():  # the walk did not get there: these are no directories any more
            self._gone += [f"{path}/{name}" for name in group.names()]
        self._report_gone()

    def remember(self) -> stamps.Memory:
        """Remember the stamps for the next look."""
        self._chain.close()
        self._known.memory.follow(self._reported, self._gone)
        return self._known.memory

    def end(self, said: dict[str, object]) -> None:
        self._put(DONE, fast_stdlib.dumps(said))
        self._flush()

    def _enter(self, path: str) -> int:
        try:
            return self._chain.directory(path)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return -1  # gone meanwhile

    def _directory(self, directory: int, path: str, *, same: bool) -> list[tuple[str, bool]]:
        """Report what changed in a directory. Return its subdirectories, and whether each is unchanged."""
        prefix = f"{path}/" if path else ""
        group = self._left.pop(path, None)
        if group is None:
            return self._each(directory, prefix, dict.fromkeys(sorted(os.listdir(directory))))
        os.fchdir(directory)
        changed = None
        if same and not self._known.links:
            changed = _unless_gone(group.changed_here)
        if changed is None:
            names = sorted(os.listdir(directory))
            self._gone += [f"{prefix}{name}" for name in set(group.names()).difference(names)]
            changed = None if self._known.links else _unless_gone(lambda: group.changed_among(names))
            if changed is None:
                known = group.of_all()
                return self._each(directory, prefix, {name: known.get(name) for name in names})
        below = [(f"{prefix}{name}", True) for name in self._directories[path] if name not in changed]
        return sorted(below + self._each(directory, prefix, changed))

    def _each(self, directory: int, prefix: str, names: dict[str, bytes | None]) -> list[tuple[str, bool]]:
        """Look at each name, with the stamp that the host knows. Return the directories among the names."""
        below = []
        for name, known in names.items():
            path = prefix + name
            try:
                info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                info = None
            same = info is not None and known is not None and known == stamps.stamp(info)
            if info is None or not (same or self._report_new(directory, name, path, info, was_kept=known is not None)):
                if known is not None:
                    self._gone.append(path)
                continue
            mode = info.st_mode
            if mode & _KIND == _FILE and info.st_nlink > 1:
                self._links.setdefault(info.st_ino, path)
            elif mode & _KIND == _DIRECTORY:
                if mode & 0o500 != 0o500 and info.st_uid == self._uid:
                    tree_walk.make_usable(name, directory)
                    self._shut.append((path, stat.S_IMODE(mode)))
                below.append((path, same))
        return below

    def _report_new(self, directory: int, name: str, path: str, info: os.stat_result, *, was_kept: bool) -> bool:
        """Report a name that is new or has changed since the last look. Return False when the name is not kept.

        `was_kept`: the name belonged to the sandbox then, and no mount came since.
        """
        if info.st_uid != self._uid:
            if not self._others or self._leads_to_mount(path) or not _is_readable(directory, name, info):
                return False  # a mount, a directory of ours that leads to a mount, or a name that cannot be read here
        elif not was_kept and self._is_mount(path):
            return False
        if len(path) > _MAX_PATH // 4 and len(os.fsencode(path)) > _MAX_PATH:
            raise UnkeptTree("long", path[:200])
        kind = info.st_mode & _KIND
        try:
            if kind == _DIRECTORY:
                self._report_entry(path, "d", info, "", settled=True)
            elif kind == _LINK:
                self._report_entry(path, "l", info, os.readlink(name, dir_fd=directory), settled=True)
            elif kind != _FILE:
                return False  # a socket or a pipe
            elif info.st_ino in self._links:
                self._report_entry(path, "h", info, self._links[info.st_ino], settled=False)
            else:
                return self._file(directory, name, path)
        except OSError as error:
            if error.errno not in _GONE:
                raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
            return False
        return True

    def _is_mount(self, path: str) -> bool:
        if self._mounts is None:
            self._mounts = mount_points()
        return path in self._mounts

    def _leads_to_mount(self, path: str) -> bool:
        """Return whether a mount lies at `path` or below."""
        if self._is_mount(path):
            return True
        assert self._mounts is not None
        return any(is_below(mount, path) for mount in self._mounts)

    def _report_entry(self, path: str, kind: str, info: os.stat_result, text: str, *, settled: bool) -> None:
        """Report one entry.

        `settled`: a later change will show in the entry's stamp, if it comes some ticks after the last.
        """
        size = info.st_size if kind == "f" else 0
        facts = [path, kind, stat.S_IMODE(info.st_mode), info.st_mtime_ns, size, text]
        stamp = stamps.stamp(info) if settled and _is_old(info) else stamps.UNKNOWN
        self._reported[path] = (kind == "d", stamp)
        self._put(ENTRY, fast_stdlib.dumps({"row": facts, "stamp": stamp.hex()}))

    def _report_gone(self) -> None:
        names: list[str] = []
        size = 0
        for name in self._gone:
            names.append(name)
            size += len(name)
            if size > _MAX_PATH:
                self._put(GONE, fast_stdlib.dumps({"names": names}))
                names = []
                size = 0
        self._put(GONE, fast_stdlib.dumps({"names": names}))

    # files

    def _file(self, directory: int, name: str, path: str) -> bool:
        for _ in range(_TRIES):
            fd = _open(directory, name)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    return False  # replaced meanwhile
                if before.st_size > self._most:
                    raise UnkeptTree("large", path)
                _wait_for_writer(fd)
                if self._whole(fd, path, before) if before.st_size <= _SMALL else self._pieces(fd, path, before):
                    return True
            finally:
                os.close(fd)
        raise UnkeptTree("moving", path)

    def _whole(self, fd: int, path: str, before: os.stat_result) -> bool:
        """Report a small file. False when the file changed while it was read; then nothing was reported."""
        settled = _is_settled(fd, before)
        data = bytearray()
        while len(data) <= before.st_size and (chunk := os.read(fd, _SMALL)):
            data += chunk
        if not _is_same(before, os.fstat(fd)) or len(data) != before.st_size:
            return False
        digest = blake2b(data, digest_size=32).hexdigest()
        held = self._known.holds(digest) or not self._contents
        self._report_entry(path, "f", before, digest if held else "", settled=settled)
        if not held:
            for start in range(0, len(data), CHUNK):
                self._put(DATA, data[start : start + CHUNK])
            self._put(END, b"")
        return True

    def _pieces(self, fd: int, path: str, before: os.stat_result) -> bool:
        """Report a large file as `_whole` does, piece by piece. What was sent of a file that changed is taken back."""
        settled = _is_settled(fd, before)
        if self._known.holds_any or not self._contents:
            digest = _digest_of(fd, before.st_size)
            if not _is_same(before, os.fstat(fd)):
                return False
            if self._known.holds(digest) or not self._contents:
                self._report_entry(path, "f", before, digest, settled=settled)
                return True
        os.lseek(fd, 0, os.SEEK_SET)
        self._report_entry(path, "f", before, "", settled=settled)
        left = before.st_size
        while left and (chunk := os.read(fd, min(CHUNK, left))):
            self._put(DATA, chunk)
            left -= len(chunk)
        kept = not left and _is_same(before, os.fstat(fd))
        self._put(END if kept else AGAIN, b"")
        return kept

    # output

    def _put(self, kind: bytes, payload: bytes | bytearray) -> None:
        self._out += RECORD.pack(kind, len(payload))
        self._out += payload
        if len(self._out) > CHUNK:
            self._flush()

    def _flush(self) -> None:
        view = memoryview(self._out)
        while view:
            view = view[os.write(1, view) :]
        self._out = bytearray()

    def _shut_again(self) -> None:
        """Take directories' rights away again, the deepest first: a closed directory lets no process through."""
        for path, mode in reversed(self._shut):
            try:
                os.fchmod(self._chain.directory(path), mode)
            except OSError:
                continue  # gone meanwhile


def _is_readable(directory: int, name: str, info: os.stat_result) -> bool:
    """Return whether a file of another owner can be read: only its owner could change that."""
    if info.st_mode & _KIND == _LINK:
        return True
    return os.access(name, os.R_OK | (os.X_OK if info.st_mode & _KIND == _DIRECTORY else 0), dir_fd=directory)


def _open(directory: int, name: str) -> int:
    """Open a file for reading, also where its owner has taken that right from himself."""
    try:
        return os.open(name, _OPEN, dir_fd=directory)
    except PermissionError:
        pass  # tried in another way
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        os.chmod(f"/proc/self/fd/{held}", mode | 0o400)
        try:
            return os.open(f"/proc/self/fd/{held}", _OPEN & ~os.O_NOFOLLOW)
        finally:
            os.chmod(f"/proc/self/fd/{held}", mode)
    finally:
        os.close(held)


def _wait_for_writer(fd: int) -> None:
    """Wait until a write that began before now has ended.

    The change time, set at its start, would hide the write (C07).

    A search for data takes the lock that a write holds. A write that begins later changes the time.
    """
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:
        pass  # ENXIO: it is empty, or one hole
    os.lseek(fd, 0, os.SEEK_SET)


def _unless_gone(look: Callable[[], dict[str, bytes | None]]) -> dict[str, bytes | None] | None:
    """Return what `look` returns; None when a name was removed meanwhile."""
    try:
        return look()
    except FileNotFoundError:
        return None


def _is_settled(fd: int, info: os.stat_result) -> bool:
    """Return whether a later change of this file must change its time.

    That holds if the last change is old, and no process writes. A process that has the file mapped may write without
    any time being set; such a mapping keeps the file open for writing, and then the kernel grants no lease.
    """
    if not _is_old(info):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _is_old(info: os.stat_result) -> bool:
    return info.st_ctime_ns + _RACY_NS < time.time_ns()


def _is_same(before: os.stat_result, after: os.stat_result) -> bool:
    """Return whether what was read between two looks is a single state.

    A file that loses a name has its change time set too: a file that is replaced all the time is whole each time.
    """
    if after.st_nlink < before.st_nlink:
        return (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return (before.st_size, before.st_ctime_ns) == (after.st_size, after.st_ctime_ns)


def _digest_of(fd: int, size: int) -> str:
    hasher = blake2b(digest_size=32)
    left = size
    while left and (chunk := os.read(fd, min(_SMALL, left))):
        hasher.update(chunk)
        left -= len(chunk)
    return hasher.hexdigest()
