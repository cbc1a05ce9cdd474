"""ringfence shell and --tty on a real terminal: output, input, and that the terminal is left as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leftovers
import weaker

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROMPT = b"user@ringfence"
RINGFENCE = (sys.executable, "-m", "ringfence")


class Screen:
    """A terminal that the test holds, with `ringfence` running on it."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        self.pid = os.fork()
        if self.pid == 0:
            self._become(argv, env)

    def _become(self, argv: list[str], env: dict[str, str]) -> None:
        try:
            os.setsid()
            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(self.slave, fd)
            os.closerange(3, 64)
            kept = {"PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execve(argv[0], argv, {**os.environ, **kept, **env})
        finally:
            os._exit(99)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def until(self, word: bytes, *, times: int = 1) -> None:
        self._look(lambda: self.seen.count(word) >= times, f"{word!r} was not shown")

    def _look(self, enough: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 20
        while not enough():
            assert time.monotonic() < deadline, f"{what}: {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """Wait for the end of the command and return the exit code. The terminal must be as it was before."""
        status: list[int] = []

        def ended() -> bool:
            pid, found = os.waitpid(self.pid, os.WNOHANG)
            status.extend([found] if pid else [])
            return bool(pid)

        self._look(ended, "it did not end")
        while select.select([self.master], [], [], 0)[0]:  # what it wrote last
            self.seen += os.read(self.master, 65536)
        self.pid = 0
        assert termios.tcgetattr(self.slave) == self.before
        self.seen = weaker.without(self.seen.decode("latin-1")).encode("latin-1")
        return os.waitstatus_to_exitcode(status[0])

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Screen]]:
    monkeypatch.chdir(tmp_path)
    opened: list[Screen] = []

    def open_one(*argv: str, program: tuple[str, ...] = RINGFENCE, **env: str) -> Screen:
        opened.append(Screen([*program, *argv], env))
        return opened[-1]

    yield open_one
    for screen in opened:
        screen.close()


def test_a_shell_has_a_prompt_a_size_colours_and_its_own_exit_code(screens: Callable[..., Screen]) -> None:
    screen = screens("shell")
    screen.until(PROMPT)
    screen.type(b"stty size; echo $TERM-$COLORTERM; printf '\\033[31mred\\033[0m\\n'; tty\n")
    screen.until(b"/dev/pts/0\r\n")
    assert b"30 100\r\nxterm-256color-truecolor\r\n\x1b[31mred\x1b[0m\r\n" in screen.seen
    screen.type(b"exit 7\n")
    assert screen.end() == 7


def test_line_editing_job_control_and_keys_are_the_guests(screens: Callable[..., Screen]) -> None:
    screen = screens("shell")
    screen.until(PROMPT)
    screen.type(b"echo ax\x7fb\x01: \x05c; echo on\n")  # backspace, beginning of the line, its end
    screen.until(b"\ron\r\n")
    screen.until(PROMPT, times=2)
    screen.type(b"\x1b[A!\n")  # the line before, and more
    screen.until(b"\ron!\r\n")
    screen.until(PROMPT, times=3)
    screen.type(b"sleep 100; echo after $((1 + 1))\n")
    time.sleep(0.7)
    screen.type(b"\x1a")
    screen.until(b"Stopped")
    screen.until(PROMPT, times=4)
    screen.type(b"fg\n")
    screen.until(b"sleep 100\r\n")
    time.sleep(0.3)
    screen.type(b"\x03")
    screen.until(PROMPT, times=5)
    screen.type(b"\x04")
    assert screen.end() == 130  # of the command that Ctrl-C ended


def test_a_resize_is_followed(screens: Callable[..., Screen]) -> None:
    screen = screens("shell")
    screen.until(PROMPT)
    screen.resize(40, 132)
    time.sleep(0.5)
    screen.type(b"stty size; exit\n")
    screen.until(b"40 132")
    assert screen.end() == 0, screen.seen


def test_what_is_dangerous_is_dropped_and_what_was_switched_is_switched_back(screens: Callable[..., Screen]) -> None:
    code = r"printf 'A\033]52;c;ZXZpbA==\007\033[6n\033]0;title\007\033[?1049h\033[?25lB'"
    screen = screens("shell", "sh", "-c", code)
    assert screen.end() == 0, screen.seen
    assert screen.seen == b"A\x1b[?1049h\x1b[?25lB\x1b[?25h\x1b[?1049l"


def test_raw_passes_all_and_still_switches_back(screens: Callable[..., Screen]) -> None:
    screen = screens("shell", "--raw", "sh", "-c", r"printf '\033]0;title\007\033[?25l'")
    assert screen.end() == 0, screen.seen
    assert screen.seen == b"\x1b]0;title\x07\x1b[?25l\x1b[?25h"


def test_exec_and_run_take_a_terminal_too(screens: Callable[..., Screen]) -> None:
    screen = screens("exec", "-t", "--", "sh", "-c", "test -t 0 && test -t 1 && echo yes; exit 3")
    assert (screen.end(), screen.seen) == (3, b"yes\r\n")
    screen = screens("run", "-t", "-c", "import sys; print(sys.stdin.isatty(), input('? '))")
    screen.until(b"? ")
    screen.type(b"x\n")
    assert (screen.end(), screen.seen) == (0, b"? x\r\nTrue x\r\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_ends_it_and_restores_the_terminal(screens: Callable[..., Screen], number: signal.Signals) -> None:
    screen = screens("shell", "sh", "-c", r"printf '\033[?1049hready'; sleep 100")
    screen.until(b"ready")
    os.kill(screen.pid, number)
    assert screen.end() == 128 + number
    assert b"\x1b[?1049l" in screen.seen


def test_in_the_background_it_waits_for_the_terminal_and_leaves_it_alone(screens: Callable[..., Screen]) -> None:
    screen = screens("--norc", "-i", program=("/bin/bash",), PS1="$ ")
    screen.until(b"$ ")
    screen.type(f"set -b; {' '.join(RINGFENCE)} exec -t -- sh -c 'echo dr''awn' &\n".encode())
    screen.until(b"Stopped")
    assert b"drawn" not in screen.seen
    screen.type(b"fg\n")
    screen.until(b"drawn")
    screen.until(b"$ ", times=screen.seen.count(b"$ ") + 1)
    screen.type(b"exit\n")
    assert screen.end() == 0


def test_two_signals_at_once_restore_it_as_well(screens: Callable[..., Screen]) -> None:
    screen = screens("shell", "sh", "-c", "echo ready; sleep 100")
    screen.until(b"ready")
    os.kill(screen.pid, signal.SIGTERM)
    os.kill(screen.pid, signal.SIGHUP)
    assert screen.end() in (128 + signal.SIGTERM, 128 + signal.SIGHUP)


def test_a_terminal_that_goes_away_ends_it_by_its_signal() -> None:
    screen = Screen([*RINGFENCE, "exec", "--", "sh", "-c", "echo ready; sleep 100"], {})
    screen.until(b"ready")
    os.close(screen.slave)
    os.close(screen.master)
    assert os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1]) == 128 + signal.SIGHUP


def test_the_end_of_the_time_restores_the_terminal(screens: Callable[..., Screen]) -> None:
    screen = screens("shell", "--timeout", "1", "sh", "-c", "stty raw -echo; sleep 100")
    assert screen.end() == 124


def test_a_shell_that_is_killed_inside_restores_the_terminal(screens: Callable[..., Screen]) -> None:
    screen = screens("shell")
    screen.until(PROMPT)
    screen.type(b"stty raw; kill -9 $$\n")
    assert screen.end() == 137


def test_a_sandbox_that_is_lost_restores_the_terminal(screens: Callable[..., Screen]) -> None:
    screen = screens("shell", "sh", "-c", "echo ready; sleep 100")
    screen.until(b"ready")
    for process in leftovers.descendants(screen.pid):
        if process.name == "rf-monitor":
            os.kill(process.pid, signal.SIGKILL)
    assert screen.end() == 125


def test_a_program_that_is_not_there_restores_the_terminal(screens: Callable[..., Screen]) -> None:
    screen = screens("shell", "no-such-program")
    assert screen.end() == 127
    assert b"ringfence: no program no-such-program inside" in screen.seen


def test_the_files_are_kept_under_a_name_and_taken_up_again(screens: Callable[..., Screen], tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    screen = screens("shell", "--keep", name, "sh", "-c", "echo hello > f", HOME=str(tmp_path))
    assert screen.end() == 0, screen.seen
    assert f"ringfence: kept 6 bytes of files as {name}; to go on: ".encode() in screen.seen
    try:
        screen = screens("shell", "--from", name, "cat", "f", HOME=str(tmp_path))
        assert (screen.end(), screen.seen) == (0, b"hello\r\n")
    finally:
        top = Path("/var/lib/ringfence") if os.geteuid() == 0 else tmp_path / ".local/state/ringfence"
        (top / "named" / f"{name}.snapshot").unlink()
    screen = screens("shell", "--from", name, "true", HOME=str(tmp_path))
    assert screen.end() == 125
    assert b"there is no such snapshot" in screen.seen
