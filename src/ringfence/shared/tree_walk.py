"""Opens and removes trees by descriptors: no link followed, no recursion, few descriptors open.

Used inside by file workers, and by the host's sweep for folders that a guest wrote to.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.shared import openat, syscalls
from ringfence.shared.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


RESOLVE_BELOW = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS
_NAMES = 1000
_KEPT = 100  # open descriptors, of the 1024 or fewer that a process may have
_STEP = 1000  # characters of a path, at most 4 bytes each: the kernel takes 4095


def below(directory: int, path: str) -> int:
    """Open a directory below another, following no link. Long paths go in steps that the kernel takes."""
    fd = os.dup(directory)
    while path:
        step, path = _first_step(path)
        try:
            deeper = syscalls.openat2(fd, step, os.O_RDONLY | os.O_DIRECTORY, 0, RESOLVE_BELOW)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def _first_step(path: str) -> tuple[str, str]:
    if len(path) <= _STEP:
        return path, ""
    cut = path.rfind("/", 0, _STEP)
    return path[:cut], path[cut + 1 :]


class Chain:
    """Directories below a top, each opened on demand. A directory near the last one is cheap.

    Without a chain every directory would be looked up from the top: in a tree that is one long path, the whole path
    each time.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._open: list[tuple[str, int]] = []  # each directory is below the one before

    def directory(self, path: str) -> int:
        """Return the directory at `path`. It belongs to the chain: do not close it; it is valid until the next call."""
        while self._open and not is_within(path, self._open[-1][0]):
            os.close(self._open.pop()[1])
        if not path:
            return self._top
        at, fd = self._open[-1] if self._open else ("", self._top)
        parts = path[len(at) :].strip("/").split("/") if path != at else []
        if len(parts) > _KEPT:
            at = "/".join([at, *parts[:-_KEPT]]).strip("/")
            parts = parts[-_KEPT:]
            fd = below(self._top, at)
            self._open.append((at, fd))
        for part in parts:
            fd = syscalls.openat2(fd, part, os.O_RDONLY | os.O_DIRECTORY, 0, RESOLVE_BELOW)
            at = f"{at}/{part}" if at else part
            self._open.append((at, fd))
        while len(self._open) > 2 * _KEPT:
            os.close(self._open.pop(0)[1])
        return fd

    def close(self) -> None:
        """Close all directories, the top too."""
        for _, fd in self._open:
            os.close(fd)
        os.close(self._top)


def remove_tree(directory: int, name: str) -> None:
    """Remove a tree, without recursion and with few descriptors open, so that any depth works (A27).

    A deeper directory is moved up beside the top directory, then emptied in its turn. If it cannot be moved, as in the
    lower layer of an overlay, it is emptied in its place.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    pending = [name]
    make_usable(name, directory)
    while pending:
        current = pending.pop()
        fd = os.open(current, flags, dir_fd=directory)
        try:
            while names := _some_names(fd):
                for entry in names:
                    if not stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                        os.unlink(entry, dir_fd=fd)
                        continue
                    moved = f".{os.urandom(8).hex()}.gone"
                    make_usable(entry, fd)
                    try:
                        os.rename(entry, moved, src_dir_fd=fd, dst_dir_fd=directory)
                        pending.append(moved)
                    except OSError as error:
                        if error.errno != errno.EXDEV:
                            raise
                        _remove_in_place(fd, entry)
        finally:
            os.close(fd)
        os.rmdir(current, dir_fd=directory)


def _remove_in_place(directory: int, name: str) -> None:
    """Remove a tree of which nothing can be moved: it is as deep as a folder of the host, and costs more with depth."""
    chain = Chain(os.dup(directory))
    pending = [(name, False)]
    try:
        while pending:
            path, emptied = pending.pop()
            above, _, last = path.rpartition("/")
            if emptied:
                os.rmdir(last, dir_fd=chain.directory(above))
                continue
            pending.append((path, True))
            make_usable(last, chain.directory(above))
            fd = chain.directory(path)
            for entry in os.listdir(fd):
                if stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                    pending.append((f"{path}/{entry}", False))
                else:
                    os.unlink(entry, dir_fd=fd)
    finally:
        chain.close()


def _some_names(directory: int) -> list[str]:
    """Return the first names: a guest decides how many there are (O22)."""
    with os.scandir(directory) as entries:
        return [entry.name for entry, _ in zip(entries, range(_NAMES), strict=False)]


def count(path: str) -> tuple[int, int]:
    """Return how many bytes and names a tree has. A directory that cannot be read counts as one name."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    pending = [""]
    used = 0
    names = 0
    seen: set[int] = set()  # files with several names
    while pending:
        prefix = pending.pop()
        try:
            directory = below(top, prefix)
        except OSError:
            continue  # gone meanwhile, or not readable
        with os.scandir(directory) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                names += 1
                used += 0 if info.st_ino in seen else info.st_blocks * 512
                if stat.S_ISDIR(info.st_mode):
                    pending.append(f"{prefix}{entry.name}/")
                elif info.st_nlink > 1:
                    seen.add(info.st_ino)
        os.close(directory)
    return used, names


def make_usable(name: str, directory: int) -> None:
    """Give a directory's owner all rights, which reading and moving need.

    Directories of other owners are left.
    """
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    except OSError as error:
        if error.errno not in (
            errno.EPERM,
            errno.EOVERFLOW,
        ):  # the second is for an owner that this sandbox does not have
            raise
    finally:
        os.close(fd)


# ── one directory at a time, held open ────────────────────────────────────────────────────────────

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def enter(directory: int, parts: list[bytes], index: int) -> int:
    """Open the next directory on a way."""
    if not syscalls.has_openat2():
        openat.refuse_link(directory, parts[index])
    return os.open(parts[index], _DIRECTORY, dir_fd=directory)


class WalkedFolder:
    """A directory below a top: its name, and the directory above.

    A walk keeps such an object for each directory that it is still to see. Whole paths would take their number times
    their depth, and a guest decides both (O22).
    """

    __slots__ = ("_above", "_name")

    def __init__(self, above: WalkedFolder | None, name: bytes) -> None:
        self._above = above
        self._name = name

    def parts(self) -> list[bytes]:
        found: list[bytes] = []
        here = self
        while here._above is not None:
            found.append(here._name)
            here = here._above
        return found[::-1]


TOP = WalkedFolder(None, b"")


class Cursor:
    """A place in the tree below a top directory. It moves step by step, follows no link, at any depth.

    `fd` is the directory of the cursor, until it moves. The way up goes by `..`, and only if the directory above is the
    one that the cursor came from: a tree that is moved meanwhile leads nowhere else (C01). A walk therefore costs its
    number of directories, not that number times their depth (A27).
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._parts: list[bytes] = []
        self._ids = [_identity(top)]
        self.fd = os.dup(top)

    def close(self) -> None:
        os.close(self.fd)

    def go(self, parts: list[bytes], step: Callable[[int, list[bytes], int], int] = enter) -> int:
        """Move to the directory `parts` below the top. Raises what `step` raises, and stays where that failed."""
        shared = 0
        for here, there in zip(self._parts, parts, strict=False):
            if here != there:
                break
            shared += 1
        if len(self._parts) - shared > shared:
            self._restart()
        while len(self._parts) > shared:
            self._up()
        for index in range(len(self._parts), len(parts)):
            self._move_to(step(self.fd, parts, index))
            self._parts.append(parts[index])
            self._ids.append(_identity(self.fd))
        return self.fd

    def _up(self) -> None:
        try:
            above = os.open(b"..", _DIRECTORY, dir_fd=self.fd)
        except OSError:  # not readable, or removed meanwhile
            self._restart()
            return
        if _identity(above) != self._ids[-2]:
            os.close(above)
            self._restart()
            return
        self._move_to(above)
        self._parts.pop()
        self._ids.pop()

    def _restart(self) -> None:
        self._move_to(os.dup(self._top))
        self._parts = []
        del self._ids[1:]

    def _move_to(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
