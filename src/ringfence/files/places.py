"""Opens host paths that a caller names for a transfer: a link that a guest planted on the way leads nowhere (K04).

Links above a folder that is shared with a guest are the caller's own and are followed. In such a folder none is, nor on
the way of a caller's link through it, and the last part of a path never is: what a guest once left there may still lie
there.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if hasattr(os, "O_PATH") else os.O_RDONLY | os.O_CLOEXEC
_LINKS = 40  # as the kernel


def open_parent(path: str, shared: Iterable[str]) -> tuple[int, str]:
    """The folder that holds `path`, open, and the name in it. `shared`: host folders that guests may write to."""
    *way, name = os.path.abspath(path).split("/")[1:]
    fenced = _identities(shared)
    fd = os.open("/", _WAY)
    left = way[::-1]
    links = 0
    try:
        inside = False
        while left:
            part = left.pop()
            target = None if inside else _leads_to(part, fd)
            if target is not None:  # part by part, because it may lead through a folder that is shared
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                left += [one for one in target.split("/") if one][::-1]
                part = "/" if target.startswith("/") else "."
            below = os.open(part, _WAY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
            inside = bool(fenced) and _is_below(fd, fenced)
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    return fd, name or "."


def _leads_to(name: str, folder: int) -> str | None:
    """What a link says; None: it is none."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


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
