"""Finds the programs of this host that we start ourselves, and says which were passed over and why (L18).

A guest with a writable mount can put a `runsc` or a `podman` there, and that folder may be in the caller's PATH.
Therefore a program is taken only when no user but root and the caller, and no guest, can have put it there. Starts
nothing.
"""

from __future__ import annotations

import os
import stat

from ringfence.shared.paths import is_within
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Looked through first, whatever PATH says: root alone puts programs there.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_MOST_LINKS = 40  # as many as the kernel follows
_MOST_NOTED = 1 << 18  # bytes of the note of folders
_KEPT_NOTED = 2000  # folders that stay when the note is shortened
# The caller's variables that such a program gets. No variable that makes a tool load or run something is among them,
# such as PYTHON*, LD_*, GIT_* and NODE_OPTIONS (O20).
_PASSED = ("HOME", "USER", "LOGNAME", "LANG")
_PROXY = "_proxy"


@final
class PassedOver(Struct):
    """A program that exists and was not taken."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} was passed over: {self.why}"


@final
class LookedUp(Struct):
    """The program of a name, if there is any, and the programs of that name that come before and were passed over."""

    path: str | None
    passed_over: tuple[PassedOver, ...]

    @property
    def remark(self) -> str:
        """Return the text to put behind "there is no NAME": "" or " (…)"."""
        return f" ({'; '.join(map(str, self.passed_over))})" if self.passed_over else ""


def look_up(name: str, *, path: str | None = None) -> LookedUp:
    """Look for a program in the system's folders, then in the folders of `path` (None: the caller's PATH).

    An absolute name is a file for which the caller vouches. It is passed over only when other users than root and the
    caller can change the file, or guests of this process.
    """
    if os.path.isabs(name):
        found = _reason(name, {}) if _is_program(name) else "there is no such program"
        return LookedUp(None, (PassedOver(name, found),)) if found else LookedUp(name, ())
    over: list[PassedOver] = []
    for at, reason in _candidates(name, os.environ.get("PATH", os.defpath) if path is None else path):
        if reason is None:
            return LookedUp(at, tuple(over))
        over.append(PassedOver(at, reason))
    return LookedUp(None, tuple(over))


def passed_over(name: str) -> tuple[PassedOver, ...]:
    """Return every program of that name that is never run, also where it comes after the program that is run."""
    found = _candidates(name, os.environ.get("PATH", os.defpath))
    return tuple(PassedOver(at, reason) for at, reason in found if reason is not None)


def _candidates(name: str, path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the path of each program of that name, and the reason to pass it over, or None."""
    noted = _noted()
    for folder in dict.fromkeys((*SYSTEM_FOLDERS, *path.split(os.pathsep))):
        at = os.path.join(folder, name)
        if _is_program(at):
            yield at, (None if folder in SYSTEM_FOLDERS else _of_a_project(folder, at)) or _reason(at, noted)


def find(name: str, *, path: str | None = None) -> str | None:
    """Return the path of a program, as `look_up` finds it, or None."""
    return look_up(name, path=path).path


def environment(program: str, *more: str) -> dict[str, str]:
    """Return the variables for a program that was found: few of the caller's, and a PATH of the system's folders.

    The folder of a program that is elsewhere comes first in that PATH. `more`: further names that this program needs,
    or beginnings of names, with a "*" at the end.
    """
    names = frozenset((*_PASSED, *more))
    starts = tuple(one[:-1] for one in more if one.endswith("*"))
    env = {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(starts) or name.lower().endswith(_PROXY)
    }
    own = os.path.dirname(program)
    folders = SYSTEM_FOLDERS if own in SYSTEM_FOLDERS or not os.path.isabs(own) else (own, *SYSTEM_FOLDERS)
    return {**env, "PATH": os.pathsep.join(folders)}


def dying_with_us(command: list[str], signal: int = 9) -> list[str]:
    """Return the command, made to get a signal when the thread that starts it is gone, however that thread ended."""
    import sys

    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_US, str(signal), *command]


_DIE_WITH_US = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,int(sys.argv[1]));os.execv(sys.argv[2],sys.argv[2:])"


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _of_a_project(folder: str, program: str) -> str | None:
    """Return why a folder of PATH is a project's, in which an earlier guest may have written, or None."""
    if not os.path.isabs(folder):
        return f"{folder or '.'!r} in PATH depends on the working directory"
    real = os.path.realpath(folder)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        top = os.environ.get(name, "")
        if os.path.isabs(top) and (is_within(folder, top) or is_within(real, os.path.realpath(top))):
            return f"it belongs to the environment that {name} names"
    if os.path.lexists(f"{os.path.dirname(real)}/pyvenv.cfg"):
        return "it belongs to a virtual environment"
    if folder.rstrip("/").endswith("/node_modules/.bin"):
        return "it belongs to a project's node_modules"
    try:
        here = os.getcwd()
    except OSError:
        return None
    if here not in ("/", os.path.expanduser("~")) and any(
        is_within(one, here) for one in (folder, real, os.path.realpath(program))
    ):
        return f"it is below the working directory, {here}"
    return None


def _reason(program: str, noted: dict[str, None]) -> str | None:
    """Return why a guest, or a user but root and the caller, may have put a program there; None if that is impossible.

    `noted`: folders that guests could write to.
    """
    trusted = _trusted_owners()
    try:
        for path, found in _steps(program):
            if found.st_uid not in trusted:
                return f"{path} belongs to user {found.st_uid}"
            # In a sticky folder no user removes what another user owns, and the owner of each next step is checked.
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            open_to = 0o022 if not _has_no_others(found) else 0o002
            if found.st_mode & open_to and not sticky and not stat.S_ISLNK(found.st_mode):
                return f"{path} can be written by others"
            if (found.st_dev, found.st_ino) in _writable or path in noted:
                return f"guests could write to {path}, which was mounted rw"
    except OSError as error:
        return str(error.strerror)
    return None


def _has_no_others(found: os.stat_result) -> bool:
    """Return whether the group of a file has no members but root and the caller, if the group may write.

    Most systems give each user such a group, and Debian's `staff` has no members. A group that cannot be looked up may
    have any member.
    """
    if not found.st_mode & 0o020:
        return True
    import grp
    import pwd

    try:
        mine = {"root", pwd.getpwuid(os.geteuid()).pw_name}
        group = grp.getgrgid(found.st_gid)
        others = [one.pw_name for one in pwd.getpwall() if one.pw_gid == found.st_gid]
    except KeyError:
        return False
    return mine.issuperset((*group.gr_mem, *others))


def _trusted_owners() -> frozenset[int]:
    """Return the uids of root and the caller.

    In a user namespace without the host's root, root's files belong to the overflow uid, which is then trusted too.
    """
    mine = frozenset((0, os.geteuid()))
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            ranges = [[int(word) for word in row.split()] for row in file]
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            nobody = int(file.read())
    except (OSError, ValueError):
        return mine
    known = any(first <= nobody < first + count for first, _, count in ranges)
    return mine if known or os.stat("/usr").st_uid != nobody else mine | {nobody}


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every folder, link and file on the way to `path`, and the file itself last. Raises OSError."""
    import errno

    yield "/", os.lstat("/")
    here = ""
    links = 0
    waiting = path.split("/")[::-1]
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = here.rpartition("/")[0]
            continue
        at = f"{here}/{part}"
        found = os.lstat(at)
        yield at, found
        if not stat.S_ISLNK(found.st_mode):
            here = at
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(at)
        here = "" if target.startswith("/") else here
        waiting += target.split("/")[::-1]


# ── what guests could write to ───────────────────────────────────────────────────────────────────

_writable: set[tuple[int, int]] = set()  # device and inode of this process's writable mounts, whatever their names
_known: set[str] = set()  # folders that are in the note already


def note_writable(sources: Iterable[str]) -> None:
    """Note folders that guests of this process can write to from now on, for later processes of this user too."""
    new = []
    for source in sources:
        real = os.path.realpath(source)
        try:
            found = os.stat(real)
        except OSError:
            continue  # a launch that names it is refused
        _writable.add((found.st_dev, found.st_ino))
        if real not in _known:
            new.append(real)
    if not new:
        return
    from ringfence.errors import UnsupportedError

    try:
        _write_note(new)
    except (OSError, UnsupportedError):
        return  # no folder, or no room, for the note: the other rules still apply
    _known.update(new)


def untouched(folders: Iterable[str]) -> list[str]:
    """Return the folders that no guest of this user could write to, nor in or around them, as far as the note says."""
    noted = _noted()
    return [folder for folder in folders if not any(_overlap(folder, one) for one in noted)]


def _overlap(folder: str, other: str) -> bool:
    """Return whether one of the folders is, or is in, the other."""
    names = (os.path.abspath(folder), os.path.realpath(folder))
    return any(is_within(name, other) or is_within(other, name) for name in names)


def _note() -> str:
    from ringfence.host import state

    return f"{state.disk_directory('writable')}/folders"


def _write_note(new: list[str]) -> None:
    path = _note()
    there = _read_note(path)
    missing = [one for one in new if one not in there]
    if not missing:
        return
    data = b"".join(os.fsencode(one) + b"\0" for one in missing)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, data)
        if os.fstat(fd).st_size > _MOST_NOTED:
            _shorten(path)
    finally:
        os.close(fd)


def _shorten(path: str) -> None:
    """Drop folders that are gone, then the oldest, from the note. What another process adds meanwhile may be lost."""
    kept = [one for one in _read_note(path) if os.path.lexists(one)][-_KEPT_NOTED:]
    new = f"{path}.{os.getpid()}"
    with open(new, "wb") as file:
        file.write(b"".join(os.fsencode(one) + b"\0" for one in kept))
    os.rename(new, path)


def _read_note(path: str) -> dict[str, None]:
    try:
        with open(path, "rb") as file:
            return dict.fromkeys(os.fsdecode(one) for one in file.read(_MOST_NOTED * 2).split(b"\0") if one)
    except FileNotFoundError:
        return {}


def _noted() -> dict[str, None]:
    from ringfence.host import state

    try:
        return _read_note(f"{state.disk_root()}/writable/folders")
    except OSError:
        return {}
