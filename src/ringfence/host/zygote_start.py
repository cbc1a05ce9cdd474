"""Starts a zygote's process: by exec, with an empty environment. The first thing a command does: it imports little,
and lies outside its package, whose own imports would come first.

A command of ours knows at once that it will need a zygote: `begin` starts one that gets ready while the rest is loaded,
and the pool takes it with `take`.
"""

from __future__ import annotations

import _socket
import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from ringfence.policy.model import Policy

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
        control.send(_state.purpose, _socket.MSG_NOSIGNAL)
    except OSError:
        pass  # it has ended already: who speaks to it next is told why
    return Started(pid, control, errors)  # type: ignore[arg-type]  # the C class has every method that is used


def _above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)


# The first packet to a zygote, so that it gets ready before it is asked for more: whether there will be many sandboxes,
# one for anything, or one for one program.
LIBRARY, COMMAND, PROGRAM = b"library", b"command", b"program"


class _State:
    """What this process has begun ahead of time."""

    def __init__(self) -> None:
        self.begun: list[Started] = []  # at most one; `pop` is one step for threads
        self.purpose = LIBRARY
        self.is_first = _thread.allocate_lock()  # taken for good by the first sandbox of this process


_state = _State()


def begin(*, program: bool = False) -> None:
    """Start the zygote of a command ahead of time: it will make one sandbox, and no spares are kept later.

    `program`: one program will run there, and nothing else: no code that is passed on, no file that is put there.

    Failing is no error here: the pool tries again and says why.
    """
    _state.purpose = PROGRAM if program else COMMAND
    _state.is_first.acquire(blocking=False)
    try:
        _state.begun.append(start(real_executable(), []))
    except OSError:
        return


def begin_first(backend: object, image: object, policy: Policy) -> bool:
    """Start the zygote of this process's first sandbox while the rest of the library is loaded.

    Only where nothing can refuse the call later: no policy that is refused starts anything. Does nothing for later
    sandboxes. Returns whether this is the first. Raises UnsupportedError on another system than Linux.
    """
    from ringfence.errors import need_linux

    need_linux()
    if not is_plain(backend, image, policy) or not _state.is_first.acquire(blocking=False):
        return False
    executable = real_executable()
    if executable:
        try:
            _state.begun.append(start(executable, []))
        except OSError:
            pass  # the pool tries again and says why
    return True


def is_plain(backend: object, image: object, policy: Policy) -> bool:
    """Return whether a sandbox is one that the process backend makes of this host, with nothing that can be refused."""
    if backend not in ("auto", "process") or image != "host" or policy.isolation == "own-kernel":
        return False
    return not (policy.mounts or policy.commands != "any" or policy.network.allow or policy.network.rules)


def is_command() -> bool:
    """Return whether this process is a command of ours that makes one sandbox for one thing."""
    return _state.purpose != LIBRARY


def take(executable: str) -> Started | None:
    """The zygote that was begun, if there is one and it is of this interpreter."""
    try:
        begun = _state.begun.pop()
    except IndexError:
        return None
    if begun.owner == os.getpid() and executable == real_executable():
        return begun
    end(begun)
    return None


def end_unneeded() -> None:
    """What was begun for a sandbox that did not come about."""
    if _state.begun and not is_command():
        try:
            end(_state.begun.pop())
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
