"""Placeholders on the host for protected names that do not exist: made, counted by sandbox, removed when not needed.

A ledger says which names are placeholders and which sandboxes need each. It has a file for each folder, in a directory
of this user that outlasts a reboot and is the same for all of the user's processes. Ledgers are read and written under
one lock, and placeholders are made and removed under it too. Whether a name is ours, and whether it can be removed, is
therefore never decided from an old state.

Each sandbox has a file of its own, its stake, which is named in the ledger and locked for as long as the sandbox lives.
The sandbox's monitor gets the lock too, so that a guest which outlives its killed library for a moment still counts. An
entry leaves the ledger only when its placeholder was removed: what cannot be removed now is tried again when the next
sandbox ends or starts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from ringfence.errors import SandboxError
from ringfence.host import lifecycle, state
from ringfence.policy.host_paths import open_itself
from ringfence.shared import fast_stdlib
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ringfence.plan.rootfs.protected import Protected

# Opened without following a link on the way: a guest of another sandbox may have put a link in a folder's place (A11).
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_S = 20.0
_POLL_S = 0.001
_MAKING_S = 60.0  # how long after its note a placeholder was made at most, if the ledger does not have its inode
_OUTLIVES_S = 10.0  # how long a guest behind an engine, which has no lock, may outlive its killed library
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

_locks: set[int] = set()  # descriptors of this process that a fork has to close


class _Unfinished:
    """Whether this process could not remove a placeholder or a stake."""

    is_left: bool = False


_unfinished = _Unfinished()


@final
class Placeholder(Struct):
    """An empty folder or a small file that we made, as the ledger of the folder around describes it."""

    name: str
    directory: bool
    content: str
    inode: int  # 0: about to be made, the number is not known yet
    noted_at: float  # seconds since the epoch
    stakes: tuple[str, ...]  # sandboxes that need it

    def with_stakes(self, stakes: tuple[str, ...]) -> Placeholder:
        return Placeholder(self.name, self.directory, self.content, self.inode, self.noted_at, stakes)

    def made(self, inode: int) -> Placeholder:
        return Placeholder(self.name, self.directory, self.content, inode, self.noted_at, self.stakes)


class Placeholders:
    """The placeholders that a sandbox needs: made before the start, released when the last process is gone.

    `outlives`: the guest is behind an engine and may live for a moment after this process, without a lock to show that.
    """

    def __init__(self, protected: Sequence[Protected], *, outlives: bool = False) -> None:
        self._folders: dict[str, list[Protected]] = {}
        for one in protected:
            if one.content is not None and not one.hidden:
                self._folders.setdefault(os.path.dirname(one.path), []).append(one)
        self._outlives = outlives
        self._stake: _Stake | None = None
        self._held: dict[str, int] = {}  # descriptors of folders with placeholders: a renamed folder is still found

    def fileno(self) -> int:
        """Return the stake's lock, for the monitor, which outlives this process; -1 if no placeholder is needed."""
        return self._stake.fd if self._stake is not None else -1

    def make(self) -> None:
        """Make the placeholders, before the mounts. Raises OSError when that fails; then none is left."""
        if not self._folders:
            return
        _register()
        try:
            with _Locked() as place:
                self._stake = _Stake(place, outlives=self._outlives)
                for folder, wanted in self._folders.items():
                    self._make_in(place, folder, wanted)
        except BaseException:
            self.release()
            raise
        if not self._held:
            self.release()

    def _make_in(self, place: str, path: str, wanted: list[Protected]) -> None:
        assert self._stake is not None
        stake = self._stake.name
        try:
            if path not in self._held:
                self._held[path] = open_itself(path, _FOLDER)
            ledger = _Ledger(place, path, self._held[path])
            wanted = list({one.path: one for one in wanted}.values())  # a folder mounted twice has each path twice
            missing = [one for one in wanted if not ledger.join(os.path.basename(one.path), stake)]
            for one in missing:
                ledger.note(one, stake)
            if not ledger.needs(stake):
                os.close(self._held.pop(path))
                return
            self._stake.add(ledger)
            ledger.write()  # before a name can be seen: a SIGKILL at any moment leaves no unknown placeholder
            for one in missing:
                ledger.make(os.path.basename(one.path))
            if missing:
                ledger.write()
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else path
            raise OSError(error.errno, f"{where} cannot be protected: {error.strerror or error}") from error

    def make_again(self, removed: Sequence[Protected]) -> None:
        """Make placeholders again that were removed on the host while the sandbox runs. Raises OSError."""
        if self._stake is None:
            raise OSError(errno.ENOENT, "the sandbox had no placeholder before")
        folders: dict[str, list[Protected]] = {}
        for one in removed:
            folders.setdefault(os.path.dirname(one.path), []).append(one)
        with _Locked() as place:
            for folder, wanted in folders.items():
                self._make_in(place, folder, wanted)

    def release(self) -> None:
        """Remove the placeholders, after the last process of the sandbox is gone. Idempotent.

        Removes what no other sandbox needs and is still as it was made. What cannot be removed, or looked at, stays in
        the ledger. The stake is no longer locked, so that the next sweep tries again.
        """
        stake, self._stake = self._stake, None
        held, self._held = self._held, {}
        if stake is None:
            return
        stake.close()
        try:
            with _Locked() as place:
                if _is_locked(f"{place}/stakes/{stake.name}"):  # the monitor has not seen the end
                    _unfinished.is_left = True
                    return
                whole = True
                for path, fd in held.items():
                    ledger = _Ledger(place, path, fd)
                    ledger.leave(stake.name)
                    ledger.write()
                    whole = whole and not ledger.needs(stake.name)
                if whole:
                    stake.remove()
        except (OSError, SandboxError):
            _unfinished.is_left = True  # for example, no descriptor is free: the next sweep does it
        finally:
            for fd in held.values():
                os.close(fd)


def is_placeholder(path: str) -> bool:
    """Return whether the file or folder at `path` is a placeholder of any sandbox of this user."""
    folder, name = os.path.split(path)
    try:
        fd = open_itself(folder, _FOLDER)
    except OSError:
        return False
    try:
        with _Locked() as place:
            found = _Ledger(place, folder, fd).placeholders.get(name)
            return found is not None and found.inode == os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino
    except (OSError, SandboxError):
        return False  # not known to be one
    finally:
        os.close(fd)


def sweep() -> list[str]:
    """Remove the placeholders of sandboxes that are gone and did not do so. Return the paths that were removed."""
    _unfinished.is_left = False
    removed: list[str] = []
    with _Locked() as place:
        for name in os.listdir(f"{place}/stakes"):
            if not _is_alive(place, name):
                removed += _sweep_stake(place, name)
    return removed


def finish() -> None:
    """Try once more to remove what this process could not remove before."""
    if _unfinished.is_left:
        sweep()


def _sweep_stake(place: str, name: str) -> list[str]:
    """Remove a dead sandbox's placeholders, then its stake if none is left. Return the paths that were removed."""
    path = f"{place}/stakes/{name}"
    removed: list[str] = []
    whole = True
    for folder, file in _read(path).get("folders", ()):
        try:
            fd = open_itself(folder, _FOLDER)
        except OSError as error:
            whole = whole and error.errno in _GONE
            continue
        try:
            ledger = _Ledger(place, folder, fd, file)
            removed += ledger.leave(name)
            ledger.write()
            whole = whole and not ledger.needs(name)
        finally:
            os.close(fd)
    if whole:
        os.unlink(path)
    return removed


# ── the ledger of one folder ─────────────────────────────────────────────────────────────────────


class _Ledger:
    """The placeholders in a folder. `place` is the ledgers' directory, which only the holder of the lock knows."""

    def __init__(self, place: str, path: str, folder: int, file: str | None = None) -> None:
        """Read the ledger of the open `folder`, whatever is at `path` now.

        `file`: the ledger's name. It holds the folder's inode and the number of the device, which may be another number
        after a reboot.
        """
        self.path = path
        self._place = place
        self._folder = folder
        there = os.fstat(folder)
        self.file = file or f"{there.st_dev}-{there.st_ino}"
        self.placeholders: dict[str, Placeholder] = {}
        if self.file.endswith(f"-{there.st_ino}"):  # else another folder has that path now
            rows = _read(f"{place}/{self.file}").get("placeholders", ())
            for name, directory, content, inode, noted_at, stakes in rows:
                self.placeholders[name] = Placeholder(name, directory, content, inode, noted_at, tuple(stakes))
        self._written = bool(self.placeholders)

    def needs(self, stake: str) -> bool:
        return any(stake in one.stakes for one in self.placeholders.values())

    def join(self, name: str, stake: str) -> bool:
        """Return whether `name` exists. If `name` is a placeholder, note that the sandbox needs it too."""
        try:
            inode = os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_ino
        except FileNotFoundError:
            return False
        known = self.placeholders.get(name)
        if known is None:
            return True  # the user's own
        if known.inode in (0, inode) and self._is_as_made(known):
            self.placeholders[name] = known.made(inode).with_stakes(tuple(dict.fromkeys((*known.stakes, stake))))
        elif known.inode != inode:
            del self.placeholders[name]  # the user's own has come in its place
        return True

    def note(self, one: Protected, stake: str) -> None:
        name = os.path.basename(one.path)
        before = self.placeholders.get(name)  # it was removed under a sandbox, whose watch will stop that sandbox
        stakes = tuple(dict.fromkeys((*before.stakes, stake))) if before is not None else (stake,)
        self.placeholders[name] = Placeholder(name, one.directory, one.content or "", 0, time.time(), stakes)

    def make(self, name: str) -> None:
        """Make a noted placeholder. If the name exists by now, it is the user's own, and the note is dropped."""
        one = self.placeholders[name]
        try:
            if one.directory:
                os.mkdir(name, 0o755, dir_fd=self._folder)
            else:
                self._make_file(one)
            inode = os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_ino
        except FileExistsError:
            del self.placeholders[name]
            return
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{self.path}/{name}") from error
        self.placeholders[name] = one.made(inode)

    def _make_file(self, one: Placeholder) -> None:
        """Write a file without a name, then give it the name: no process sees half a file."""
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            fd = os.open(".", flags | os.O_TMPFILE, 0o644, dir_fd=self._folder)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            # a file system without nameless files
            fd = os.open(one.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=self._folder)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(one.content)
            return
        with open(fd, "w", encoding="utf-8") as file:
            file.write(one.content)
            file.flush()
            os.link(f"/proc/self/fd/{fd}", one.name, dst_dir_fd=self._folder, follow_symlinks=True)

    def leave(self, stake: str) -> list[str]:
        """End a sandbox's need. Remove placeholders that no living sandbox needs, and return the removed paths."""
        removed = []
        for name, one in list(self.placeholders.items()):
            others = tuple(other for other in one.stakes if other != stake)
            if any(_is_alive(self._place, other) for other in others):
                self.placeholders[name] = one.with_stakes(others)
                continue
            try:
                if self._remove(one):
                    removed.append(f"{self.path}/{name}")
            except OSError as error:
                if error.errno not in _GONE:
                    continue  # the entry stays, with this stake: the next sweep sees that no living sandbox needs it
            del self.placeholders[name]
        return removed

    def _remove(self, one: Placeholder) -> bool:
        """Remove a placeholder. Return False if it is not as made. Raises OSError when that cannot be done."""
        if not self._is_as_made(one):
            return False
        try:
            if one.directory:
                os.rmdir(one.name, dir_fd=self._folder)
            else:
                os.unlink(one.name, dir_fd=self._folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False  # the user's own things are in it
            raise
        return True

    def _is_as_made(self, one: Placeholder) -> bool:
        """Return whether inode and kind are as made, and the content is empty or ours. Waits for no pipe or device."""
        there = os.stat(one.name, dir_fd=self._folder, follow_symlinks=False)
        if one.inode not in (0, there.st_ino):
            return False
        if one.inode == 0 and not -1 <= there.st_mtime - one.noted_at <= _MAKING_S:
            return False  # made at another time, by another process
        if one.directory:
            return stat.S_ISDIR(there.st_mode)
        if not stat.S_ISREG(there.st_mode) or there.st_size > len(one.content.encode()):
            return False
        return self._text_of(one) == one.content or (one.inode == 0 and there.st_size == 0)

    def _text_of(self, one: Placeholder) -> str:
        if not one.content:
            return ""  # the caller has seen that its size is zero
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(one.name, flags, dir_fd=self._folder)
        try:
            return os.read(fd, 4096).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def write(self) -> None:
        if self.placeholders:
            rows = [[p.name, p.directory, p.content, p.inode, p.noted_at, p.stakes] for p in self.placeholders.values()]
            _write(f"{self._place}/{self.file}", {"placeholders": rows})
        elif self._written:
            os.unlink(f"{self._place}/{self.file}")
        self._written = bool(self.placeholders)


# ── stakes ───────────────────────────────────────────────────────────────────────────────────────


class _Stake:
    """The file that stands for a sandbox in the ledgers. `add` and `remove` need the lock, as `place` shows."""

    def __init__(self, place: str, *, outlives: bool) -> None:
        self.name = os.urandom(6).hex()
        self._path = f"{place}/stakes/{self.name}"
        self._says: dict[str, object] = {"folders": [], "outlives": outlives}
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _locks.add(self.fd)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
        except BaseException:
            self.close()
            self.remove()
            raise

    def add(self, ledger: _Ledger) -> None:
        folders = self._says["folders"]
        assert isinstance(folders, list)
        if [ledger.path, ledger.file] not in folders:
            folders.append([ledger.path, ledger.file])
            self._write()

    def _write(self) -> None:
        """Write the stake in place, as the lock is the file's. Each text is longer, so no old rest stays."""
        text = fast_stdlib.dumps(self._says)
        if os.pwrite(self.fd, text, 0) != len(text):  # half a text would name no folder, and nothing would be swept
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remove(self) -> None:
        os.unlink(self._path)

    def close(self) -> None:
        """Close our copy of the lock. The lock ends with the last copy, which may be the monitor's."""
        _locks.discard(self.fd)
        os.close(self.fd)


def _is_alive(place: str, stake: str) -> bool:
    """Return whether a process of the sandbox may run. To be called with the ledgers' lock held."""
    path = f"{place}/stakes/{stake}"
    if _is_locked(path):
        return True
    says = _read(path)
    if not says.get("outlives"):
        return False
    if "ended_at" not in says:
        _write(path, {**says, "ended_at": time.time()})
        return True
    return time.time() < float(says["ended_at"]) + _OUTLIVES_S


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not known now: a sandbox that may live loses nothing
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# ── files ────────────────────────────────────────────────────────────────────────────────────────


class _Locked:
    """The lock on all ledgers of this user, held for a short time: only names in a few folders are touched."""

    def __init__(self) -> None:
        self._fd = -1

    def __enter__(self) -> str:
        """Take the lock and return the ledgers' directory. Raises SandboxError when the lock is not free in time."""
        place = state.lasting_directory("placeholders")
        if not os.path.isdir(f"{place}/stakes"):
            os.makedirs(f"{place}/stakes", 0o700, exist_ok=True)
        self._fd = os.open(f"{place}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _locks.add(self._fd)
        if not state.lock_until(self._fd, time.monotonic() + _LOCK_S, poll_s=_POLL_S):
            self._close()
            raise SandboxError(
                f"{place}/lock has been held for {_LOCK_S:.0f} s: another process of this user is stopped",
                code="placeholders-busy",
                fix=f"continue or end the process that holds it: fuser {place}/lock",
            )
        return place

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough: a fork of the caller at this moment has a copy
        self._close()

    def _close(self) -> None:
        _locks.discard(self._fd)
        os.close(self._fd)


def _register() -> None:
    lifecycle.at_exit(lifecycle.PLACEHOLDERS, finish)
    lifecycle.after_fork(_close_locks)


def _close_locks() -> None:
    for fd in _locks:
        os.close(fd)
    _locks.clear()


def _read(path: str) -> dict[str, Any]:
    """Return the content of a ledger or stake; {} if there is no file, or half a file after a power cut."""
    try:
        with open(path, "rb") as file:
            content: dict[str, Any] = fast_stdlib.loads(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return content


def _write(path: str, content: dict[str, Any]) -> None:
    """Replace a ledger or stake. After a SIGKILL the file is old or new, never half written."""
    new = f"{path}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(fast_stdlib.dumps(content))
    os.rename(new, path)
