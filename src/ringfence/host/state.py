"""The state directory of this user: records of what must not outlive a library process, and the sweep that reads them.

The sweep removes only what carries our name or is noted in a record, and only when the owner is dead.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import stat
import time

from ringfence.errors import SandboxClosedError, SandboxError, UnsupportedError
from ringfence.host import lifecycle, process_id
from ringfence.values import Struct, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    Fact: TypeAlias = str | int
    Entry: TypeAlias = tuple[str, tuple[tuple[str, Fact], ...]]  # kind, sorted facts


_NAME = "ringfence"
_OWNERS = "owners"
_NEW = ".new"  # the ending of a record that is being rewritten
_COMPACT_AFTER = 1_000  # lines of a record that no longer matter
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SweepReport(Struct):
    """What a sweep removed. `busy`: another sweep worked for too long, and this sweep did not read the records."""

    owners: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    uids: int = 0
    busy: bool = False


def state_dir() -> str:
    """Return the state directory, made when missing. UnsupportedError unless it is ours, 0700, no link (C09, C10)."""
    if os.geteuid() == 0:
        return _own(f"/run/{_NAME}")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_mine(runtime):
        return _own(f"{runtime}/{_NAME}")
    home = os.path.expanduser("~/.local/state")
    _make(home)
    return _own(f"{home}/{_NAME}")


def _make(path: str) -> None:
    """Make a folder and the folders above. Raises UnsupportedError, as where a service's user has no home."""
    try:
        os.makedirs(path, 0o700, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(
            f"{path}, where Ringfence notes what it has to remove, cannot be made: {error.strerror}",
            code="state",
            fix="set HOME to a folder that this user may write, or XDG_RUNTIME_DIR to one that is its own",
        ) from None


def directory(name: str) -> str:
    """Return a directory below the state directory, made when missing. Checks and raises as `state_dir` does."""
    return _own(f"{state_dir()}/{name}")


def disk_directory(name: str) -> str:
    """Return a directory for what may be large, made when missing: never in /run, which is memory on most hosts."""
    root = disk_root()
    _make(os.path.dirname(root))
    return _own(f"{_own(root)}/{name}")


def lasting_directory(name: str) -> str:
    """Return a directory that outlasts a reboot, made when missing.

    It is the same for all processes of this user, whatever XDG_RUNTIME_DIR says. Where no such place can be made (a
    service without a home, a read-only root), it is in the state directory.
    """
    try:
        return disk_directory(name)
    except (UnsupportedError, OSError):
        return directory(name)


def lasting_place(name: str) -> str:
    """Return the path that `lasting_directory` would return. Makes no such directory."""
    place = f"{disk_root()}/{name}"
    return place if _is_mine(place) else f"{state_dir()}/{name}"


def disk_root() -> str:
    """Return the folder in which `disk_directory` makes directories. Makes nothing."""
    return f"/var/lib/{_NAME}" if os.geteuid() == 0 else os.path.expanduser(f"~/.local/state/{_NAME}")


def register() -> OwnerRecord:
    """Open the record of this process, made when missing. Cheap; call this once and keep the result."""
    return OwnerRecord(record())


def record() -> str:
    """Return the path that the record of this process has, if there is a record."""
    return f"{directory(_OWNERS)}/{process_id.name()}"


def sweep(timeout_s: float = 5.0) -> SweepReport:
    """Remove what dead library processes left: frozen or running guests, cgroups, placeholders, files, uid locks.

    Costs a directory listing or two when nothing was left. Two sweeps never work at once; the second waits up to
    `timeout_s`.
    """
    from ringfence.host import cgroups

    groups = tuple(cgroups.remove_dead_owners(process_id.is_dead))  # guests first, so that none writes any more
    records = directory(_OWNERS)
    report = SweepReport()
    if any(True for _ in _dead(records)):
        report = _sweep_records(records, timeout_s)
    uids = _sweep_uids() if report.owners or groups else 0
    files = (*report.files, *_sweep_placeholders())
    return replace(report, cgroups=(*groups, *report.cgroups), files=files, uids=uids)


_swept_as: set[str] = set()  # the names of this process, one more after each fork


def sweep_once() -> None:
    """Sweep, the first time that this process asks for it."""
    name = process_id.name()
    if name not in _swept_as:
        _swept_as.add(name)
        sweep()


class OwnerRecord:
    """The record of one library process: a file of JSON lines. Safe to use from many threads.

    In a fork of the process the object is dead: `note` and `forget` raise SandboxClosedError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = _thread.allocate_lock()
        self._entries: dict[Entry, None] = dict.fromkeys(_read_record(path))
        self._stale_lines = 0
        self._fd = _open_record(path, os.O_CREAT)

    def note(self, kind: str, **facts: Fact) -> None:
        """Note something to remove if this process dies. The note is in the file when this returns.

        Kinds: `file` (path, device, inode), `cgroup` (path), `tree` (path, right below a `disk_directory`).
        """
        entry = (kind, tuple(sorted(facts.items())))
        with self._lock:
            self._check()
            if entry not in self._entries:
                self._entries[entry] = None
                self._append("note", entry)

    def forget(self, kind: str, **facts: Fact) -> None:
        """Take back the note with the same facts, if there is such a note."""
        entry = (kind, tuple(sorted(facts.items())))
        with self._lock:
            self._check()
            if entry in self._entries:
                del self._entries[entry]
                self._append("forget", entry)
                self._stale_lines += 2
                if self._stale_lines > _COMPACT_AFTER + len(self._entries):
                    self._compact()

    def close(self) -> None:
        """Close the record. What is still noted stays on disk, for a sweep after this process is gone."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            if os.getpid() == self._pid and not self._entries:
                _unlink(self._path)
            os.close(fd)

    def _check(self) -> None:
        if self._fd < 0 or os.getpid() != self._pid:
            raise SandboxClosedError(
                f"the record {self._path} belongs to process {self._pid}, or is closed",
                fix="make sandboxes in the process that uses them, after a fork",
            )

    def _append(self, verb: str, entry: Entry) -> None:
        os.write(self._fd, _line(verb, entry))

    def _compact(self) -> None:
        """Replace the record's file by a file with the notes that still hold."""
        new = f"{self._path}{_NEW}"
        _unlink(new)
        fd = _open_record(new, os.O_CREAT | os.O_EXCL)
        os.write(fd, b"".join(_line("note", entry) for entry in self._entries))
        os.rename(new, self._path)
        os.close(self._fd)
        self._fd = fd
        self._stale_lines = 0


def remove_if_same(facts: dict[str, Fact]) -> bool:
    """Remove a file or an empty directory whose inode is the noted one. Return whether it was removed.

    The parent is opened once. If the directory was swapped for a link in between (C01 and similar attacks), the name
    has another inode there, and nothing is removed.
    """
    path = str(facts["path"])
    try:
        parent = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    name = os.path.basename(path)
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if (found.st_dev, found.st_ino) != (facts["device"], facts["inode"]):
            return False
        if stat.S_ISDIR(found.st_mode):
            os.rmdir(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
    except OSError:
        return False  # gone, not empty, or on a file system that is read-only now: not ours to force
    finally:
        os.close(parent)
    return True


# ── the sweep ────────────────────────────────────────────────────────────────────────────────────


def _dead(records: str) -> Iterator[str]:
    for name in os.listdir(records):
        owner = name.removesuffix(_NEW)
        if process_id.is_dead(owner) or (process_id.parse(owner) and _is_abandoned(f"{records}/{name}", owner)):
            yield name


def _is_abandoned(path: str, owner: str) -> bool:
    """Return whether no process locks the record of an owner in another pid namespace (a container, perhaps ended)."""
    found = process_id.parse(owner)
    if found is None or found[2] == process_id.pid_namespace():
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _sweep_records(records: str, timeout_s: float) -> SweepReport:
    lock = os.open(f"{state_dir()}/sweep.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(lock, 0o600)
    try:
        if not lock_until(lock, time.monotonic() + timeout_s):
            return SweepReport(busy=True)
        swept: list[str] = []
        groups: list[str] = []
        files: list[str] = []
        for name in list(_dead(records)):
            entries = _read_record(f"{records}/{name}")
            _sweep_entries(name.removesuffix(_NEW), entries, groups, files)
            _unlink(f"{records}/{name}")
            swept.append(name)
        return SweepReport(owners=tuple(swept), cgroups=tuple(groups), files=tuple(files))
    finally:
        os.close(lock)


def _sweep_entries(owner: str, entries: list[Entry], groups: list[str], files: list[str]) -> None:
    from ringfence.host import cgroups

    for kind, facts in reversed(entries):
        path = str(dict(facts)["path"])
        if kind == "cgroup" and cgroups.remove_noted(path, owner):
            groups.append(path)
    for kind, facts in reversed(entries):
        remover = {"file": remove_if_same, "tree": _remove_noted_tree}.get(kind)
        if remover is not None and remover(dict(facts)):
            files.append(str(dict(facts)["path"]))


def remove_tree(path: str) -> bool:
    """Remove our directory right below a `disk_directory`, with all that a guest put there. Return False if not found.

    Works by descriptors and follows no link: the content may be as hostile as a guest likes (K01, A27).
    """
    from ringfence.shared import tree_walk

    kept_in, name = os.path.split(path)
    ours = os.path.dirname(kept_in)
    if os.path.basename(ours) != _NAME or not (_is_mine(ours) and _is_mine(kept_in)):
        return False
    parent = os.open(kept_in, _DIRECTORY)
    try:
        tree_walk.remove_tree(parent, name)
    except FileNotFoundError:
        return False
    finally:
        os.close(parent)
    return True


def _remove_noted_tree(facts: dict[str, Fact]) -> bool:
    return remove_tree(str(facts["path"]))


def _sweep_placeholders() -> list[str]:
    try:
        if not os.listdir(f"{lasting_place('placeholders')}/stakes"):
            return []  # the usual case, without an import
    except FileNotFoundError:
        return []
    from ringfence.host import placeholders

    return placeholders.sweep()


def _sweep_uids() -> int:
    if os.geteuid() != 0:
        return 0
    from ringfence.host import uids

    return uids.sweep()


def lock_until(fd: int, deadline: float, *, poll_s: float = 0.01) -> bool:
    """Lock a file, trying until the deadline. Return whether it is locked."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(poll_s)
        else:
            return True


# ── records and directories ──────────────────────────────────────────────────────────────────────


def _open_record(path: str, flags: int) -> int:
    """Open and lock a record. The lock shows processes of other pid namespaces that this process lives."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    os.fchmod(fd, 0o600)  # whatever the caller's umask: a sweep reads the record
    if lock_until(fd, time.monotonic() + 1.0):
        return fd
    os.close(fd)
    raise SandboxError(f"the record {path} is open already: a process registers once", code="registered-twice")


def _line(verb: str, entry: Entry) -> bytes:
    import json

    return json.dumps({"verb": verb, "kind": entry[0], "facts": dict(entry[1])}).encode() + b"\n"


def _read_record(path: str) -> list[Entry]:
    """Return what is still noted in a record, in order. The last line may be half written."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    import json

    entries: dict[Entry, None] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        row = json.loads(line)
        entry = (row["kind"], tuple(sorted(row["facts"].items())))
        if row["verb"] == "note":
            entries[entry] = None
        else:
            entries.pop(entry, None)
    return list(entries)


def _own(path: str) -> str:
    if _is_mine(path):
        return path
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the caller's umask
    except FileExistsError:
        pass  # its owner is checked next
    if not _is_mine(path):
        raise UnsupportedError(
            f"{path} cannot hold our state: it is a link, no directory, another user's, or open to others",
            code="state-directory",
            fix=f"look at it, then remove it: ls -ld {path}",
        )
    return path


def _is_mine(path: str) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


# ── the record of this process: a single record for all that must not outlive it ──────────────────

_owners: dict[int, OwnerRecord] = {}
_lock = _thread.allocate_lock()


def owner() -> OwnerRecord:
    """Return the record of this process, opened on first use. A fork gets a record of its own."""
    with _lock:
        pid = os.getpid()
        if pid not in _owners:
            lifecycle.at_exit(lifecycle.RECORD, close)
            _owners.clear()
            _owners[pid] = register()
        return _owners[pid]


def close() -> None:
    """Close the record when the process ends. A record without notes is removed."""
    with _lock:
        found = _owners.pop(os.getpid(), None)
    if found is not None:
        found.close()
