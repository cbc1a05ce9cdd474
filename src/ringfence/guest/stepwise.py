"""openat2 for kernels that lack it (gVisor of 2022): a path is walked name by name, each link read and followed by us.

It may race with a guest that swaps names, as every walk does; the worker has the guest's own rights, so such a race
reaches what the guest can reach anyway. Links of /proc, which lead to descriptors, are refused as openat2 would (J18).
"""

from __future__ import annotations

import errno
import os

RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x04, 0x08
_MOST_LINKS = 40


def open_below(directory: int, path: str, flags: int, mode: int, resolve: int) -> int:
    """As openat2 with RESOLVE_IN_ROOT or RESOLVE_BENEATH: `directory` is the root of the walk."""
    waiting = [part for part in path.split("/") if part not in ("", ".")][::-1]
    opened = [os.dup(directory)]
    links = 0
    try:
        while waiting:
            name = waiting.pop()
            if name == "..":
                _up(opened, resolve, path)
                continue
            last = not waiting
            wanted = flags if last else os.O_PATH | os.O_DIRECTORY
            link = _link(opened[-1], name) if not (last and flags & os.O_NOFOLLOW) else None
            if link is None:
                fd = os.open(name, wanted | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=opened[-1])
                if last:
                    return fd
                opened.append(fd)
                continue
            links += 1
            if resolve & RESOLVE_NO_SYMLINKS or links > _MOST_LINKS or _in_proc(opened[-1]):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if link.startswith("/"):
                if resolve & RESOLVE_BENEATH:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                while len(opened) > 1:
                    os.close(opened.pop())
            waiting += [part for part in link.split("/") if part not in ("", ".")][::-1]
        return os.open(".", flags | os.O_CLOEXEC, mode, dir_fd=opened[-1])
    finally:
        for fd in opened:
            os.close(fd)


def _up(opened: list[int], resolve: int, path: str) -> None:
    if len(opened) > 1:
        os.close(opened.pop())
    elif resolve & RESOLVE_BENEATH:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)


def _link(directory: int, name: str) -> str | None:
    """Where it leads, None when it is no link."""
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _in_proc(directory: int) -> bool:
    try:
        return os.fstat(directory).st_dev == os.stat("/proc").st_dev
    except OSError:
        return True
