"""Opens host paths that a caller names for a transfer: a link that a guest planted on the way leads nowhere (K04).

Links above a folder that is shared with a guest are the caller's own and are followed. In such a folder none is, and
the last part of a path never is: what a guest once left there may still lie there.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if hasattr(os, "O_PATH") else os.O_RDONLY | os.O_CLOEXEC


def open_parent(path: str, shared: Iterable[str]) -> tuple[int, str]:
    """The folder that holds `path`, open, and the name in it. `shared`: host folders that guests may write to."""
    whole = os.path.abspath(path)
    *way, name = whole.split("/")[1:]
    fenced = _identities(shared)
    inside = False
    fd = os.open("/", _WAY)
    for part in way:
        try:
            below = os.open(part, _WAY | (os.O_NOFOLLOW if inside else 0), dir_fd=fd)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
        finally:
            os.close(fd)
        fd = below
        inside = inside or (bool(fenced) and _is_below(fd, fenced))
    return fd, name or "."


def open_itself(path: str, flags: int, shared: Iterable[str]) -> int:
    """What is at `path`, which is no link."""
    parent, name = open_parent(path, shared)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:
            words = "it is a link; name what it leads to (os.path.realpath)"
            raise OSError(errno.ELOOP, words, path) from None
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(parent)


def _identities(paths: Iterable[str]) -> set[tuple[int, int]]:
    found = set()
    for path in paths:
        try:
            info = os.stat(path)
        except OSError:
            continue  # gone: nothing can be below it
        found.add((info.st_dev, info.st_ino))
    return found


def _is_below(fd: int, fenced: set[tuple[int, int]]) -> bool:
    """Whether a directory is one of these or lies below one: by going up to the root, whatever its names are."""
    here = os.dup(fd)
    last = None
    try:
        while True:
            info = os.fstat(here)
            identity = (info.st_dev, info.st_ino)
            if identity in fenced:
                return True
            if identity == last:
                return False
            last = identity
            above = os.open("..", _WAY, dir_fd=here)
            os.close(here)
            here = above
    finally:
        os.close(here)
