"""Owns the loop of a bash session: a single bash executes the host's cells in its top-level shell.

This process runs no cell itself: it exchanges messages with the host and names to bash, by a pipe, what to read. It is
a guest process: bash and its children can do to it what they like, and the host takes its messages as data.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import os
import select

from ringfence.guest.interpreter.line import Line
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

    from ringfence.guest.guestd.protocols import ProcessWork

PROGRAM = "bash"
_STDERR = 9  # the real standard error, while bash complains that it has no terminal
_ENOENT = 2
# Interactive, so that SIGINT ends the cell and not the shell, and aliases work; without the features for people at
# a terminal: prompts, history, job control, the word that `exit` prints.
_ARGV = (PROGRAM, "--noprofile", "--norc", "--noediting", "-i")
_BEGIN = (
    "set +mH +o history; unset MAILCHECK HISTFILE; PS1= PS2= PS4='+ '; "
    'exit() { builtin exit "$@" 2>/dev/null; }; '
    f"history -c; exec 2>&{_STDERR} {_STDERR}>&-\n"
)


def serve(job: ProcessWork, line_fd: int) -> int:
    """Execute cells until the host has no more, or bash ends. Return the exit code, which is bash's if bash ended."""
    line = Line(line_fd)
    env: dict[str, str] = job["env"]
    program = _find(env)
    if program is None:
        line.send({"m": "failed", "stage": "exec", "errno": _ENOENT})
        return 127
    return Driver(line, program, env).serve()


def _find(env: dict[str, str]) -> str | None:
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        path = f"{folder}/{PROGRAM}"
        if folder and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


class Driver:
    def __init__(self, line: Line, program: str, env: dict[str, str]) -> None:
        self._line = line
        self._line_fd = line.fileno()
        script, self._script = os.pipe2(os.O_CLOEXEC)
        self._status, self._status_theirs = os.pipe2(os.O_CLOEXEC)
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._children, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # not a pidfd, which gVisor of 2022 lacks
        _signal.signal(_signal.SIGCHLD, _nothing)
        self._bash = self._start(program, env, script)
        os.close(script)
        self._number: int | None = None  # the number of the cell that runs
        self._opened: list[int] = []  # descriptors that bash reads in this cell
        self._input = -1  # our end of the cell's standard input, when the host answers requests for input
        self._input_ended = False
        self._pending = bytearray()

    def _start(self, program: str, env: dict[str, str], script: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setpgid(0, 0)
            fast_stdlib.default_signals(fast_stdlib.SIGPIPE, fast_stdlib.SIGXFSZ)
            os.dup2(2, _STDERR)
            os.dup2(os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC), 2)
            os.dup2(script, 0)
            os.execve(program, _ARGV, env)
        finally:
            os._exit(126)

    def serve(self) -> int:
        _signal.signal(_signal.SIGINT, self._on_interrupt)
        self._say(_BEGIN)
        poll = select.poll()
        for fd in (self._line_fd, self._status, self._children):
            poll.register(fd, select.POLLIN)
        while True:
            full = self._input if self._pending else -1
            if full >= 0:
                poll.register(full, select.POLLOUT)
            ready = [fd for fd, _ in poll.poll()]
            if full >= 0:
                poll.unregister(full)
                self._push_input()
            if self._status in ready:
                self._done(os.read(self._status, 64))
            elif self._children in ready:
                os.read(self._children, 64)
                ended, status = os.waitpid(self._bash, os.WNOHANG)
                if ended:
                    return _as_ended(status)
            if self._line_fd in ready and not self._heard():
                return 0

    def _say(self, text: str) -> None:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(self._script, rest) :]

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        if self._number is not None:
            os.killpg(self._bash, _signal.SIGINT)

    def _heard(self) -> bool:
        received = self._line.receive()
        if received is None:
            return False
        message, data = received
        if message["m"] == "cell":
            self._begin(message, data)
        elif message["m"] == "input" and self._input >= 0:
            self._pending += data
            self._input_ended = bool(message["eof"])
            self._push_input()
        return True

    def _begin(self, message: dict[str, Any], data: bytes) -> None:
        """Make bash run a cell.

        Bash opens descriptors of this process: the code, the input, and where its status goes.
        """
        self._number = message["n"]
        ours = f"/proc/{os.getpid()}/fd"
        code = self._file(data[: message["code"]])
        stdin = self._null
        if message["asks"]:
            stdin, self._input = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._input, False)
            self._opened.append(stdin)
        elif message["stdin"] is not None:
            stdin = self._file(data[message["code"] :])
        env = "".join(f"{name}={_quoted(value)} " for name, value in message["env"].items())
        self._say(
            f'{env}eval "$(<{ours}/{code})" <{ours}/{stdin}\n'
            f'builtin printf "%d " "$?" >{ours}/{self._status_theirs}\n'  # its own line: an error skips to it
        )

    def _file(self, data: bytes) -> int:
        fd = os.memfd_create("cell", os.MFD_CLOEXEC)
        self._opened.append(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        return fd

    def _push_input(self) -> None:
        try:
            del self._pending[: os.write(self._input, self._pending)]
        except BlockingIOError:
            return
        except OSError:  # bash does not read it any more
            self._pending.clear()
        if self._input_ended and not self._pending:
            self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
        self._input = -1
        self._input_ended = False
        self._pending.clear()

    def _done(self, said: bytes) -> None:
        if self._number is None:
            return
        number, self._number = self._number, None
        self._close_input()
        while self._opened:
            os.close(self._opened.pop())
        words = said.split()
        status = int(words[-1]) & 0xFF if words and words[-1].isdigit() else 1
        self._line.send({"m": "done", "n": number, "exit": status, "exception": None})


def _as_ended(status: int) -> int:
    """End this process the way bash ended."""
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


def _nothing(_: int, __: FrameType | None) -> None:
    return


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def _die_of(number: int) -> NoReturn:
    if number not in (fast_stdlib.SIGKILL, fast_stdlib.SIGSTOP):
        _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
