"""Owns a sandbox's job as the monitor sees it: streams, standard input, report and end."""

from __future__ import annotations

import errno
import os
import select
import struct
import time

from ringfence.shared import children, fast_stdlib, framing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.guest.guestd.daemon import Guestd
    from ringfence.guest.guestd.protocols import GuestdRequest
    from ringfence.guest.guestd.supervisor import Inside

_READ = 1 << 16
_READ_FILES = 1 << 17  # a file worker moves much data; more would not fit into the channel at once
_WRITE = 1 << 18
_PIPE_FILES = 1 << 20
_WORTH_TELLING = 1 << 16  # bytes written to an interpreter's line that are worth a message
_WITH_LINE = ("python", "fresh", "javascript", "session")
_PIECE = 64  # the charge for each piece besides its bytes, as the host counts (F16)
_REPORT_CAP = 1 << 18
_DISCARDED = 16 << 20  # bytes dropped of a child that outlives its job; then its writes fail (D16, F16)
_AFTER_EXIT = (1 << 20) + _READ  # a pipe holds at most 1 MiB; more than that was written after the exit
_END_OF_INPUT = b"\x04"  # what Ctrl-D is on a terminal
_TIOCSPTLCK, _TIOCGPTN, _TIOCSWINSZ, _TIOCSCTTY = 0x40045431, 0x80045430, 0x5414, 0x540E
_MOST = 0x7FFF  # lines or columns of a terminal


class Job:
    def __init__(self, guestd: Guestd, number: int, request: GuestdRequest) -> None:
        self.id = number
        self.one_shot = bool(request["one_shot"])
        kind = request["job"]["kind"]
        self.alone = kind in ("file", "connect")  # it starts no process, and is killed without looking for others
        self.session = kind == "session"
        self.in_cell = not self.session  # a session between two cells does not keep the sandbox from being idle
        self._cell = 0  # the number of the cell that runs, or ran last
        self.exited = False
        self.hurried = False  # whether its end was requested, before it started or while a cell ran
        self.time_is_up: str | None = None  # the reason why the cell was interrupted
        self.asked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.sessions_before: list[int] = []  # of jobs that ended just before this job was requested
        self.inner_pid = 0
        self.why: str | None = None
        self.deadline: float | None = None
        self.cpu_deadline: float | None = None
        self._guestd = guestd
        self._request = request
        self.pidfd = -1
        self.terminal = request["pty"]
        self._stdin = Feed(guestd, number) if request["stdin"] else None
        self._has_line = kind in _WITH_LINE
        self._line = (
            Feed(guestd, number, _WORTH_TELLING) if self.session else None
        )  # a run of a single piece of code gets no messages
        self._outputs: dict[int, int] = {}  # descriptor → frame type
        self._said = b""  # bytes read from the line and not passed on yet
        self._report_fd = -1
        self._report = bytearray()
        self._credit = request["credit"]
        self._paused = False
        self._status: dict[str, object] | None = None
        self._left_after_exit = _AFTER_EXIT
        self._opened: tuple[int, ...] = ()
        self._terminal_fd = -1

    def start(self, inside: Inside) -> None:
        """Ask for this job to be started; `started` or `refused` follows, at once or later."""
        try:
            theirs = self._pipes()
        except OSError as error:
            self.refused(error.errno or errno.EIO, error.strerror or str(error))
            return
        body = fast_stdlib.dumps(self._request["job"])
        if self.one_shot:
            inside.become(self, body, theirs)
            for fd in theirs:
                os.close(fd)
        else:
            inside.spawn(self, body, theirs)

    def started(self, pidfd: int, inner_pid: int, terminal: int = -1) -> None:
        """Begin to relay a job that runs now.

        `terminal`: the master end of its terminal, if the job was to have a terminal.
        """
        self.pidfd = pidfd
        self.inner_pid = inner_pid
        if self.why is not None:
            self.signal(fast_stdlib.SIGKILL)  # its end was requested before it began
        out, err, report = self._opened
        if terminal >= 0:
            self._take_terminal(terminal)
            for fd in (out, err):
                os.close(fd)
        else:
            self._outputs = {out: framing.STDOUT, err: framing.STDERR}
        if self._has_line:
            self._outputs[report] = framing.LINE
        else:
            self._report_fd = report
            self._guestd.watch(report, select.EPOLLIN, self._on_report)
        for fd in self._outputs:
            self._guestd.watch(fd, select.EPOLLIN, self._reader(fd))
        self._guestd.watch(pidfd, select.EPOLLIN, self._on_exit)
        if self.session:
            self._guestd.say(ev="started", id=self.id, pid=children.number_of(pidfd))

    def _take_terminal(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._outputs = {fd: framing.STDOUT}
        self._terminal_fd = fd
        assert self.terminal is not None
        # The size may have changed since the terminal was asked for.
        set_terminal_size(fd, self.terminal["cols"], self.terminal["rows"])
        if self._stdin is not None:
            self._stdin.open(os.dup(fd), terminal=True)

    def begin_cell(self, number: int) -> None:
        """Begin a cell, or another piece of work for a process that stays, which has the number 0."""
        self.in_cell = True
        self._cell = number
        self.hurried = False
        self.time_is_up = None

    def end_cell(self, number: int) -> bool:
        """Note that a cell has ended. False when another cell runs by now, whose clocks go on."""
        if number not in (0, self._cell):
            return False
        self.in_cell = False
        self.deadline = self.cpu_deadline = None
        return True

    def refused(self, number: int, error: str) -> None:
        self.abandon()
        self._guestd.refused(self, number, error)

    def _pipes(self) -> list[int]:
        """Make the job's pipes and return the guest's ends. Raises OSError, and then none is left open."""
        made: list[int] = []
        try:
            made = self._guestd.output_pipes()
            out, err, out_theirs, err_theirs = made
            report, report_theirs = os.pipe2(os.O_CLOEXEC)
            made += (report, report_theirs)
            os.set_blocking(report, False)
            stdin = self._input()
            made.append(stdin)
            line = self._line_input()
            made += line
            # Room for the handle of its process: if the handle were lost on its way, the process could not be waited
            # for.
            os.close(os.dup(stdin))
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        if self.alone:
            _enlarge(out, *([stdin] if self._stdin is not None else []))
        self._opened = (out, err, report)
        image = []
        if self._request["job"].get("image"):
            image, self._guestd.image = [self._guestd.image], -1
        return [stdin, out_theirs, err_theirs, report_theirs, *line, *image]

    def _input(self) -> int:
        if self._stdin is None or self.terminal is not None:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        stdin, ours = os.pipe2(os.O_CLOEXEC)
        self._stdin.open(ours)
        if self._guestd.owner is not None:
            os.fchown(stdin, self._guestd.owner, self._guestd.owner)
        return stdin

    def _line_input(self) -> list[int]:
        """Make the pipe by which a session reads the host's messages.

        A session's line is two pipes and no socket: by a socket a guest could send us files, and closing a connection
        that lingers takes as long as the guest likes (D03).
        """
        if self._line is None:
            return []
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        self._line.open(ours)
        return [theirs]

    def _close_feeds(self) -> None:
        for feed in (self._stdin, self._line):
            if feed is not None:
                feed.close()

    def abandon(self) -> None:
        """Close what was opened for a job that never started."""
        for fd in self._opened:
            self._guestd.unwatch(fd)
            os.close(fd)
        self._close_feeds()

    def close(self) -> None:
        """Close everything and reap the process: the sandbox is gone, and nothing more is to be reported."""
        if not self.inner_pid:
            self.abandon()
            return
        if not self.exited:
            children.signal(self.pidfd, fast_stdlib.SIGKILL)
            children.wait(self.pidfd, os.WEXITED)
            self._guestd.unwatch(self.pidfd)
            children.close(self.pidfd)
        self._close_report()
        for fd in self._outputs:
            self._guestd.unwatch(fd)
            os.close(fd)
        self._close_feeds()

    # output

    def _reader(self, fd: int) -> Callable[[int], None]:
        def on_output(_: int) -> None:
            self._read(fd)

        def on_line(_: int) -> None:
            self._read_line(fd)

        return on_line if self._outputs[fd] == framing.LINE else on_output

    def _read_line(self, fd: int) -> None:
        """Read a message and what was printed before it: the message is read first and passed on last."""
        if not self._said and self._credit > 0:
            try:
                self._said = os.read(fd, min(_READ, self._credit))
            except OSError:
                self._said = b""  # `_read` meets the same error
        for other in [each for each in self._outputs if each != fd]:
            while other in self._outputs and not self._paused and self._read(other):
                pass
        if not self._paused:
            self._read(fd)

    def _read(self, fd: int) -> bool:
        """Pass on what has come. Return False when there is nothing now, or the host takes nothing."""
        if self._credit <= 0 or self._guestd.congested:
            self._pause()
            return False
        try:
            data = self._next(fd)
        except BlockingIOError:
            if self._status is not None:
                self._let_go(fd)
            return False
        except OSError:  # EIO: no process has the terminal open; or the line was reset by the other side
            data = b""
        if not data:
            self._close_output(fd)
            return False
        self._credit -= len(data) + _PIECE
        self._guestd.relay(self._outputs[fd], self.id, data)
        if self._status is not None:
            self._left_after_exit -= len(data)
            if self._left_after_exit <= 0:
                self._let_go(fd)
        return True

    def _next(self, fd: int) -> bytes:
        if self._said and self._outputs[fd] == framing.LINE:
            said, self._said = self._said, b""
            return said
        return os.read(fd, min(_READ_FILES if self.alone else _READ, self._credit))

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            for fd in self._outputs:
                self._guestd.unwatch(fd)

    def resume(self) -> None:
        if self._paused and self._credit > 0 and not self._guestd.congested:
            self._paused = False
            for fd in self._outputs:
                self._guestd.watch(fd, select.EPOLLIN, self._reader(fd))
            if self._status is not None:
                self._drain()
            elif self._said:
                self._read_line(next(fd for fd, kind in self._outputs.items() if kind == framing.LINE))

    def add_credit(self, count: int) -> None:
        self._credit += count
        self.resume()

    def _close_output(self, fd: int) -> None:
        self._guestd.unwatch(fd)
        del self._outputs[fd]
        os.close(fd)
        self._maybe_finish()

    def hang_up(self) -> None:
        """Close the job's line, on which it sent nonsense: a flood there then costs us nothing (F16)."""
        self._said = b""
        for fd in [fd for fd, kind in self._outputs.items() if kind == framing.LINE]:
            self._close_output(fd)
        if self._line is not None:
            self._line.close()

    def _let_go(self, fd: int) -> None:
        """Drop a drained pipe after the process has ended, though a child of that process has the other end (D16).

        The child's later output goes nowhere, and the child does not block.
        """
        self._guestd.unwatch(fd)
        del self._outputs[fd]
        if self.one_shot:
            os.close(fd)
        else:
            self._guestd.watch(fd, select.EPOLLIN, _discard(self._guestd, fd))
        self._maybe_finish()

    # input

    def write(self, data: bytes) -> None:
        if self._stdin is not None:
            self._stdin.write(data)

    def close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.end()

    def tell(self, data: bytes) -> None:
        """Send a message to the interpreter, by its line."""
        if self._line is not None:
            self._line.write(data)

    def resize(self, cols: int, rows: int) -> None:
        self.terminal = {"cols": cols, "rows": rows}
        if self._terminal_fd in self._outputs:
            set_terminal_size(self._terminal_fd, cols, rows)

    def cpu_used(self) -> float:
        """Return the CPU time in seconds, of the first process alone."""
        if self.pidfd < 0:
            return 0.0
        clock = ~children.number_of(self.pidfd) << 3 | 2  # the way clock_getcpuclockid does
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0  # the process ended just now

    # the end

    def signal(self, number: int) -> None:
        if self.pidfd >= 0 and not self.exited:
            children.signal(self.pidfd, number)

    def _on_report(self, _: int) -> None:
        try:
            data = os.read(self._report_fd, _READ)
        except BlockingIOError:
            return
        self._report += data
        if not data or len(self._report) >= _REPORT_CAP:
            del self._report[_REPORT_CAP:]
            self._close_report()  # beyond the cap nothing is read: a flood must not cost us CPU time (F16)

    def _close_report(self) -> None:
        if self._report_fd >= 0:
            self._guestd.unwatch(self._report_fd)
            os.close(self._report_fd)
            self._report_fd = -1

    def _on_exit(self, _: int) -> None:
        info = children.wait(self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return
        usage = os.wait4(info.si_pid, 0)[2]  # the child is still unreaped, so its number is its own
        self._guestd.unwatch(self.pidfd)
        children.close(self.pidfd)
        self.pidfd = -1
        exited = info.si_code == os.CLD_EXITED
        self._status = {
            "code": info.si_status if exited else None,
            "signal": None if exited else info.si_status,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }
        self._ended_at = time.monotonic()
        self.exited = True
        self.deadline = self.cpu_deadline = None  # only its output is still to be fetched
        while self._report_fd >= 0 and self._more_report():
            pass
        self._drain()

    def _more_report(self) -> bool:
        before = len(self._report)
        self._on_report(0)
        return len(self._report) > before

    def _drain(self) -> None:
        """Relay what the process wrote before its end, and nothing that children write later."""
        for fd in list(self._outputs):
            while fd in self._outputs and not self._paused:
                self._read(fd)
        self._maybe_finish()

    def _maybe_finish(self) -> None:
        if self._status is None or self._outputs:
            return
        status, self._status = self._status, None
        self._close_report()
        self._close_feeds()
        report = self._report.decode("utf-8", "replace")
        self._guestd.finished(self, why=self.why, report=report, ended_at=self._ended_at, **status)


def output_pipes(owner: int | None) -> list[int]:
    """Make pipes for stdout and stderr: our two ends, then the guest's. Raises OSError, and then none is left open."""
    out, out_theirs = os.pipe2(os.O_CLOEXEC)
    try:
        err, err_theirs = os.pipe2(os.O_CLOEXEC)
    except OSError:
        os.close(out)
        os.close(out_theirs)
        raise
    for ours in (out, err):
        os.set_blocking(ours, False)
        if owner is not None:
            os.fchown(ours, owner, owner)
    return [out, err, out_theirs, err_theirs]


def _enlarge(*pipes: int) -> None:
    """Enlarge a pipe, for fewer turns with much data. The pipe stays small if this user has no room for more."""
    import fcntl  # only here: under gVisor it takes 3 ms to load at each start

    for fd in pipes:
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_FILES)
        except OSError:
            return


def _discard(guestd: Guestd, fd: int) -> Callable[[int], None]:
    left = _DISCARDED

    def on_output(_: int) -> None:
        nonlocal left
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal open
            data = b""
        left -= len(data)
        if not data or left <= 0:
            guestd.unwatch(fd)
            os.close(fd)

    return on_output


# ── input ─────────────────────────────────────────────────────────────────────────────────────────


class Feed:
    """The bytes on their way into a guest by a descriptor.

    Bytes are held while the guest does not read, and dropped when it never will. The host counts the bytes on their
    way: it is sent how much the guest has taken, in messages of `worth` bytes or more.
    """

    def __init__(self, guestd: Guestd, number: int, worth: int = 1) -> None:
        self._guestd = guestd
        self._number = number
        self._worth = worth
        self._taken = 0
        self._fd = -1
        self._terminal = False
        self._pending = bytearray()
        self._ended = False
        self._closed = False

    def open(self, fd: int, *, terminal: bool = False) -> None:
        """Write to `fd` from now on, and own that descriptor."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._terminal = terminal
        if self._pending or self._ended:
            self._push()

    def write(self, data: bytes) -> None:
        if not self._ended and not self._closed:
            self._pending += data
            self._push()

    def end(self) -> None:
        """Close the descriptor when all is written, as no more will come. On a terminal the end is a character."""
        if self._terminal and not self._ended:
            self._pending += _END_OF_INPUT
        self._ended = True
        self._push()

    def close(self) -> None:
        self._closed = True
        self._pending.clear()
        if self._fd >= 0:
            self._guestd.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_room(self, events: int) -> None:
        if self._terminal and events & select.EPOLLHUP:
            self._lose()  # no process has it open, and the kernel would report that for ever while it is full
        else:
            self._push()

    def _lose(self) -> None:
        self.close()
        self._guestd.say(ev="stdin-closed", id=self._number)

    def _push(self) -> None:
        if self._fd < 0:
            return
        try:
            while self._pending:
                with memoryview(self._pending) as view:
                    count = os.write(self._fd, view[:_WRITE])
                del self._pending[:count]
                self._taken += count
        except BlockingIOError:
            self._guestd.unwatch(self._fd)
            self._guestd.watch(self._fd, select.EPOLLOUT, self._on_room)
        except OSError:  # EPIPE, on a terminal EIO: there is no reader any more
            self._lose()
            return
        if self._taken >= self._worth:
            self._guestd.say(ev="took", id=self._number, bytes=self._taken)
            self._taken = 0
        if self._pending:
            return
        if self._ended and not self._terminal:
            self.close()
        else:
            self._guestd.unwatch(self._fd)


# ── terminals: the master end is made by the spawner inside and kept by the monitor ───────────────


def make_terminal(cols: int, rows: int) -> tuple[int, int]:
    """Return master and slave of a new terminal of this sandbox's own devpts."""
    from fcntl import ioctl  # only here, as above

    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("I", ioctl(master, _TIOCGPTN, bytes(4)))[0]
        set_terminal_size(master, cols, rows)
        return master, os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        os.close(master)
        raise


def set_terminal_size(fd: int, cols: int, rows: int) -> None:
    from fcntl import ioctl

    ioctl(fd, _TIOCSWINSZ, struct.pack("HHHH", min(rows, _MOST), min(cols, _MOST), 0, 0))


def take_terminal(slave: int) -> None:
    """Make `slave` the controlling terminal of this process, which leads a session."""
    from fcntl import ioctl

    ioctl(slave, _TIOCSCTTY, 0)
