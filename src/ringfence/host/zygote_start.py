"""Starts a zygote's process: by exec, with an empty environment. The first thing a command does: it imports little,
and lies outside its package, whose own imports would come first.

A command of ours knows at once that it will need a zygote: `begin` starts one that gets ready while the rest is loaded,
and the pool takes it with `take`.
"""

from __future__ import annotations

import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

_SIGKILL = 9
_FIRST_FREE = 10  # above the fixed descriptors of the zygote


class Started:
    """A zygote's process that has not been spoken to."""

    __slots__ = ("control", "errors", "owner", "pid")

    def __init__(self, pid: int, control: socket, errors: int) -> None:
        self.owner = os.getpid()
        self.pid = pid
        self.control = control
        self.errors = errors  # a file in memory with what it said on standard error


def launcher() -> str:
    """The one file after whose exec everything privileged happens."""
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), "guest", "launch", "launch")


def real_executable() -> str:
    """This Python's own file: no shim, no link. Nothing where that is not known; whoever plans a sandbox says so."""
    known = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(known) if known else ""


def own_package() -> str:
    """The first line of a program for `python -I -c`: this very package, whatever else is installed. The folder that it
    lies in is asked for nothing more: it may hold what a guest left (L12)."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return f"import __future__, sys; sys.path.insert(0, {folder!r}); import ringfence; del sys.path[0]"


def start(executable: str, prefix: list[str]) -> Started:
    """posix_spawn: no copy of the caller's memory, descriptors 0–4 alone. Raises OSError."""
    control, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    errors = os.memfd_create("zygote-stderr", os.MFD_CLOEXEC)
    ours: list[int] = []
    argv = [*prefix, launcher(), executable]
    try:
        ours.append(os.pidfd_open(os.getpid()))
        ours.append(_above(theirs.fileno()))
        ours.append(_above(ours[0]))
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
            (os.POSIX_SPAWN_DUP2, ours[1], 3),
            (os.POSIX_SPAWN_DUP2, ours[2], 4),
        ]
        # The caller's thread may block or ignore signals; a guest must not inherit that.
        pid = os.posix_spawn(
            argv[0], argv, {}, file_actions=actions, setsid=True, setsigmask=[], setsigdef=range(1, 32)
        )
    except OSError:
        control.close()
        os.close(errors)
        raise
    finally:
        theirs.close()
        for fd in ours:
            os.close(fd)
    try:
        control.send(_command[0] if _command else LIBRARY, _socket.MSG_NOSIGNAL)
    except OSError:
        pass  # it has ended already: who speaks to it next is told why
    return Started(pid, control, errors)  # type: ignore[arg-type]  # the C class has every method that is used


def _above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)


# The first packet to a zygote, so that it gets ready before it is told more: whether there will be many sandboxes, one
# for anything, or one for one program.
LIBRARY, COMMAND, PROGRAM = b"library", b"command", b"program"
_begun: list[Started] = []
_is_first: list[bool] = [True]  # taken away by whoever makes the first sandbox of this process
meanwhile: list[Callable[[], object]] = []  # what can be done while the first sandbox is made
_command: list[bytes] = []  # what is said to its zygote


def begin(*, program: bool = False) -> None:
    """For a command that will make one sandbox: start its zygote ahead of time, and keep no spares later.

    `program`: one program will run there, and nothing else: no code that is passed on, no file that is put there.

    Failing is no error here: the pool tries again and says why.
    """
    _command.append(PROGRAM if program else COMMAND)
    _is_first.clear()
    try:
        _begun.append(start(real_executable(), []))
    except OSError:
        return


def begin_first() -> bool:
    """For a library whose first sandbox is asked for: the same, once; False later."""
    try:
        _is_first.pop()
    except IndexError:
        return False
    executable = real_executable()
    if executable:
        try:
            _begun.append(start(executable, []))
        except OSError:
            pass  # as above
    return True


def is_command() -> bool:
    return bool(_command)


def take(executable: str) -> Started | None:
    """The zygote that was begun, if there is one and it is of this interpreter."""
    try:
        begun = _begun.pop()
    except IndexError:
        return None
    if begun.owner == os.getpid() and executable == real_executable():
        return begun
    end(begun)
    return None


def end_unneeded() -> None:
    """What was begun for a sandbox that did not come about."""
    if _begun and not _command:
        try:
            end(_begun.pop())
        except IndexError:
            return  # another thread took it


def end(begun: Started) -> None:
    """It has done nothing yet. In a fork of its owner it is not ours to end."""
    begun.control.close()
    os.close(begun.errors)
    if begun.owner == os.getpid():
        try:
            os.waitid(os.P_PID, begun.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises: the number is not its own
            os.kill(begun.pid, _SIGKILL)
            os.waitpid(begun.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            return  # the caller reaps all children
