"""Looks through a writable mount after the guest is gone: protected names that appeared or changed, set-uid files,
changed files that have another name outside.

Reports, removes nothing. Names come from the guest: they are opened by directory descriptor, never followed, and only
printed in an escaped form. Bounded in entries, depth and time; a scan that was cut says so.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ringfence.plan.protected import GIT_MARKS, NAMES
from ringfence.results import Denial
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES = 400_000
_LONG = 64  # characters of a name that count as an entry more: a folder's are held while they are looked at (O22)
_SECONDS = 5.0
_DEPTH = 64
_REPORTED = 100
_TICK_NS = 20_000_000  # file times come from a clock that is up to one tick behind
_GIT_NAMES = frozenset(("config", "config.worktree", "commondir", "hooks"))
_GIT_SKIPPED = frozenset(("objects", "refs", "logs"))  # git runs nothing from there
# Of a folder: gone, no folder any more, or unreadable, which is told where that is new.
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
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


def end_scan(
    root: str,
    before: Before,
    *,
    ignore: frozenset[tuple[int, int]] = frozenset(),
    known: frozenset[str] = frozenset(),
) -> tuple[Denial, ...]:
    """What is new or changed below `root` since `before`, as denials; `ignore` are inodes known to be placeholders,
    `known` git directories that were there before and whose hooks and configuration were held.

    To be called when no process of the sandbox is left and the placeholders are removed. Opens nothing but folders.
    """
    scan = _Scan(before, ignore, frozenset(os.path.relpath(path, root) for path in known))
    found = []
    for code, relative, message in scan.walk(root):
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
    def __init__(self, before: Before, ignore: frozenset[tuple[int, int]], known: frozenset[str]) -> None:
        self._before = before.at_ns
        self._ignore = ignore
        self._known = known
        self._left = _ENTRIES
        self._deadline = time.monotonic() + _SECONDS
        self._linked: dict[tuple[int, int], _Linked] = {}

    def walk(self, root: str) -> Iterator[tuple[str, str, str]]:
        """Depth first with one open descriptor for each level."""
        stack: list[_Level] = []
        try:
            try:
                top = _Child(root, directory=True, held=False, skipped=False, among_modules=False)
                stack.append(self._level(None, "", top))
            except OSError as error:
                yield "mount.scan-cut", "", _unseen(root, error)
            while stack:
                level = stack[-1]
                entry = next(level.children, None)
                if entry is None:
                    os.close(stack.pop().fd)
                    continue
                path = f"{level.path}/{entry.name}" if level.path else entry.name
                if self._left <= 0 or time.monotonic() > self._deadline:
                    yield "mount.scan-cut", level.path, f"the end scan stopped after {_ENTRIES - self._left} entries"
                    return
                yield from self._look(level.fd, path, entry)
                if entry.directory and not entry.skipped:
                    if len(stack) >= _DEPTH:
                        yield "mount.scan-cut", path, f"folders below level {_DEPTH} were not looked at"
                        continue
                    try:
                        stack.append(self._level(level.fd, path, entry))
                    except OSError as error:
                        if error.errno not in _EXPECTED:
                            yield "mount.scan-cut", path, _unseen(path, error)
                        continue
                    if self._is_new_repository(level.fd, stack[-1]):
                        yield "mount.protected-name", path, _appeared(path)
            yield from self._linked_outside()
        finally:
            for level in stack:
                os.close(level.fd)

    def _linked_outside(self) -> Iterator[tuple[str, str, str]]:
        """When everything was looked at."""
        for file in self._linked.values():
            if file.seen < file.names:
                yield "mount.linked", file.path, _shared(file.path)

    def _level(self, parent: int | None, path: str, entry: _Child) -> _Level:
        """The folder `entry` in `parent`. One called `.git` counts as a repository before it is whole: a later run
        could add what is missing, and the hooks would then be older than it (L01). So does what lies among submodules'.
        """
        fd = os.open(entry.name, _OPEN, dir_fd=parent)
        listed = []
        try:
            with os.scandir(fd) as entries:
                for one in entries:
                    self._left -= 1 + len(one.name) // _LONG
                    if self._left <= 0:
                        break
                    listed.append((one.name, one.is_dir(follow_symlinks=False)))
        except BaseException:
            os.close(fd)
            raise
        names = {name for name, _ in listed}
        repository = entry.name == ".git" or names.issuperset(GIT_MARKS)  # a bare one may stand in for `.git`
        in_git = repository or entry.among_modules
        children = []
        for name, directory in sorted(listed):
            held = name in NAMES or (name == ".git" and not directory) or (in_git and name in _GIT_NAMES)
            skipped = repository and name in _GIT_SKIPPED
            among_modules = entry.among_modules or (repository and name == "modules")
            children.append(_Child(name, directory, held or entry.held, skipped, among_modules))
        return _Level(fd, path, entry.name, repository, children)

    def _is_new_repository(self, parent: int, level: _Level) -> bool:
        """Whether it became one since the start: by its name, with contents that an earlier run left, or by what was
        missing of it. Work in a repository that nobody held may look the same, and is told then."""
        if not level.repository or level.path in self._known or not self._is_new(level.fd, ""):
            return False
        if level.name == ".git":
            return self._is_new(parent, "")
        return any(self._is_new(level.fd, name) for name in ("HEAD", *GIT_MARKS))

    def _is_new(self, fd: int, name: str) -> bool:
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False) if name else os.fstat(fd)
        except OSError:
            return False  # it has no such part
        return status.st_ctime_ns >= self._before

    def _look(self, fd: int, path: str, entry: _Child) -> Iterator[tuple[str, str, str]]:
        try:
            status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return
        if status.st_ctime_ns < self._before or (status.st_dev, status.st_ino) in self._ignore:
            return
        shown = _printable(path)
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o6000:
            yield "mount.setuid", path, f"{shown} was made set-uid or set-gid while the sandbox ran"
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            file = self._linked.setdefault((status.st_dev, status.st_ino), _Linked(path, status.st_nlink))
            file.seen += 1
        if entry.held:
            yield "mount.protected-name", path, _appeared(path)
        if stat.S_ISDIR(status.st_mode) and not os.access(entry.name, os.R_OK | os.X_OK, dir_fd=fd):
            yield "mount.scan-cut", path, f"{shown} was shut while the sandbox ran, and was not looked through"


def _unseen(path: str, error: OSError) -> str:
    return f"{_printable(path)} was not looked through: {error.strerror}"


def _appeared(path: str) -> str:
    return f"{_printable(path)} appeared or changed; a program on the host may run or trust it"


def _shared(path: str) -> str:
    return (
        f"{_printable(path)} changed, or a name of it came or went; it has another outside the mount, "
        "and what uses that has the change too"
    )


class _Linked:
    """A changed file of several names, and how many of them lie in the mount."""

    __slots__ = ("names", "path", "seen")

    def __init__(self, path: str, names: int) -> None:
        self.path, self.names, self.seen = path, names, 0


class _Child:
    """An entry of a folder."""

    __slots__ = ("among_modules", "directory", "held", "name", "skipped")

    def __init__(self, name: str, directory: bool, held: bool, skipped: bool, among_modules: bool) -> None:
        self.name = name
        self.directory = directory
        self.held = held  # a protected name, or below one: it is reported
        self.skipped = skipped
        self.among_modules = among_modules  # where git keeps the repositories of submodules


class _Level:
    """A folder that is open, and what of it is still to be looked at."""

    __slots__ = ("children", "fd", "name", "path", "repository")

    def __init__(self, fd: int, path: str, name: str, repository: bool, children: list[_Child]) -> None:
        self.fd = fd
        self.path = path
        self.name = name
        self.repository = repository
        self.children = iter(children)
