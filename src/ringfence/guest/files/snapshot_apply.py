"""Makes /workspace what the host says, from inside with the guest's rights: order by order, without decisions.

Orders come on standard input as records. Names are resolved beneath /workspace and no link is followed.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.guest.files.snapshot_scan import mount_points, open_workspace
from ringfence.shared import fast_stdlib, tree_walk
from ringfence.shared.paths import is_below
from ringfence.shared.stamps import CHUNK, DATA, END, RECORD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BLOCK = 4096
_HOLE = bytes(_BLOCK)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def restore(_: dict[str, Any]) -> dict[str, object]:
    """Carry out all orders until the end of the input. An OSError names the path in question."""
    restorer = _Restorer()
    while True:
        kind, payload = _record()
        if not kind:
            return {}
        order = fast_stdlib.loads(payload)
        try:
            restorer.do(order)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), order["path"]) from None


def _record() -> tuple[bytes, bytes]:
    header = _exactly(RECORD.size)
    if not header:
        return b"", b""
    kind, size = RECORD.unpack(header)
    return kind, _exactly(size)


def _exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := os.read(0, min(size - len(data), 1 << 18))):
        data += chunk
    return bytes(data)


class _Restorer:
    def __init__(self) -> None:
        self._top = open_workspace()
        self._chain = tree_walk.Chain(self._top)
        self._directory = self._top
        self._mounts: set[str] | None = None  # mounts below /workspace, read when something is to be removed

    def do(self, order: dict[str, Any]) -> None:
        path = str(order["path"])
        parent, _, name = path.rpartition("/")
        self._directory = self._chain.directory(parent)
        getattr(self, f"_{order['do']}")(name, order)

    def _clear(self, _name: str, _: dict[str, Any]) -> None:
        for name in os.listdir(self._top):
            self._take_away(name)

    def _remove(self, _name: str, order: dict[str, Any]) -> None:
        try:
            self._take_away(str(order["path"]))
        except FileNotFoundError:
            return

    def _take_away(self, path: str) -> None:
        """Remove a whole tree, except mounts, which are the policy's, and directories that lead to a mount.

        A guest may move such directories.

        In a copy of a folder there may be files of an owner that this sandbox does not have. No process here can remove
        them, so they were not removed in the original either.
        """
        if self._mounts is None:
            self._mounts = mount_points()
        pending = [path]
        while pending:
            path = pending.pop()
            if path in self._mounts:
                continue
            parent, _, name = path.rpartition("/")
            directory = self._chain.directory(parent)
            if any(is_below(mount, path) for mount in self._mounts):
                pending += [f"{path}/{below}" for below in os.listdir(self._chain.directory(path))]
                continue
            try:
                if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    tree_walk.remove_tree(directory, name)
                else:
                    os.unlink(name, dir_fd=directory)
            except OSError as error:
                if error.errno != errno.EOVERFLOW:
                    raise

    def _vacate(self, name: str) -> None:
        """Remove a pipe or a socket.

        No snapshot holds such a file, and it must not keep the name of a file that is in one.
        """
        try:
            info = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
            os.unlink(name, dir_fd=self._directory)

    def _mkdir(self, name: str, _: dict[str, Any]) -> None:
        self._vacate(name)
        try:
            os.mkdir(name, 0o700, dir_fd=self._directory)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=self._directory, follow_symlinks=False).st_mode):
                raise

    def _open(self, name: str, _: dict[str, Any]) -> None:
        """Give the owner of a directory the rights to change names in that directory."""
        tree_walk.make_usable(name, self._directory)

    def _file(self, name: str, order: dict[str, Any]) -> None:
        self._vacate(name)
        fd = os.open(name, _NEW, 0o600, dir_fd=self._directory)
        try:
            size = 0
            while True:
                kind, data = _record()
                if kind != DATA:
                    break
                _write_sparse(fd, data, size)
                size += len(data)
            if kind != END:
                raise OSError(5, "the host's data ended early")
            os.ftruncate(fd, size)
            os.fchmod(fd, order["mode"])
            os.utime(fd, ns=(order["mtime_ns"], order["mtime_ns"]))
        finally:
            os.close(fd)

    def _symlink(self, name: str, order: dict[str, Any]) -> None:
        self._vacate(name)
        os.symlink(order["target"], name, dir_fd=self._directory)
        times = (order["mtime_ns"], order["mtime_ns"])
        os.utime(name, ns=times, dir_fd=self._directory, follow_symlinks=False)

    def _link(self, name: str, order: dict[str, Any]) -> None:
        self._vacate(name)
        parent, _, first = str(order["target"]).rpartition("/")
        source = tree_walk.below(self._top, parent)
        try:
            os.link(first, name, src_dir_fd=source, dst_dir_fd=self._directory, follow_symlinks=False)
        finally:
            os.close(source)

    def _facts(self, name: str, order: dict[str, Any]) -> None:
        """Set mode and time of an existing file or directory. Those of another owner's files cannot be set."""
        if not self._is_own(name):
            return
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            here = f"/proc/self/fd/{fd}"
            os.chmod(here, order["mode"])
            os.utime(here, ns=(order["mtime_ns"], order["mtime_ns"]))
        finally:
            os.close(fd)

    def _is_own(self, name: str) -> bool:
        return os.stat(name, dir_fd=self._directory, follow_symlinks=False).st_uid == os.geteuid()


def _write_sparse(fd: int, data: bytes, offset: int) -> None:
    """Write blocks of zeros as holes, so that a sparse file takes no more of the disk than before."""
    view = memoryview(data)
    start = 0
    for at in range(0, len(data) + _BLOCK, _BLOCK):
        block = view[at : at + _BLOCK]
        if block and block != _HOLE[: len(block)]:
            continue
        _write_at(fd, view[start:at], offset + start)
        start = at + len(block)


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view[:CHUNK], offset)
        view, offset = view[count:], offset + count
