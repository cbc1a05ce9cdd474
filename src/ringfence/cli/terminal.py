"""Lend the caller's terminal to a guest: raw mode, size and keys. Afterwards the terminal is as before."""

from __future__ import annotations

import os
import signal
import termios

from ringfence.cli.console import OUT, Problem, write
from ringfence.cli.terminal_filter import ScreenFilter, charset

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Self

    from ringfence import Result
    from ringfence.types import Pty

_IN = 0
_PIECE = 1 << 16
_LARGEST = 1000
_IFLAG, _OFLAG, _CFLAG, _LFLAG, _CC = 0, 1, 2, 3, 6
_SIZE, _MODE = b"s", b"m"


def require(fix: str) -> None:
    """Raise Problem when there is no terminal to lend."""
    for fd, name in ((_IN, "standard input"), (OUT, "standard output")):
        if not os.isatty(fd):
            raise Problem(f"{name} is not a terminal", fix=fix, code="no-terminal")


def size() -> tuple[int, int]:
    """Return columns and rows of the caller's terminal, within the sizes that a sandbox accepts."""
    try:
        found = os.get_terminal_size(OUT)
    except OSError:
        found = os.terminal_size((80, 24))
    return min(found.columns or 80, _LARGEST), min(found.lines or 24, _LARGEST)


def variables() -> dict[str, str]:
    """Return the variables that describe the terminal to programs inside. Only plain words are passed."""
    kinds = {"TERM": "xterm-256color", "COLORTERM": ""}
    for name in kinds:
        word = os.environ.get(name, "")
        if word and len(word) <= 64 and word.replace("-", "").replace("+", "").replace(".", "").isalnum():
            kinds[name] = word
    return {name: word for name, word in kinds.items() if word}


class Terminal:
    """The caller's terminal, lent to a guest within `with`. It is restored however the block ends."""

    def __init__(self, *, raw_output: bool) -> None:
        self._raw_output = raw_output
        self._filter = ScreenFilter(charset(OUT))
        self._saved = termios.tcgetattr(_IN)
        self._handlers: dict[int, object] = {}
        self._given = False
        self._undo = b""
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        self._set_raw()  # before the handlers: in the background this stops us until the shell gives us the terminal
        self._given = True
        for number, handler in ((signal.SIGWINCH, self._on_resize), (signal.SIGCONT, self._on_continue)):
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself gave us

    def _set_raw(self) -> None:
        """Set raw mode, as cfmakeraw does: every key goes to the guest, Ctrl-C, Ctrl-Z and Ctrl-S too."""
        mode = termios.tcgetattr(_IN)
        mode[_IFLAG] &= ~(
            termios.IGNBRK | termios.BRKINT | termios.PARMRK | termios.ISTRIP
            | termios.INLCR | termios.IGNCR | termios.ICRNL | termios.IXON
        )  # fmt: skip
        mode[_OFLAG] &= ~termios.OPOST
        mode[_CFLAG] = mode[_CFLAG] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        mode[_LFLAG] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
        mode[_CC][termios.VMIN] = 1
        mode[_CC][termios.VTIME] = 0
        termios.tcsetattr(_IN, termios.TCSADRAIN, mode)

    def give_back(self) -> None:
        """Undo the guest's switches, drop its unread keys, restore the mode. Never raises.

        Idempotent up to the last line: a second signal may come at any line, and then every step is done again.
        """
        if not self._given:
            return
        if signal.SIGTTOU not in self._handlers:  # in the background, tcsetattr would stop this process
            self._handlers[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._undo += self._filter.finish()
        try:
            write(OUT, self._undo)
        except (OSError, Problem):
            pass  # the screen is gone; the mode still matters to the terminal's next user
        try:
            termios.tcflush(_IN, termios.TCIFLUSH)
            termios.tcsetattr(_IN, termios.TCSANOW, self._saved)
        except (OSError, termios.error):
            pass  # the terminal is gone; there is no mode to restore
        self._given = False

    def hand_to(self, guest: Pty) -> Result:
        """Pass output, keys and sizes between terminal and guest until the guest ends. Return the result."""
        import _thread

        from ringfence.events import Stdout

        _thread.start_new_thread(self._pump, (guest,))
        for event in guest:
            if isinstance(event, Stdout):
                shown = self._filter.feed(event.data)
                write(OUT, event.data if self._raw_output else shown)
        return guest.wait()

    # input

    def _on_resize(self, _: int, __: FrameType | None) -> None:
        os.write(self._woken, _SIZE)

    def _on_continue(self, _: int, __: FrameType | None) -> None:
        os.write(self._woken, _MODE)

    def _pump(self, guest: Pty) -> None:
        import select

        from ringfence.errors import RingfenceError

        try:
            while self._given:
                ready = select.select([_IN, self._wake], [], [])[0]
                if self._wake in ready:
                    self._news(os.read(self._wake, 64), guest)
                if _IN in ready:
                    keys = os.read(_IN, _PIECE)
                    if not keys:
                        break
                    guest.write(keys)
            guest.close_stdin()
        except (OSError, RingfenceError):
            return  # the guest or the terminal has gone; the main thread knows how

    def _news(self, what: bytes, guest: Pty) -> None:
        if _MODE in what and self._given:
            try:
                self._set_raw()
            except termios.error:
                return  # in the background again; the next SIGCONT tries again
        cols, rows = size()
        guest.resize(cols=cols, rows=rows)
