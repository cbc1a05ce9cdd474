"""Finds the programs of this host that we start ourselves, and says which were passed over and why (L18).

A guest with a writable mount can put a `runsc` or a `podman` there, and that folder may be in the caller's PATH. So a
program is taken only when nobody but root and the caller can have put it there. Starts nothing.
"""

from __future__ import annotations

import os
import stat

from ringfence.policy.host_paths import within
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Looked through first, whatever PATH says: root alone puts programs there.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_MOST_LINKS = 40  # as the kernel follows
_MOST_NOTED = 1 << 18  # bytes of the note of folders
_KEPT_NOTED = 2000  # folders that stay when it is written anew
# What such a program gets of the caller's variables. None that makes a tool load or run something, such as PYTHON*,
# LD_*, GIT_* and NODE_OPTIONS (O20).
_PASSED = ("HOME", "USER", "LOGNAME", "LANG")
_PROXY = "_proxy"


@final
class PassedOver(Struct):
    """A program that was there and was not taken."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} was passed over: {self.why}"


@final
class LookedUp(Struct):
    """The answer to one name. `passed_over` holds what came before it, or all there was."""

    path: str | None
    passed_over: tuple[PassedOver, ...]

    @property
    def remark(self) -> str:
        """To be put behind "there is no NAME": "" or " (…)"."""
        return f" ({'; '.join(map(str, self.passed_over))})" if self.passed_over else ""


def look_up(name: str, *, path: str | None = None) -> LookedUp:
    """The program of that name: in the system's folders, then in those of `path` (None: the caller's PATH).

    An absolute name is that file: the caller vouches for it, and it is passed over only when others than root and the
    caller can change it, guests of this process among them.
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
    """Every program of that name which is never run: those too that come after the one that is."""
    found = _candidates(name, os.environ.get("PATH", os.defpath))
    return tuple(PassedOver(at, reason) for at, reason in found if reason is not None)


def _candidates(name: str, path: str) -> Iterator[tuple[str, str | None]]:
    """Each with why it is passed over; None: it is not."""
    noted = _noted()
    for folder in dict.fromkeys((*SYSTEM_FOLDERS, *path.split(os.pathsep))):
        at = os.path.join(folder, name)
        if _is_program(at):
            yield at, (None if folder in SYSTEM_FOLDERS else _of_a_project(folder, at)) or _reason(at, noted)


def find(name: str, *, path: str | None = None) -> str | None:
    """`look_up` for who needs no reason."""
    return look_up(name, path=path).path


def environment(program: str, *more: str) -> dict[str, str]:
    """The variables for a program that was found: little of the caller's, and a PATH of the system's folders alone.

    Where the program lies elsewhere its own folder comes first there. `more`: names, or their beginnings with a "*",
    which this program needs besides.
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
    """The command that gets a signal when the thread that starts it is gone, however that ended."""
    import sys

    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_US, str(signal), *command]


_DIE_WITH_US = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,int(sys.argv[1]));os.execv(sys.argv[2],sys.argv[2:])"


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _of_a_project(folder: str, program: str) -> str | None:
    """Why a folder of PATH is one that belongs to what is worked on, where a guest before may have written."""
    if not os.path.isabs(folder):
        return f"{folder or '.'!r} in PATH means another folder wherever one stands"
    real = os.path.realpath(folder)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        top = os.environ.get(name, "")
        if os.path.isabs(top) and (within(folder, top) or within(real, os.path.realpath(top))):
            return f"it is of the environment that {name} names"
    if os.path.lexists(f"{os.path.dirname(real)}/pyvenv.cfg"):
        return "it is of a virtual environment"
    if folder.rstrip("/").endswith("/node_modules/.bin"):
        return "it is of a project's node_modules"
    try:
        here = os.getcwd()
    except OSError:
        return None
    if here not in ("/", os.path.expanduser("~")) and any(
        within(one, here) for one in (folder, real, os.path.realpath(program))
    ):
        return f"it is below the working directory, {here}"
    return None


def _reason(program: str, noted: dict[str, None]) -> str | None:
    """Why others than root and the caller may have put it there; None: they can not. `noted`: folders of guests'."""
    trusted = _trusted_owners()
    try:
        for path, found in _steps(program):
            if found.st_uid not in trusted:
                return f"{path} belongs to user {found.st_uid}"
            # In a sticky folder nobody removes what another owns, and the owner of each next step is looked at.
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
    """Whether root and the caller are all there is of the group: a user's own, as most systems give one to each, or one
    that nobody is in, as Debian's `staff`. One that cannot be looked up may have anybody."""
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
    """Root and the caller. In a user namespace without the host's root, what is root's belongs to nobody known."""
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
    """Every folder, link and file that leads to `path`, what it means last. Raises OSError."""
    import errno

    yield "/", os.lstat("/")
    here, links = "", 0
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

_writable: set[tuple[int, int]] = set()  # device and inode, by whatever name they are reached: of this process's mounts
_known: set[str] = set()  # that are in the note already


def note_writable(sources: Iterable[str]) -> None:
    """Guests of this process may write there from now on; later processes of this user are to know it, too."""
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
        return  # no folder, or no room, to write it down: the other rules stand
    _known.update(new)


def untouched(folders: Iterable[str]) -> list[str]:
    """Those that no guest of this user was shown writable, nor anything around or in them, as far as it is noted."""
    noted = _noted()
    return [folder for folder in folders if not any(_meet(folder, one) for one in noted)]


def _meet(folder: str, other: str) -> bool:
    names = (os.path.abspath(folder), os.path.realpath(folder))
    return any(within(name, other) or within(other, name) for name in names)


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
    """Folders that are gone are left out, then the oldest. What two processes add at that moment may be lost to one."""
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
