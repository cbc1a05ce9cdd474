"""Connect the guest's three streams with our own: output and input are passed on as they come."""

from __future__ import annotations

import os
import stat

from ringfence.cli.console import ERR, OUT, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.terminal_filter import EscapeFilter
    from ringfence.types import Process

_PIECE = 64 * 1024
_TAIL = 8 * 1024
_NULL_DEVICE = os.makedev(1, 3)


class OutputStreams:
    """Our standard output and error. A terminal gets only text and colours, unless `raw`."""

    __slots__ = ("_filters", "stderr_tail")

    def __init__(self, *, raw: bool) -> None:
        self._filters: dict[int, EscapeFilter] = {}
        self.stderr_tail = b""
        for fd in (OUT, ERR):
            if not raw and os.isatty(fd):
                from ringfence.cli.terminal_filter import EscapeFilter, charset

                self._filters[fd] = EscapeFilter(charset(fd))

    def write(self, fd: int, data: bytes) -> None:
        """Pass a piece of output on. Raises BrokenPipeError when the reader has gone."""
        if fd == ERR:
            self.stderr_tail = (self.stderr_tail + data)[-_TAIL:]
        if fd in self._filters:
            data = self._filters[fd].feed(data)
        write(fd, data)

    def finish(self) -> None:
        """Write what the filters held back, and switch colours off, after the guest's end."""
        for fd, strip in self._filters.items():
            write(fd, strip.finish())


def feed(process: Process) -> None:
    """Pass our standard input on, in a thread if reading may wait. Returns at once."""
    if is_null(0):
        process.close_stdin()
        return
    import _thread  # threading would cost a millisecond, and this thread needs neither a name nor a join

    _thread.start_new_thread(_pump, (process, os.isatty(0)))


def is_null(fd: int) -> bool:
    """Return whether a descriptor is closed or the null device, which never have input."""
    try:
        status = os.fstat(fd)
    except OSError:
        return True
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL_DEVICE


def _pump(process: Process, terminal: bool) -> None:
    from ringfence.errors import RingfenceError

    try:
        while piece := _read(terminal):
            process.write(piece)
        process.close_stdin()
    except (OSError, RingfenceError):
        return  # the guest closed its input or has ended; the main thread knows how


def _read(terminal: bool) -> bytes:
    while terminal and not _in_foreground():
        import time

        time.sleep(0.2)  # a read in the background would stop our whole process (SIGTTIN), guest and all
    return os.read(0, _PIECE)


def _in_foreground() -> bool:
    import select

    while not select.select([0], [], [], 1.0)[0]:
        pass
    return os.tcgetpgrp(0) == os.getpgrp()
