"""Watches a directory inside by inotify, in a worker: events as JSON lines on standard output, until it is killed.

A directory that appears is watched at once and then listed, so that what was made in it before the watch is reported
as well. When the kernel's queue ran over, or no watch is left, that is reported as `overflow`: the reader lists again.
Where the host itself puts a file, only the finished file is reported, not the name that it has until then.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct

from ringfence.shared import fast_stdlib, syscalls
from ringfence.shared.openat import open_path, write_all
from ringfence.shared.tree_walk import Cursor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.shared.openat import Args

_NR_ADD_WATCH, _NR_RM_WATCH, _NR_INIT1 = 254, 255, 294
_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _Q_OVERFLOW, _IGNORED, _ISDIR = 0x400, 0x4000, 0x8000, 0x40000000
_ONLYDIR = 0x01000000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _ONLYDIR
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 16
_LOOK_MS = 1000
_OTHER_HALF_MS = 5  # the kernel queues both halves of a rename one after the other
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_STAGE = (b".ringfence-", b".part", 32)  # beginning, end and length of the host's name for an unfinished file
_PLAIN = ((_CREATE, "create"), (_DELETE, "remove"), (_MODIFY, "write"), (_ATTRIB, "chmod"))


def watch(args: Args) -> dict[str, object]:
    """Watch a directory and report events, `ready` first. Ends when the watched directory itself is removed."""
    top = open_path(str(args["path"]), os.O_RDONLY | os.O_DIRECTORY)
    watcher = _Watcher(top, recursive=bool(args["recursive"]))
    watcher.add(b"", tell=False)
    if watcher.short:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args["path"]))
    watcher.tell("ready", b"")
    watcher.flush()
    while watcher.turn():
        watcher.flush()
    watcher.flush()
    return {}


def _is_stage(name: bytes) -> bool:
    begins, ends, length = _STAGE
    return len(name) == length and name.startswith(begins) and name.endswith(ends)


class _Watcher:
    def __init__(self, top: int, *, recursive: bool) -> None:
        self._top = top
        self._recursive = recursive
        self._fd = syscalls.syscall(_NR_INIT1, os.O_CLOEXEC, what="inotify_init1")
        self._paths: dict[int, bytes] = {}  # watch → directory, "" or with a closing slash
        self._told: set[bytes] = set()  # names found by listing; the kernel's events for them are still to come
        self._moved: tuple[int, bytes, bool] | None = None  # half of a rename: cookie, path, whether a directory
        self._lines: list[bytes] = []
        self._last: tuple[str, bytes] | None = None
        self.short = False  # whether there were not enough watches

    # watches

    def add(self, path: bytes, *, tell: bool) -> None:
        """Watch a directory and, when recursive, all below; with `tell`, what is in there is new."""
        pending = [path]
        cursor = Cursor(self._top)
        try:
            while pending:
                prefix = pending.pop()
                try:
                    directory = cursor.go(prefix.split(b"/")[:-1])
                except OSError as error:
                    if error.errno in _GONE and prefix:
                        continue
                    raise
                if self._add_one(directory, prefix) and (tell or self._recursive):
                    pending += self._look(directory, prefix, tell=tell)
        finally:
            cursor.close()

    def _add_one(self, directory: int, prefix: bytes) -> bool:
        try:
            number = syscalls.syscall(
                _NR_ADD_WATCH, self._fd, b"/proc/self/fd/%d" % directory, _MASK, what="inotify_add_watch"
            )
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.short = True
            return False
        self._paths[number] = prefix
        return True

    def _look(self, directory: int, prefix: bytes, *, tell: bool) -> list[bytes]:
        inner = []
        for name in sorted(map(os.fsencode, os.listdir(directory))):
            if _is_stage(name):
                continue
            try:
                info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            if tell:
                self.tell("create", prefix + name)
                self._told.add(prefix + name)
            if self._recursive and stat.S_ISDIR(info.st_mode):
                inner.append(prefix + name + b"/")
        return inner

    def _drop_below(self, prefix: bytes) -> None:
        for number, path in list(self._paths.items()):
            if path.startswith(prefix):
                del self._paths[number]
                try:
                    syscalls.syscall(_NR_RM_WATCH, self._fd, number, what="inotify_rm_watch")
                except OSError:
                    continue  # the directory was removed, and its watch with it

    def _renamed(self, old: bytes, new: bytes) -> None:
        for number, path in self._paths.items():
            if path.startswith(old):
                self._paths[number] = new + path[len(old) :]

    # events

    def turn(self) -> bool:
        """Take the kernel's events. Return False when there is nothing left to watch."""
        while not self._more(_LOOK_MS):
            if os.fstat(self._top).st_nlink == 0:  # it is open here, so the kernel sends no event
                self.tell("remove", b".")
                return False
        data = os.read(self._fd, _BUFFER)
        events = []
        at = 0
        while at < len(data):
            number, mask, cookie, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            events.append((number, mask, cookie, name))
            at += _EVENT.size + length
        for event in events:
            self._take(*event)
        if not self._more(_OTHER_HALF_MS if self._moved is not None else 0):
            self._lose_half()
            self._told.clear()
        return bool(self._paths)

    def _more(self, within_ms: int) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(within_ms))

    def _take(self, number: int, mask: int, cookie: int, name: bytes) -> None:
        if self._moved is not None and not (mask & _MOVED_TO and cookie == self._moved[0]):
            self._lose_half()
        if mask & _Q_OVERFLOW:
            self._overflow()
        prefix = self._paths.get(number)
        if prefix is None or _is_stage(name):
            return
        path = prefix + name
        folder = bool(mask & _ISDIR)
        if mask & _MOVED_FROM:
            self._told.discard(path)
            self._moved = (cookie, path, folder)
        elif mask & _MOVED_TO:
            self._arrived(path, folder=folder)
        elif mask & (_DELETE_SELF | _IGNORED):
            self._ended(number, prefix)
        else:
            self._plain(path, mask, folder=folder)

    def _lose_half(self) -> None:
        """Report half of a rename alone: the other half did not come, so the name left or entered what is watched."""
        if self._moved is not None:
            _, path, folder = self._moved
            self._moved = None
            self.tell("remove", path)
            if folder:
                self._drop_below(path + b"/")

    def _plain(self, path: bytes, mask: int, *, folder: bool) -> None:
        if not path.rpartition(b"/")[2]:
            return  # about a watched directory itself, which its parent reports
        kind = next((kind for bit, kind in _PLAIN if mask & bit), None)
        if kind == "create":
            self._created(path, folder=folder)
        elif kind is not None and not (mask & (_MODIFY | _ATTRIB) and self._is_nameless(path)):
            self._told.discard(path) if kind == "remove" else None
            self.tell(kind, path)

    def _is_nameless(self, path: bytes) -> bool:
        """Return whether this is a file opened without a name (O_TMPFILE).

        The kernel reports such a file as "#" and its inode.
        """
        name = path.rpartition(b"/")[2]
        if not (name.startswith(b"#") and name[1:].isdigit()):
            return False
        try:
            os.stat(path, dir_fd=self._top, follow_symlinks=False)
        except OSError:
            return True
        return False

    def _created(self, path: bytes, *, folder: bool) -> None:
        if path in self._told:
            self._told.discard(path)
            return
        self.tell("create", path)
        if folder and self._recursive:
            self.add(path + b"/", tell=True)
            if self.short:
                self.short = False
                self.tell("overflow", b".")

    def _arrived(self, path: bytes, *, folder: bool) -> None:
        if self._moved is None:
            self._created(path, folder=folder)
            return
        source = self._moved[1]
        self._moved = None
        self.tell("rename", path, source=source)
        if folder:
            self._renamed(source + b"/", path + b"/")

    def _ended(self, number: int, prefix: bytes) -> None:
        del self._paths[number]
        if not prefix:
            self.tell("remove", b".")
            self._drop_below(b"")

    def _overflow(self) -> None:
        self.tell("overflow", b".")
        if self._recursive:
            self.add(b"", tell=False)  # directories whose making was lost

    # reporting

    def tell(self, kind: str, path: bytes, *, source: bytes | None = None) -> None:
        if (kind, path) == self._last and kind in ("write", "chmod", "overflow"):
            return  # the same event again, before the first was read
        self._last = (kind, path)
        entry = {"kind": kind, "path": os.fsdecode(path), "source": None if source is None else os.fsdecode(source)}
        self._lines.append(fast_stdlib.dumps(entry))

    def flush(self) -> None:
        if self._lines:
            write_all(1, b"\n".join(self._lines) + b"\n")
            self._lines.clear()
            self._last = None
