"""Tells the host what /workspace holds, from inside with the guest's rights: every name, and the content it lacks.

The host says on standard input what it knows: a stamp for each name of its last look, and the digests of content that
it has. A name whose stamp (inode, size, change time …) is still the same is not told again, and its file neither opened
nor read. Records go to standard output; the host believes none of them and hashes every byte it gets.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import struct
import time
from _blake2 import blake2b

from . import lean, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER = struct.Struct(">cI")  # kind of a record, bytes of its payload
ENTRY, DATA, END, AGAIN, GONE, DONE = b"E", b"D", b"F", b"R", b"G", b"Z"
CHUNK = 1 << 16
HINT = 32  # characters of a digest that tell it from all others
_SMALL = 1 << 20  # read as a whole, so that what changed meanwhile is read again before a byte of it was sent
_TRIES = 5
_RACY_NS = 50_000_000  # a change in the same tick of the clock as the last one shows in no time stamp: some ticks more
_MAX_PATH = 16_384
_SIGIO = 29  # what breaks a lease sends it
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
WORKSPACE = "/workspace"
_KIND, _FILE, _DIRECTORY, _LINK = 0o170000, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


class Problem(Exception):  # noqa: N818  # not an error: an answer to the host
    """What keeps this tree from being kept: a code that the host knows, and the path."""


def keep(args: dict[str, Any]) -> dict[str, object]:
    """`contents`: send what the host does not have; else digests alone. `bytes`: no file can be larger."""
    lean.ignore_signals(_SIGIO)
    gc.disable()  # it would look at everything again and again, and this process ends soon
    keeper = _Keeper(lean.loads(_read_all(0)), contents=bool(args["contents"]), most=int(args["bytes"]))
    try:
        keeper.walk()
    except Problem as problem:
        return {"problem": problem.args[0], "path": problem.args[1]}
    return {"left_out": keeper.left_out}


def _read_all(fd: int) -> bytes:
    data = bytearray()
    while chunk := os.read(fd, CHUNK):
        data += chunk
    return bytes(data)


def open_workspace() -> int:
    """Its own mode is not kept: whoever shut it gets it back open."""
    held = os.open(WORKSPACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        if mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{held}", mode | 0o700)
    finally:
        os.close(held)
    return os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def mount_points() -> set[str]:
    """Below /workspace, relative to it: what lies there is the policy's, not the sandbox's."""
    found = set()
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            path = os.fsdecode(_unescaped(line.split(b" ")[4]))
            if path.startswith(f"{WORKSPACE}/"):
                found.add(path[len(WORKSPACE) + 1 :])
    return found


def _unescaped(text: bytes) -> bytes:
    for code, char in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        text = text.replace(code, char)
    return text


class _Keeper:
    def __init__(self, known: dict[str, Any], *, contents: bool, most: int) -> None:
        self._known: dict[str, str] = known["stamps"]  # what is left at the end is gone
        self._hints: str = known["digests"]
        self._digests: set[str] | None = None  # the first characters of each; made when the first file has to be read
        self._contents = contents
        self._most = most
        self._mounts = mount_points()
        self._uid = os.geteuid()
        self._links: dict[int, str] = {}  # inodes with several names → the first
        self._out = bytearray()
        self._shut: list[tuple[str, int]] = []  # directories that had to be opened, and their mode
        self.left_out = 0
        self._chain = trees.Chain(open_workspace())

    def walk(self) -> None:
        """Depth first; names and no descriptors are kept, because a tree may be deeper than a process may open."""
        pending = [""]
        try:
            while pending:
                prefix = pending.pop()
                directory = self._enter(prefix)
                if directory >= 0:
                    pending += reversed(self._directory(directory, prefix))
        finally:
            self._shut_again()
        self._tell_gone()
        self._put(DONE, b"")
        self._flush()

    def _enter(self, prefix: str) -> int:
        try:
            return self._chain.directory(prefix.rstrip("/"))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return -1  # gone meanwhile

    def _directory(self, directory: int, prefix: str) -> list[str]:
        """Tell of all names in it. Returns the directories among them."""
        deeper = []
        with os.scandir(directory) as entries:
            found = sorted(entries, key=_name)
        known = self._known
        for entry in found:
            path = prefix + entry.name
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            mode = info.st_mode
            if known.pop(path, None) == _stamp(info):  # the usual case, and all that it costs
                if mode & _KIND == _FILE and info.st_nlink > 1:
                    self._links[info.st_ino] = path
            elif path in self._mounts or info.st_uid != self._uid:
                continue  # a mount, or a directory of ours that leads to one
            else:
                self._tell_new(directory, entry.name, path, info)
            if mode & _KIND == _DIRECTORY:
                if mode & 0o500 != 0o500:
                    trees.make_usable(entry.name, directory)
                    self._shut.append((path, stat.S_IMODE(mode)))
                deeper.append(f"{path}/")
        return deeper

    def _tell_new(self, directory: int, name: str, path: str, info: os.stat_result) -> None:
        """Of what is new, or has changed since the last look."""
        if len(path) > _MAX_PATH // 4 and len(os.fsencode(path)) > _MAX_PATH:
            raise Problem("long", path[:200])
        kind = info.st_mode & _KIND
        try:
            if kind == _DIRECTORY:
                self._tell(path, "d", info, "", stamp=_stamp(info))
            elif kind == _LINK:
                self._tell(path, "l", info, os.readlink(name, dir_fd=directory), stamp=_stamp(info))
            elif kind != _FILE:
                self.left_out += 1
            elif info.st_ino in self._links:
                self._tell(path, "h", info, self._links[info.st_ino], stamp="")
            elif self._file(directory, name, path) and info.st_nlink > 1:
                self._links[info.st_ino] = path
        except OSError as error:
            if error.errno not in _GONE:
                raise OSError(error.errno, os.strerror(error.errno or 0), path) from None

    def _tell(self, path: str, kind: str, info: os.stat_result, text: str, *, stamp: str) -> None:
        size = info.st_size if kind == "f" else 0
        facts = [path, kind, stat.S_IMODE(info.st_mode), info.st_mtime_ns, size, text]
        self._put(ENTRY, lean.dumps({"row": facts, "stamp": stamp if _is_old(info) else ""}))

    def _tell_gone(self) -> None:
        names: list[str] = []
        size = 0
        for name in self._known:
            names.append(name)
            size += len(name)
            if size > _MAX_PATH:
                self._put(GONE, lean.dumps({"names": names}))
                names, size = [], 0
        self._put(GONE, lean.dumps({"names": names}))

    # files

    def _file(self, directory: int, name: str, path: str) -> bool:
        for _ in range(_TRIES):
            fd = _open(directory, name)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    return False  # replaced meanwhile
                if before.st_size > self._most:
                    raise Problem("large", path)
                _wait_for_writer(fd)
                if self._whole(fd, path, before) if before.st_size <= _SMALL else self._pieces(fd, path, before):
                    return True
            finally:
                os.close(fd)
        raise Problem("moving", path)

    def _whole(self, fd: int, path: str, before: os.stat_result) -> bool:
        """False when it changed while it was read; then nothing was told of it."""
        stamp = _stamp(before) if _is_settled(fd, before) else ""
        data = bytearray()
        while len(data) <= before.st_size and (chunk := os.read(fd, _SMALL)):
            data += chunk
        if not _is_same(before, os.fstat(fd)) or len(data) != before.st_size:
            return False
        digest = blake2b(data, digest_size=32).hexdigest()
        held = self._is_held(digest) or not self._contents
        self._tell(path, "f", before, digest if held else "", stamp=stamp)
        if not held:
            for start in range(0, len(data), CHUNK):
                self._put(DATA, data[start : start + CHUNK])
            self._put(END, b"")
        return True

    def _pieces(self, fd: int, path: str, before: os.stat_result) -> bool:
        """As `_whole`, without holding it; what was sent of a file that changed is taken back."""
        stamp = _stamp(before) if _is_settled(fd, before) else ""
        if self._hints or not self._contents:
            digest = _digest_of(fd, before.st_size)
            if not _is_same(before, os.fstat(fd)):
                return False
            if self._is_held(digest) or not self._contents:
                self._tell(path, "f", before, digest, stamp=stamp)
                return True
        os.lseek(fd, 0, os.SEEK_SET)
        self._tell(path, "f", before, "", stamp=stamp)
        left = before.st_size
        while left and (chunk := os.read(fd, min(CHUNK, left))):
            self._put(DATA, chunk)
            left -= len(chunk)
        kept = not left and _is_same(before, os.fstat(fd))
        self._put(END if kept else AGAIN, b"")
        return kept

    def _is_held(self, digest: str) -> bool:
        if self._digests is None:
            self._digests = {self._hints[at : at + HINT] for at in range(0, len(self._hints), HINT)}
        return digest[:HINT] in self._digests

    # output

    def _put(self, kind: bytes, payload: bytes | bytearray) -> None:
        self._out += HEADER.pack(kind, len(payload))
        self._out += payload
        if len(self._out) > CHUNK:
            self._flush()

    def _flush(self) -> None:
        view = memoryview(self._out)
        while view:
            view = view[os.write(1, view) :]
        self._out = bytearray()

    def _shut_again(self) -> None:
        """The deepest first: a directory without rights for its owner lets nobody through."""
        for path, mode in reversed(self._shut):
            try:
                os.fchmod(self._chain.directory(path), mode)
            except OSError:
                continue  # gone meanwhile


def _open(directory: int, name: str) -> int:
    """For reading, also where its owner has not permitted that to himself."""
    try:
        return os.open(name, _OPEN, dir_fd=directory)
    except PermissionError:
        pass
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
    """Until a write that began before now has ended: it set the change time at its start, and would go unseen (C07).

    Looking for data takes the lock that a write holds. A write that begins later changes the time.
    """
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:
        pass  # ENXIO: it is empty, or one hole
    os.lseek(fd, 0, os.SEEK_SET)


def _stamp(info: os.stat_result) -> str:
    """The same as long as nothing about it changed: every change sets the change time, and no guest can."""
    return f"{info.st_ino} {info.st_ctime_ns} {info.st_size}"


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _is_settled(fd: int, info: os.stat_result) -> bool:
    """Whether a later change of this file must change its time: the last one is some ticks old, and nobody writes.

    Who has it mapped may write without any time being set; such a mapping keeps it open for writing, and then the
    kernel grants no lease.
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
    return (before.st_size, before.st_ctime_ns) == (after.st_size, after.st_ctime_ns)


def _digest_of(fd: int, size: int) -> str:
    hasher = blake2b(digest_size=32)
    left = size
    while left and (chunk := os.read(fd, min(_SMALL, left))):
        hasher.update(chunk)
        left -= len(chunk)
    return hasher.hexdigest()
