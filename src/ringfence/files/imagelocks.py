"""Locks of the image store, which die with their owner: on a tree in use, and on a place where something is made."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

# Of unshare, for an ordinary user: root of a user namespace, with the range of uids that /etc/subuid gives it.
AS_ROOT = ("--user", "--map-root-user", "--map-auto")


def lock(path: str, how: int) -> int | None:
    """A descriptor that holds a lock on the file at `path`, made when missing. None: with LOCK_NB, another has it.

    The file that is locked is the one that has the name then, not one that was removed meanwhile.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_at(fd: int, path: str) -> bool:
    """Whether the open file is the one that has the name now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class Held:
    """A tree that nobody may remove while this is open."""

    def __init__(self, root: str, fd: int) -> None:
        self.root = root
        self._fd = fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.close()


class Workplace:
    """A directory in which something is made. Leaving `with` removes what is still there; a crash, the next sweep."""

    def __init__(self, directory: str, lock_path: str, fd: int) -> None:
        self.directory = directory
        self._lock_path = lock_path
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        remove_tree(self.directory)
        os.unlink(self._lock_path)
        os.close(self._fd)


def remove_tree(path: str) -> None:
    """All of it; what is gone already is no error."""
    import shutil

    try:
        if os.path.lexists(path):
            shutil.rmtree(path)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        _remove_as_root(path)


def run_as_root(command: list[str], timeout_s: float | None = None) -> str | None:
    """A program in a user namespace as `AS_ROOT` makes it. Returns what went wrong; None: nothing.

    Where the kernel refuses the namespace, unshare of util-linux 2.38 ends and leaves a helper that waits for ever and
    holds every pipe: so it is waited for alone, and then all of its session is ended.
    """
    import subprocess

    from ringfence.backends import host_programs

    unshare, program = host_programs.look_up("unshare"), host_programs.look_up(command[0])
    if unshare.path is None or program.path is None:
        return f"there is no {'unshare' if unshare.path is None else command[0]}{unshare.remark or program.remark}"
    quiet = subprocess.DEVNULL
    try:
        running = subprocess.Popen(
            [unshare.path, *AS_ROOT, program.path, *command[1:]],
            env=host_programs.environment(unshare.path),  # by its PATH it finds newuidmap and newgidmap
            stdin=quiet,
            stdout=quiet,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    assert running.stderr is not None
    with running.stderr:
        try:
            status = running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        said = " ".join(running.stderr.read().decode("utf-8", "replace").split())
        return (said or f"status {status}") if status else None


def _remove_as_root(path: str) -> None:
    """A build of an ordinary user that was killed leaves files of the uids that are mapped for it."""
    if run_as_root(["rm", "-rf", "--", path]) is not None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
