"""Host uids for guests when we are root: a different uid for each sandbox, across all processes of this host.

A uid is held by a lock on a file in the state directory. The lock ends with the process, so that the uid is free again
without a sweep. Never hands out a number that /etc/subuid or /etc/subgid gives to a user.
"""

from __future__ import annotations

import fcntl
import os

from ringfence.errors import SandboxError
from ringfence.host import state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST = 2_000_000
LAST = 2_065_535
_RANDOM_TRIES = 32
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class HeldUid:
    """A uid that no other sandbox gets until `release`, or until this process ends. It is used as the gid too."""

    __slots__ = ("_fd", "_path", "_pid", "uid")

    def __init__(self, uid: int, fd: int, path: str) -> None:
        self.uid = uid
        self._fd = fd
        self._path = path
        self._pid = os.getpid()

    def fileno(self) -> int:
        """Return the lock, which the monitor holds too: the uid stays taken while a process of the sandbox lives."""
        return self._fd

    def disown_descriptors(self) -> None:
        """Drop a lock whose descriptor the library's caller has closed. The next sweep removes the file."""
        self._fd = -1

    def release(self) -> None:
        """Give the uid back. Idempotent. A fork of the holder only closes its copy, and the uid stays held."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if os.getpid() == self._pid:
                os.unlink(self._path)  # while locked: a process that waits for this inode sees that it has no name
        except FileNotFoundError:
            return  # the state directory was emptied
        finally:
            os.close(fd)


def hold(first: int = FIRST, last: int = LAST) -> HeldUid:
    """Hold a uid of `first` to `last` that is free. Root only. Raises SandboxError when all are taken.

    Costs about 0.1 ms. Starts at a random number, so that a uid is seldom used again soon.
    """
    if not 0 < first <= last:
        raise ValueError(f"{first} to {last} is no range of uids")
    directory = state.directory("uid")
    taken = [*_given_out("/etc/subuid"), *_given_out("/etc/subgid")]
    for uid in _candidates(first, last):
        if any(low <= uid <= high for low, high in taken):
            continue
        held = _try(directory, uid)
        if held is not None:
            return held
    raise SandboxError(
        f"no uid from {first} to {last} is free: each is held by a sandbox or given out in /etc/subuid or /etc/subgid",
        code="uids-exhausted",
        fix="close sandboxes, or name another range of uids",
        retryable=True,
    )


def sweep() -> int:
    """Remove the lock files whose holder is gone. Return how many. Root only."""
    removed = 0
    directory = state.directory("uid")
    for name in os.listdir(directory):
        held = _try(directory, int(name)) if name.isascii() and name.isdigit() else None
        if held is not None:
            held.release()
            removed += 1
    return removed


def _candidates(first: int, last: int) -> Iterator[int]:
    """Yield some random numbers of the range, then all from a random start: fast if few are taken, complete if many."""
    size = last - first + 1
    for _ in range(_RANDOM_TRIES):
        yield first + _random_below(size)
    start = _random_below(size)
    for step in range(size):
        yield first + (start + step) % size


def _random_below(limit: int) -> int:
    return int.from_bytes(os.urandom(8), "little") % limit


def _try(directory: str, uid: int) -> HeldUid | None:
    path = f"{directory}/{uid}"
    fd = os.open(path, _OPEN, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_file(path, fd):
            return HeldUid(uid, fd, path)
    except BlockingIOError:
        pass  # another process holds it
    except OSError:
        os.close(fd)
        raise
    os.close(fd)  # another process holds it, or it was released and removed between open and lock
    return None


def _is_file(path: str, fd: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


_known: dict[str, tuple[object, list[tuple[int, int]]]] = {}


def _given_out(path: str) -> list[tuple[int, int]]:
    """Return the ranges in a file, which is read again only when it has changed."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return []
    version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = _known.get(path)
    if known is None or known[0] != version:
        known = _known[path] = (version, _ranges_in(path))
    return known[1]


def _ranges_in(path: str) -> list[tuple[int, int]]:
    """Return the ranges in a file of `name:first:count` lines. Other lines are ignored."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    ranges = []
    for line in lines:
        parts = line.split(b":")
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            low = int(parts[1])
            ranges.append((low, low + int(parts[2]) - 1))
    return ranges
