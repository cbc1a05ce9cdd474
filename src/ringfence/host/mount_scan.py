"""Scans a writable mount after the guest is gone, for what could harm the host later.

Reports protected names that appeared or changed, set-uid files, changed files that have another name outside, links
that lead out, and files that Python would import in place of another module. Removes nothing. Names come from the
guest: they are opened by directory descriptor, never followed, and printed only in an escaped form. The scan is limited
in entries, depth and time; a scan that was cut says so.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time

from ringfence.plan.rootfs.protected import GIT_MARKS, NAMES
from ringfence.policy.host_paths import open_itself
from ringfence.results import Denial
from ringfence.shared.paths import is_within
from ringfence.text import printable
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES = 400_000
_LONG = 64  # so many characters of a name count as one more entry: a folder's names are held in memory (O22)
_SECONDS = 5.0
_DEPTH = 64
_REPORTED = 100  # of each code, so that many findings of one code hide none of another
_PLACES = 1000  # so many places outside the mount that links lead to
_STEPS = 40  # links on the way of a link, as many as the kernel follows
_FILE_CLOCK = 5  # CLOCK_REALTIME_COARSE, from which file times come: on a busy host it is many milliseconds behind
_GIT_NAMES = frozenset(("config", "config.worktree", "commondir", "hooks"))
_GIT_SKIPPED = frozenset(("objects", "refs", "logs"))  # git runs nothing from there
# Errors that opening a folder may give: gone, no folder any more, or unreadable, which is reported if it is new.
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# All may read there and only root may write. A user's virtual environments lead there, which does no harm.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# What Ringfence, the packages it can use and Python itself may import, beside the standard library.
IMPORTED = frozenset(
    (
        *("ringfence", "sitecustomize", "usercustomize", "h11", "h2", "hpack", "hyperframe", "cryptography", "cffi"),
        *("_cffi_backend", "pycparser", "docker", "requests", "urllib3", "certifi", "idna", "charset_normalizer"),
        *("chardet", "simplejson", "brotli", "brotlicffi", "zstandard", "socks", "paramiko", "websocket"),
        *("inspect_ai", "pydantic", "pydantic_core", "typing_extensions", "org", "java", "vms_lib"),
    )
)


@final
class Before(Struct):
    """The moment before the guest started.

    A file's ctime cannot be set back. Therefore a file with a later ctime was changed by the guest, or by a program on
    the host in the same time. A file system with a clock of its own (NFS) may be off by the difference of the clocks.
    """

    at_ns: int


def snapshot_before(root: str) -> Before:
    """Return the moment to compare with, before the sandbox starts. Costs one call, however large the folder."""
    del root  # one clock for all local file systems
    return Before(at_ns=time.clock_gettime_ns(_FILE_CLOCK))


def end_scan(
    root: str,
    before: Before,
    *,
    ignore: frozenset[tuple[int, int]] = frozenset(),
    known: frozenset[str] = frozenset(),
) -> tuple[Denial, ...]:
    """Return what is new or changed below `root` since `before`, as denials.

    `ignore`: inodes of placeholders. `known`: git directories that existed before and whose hooks and configuration
    were protected. To be called when no process of the sandbox is left and the placeholders are removed. Opens only
    folders.
    """
    scan = _Scan(root, before, ignore, frozenset(os.path.relpath(path, root) for path in known))
    found = []
    seen: dict[str, int] = {}
    for code, relative, message in scan.walk():
        seen[code] = seen.get(code, 0) + 1
        if seen[code] <= _REPORTED:
            found.append(_denial(code, f"{root}/{relative}" if relative else root, message))
    more = ", ".join(f"{count - _REPORTED} {code}" for code, count in seen.items() if count > _REPORTED)
    if more:
        found.append(_denial("mount.scan-cut", root, f"not listed are {more} more"))
    return tuple(found)


def _denial(code: str, path: str, message: str) -> Denial:
    return Denial(kind="mount", target=printable(path), code=code, message=message, allow=None)


class _Scan:
    def __init__(self, root: str, before: Before, ignore: frozenset[tuple[int, int]], known: frozenset[str]) -> None:
        self._root = root
        self._before = before.at_ns
        self._ignore = ignore
        self._known = known
        self._left = _ENTRIES
        self._deadline = time.monotonic() + _SECONDS
        self._linked: dict[tuple[int, int], _Linked] = {}
        self._outside: dict[str, _Outside] = {}  # by the place they lead to: places that exist, and places that do not
        self._nowhere: dict[str, _Outside] = {}
        self._older: _Outside | None = None  # older links that lead out and may have been moved
        self._left_out = 0  # links to more places than are kept
        self._imports = _import_folders(root)

    def walk(self) -> Iterator[tuple[str, str, str]]:
        """Yield (code, path below the mount, message). Goes depth first, with one open descriptor for each level."""
        stack: list[_Level] = []
        try:
            try:
                top = _Child("", directory=True, protected=False, skipped=False, among_modules=False)
                stack.append(self._level(None, "", top))
            except OSError as error:
                yield "mount.scan-cut", "", _unseen(self._root, error)
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
                yield from self._look(level, path, entry)
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
                    stack[-1].changed = level.changed or entry.changed
                    if self._is_new_repository(level.fd, stack[-1]):
                        yield "mount.protected-name", path, _appeared(path)
                    if level.path in self._imports and self._is_new_package(entry, stack[-1]):
                        yield "mount.import-shadow", path, _shadows(path, entry.name)
            yield from self._linked_outside()
            yield from self._leading_out()
        finally:
            for level in stack:
                os.close(level.fd)

    def _linked_outside(self) -> Iterator[tuple[str, str, str]]:
        """Yield changed files that have another name outside the mount, after the whole mount was scanned."""
        for file in self._linked.values():
            if file.seen < file.names:
                yield "mount.linked", file.path, _shared(file.path)

    def _level(self, parent: int | None, path: str, entry: _Child) -> _Level:
        """Open and list the folder `entry` in `parent`, without a parent the mount itself. Raises OSError.

        A folder called `.git` counts as a repository before it is complete: a later run could add what is missing, and
        the hooks would then be older than that run (L01). A folder among the repositories of submodules counts too.
        """
        fd = open_itself(self._root, _OPEN) if parent is None else os.open(entry.name, _OPEN, dir_fd=parent)
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
        repository = entry.name == ".git" or names.issuperset(GIT_MARKS)  # a bare repository may stand in for `.git`
        in_git = repository or entry.among_modules
        children = []
        for name, directory in sorted(listed):
            protected = name in NAMES or (name == ".git" and not directory) or (in_git and name in _GIT_NAMES)
            skipped = repository and name in _GIT_SKIPPED
            among_modules = entry.among_modules or (repository and name == "modules")
            children.append(_Child(name, directory, protected or entry.protected, skipped, among_modules))
        return _Level(fd, path, entry.name, repository, children)

    def _is_new_repository(self, parent: int, level: _Level) -> bool:
        """Return whether a folder became a repository since the start.

        It did by its new name, with contents that an earlier run left, or by parts that were missing before. Work in a
        repository that was not protected may look the same, and is then reported.
        """
        if not level.repository or level.path in self._known or not self._is_new(level.fd, ""):
            return False
        if level.name == ".git":
            return self._is_new(parent, "")
        return any(self._is_new(level.fd, name) for name in ("HEAD", *GIT_MARKS))

    def _is_new(self, fd: int, name: str) -> bool:
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False) if name else os.fstat(fd)
        except OSError:
            return False  # the folder has no such entry
        return status.st_ctime_ns >= self._before

    def _look(self, level: _Level, path: str, entry: _Child) -> Iterator[tuple[str, str, str]]:
        fd = level.fd
        try:
            status = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_ctime_ns < self._before or (status.st_dev, status.st_ino) in self._ignore:
            if is_link and level.changed:
                self._note_older(fd, path, entry)
            return
        entry.changed = stat.S_ISDIR(status.st_mode)
        if is_link:
            self._note_link(path)
        if level.path in self._imports and not entry.directory:
            shadowed = _module(entry.name, folder=is_link)
            if shadowed is not None:
                yield "mount.import-shadow", path, _shadows(path, shadowed)
        shown = printable(path)
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o6000:
            yield "mount.setuid", path, f"{shown} was made set-uid or set-gid while the sandbox ran"
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            file = self._linked.setdefault((status.st_dev, status.st_ino), _Linked(path, status.st_nlink))
            file.seen += 1
        if entry.protected:
            yield "mount.protected-name", path, _appeared(path)
        if stat.S_ISDIR(status.st_mode) and not os.access(entry.name, os.R_OK | os.X_OK, dir_fd=fd):
            yield "mount.scan-cut", path, f"{shown} was shut while the sandbox ran, and was not looked through"

    def _is_new_package(self, entry: _Child, level: _Level) -> bool:
        return entry.name in _shadowable() and any(
            _is_init(name) and (entry.changed or self._is_new(level.fd, name)) for name in level.names
        )

    def _note_link(self, path: str) -> None:
        """Note where a new or changed link leads out of the mount. A way out by another new link is not noted twice."""
        place = self._way_out(path, {})
        if place is None:
            return
        places = self._outside if os.path.lexists(place) else self._nowhere
        if place in places:
            places[place].count += 1
        elif len(places) < _PLACES:
            places[place] = _Outside(path, 1)
        else:
            self._left_out += 1

    def _note_older(self, fd: int, path: str, entry: _Child) -> None:
        """Note an older relative link that leads out of a changed folder: the folder may have been moved here."""
        target = _text(entry.name, fd)
        if target is None or target.startswith("/"):
            return
        if os.path.normpath(f"{os.path.dirname(path)}/{target}".lstrip("/")).split("/")[0] == "..":
            self._older = self._older or _Outside(path, 0)
            self._older.count += 1

    def _way_out(self, path: str, visited: dict[str, str | None]) -> str | None:
        """Return the place outside the mount that a link leads to, or None.

        Returns None too if another new link on the way is the link that leaves the mount. `visited`: links on the way
        here. Names are looked up and never followed.
        """
        visited[path] = None  # a link that comes back to itself leads nowhere
        text = _text(f"{self._root}/{path}") or ""
        left = self._inside(text)
        if left is None:
            return self._unless_harmless(text)
        at = [] if text.startswith("/") else _parts(os.path.dirname(path))
        steps = 0
        while left and steps <= _STEPS and time.monotonic() < self._deadline:
            part = left.pop(0)
            if part == "..":
                if not at:
                    return os.path.normpath("/".join((self._root, "..", *left)))
                at.pop()
                continue
            here = "/".join((*at, part))
            text = _text(f"{self._root}/{here}") or ""
            if not text:
                at.append(part)
                continue
            steps += 1
            place = visited[here] if here in visited or len(visited) > _STEPS else self._way_out(here, visited)
            inner = self._inside(text)
            if place is not None or inner is None:
                return None if self._is_new_link(here) else place
            at = [] if text.startswith("/") else at
            left = inner + left
        return None

    def _inside(self, text: str) -> list[str] | None:
        """Return the parts of a link's text below the mount, or None for an absolute path outside the mount."""
        if not text.startswith("/"):
            return _parts(text)
        place = os.path.normpath(text)
        return _parts(os.path.relpath(place, self._root)) if is_within(place, self._root) else None

    def _unless_harmless(self, text: str) -> str | None:
        place = os.path.normpath(text)
        return None if os.geteuid() != 0 and any(is_within(place, folder) for folder in _SYSTEM) else place

    def _is_new_link(self, path: str) -> bool:
        try:
            return os.lstat(f"{self._root}/{path}").st_ctime_ns >= self._before
        except OSError:
            return False

    def _leading_out(self) -> Iterator[tuple[str, str, str]]:
        """Yield the links that lead out, after the whole mount was scanned. Links to existing places come first."""
        for place, link in (*self._outside.items(), *self._nowhere.items()):
            yield "mount.link-out", link.path, _leads(link.path, place, link.count)
        if self._left_out:
            words = f"{self._left_out} more links that appeared or changed lead out of the mount, to other places"
            yield "mount.link-out", "", words
        if self._older is not None:
            yield "mount.link-out", self._older.path, _may_have_moved(self._older.path, self._older.count)


def _import_folders(root: str) -> frozenset[str]:
    """Return the folders below `root`, "" for `root`, from which a Python of the host imports.

    These are `root`, where a Python may be started, and the folders on our own path.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    named = [*sys.path, os.path.dirname(main) if isinstance(main, str) else ""]
    found = {os.path.realpath(str(folder)) for folder in named} | {root}
    return frozenset(folder[len(root) :].lstrip("/") for folder in found if is_within(folder, root))


def _shadowable() -> frozenset[str]:
    return sys.stdlib_module_names | IMPORTED


def _module(name: str, *, folder: bool) -> str | None:
    """Return the other module that Python would import a file for, or None. `folder`: a package may be meant."""
    module, dot, ending = name.partition(".")
    if module not in _shadowable():
        return None
    is_source = ending in ("py", "pyc", "so") or ending.endswith(".so")
    return module if (is_source if dot else folder) else None


def _is_init(name: str) -> bool:
    module, _, ending = name.partition(".")
    return module == "__init__" and (ending in ("py", "pyc", "so") or ending.endswith(".so"))


def _text(path: str, folder: int | None = None) -> str | None:
    """Return the text of a link; None if the path is no link or gone."""
    try:
        return os.readlink(path, dir_fd=folder)
    except OSError:
        return None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _shadows(path: str, module: str) -> str:
    return (
        f"{printable(path)} appeared or changed; a Python of the host that has its folder on the path, or is started "
        f"there, runs it in place of {module}"
    )


def _leads(path: str, place: str, count: int) -> str:
    more = f", as {'does' if count == 2 else 'do'} {count - 1} more" if count > 1 else ""
    return (
        f"{printable(path)} appeared or changed, and leads out of the mount to {printable(place)}{more}; "
        "a program on the host that follows it reads or writes there"
    )


def _may_have_moved(path: str, count: int) -> str:
    links = f"{count} links, the first of them {printable(path)}," if count > 1 else printable(path)
    return (
        f"{links} lead out of the mount and are older than the sandbox; their folder changed, and may have been moved"
    )


def _unseen(path: str, error: OSError) -> str:
    return f"{printable(path)} was not looked through: {error.strerror}"


def _appeared(path: str) -> str:
    return f"{printable(path)} appeared or changed; a program on the host may run or trust it"


def _shared(path: str) -> str:
    return (
        f"{printable(path)} changed, or got or lost a name; it has another name outside the mount, "
        "and what uses that name has the change too"
    )


class _Linked:
    """A changed file of several names, and how many names are in the mount."""

    __slots__ = ("names", "path", "seen")

    def __init__(self, path: str, names: int) -> None:
        self.path = path
        self.names = names
        self.seen = 0


class _Outside:
    """The links to a place outside: the first link, and how many there are."""

    __slots__ = ("count", "path")

    def __init__(self, path: str, count: int) -> None:
        self.path = path
        self.count = count


class _Child:
    """An entry of a folder."""

    __slots__ = ("among_modules", "changed", "directory", "name", "protected", "skipped")

    def __init__(self, name: str, directory: bool, protected: bool, skipped: bool, among_modules: bool) -> None:
        self.name = name
        self.directory = directory
        self.protected = protected  # a protected name, or below one: it is reported
        self.skipped = skipped
        self.among_modules = among_modules  # where git keeps the repositories of submodules
        self.changed = False  # for a folder: whether the folder or an entry of it changed


class _Level:
    """An open folder, and the entries that are still to be scanned."""

    __slots__ = ("changed", "children", "fd", "name", "names", "path", "repository")

    def __init__(self, fd: int, path: str, name: str, repository: bool, children: list[_Child]) -> None:
        self.fd = fd
        self.path = path
        self.name = name
        self.repository = repository
        self.changed = False  # whether the folder, or a folder around it in the mount, changed
        self.names = [child.name for child in children]
        self.children = iter(children)
