"""Looks through a writable mount after the guest is gone: protected names that appeared or changed, set-uid files.

Reports, removes nothing. Names come from the guest: they are opened by directory descriptor, never followed, and only
printed in an escaped form. Bounded in entries, depth and time; a scan that was cut says so.
"""

from __future__ import annotations

import os
import stat
import time

from ringfence.plan.protected import NAMES
from ringfence.results import Denial
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES = 400_000
_SECONDS = 5.0
_DEPTH = 64
_REPORTED = 100
_TICK_NS = 20_000_000  # file times come from a clock that is up to one tick behind
_GIT_NAMES = frozenset(("config", "config.worktree", "commondir", "hooks"))
_GIT_SKIPPED = frozenset(("objects", "refs", "logs"))  # git runs nothing from there
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@final
class Before(Struct):
    """The moment before the guest started. A file's ctime cannot be set back, so later ones are the guest's doing, or a
    program's on the host in the same time. A file system with a clock of its own (NFS) may be off by its skew."""

    at_ns: int


def snapshot_before(root: str) -> Before:
    """To be taken before the sandbox starts. Costs one call, however large the folder."""
    del root  # one clock for all local file systems
    return Before(at_ns=time.time_ns() - _TICK_NS)


def end_scan(root: str, before: Before, *, ignore: frozenset[tuple[int, int]] = frozenset()) -> tuple[Denial, ...]:
    """What is new or changed below `root` since `before`, as denials; `ignore` are inodes known to be placeholders.

    To be called when no process of the sandbox is left and the placeholders are removed. Opens nothing but folders.
    """
    scan = _Scan(before, ignore)
    try:
        fd = os.open(root, _OPEN)
    except OSError as error:
        return (_denial("mount.scan-cut", root, f"{_printable(root)} could not be looked through: {error.strerror}"),)
    found = []
    for code, relative, message in scan.walk(fd):
        found.append(_denial(code, f"{root}/{relative}" if relative else root, message))
        if len(found) >= _REPORTED:
            found.append(_denial("mount.scan-cut", root, f"more than {_REPORTED} findings; the rest is not listed"))
            break
    return tuple(found)


def _denial(code: str, path: str, message: str) -> Denial:
    return Denial(kind="mount", target=_printable(path), code=code, message=message, allow=None)


def _printable(path: str) -> str:
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _Scan:
    def __init__(self, before: Before, ignore: frozenset[tuple[int, int]]) -> None:
        self._before = before.at_ns
        self._ignore = ignore
        self._left = _ENTRIES
        self._deadline = time.monotonic() + _SECONDS

    def walk(self, root: int) -> Iterator[tuple[str, str, str]]:
        """Depth first with one open descriptor for each level. Closes `root`."""
        stack = [(root, "", False, iter(self._children(root, "")))]
        try:
            while stack:
                fd, relative, held, children = stack[-1]
                entry = next(children, None)
                if entry is None:
                    os.close(stack.pop()[0])
                    continue
                path = f"{relative}/{entry.name}" if relative else entry.name
                if self._left <= 0 or time.monotonic() > self._deadline:
                    yield "mount.scan-cut", relative, f"the end scan stopped after {_ENTRIES - self._left} entries"
                    return
                yield from self._look(fd, path, entry, held)
                if entry.directory and not entry.skipped:
                    if len(stack) >= _DEPTH:
                        yield "mount.scan-cut", path, f"folders below level {_DEPTH} were not looked at"
                        continue
                    below = self._open(fd, entry.name)
                    if below is not None:
                        stack.append((below, path, held or entry.held, iter(self._children(below, entry.name))))
        finally:
            for fd, *_ in stack:
                os.close(fd)

    def _open(self, parent: int, name: str) -> int | None:
        try:
            return os.open(name, _OPEN, dir_fd=parent)
        except OSError:
            return None  # gone, or made unreadable: an unreadable folder cannot be used by the host's tools either

    def _children(self, fd: int, name: str) -> list[_Child]:
        """Of the folder called `name`. One called `.git` counts as a repository before it is whole: a later run could
        add what is missing, and the hooks would then be older than it (L01)."""
        try:
            with os.scandir(fd) as entries:
                listed = []
                for entry in entries:
                    self._left -= 1
                    if self._left <= 0:
                        break
                    listed.append((entry.name, entry.is_dir(follow_symlinks=False)))
        except OSError:
            return []
        names = {name for name, _ in listed}
        bare = {"HEAD", "objects", "refs"} <= names  # a bare repository may stand in for `.git`
        in_git = name == ".git" or bare
        return [_child(name, directory, in_git) for name, directory in sorted(listed)]

    def _look(self, fd: int, path: str, entry: _Child, held: bool) -> Iterator[tuple[str, str, str]]:
        try:
            status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return
        if status.st_ctime_ns < self._before or (status.st_dev, status.st_ino) in self._ignore:
            return
        shown = _printable(path)
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o6000:
            yield "mount.setuid", path, f"{shown} was made set-uid or set-gid while the sandbox ran"
        if held or entry.held:
            yield (
                "mount.protected-name",
                path,
                f"{shown} appeared or changed; a program on the host may run or trust it",
            )


@final
class _Child(Struct):
    name: str
    directory: bool
    held: bool  # a protected name: it and what is below is reported
    skipped: bool


def _child(name: str, directory: bool, in_git: bool) -> _Child:
    held = name in NAMES or (name == ".git" and not directory) or (in_git and name in _GIT_NAMES)
    return _Child(name, directory, held, in_git and name in _GIT_SKIPPED)
