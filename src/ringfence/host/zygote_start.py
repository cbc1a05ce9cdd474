"""Starts a zygote's process, by exec and with an empty environment.

This is the first thing that our command does. Therefore this module imports little, and is outside the package
`ringfence.cli`, whose own imports would come first. A command knows at once that it will need a zygote: `begin` starts
a zygote that gets ready while the rest is loaded, and the pool takes that zygote with `take`.
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
    """A zygote's process that was started and has got no request yet."""

    __slots__ = ("control", "errors", "owner", "pid")

    def __init__(self, pid: int, control: socket, errors: int) -> None:
        self.owner = os.getpid()
        self.pid = pid
        self.control = control
        self.errors = errors  # a file in memory: its standard error


def launcher() -> str:
    """Return the path of the launcher: everything privileged happens after an exec of this file."""
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), "guest", "launch", "launch")


def real_executable() -> str:
    """Return the file of this Python, no shim and no link; "" where it is not known, which the plan reports."""
    known = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(known) if known else ""


def own_package() -> str:
    """Return the first line of a program for `python -I -c`, which imports this very package, whatever is installed.

    Nothing else is imported from the package's folder: a guest may have left modules there (L12).
    """
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return f"import __future__, sys; sys.path.insert(0, {folder!r}); import ringfence; del sys.path[0]"


def start(executable: str, prefix: list[str]) -> Started:
    """Start a zygote by posix_spawn: with descriptors 0–4 alone, without a copy of our memory. Raises OSError."""
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
        pass  # it has ended already: the next request to it fails and says why
    return Started(pid, control, errors)  # type: ignore[arg-type]  # the C class has every method that is used


def _above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)


# The first packet to a zygote, so that it gets ready before the first request. It says what is to come: many sandboxes,
# a single sandbox for anything, or a single sandbox for a program.
LIBRARY, COMMAND, PROGRAM = b"library", b"command", b"program"


class _State:
    """Zygotes that this process has begun ahead of time."""

    def __init__(self) -> None:
        self.begun: list[Started] = []  # at most one; `pop` is one step for threads
        self.purpose = LIBRARY
        self.is_first = _thread.allocate_lock()  # taken for good by the first sandbox of this process


_state = _State()


def begin(*, program: bool = False) -> None:
    """Start the zygote of a command ahead of time. The zygote will make one sandbox, and no spares are kept later.

    `program`: only a program will run in that sandbox; no code is passed on and no file is put there.

    A failure is no error here: the pool tries again and says why.
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
    """Return whether the process backend would make the sandbox from this host, and nothing in it can be refused."""
    if backend not in ("auto", "process") or image != "host" or policy.isolation == "own-kernel":
        return False
    return not (policy.mounts or policy.commands != "any" or policy.network.allow or policy.network.rules)


def is_command() -> bool:
    """Return whether this process is our command, which makes a single sandbox."""
    return _state.purpose != LIBRARY


def take(executable: str) -> Started | None:
    """Return the zygote that this process began for this interpreter, or None. End a zygote begun otherwise."""
    try:
        begun = _state.begun.pop()
    except IndexError:
        return None
    if begun.owner == os.getpid() and executable == real_executable():
        return begun
    end(begun)
    return None


def end_unneeded() -> None:
    """End a zygote that was begun for a sandbox which was then not made. A command keeps its zygote."""
    if _state.begun and not is_command():
        try:
            end(_state.begun.pop())
        except IndexError:
            return  # another thread took it


def end(begun: Started) -> None:
    """End a zygote that has done nothing yet. A fork of the owner only closes descriptors."""
    begun.control.close()
    os.close(begun.errors)
    if begun.owner == os.getpid():
        try:
            # Raises if the zygote was reaped: the number may belong to another process.
            os.waitid(os.P_PID, begun.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(begun.pid, _SIGKILL)
            os.waitpid(begun.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            return  # the caller reaps all children
