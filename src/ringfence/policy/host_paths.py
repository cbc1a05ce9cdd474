"""Opens host paths that a caller names, part by part: a link that a guest could have made is refused, never followed.

What a guest wrote in a shared folder is still there when the next command names a path in the folder (L15, L16, L17).
Each folder on the way is therefore held open, and a link is followed only where no user but root could have made the
link: see `_Way._is_roots`. The opened descriptor is what is used; no path is looked up a second time.
"""

from __future__ import annotations

import errno
import os

from ringfence.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if hasattr(os, "O_PATH") else os.O_RDONLY | os.O_CLOEXEC
_LINKS = 40  # links followed at most, as in the kernel
_OTHERS_WRITE = 0o022
# A guest that root started writes files that look like root's own. As root, links are therefore followed only where no
# mount can ever be writable (plan/rootfs/mounts.py).
_ROOTS_OWN = frozenset(("/", "/dev", "/proc", "/var"))  # in these folders themselves
_ROOTS_TREES = ("/usr", "/etc")  # in these folders and below
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/")


def within(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies below. Both are absolute and normal; links are not followed."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


class LinkError(OSError):
    """A named path is a link that a guest could have made, or goes through such a link."""

    def __init__(self, path: str, link: str, target: str) -> None:
        shown = f"{printable(link)} is a link to {printable(target)}, and a guest could have made it"
        super().__init__(errno.ELOOP, shown, path)
        self.link = link
        self.target = target
        self.fix = f"name {printable(os.path.realpath(path))} itself, if that is what you mean"

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.fix}"


def open_parent(path: str) -> tuple[int, str]:
    """Return a descriptor of the folder that holds `path`, and the last name of `path` without links.

    The name is no link at this moment, and need not exist. Raises LinkError, or another OSError.
    """
    with _Way(path) as way:
        return os.dup(way.folder), way.name


def open_itself(path: str, flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of the file at `path`. Raises LinkError, or another OSError.

    For the path of a descriptor of this process, such as /dev/stdout or the /dev/fd/63 of a shell, return a duplicate.
    """
    number = descriptor(path)
    if number is not None:
        return _duplicate(number, flags, path)
    with _Way(path) as way:
        return way.open(flags, mode)


def resolve(path: str) -> tuple[str, os.stat_result]:
    """Return `path` without any link, and the status of the file there. Raises LinkError, or another OSError."""
    with _Way(path) as way:
        if not hasattr(os, "O_PATH"):
            return way.where, os.stat(way.name, dir_fd=way.folder, follow_symlinks=False)
        fd = way.open(os.O_PATH)
        try:
            return way.where, os.fstat(fd)
        finally:
            os.close(fd)


def without_links(path: str) -> str:
    """Return `path` without any link. Only its folder must exist. Raises LinkError, or another OSError."""
    with _Way(path) as way:
        return way.where


def descriptor(path: str) -> int | None:
    """Return the number of the descriptor of this process that `path` names; None for any other path."""
    if path in _STREAMS:
        return _STREAMS[path]
    for folder in _DESCRIPTORS:
        number = path.removeprefix(folder)
        if number != path and number.isascii() and number.isdigit() and len(number) < 8:
            return int(number)
    return None


def _duplicate(number: int, flags: int, path: str) -> int:
    import fcntl

    try:
        has = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        if has not in (flags & os.O_ACCMODE, os.O_RDWR):
            raise OSError(errno.EBADF, "it is open for the other direction")
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


class _Way:
    """The way from the root, or from the working directory, to the file that a path names. Holds its folder open.

    For `..` the way is walked again from its start: another folder may be above the current folder by now.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._begin_fd = -1
        self.folder = -1  # holds the named file
        self._top = ""  # path of the folder where the way begins
        self._names: list[str] = []  # the folders entered since
        self._only_root = False  # whether only root could have made a link in this folder and all folders above
        self.name = "."
        try:
            self._go(path)
        except LinkError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Way:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def where(self) -> str:
        """The path from the root, without a link."""
        names = (*self._names, self.name) if self.name != "." else self._names
        return "/".join((self._top, *names)) or "/"

    def open(self, flags: int, mode: int = 0o666) -> int:
        try:
            fd = os.open(self.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self.folder)
        except OSError as error:
            if error.errno == errno.ELOOP:  # the link was made after the check
                raise self._refusal(self.name, self._link(self.name) or "") from None
            raise OSError(error.errno, os.strerror(error.errno or 0), self._path) from None
        target = _link_of(fd) if flags & getattr(os, "O_PATH", 0) else None  # O_PATH may open a link itself
        if target is not None:
            os.close(fd)
            raise self._refusal(self.name, target)
        return fd

    def close(self) -> None:
        for fd in (self._begin_fd, self.folder):
            if fd >= 0:
                os.close(fd)
        self._begin_fd = self.folder = -1

    def _go(self, path: str) -> None:
        if not path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._begin("/" if path.startswith("/") else ".")
        left = _parts(path)[::-1]
        links = 0
        while left:
            part = left.pop()
            if part == "..":
                self._back()
                continue
            target = self._link(part)
            if target is not None:
                if not self._only_root:
                    raise self._refusal(part, target)
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                left += _parts(target)[::-1]
                if target.startswith("/"):
                    self._begin("/")
            elif left:
                self._enter(part)
            else:
                self.name = part

    def _begin(self, where: str) -> None:
        """Start the way at the root, or for a relative path at the working directory as the kernel holds it."""
        self.close()
        self._top = "" if where == "/" else os.getcwd().rstrip("/")
        self._begin_fd = os.open(where, _WAY)
        self._restart(())

    def _restart(self, names: Sequence[str]) -> None:
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1
        self.folder = os.dup(self._begin_fd)
        self._names = []
        self._only_root = self._top == "" and self._is_roots()
        for name in names:
            self._enter(name)

    def _enter(self, part: str) -> None:
        below = os.open(part, _WAY | os.O_NOFOLLOW, dir_fd=self.folder)
        os.close(self.folder)
        self.folder = below
        self._names.append(part)
        self._only_root = self._only_root and self._is_roots()

    def _back(self) -> None:
        if self._names:
            self._restart(self._names[:-1])
        elif self._top:  # above the working directory
            above = os.open("..", _WAY, dir_fd=self._begin_fd)
            os.close(self._begin_fd)
            self._begin_fd = above
            self._top = os.path.dirname(self._top).rstrip("/")
            self._restart(())

    def _link(self, name: str) -> str | None:
        """Return what the link `name` says; None when `name` is no link."""
        try:
            return os.readlink(name, dir_fd=self.folder)
        except OSError:
            return None

    def _is_roots(self) -> bool:
        """Return whether only root can have made links in the folder that was just opened."""
        info = os.fstat(self.folder)
        if info.st_uid != 0 or info.st_mode & _OTHERS_WRITE:
            return False
        here = "/".join((self._top, *self._names)) or "/"
        return os.geteuid() != 0 or here in _ROOTS_OWN or any(within(here, folder) for folder in _ROOTS_TREES)

    def _refusal(self, name: str, target: str) -> LinkError:
        return LinkError(self._path, "/".join((self._top, *self._names, name)), target)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _link_of(fd: int) -> str | None:
    """Return what the link behind a descriptor says; None for a descriptor of any other file."""
    try:
        return os.readlink("", dir_fd=fd)
    except OSError:
        return None
