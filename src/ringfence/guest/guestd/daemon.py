"""Owns a sandbox inside its monitor: starts what the host asks for, relays streams, waits, keeps the clocks.

The daemon believes nothing from inside: exit statuses come from waitid on the monitor's own children, pipe bytes are
relayed unread, reports are passed on as text. It never waits for an answer: every answer is an event.
"""

from __future__ import annotations

import errno
import os
import select
import time

from ringfence.guest.guestd.job import Job, output_pipes
from ringfence.guest.guestd.supervisor import Inside
from ringfence.shared import fast_stdlib, framing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.guest.guestd.protocols import GuestdRequest, GuestdSocket, Keeper
    from ringfence.guest.guestd.relay import Relaying

_READ = 1 << 18
_SEND_BUFFER_STOP = 1 << 20  # stop reading guests while the host is this far behind
_WORTH_PARTS = 1 << 15
_CPU_POLL_S = 0.05
_START_S = 0.4
_STRAYS_S = 0.1
_HEAR_S = 5.0  # how long the host may take to read the rest when all has ended
_INTERRUPT_S = 0.4  # how long an interrupted cell may take to end by itself
_JUST_ENDED_S = 0.05  # longer than a clock tick, in which processes of two jobs cannot be told apart by their age


class Guestd:
    def __init__(
        self,
        monitor: Keeper,
        number: int,
        channel: GuestdSocket,
        named: dict[str, int],
        *,
        owner: int | None,
        inside: type[Inside] = Inside,
    ) -> None:
        self._monitor = monitor
        self._number = number
        self.owner = owner  # the owner of the pipes, so that a guest can open /dev/stdout; None: the same user
        self._channel = channel
        self._channel.setblocking(False)
        self._cpu_fd = named.get("cpu", -1)
        # Closed at the end. Two of them are locks, which show that the sandbox is not gone.
        self._kept = [named[name] for name in ("cpu", "uid", "stake") if name in named]
        self._inside = inside(monitor, number, named.get("freezer", -1), self._finish_dying)
        self.relaying: Relaying | None = None  # set where connections go by this channel too
        self.image = -1  # memory of another session, for a session that becomes its copy
        self._wants_image: Job | None = None
        self._pipes_ahead: list[int] = []
        self._reader = framing.FrameCutter()
        self._out = bytearray()
        self._jobs: dict[int, Job] = {}
        self._ended_sessions: list[tuple[float, int]] = []  # when a job ended, and its session
        self._lifetime_at: float | None = None
        self._idle_s: float | None = None
        self._pauses_when_idle = False
        self._paused_at: float | None = None
        self._idle_since = time.monotonic()
        self._dying = False
        self._heard_until = 0.0
        self._last_word: bytes | None = None  # the result of a one-shot run, held back until no process of it is left

    def take_image(self, fd: int) -> None:
        """Take a memory image.

        The image and the request for it come by different ways: the first waits for the second.
        """
        if self.image >= 0:
            os.close(self.image)
        self.image = fd
        if self._wants_image is not None:
            job, self._wants_image = self._wants_image, None
            job.start(self._inside)

    # from the forker

    def built(self, fds: list[int], init_pid: int) -> None:
        self._inside.built(fds, init_pid, self._on_init_gone, self._on_ready)

    def respawned(self, fds: list[int]) -> None:
        self._inside.respawned(fds)

    def maker_gone(self) -> None:
        self._inside.maker_gone()
        if not self._inside.ready:
            self.close()  # without a report: another sandbox can be made
        self._finish_dying()

    def failed(self, error: str, number: int | None, fds: list[int]) -> None:
        """Report that the sandbox could not be built, or get no new spawner. `fds`: pidfds of what was made."""
        if self._inside.ready:
            self._inside.no_spawner(number or errno.EIO, error)
            self._finish_dying()
            return
        self._send(framing.message(ev="failed", error=error, errno=number))
        self._inside.take_ruins(fds)
        self.close()
        self._finish_dying()

    def _on_ready(self, failure: str | None) -> None:
        if failure is not None:
            self._send(framing.message(ev="failed", error=failure, errno=None))
            self.close()
            return
        self._monitor.watch(self._channel.fileno(), select.EPOLLIN, self._on_channel)
        self.say(ev="ready", init=self._inside.init_pid)
        try:
            self._pipes_ahead = output_pipes(self.owner)  # for the first job, while no caller waits
        except OSError:
            self._pipes_ahead = []  # the job that finds no pipes meets the same error, and reports it

    # the channel

    def say(self, **data: object) -> None:
        self._send(framing.message(**data))

    def _send(self, data: bytes | memoryview) -> None:
        if not self._out:
            try:
                sent = self._channel.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            data = data[sent:]
        if data:
            self._out += data
            if self._inside.ready and not self._dying:
                self._monitor.change(self._channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _on_channel(self, events: int) -> None:
        if events & select.EPOLLOUT or self._dying:
            self._drain_out()
        if self._dying or not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = self._channel.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        for kind, stream, payload in self._reader.feed(data):
            if kind == framing.JSON:
                self._request(fast_stdlib.loads(payload))
                continue
            if kind >= framing.OPEN:
                if self.relaying is not None:
                    self.relaying.take(kind, stream, payload)
                continue
            job = self._jobs.get(stream)
            if job is not None:
                job.write(payload) if kind == framing.STDIN else job.tell(payload)
        if self.relaying is not None:
            self.relaying.settle()

    def _drain_out(self) -> None:
        try:
            del self._out[: self._channel.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()
            self.close()
        if not self._out and self._dying:
            self._finish_dying()
        elif not self._out:
            self._monitor.change(self._channel.fileno(), select.EPOLLIN)
            for job in list(self._jobs.values()):
                job.resume()
            if self.relaying is not None:
                self.relaying.resume()

    @property
    def congested(self) -> bool:
        return len(self._out) > _SEND_BUFFER_STOP

    # what jobs need of guestd

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._monitor.watch(fd, events, handler)

    def unwatch(self, fd: int) -> None:
        self._monitor.unwatch(fd)

    def relay(self, kind: int, stream: int, data: bytes | memoryview) -> None:
        if self._out or len(data) < _WORTH_PARTS:
            self._send(framing.pack(kind, stream, data))
            return
        head = framing.HEADER.pack(len(data), kind, stream)
        try:
            sent = self._channel.sendmsg([head, data])  # large data is not copied once more
        except OSError:
            sent = 0  # `_send` meets the same error, and handles it
        if sent < len(head):
            self._send(head[sent:] + data)
        elif sent < len(head) + len(data):
            self._send(data[sent - len(head) :])

    def output_pipes(self) -> list[int]:
        """Return pipes for stdout and stderr, for the caller to close. Raises OSError."""
        pipes, self._pipes_ahead = self._pipes_ahead, []
        return pipes or output_pipes(self.owner)

    def finished(self, job: Job, **outcome: object) -> None:
        self._jobs.pop(job.id, None)
        self._idle_since = time.monotonic()
        if job.inner_pid:
            self._ended_sessions.append((self._idle_since, job.inner_pid))
        lost = outcome["signal"] == fast_stdlib.SIGKILL and job.why is None and self._inside.init_is_ending()
        if lost:
            outcome["why"] = "lost"  # PID 1 was killed, and the kernel killed the guest with it
        word = framing.message(ev="exit", id=job.id, **outcome)
        if not job.one_shot:
            self._send(word + framing.message(ev="end", why="init-lost") if lost else word)
            if lost:
                self.close()
            return
        # No process outlives a one-shot run: all are gone before the host gets the result (L02).
        if self._inside.has_children():
            self._last_word = word
        else:
            self._send(word)  # before PID 1 ends, which may take the CPU time that the host needs
        self._inside.kill()

    # requests of the host

    def _request(self, request: GuestdRequest) -> None:
        op = request["op"]
        if op == "start":
            self._start(request)
        elif op == "clocks":
            self._set_clocks(request)
        elif op == "close":
            self.close()
        elif op == "pause":
            self._pause(asked=True)
        elif op == "resume":
            self._resume()
        elif op == "clear":
            self._clear()
        else:
            job = self._jobs.get(request["id"])
            if job is not None:
                self._for_job(job, op, request)

    def _for_job(self, job: Job, op: str, request: GuestdRequest) -> None:
        if op == "credit":
            job.add_credit(int(request["bytes"]))
        elif op == "eof":
            job.close_stdin()
        elif op == "signal":
            job.signal(int(request["signal"]))
        elif op == "kill":
            self._end_job(job, str(request["why"]))
        elif op == "cell":
            self._begin_cell(job, request)
        elif op == "idle":
            if job.end_cell(request["n"]):
                self._idle_since = time.monotonic()
        elif op == "hang-up":
            job.hang_up()
        elif op == "resize":
            job.resize(int(request["cols"]), int(request["rows"]))

    def _start(self, request: GuestdRequest) -> None:
        job = Job(self, request["id"], request)
        self._jobs[job.id] = job
        now = time.monotonic()
        self._ended_sessions = [(at, session) for at, session in self._ended_sessions if now - at < _JUST_ENDED_S]
        job.sessions_before = [session for _, session in self._ended_sessions]
        self._resume()
        self._set_deadlines(job, request)
        if request["job"].get("image") and self.image < 0:
            self._wants_image = job
        else:
            job.start(self._inside)

    def _begin_cell(self, job: Job, request: GuestdRequest) -> None:
        """Begin a cell. The host sends the cell to the interpreter right after this."""
        self._resume()
        job.begin_cell(request["n"])
        self._set_deadlines(job, request)

    def _set_deadlines(self, job: Job, request: GuestdRequest) -> None:
        if request["timeout_s"] is not None:
            job.deadline = time.monotonic() + float(request["timeout_s"])
        if request["cpu_s"] is not None and (self._cpu_fd >= 0 or job.session):
            job.cpu_deadline = self._cpu_used(job) + float(request["cpu_s"])

    def refused(self, job: Job, number: int, error: str) -> None:
        """Report a job that could not start: the sandbox holds no further process, or has no spawner."""
        self._jobs.pop(job.id, None)
        if self._inside.init_is_ending():
            self._end("init-lost")
            return
        self.say(ev="refused", id=job.id, errno=number, error=error)

    def _set_clocks(self, request: GuestdRequest) -> None:
        self._lifetime_at = time.monotonic() + float(request["lifetime_s"])
        self._idle_s = float(request["idle_s"])
        self._pauses_when_idle = request["on_idle"] == "pause"
        self._idle_since = time.monotonic()

    def _pause(self, *, asked: bool) -> None:
        """Freeze the sandbox and stop its clocks.

        CPU time stops by itself. Without `asked`, the sandbox was idle too long.
        """
        if self._paused_at is None and self._inside.freeze(asked=asked):
            self._paused_at = time.monotonic()
            self.say(ev="paused")

    def _resume(self) -> None:
        if self._paused_at is None:
            return
        self._inside.thaw()
        self.say(ev="resumed")
        missed = time.monotonic() - self._paused_at
        self._paused_at = None
        self._idle_since = time.monotonic()
        if self._lifetime_at is not None:
            self._lifetime_at += missed
        for job in self._jobs.values():
            if job.deadline is not None:
                job.deadline += missed

    # clocks

    @property
    def expects_children(self) -> bool:
        """Return whether a process may exist that the forker or the spawner has yet to report."""
        return not self._dying and (not self._inside.ready or self._inside.answer_by is not None)

    @property
    def expects_since(self) -> float:
        """Return when the oldest unreported process began, in seconds since boot."""
        return self._inside.expects_since

    def next_wait(self) -> float | None:
        """Return the seconds until a clock of this sandbox may run out; None when none runs."""
        if self._paused_at is not None and not self._dying:
            return None
        ends = [job.deadline for job in self._jobs.values() if job.deadline is not None]
        now = time.monotonic()
        if any(job.cpu_deadline is not None for job in self._jobs.values()):
            ends.append(now + _CPU_POLL_S)
        if self._lifetime_at is not None:
            ends.append(self._lifetime_at)
        if self._idle_s is not None and not self._in_use:
            ends.append(self._idle_since + self._idle_s)
        if self._inside.answer_by is not None:
            ends.append(self._inside.answer_by)
        if self._dying:
            ends.append(now + _STRAYS_S)
        return max(0.0, min(ends) - now) if ends else None

    @property
    def _in_use(self) -> bool:
        return any(job.in_cell for job in self._jobs.values())

    def keep_clocks(self) -> None:
        if self._dying:
            self._monitor.reap_strays()
            self._finish_dying()
            return
        if self._paused_at is not None:
            return
        now = time.monotonic()
        if self._inside.answer_by is not None and now >= self._inside.answer_by and not self._inside.late():
            self._end("tree-stuck")
        for job in list(self._jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                self._time_is_up(job, "timeout")
            elif job.cpu_deadline is not None and self._cpu_used(job) >= job.cpu_deadline:
                self._time_is_up(job, "cpu")
        if self._lifetime_at is not None and now >= self._lifetime_at:
            self._end("lifetime")
        elif self._idle_s is not None and not self._in_use and now >= self._idle_since + self._idle_s:
            self._pause(asked=False) if self._pauses_when_idle else self._end("idle")

    def _time_is_up(self, job: Job, why: str) -> None:
        """End a job. A cell is interrupted first, so that its session may live on; what does not end then is killed."""
        if not job.session or not job.inner_pid or job.hurried:
            self._end_job(job, job.time_is_up or why)
            return
        job.hurried = True
        job.time_is_up = why
        job.deadline = time.monotonic() + _INTERRUPT_S
        job.cpu_deadline = None
        self.say(ev="interrupted", id=job.id, why=why)
        job.signal(fast_stdlib.SIGINT)

    def _cpu_used(self, job: Job) -> float:
        """Return the CPU time of the whole sandbox; where no cgroup counts that, of the session's interpreter."""
        if self._cpu_fd < 0:
            return job.cpu_used()
        text = os.pread(self._cpu_fd, 256, 0)
        if text.startswith(b"usage_usec"):  # cgroup v2 cpu.stat
            return int(text.split()[1]) / 1e6
        return int(text) / 1e9  # cgroup v1 cpuacct.usage

    def _end_job(self, job: Job, why: str) -> None:
        """Kill a job's whole tree, daemonised children included (D10, D11)."""
        self._resume()  # on cgroup v1 a frozen process takes no signal (D18)
        if not job.exited:
            job.why = job.why or why
        job.deadline = job.cpu_deadline = None
        if not job.inner_pid:
            if job.hurried:
                self._give_up(job)
            job.hurried = True
            job.deadline = time.monotonic() + _START_S  # the job is killed as soon as it starts, which is now or never
        elif job.alone:
            job.signal(fast_stdlib.SIGKILL)
        elif job.one_shot:
            self._inside.kill()
        else:

            def others() -> list[int]:
                return [j.inner_pid for j in self._jobs.values() if j is not job and j.inner_pid]

            self._inside.kill_all_but(
                others, since=job.asked_at, sessions=job.sessions_before, on_stuck=lambda: self._end("tree-stuck")
            )

    def _clear(self) -> None:
        """Kill every process but those that make processes. A job that is requested from now on starts after that."""
        self._resume()  # on cgroup v1 a frozen process takes no SIGKILL (D18)
        for job in self._jobs.values():
            if not job.exited:
                job.why = job.why or "caller"
        self._inside.kill_all_but(list, since=0.0, sessions=[], on_stuck=lambda: self._end("tree-stuck"))

    def _give_up(self, job: Job) -> None:
        """Give up a job that was not even started, because the guest stopped the spawner."""
        self._inside.give_up(job)
        job.abandon()
        self._jobs.pop(job.id, None)
        now = time.monotonic()
        self.say(
            ev="exit", id=job.id, why=job.why, report="", ended_at=now, code=None, signal=fast_stdlib.SIGKILL, cpu_s=0.0
        )

    # the end

    def _end(self, why: str) -> None:
        if not self._dying:
            self.say(ev="end", why=why)
            self.close()

    def _on_init_gone(self) -> None:
        """End the sandbox: PID 1 is gone, and with it every process inside."""
        if self._last_word is not None:
            self._send(self._last_word)
            self._last_word = None
        if not self._dying and not any(job.one_shot for job in self._jobs.values()):
            for job in list(self._jobs.values()):
                job.why = job.why or "lost"
            self._end("init-lost")

    def close(self) -> None:
        """Kill everything. The rest follows by events: every child is reaped, then the channel is closed."""
        if self._dying:
            return
        self._dying = True
        self._heard_until = time.monotonic() + _HEAR_S
        self._monitor.unwatch(self._channel.fileno())  # a closed peer would be an event for ever
        self._lifetime_at = self._idle_s = None
        for job in list(self._jobs.values()):
            job.deadline = job.cpu_deadline = None
        self._inside.close()
        self._finish_dying()

    def pidfds(self) -> list[int]:
        """Return the pidfds of all known children of the monitor."""
        return [*self._inside.pidfds(), *(job.pidfd for job in self._jobs.values() if job.pidfd >= 0)]

    def _finish_dying(self) -> None:
        if not self._dying or not self._inside.gone or self._number < 0:
            return
        for job in list(self._jobs.values()):
            job.close()
        self._jobs.clear()
        self._monitor.unwatch(self._channel.fileno())
        if self._out and time.monotonic() < self._heard_until:  # the host is behind, and the rest is its result
            self._monitor.watch(self._channel.fileno(), select.EPOLLOUT, self._on_channel)
            return
        for fd in (*self._kept, self.image, *self._pipes_ahead):
            if fd >= 0:
                os.close(fd)
        self._channel.close()  # last, so that a caller that waits for it finds the locks free
        number, self._number = self._number, -1
        self._monitor.gone(number)

    def crashed(self, error: str) -> None:
        """Report that the monitor ends by a fault of our own code, and send what the host has not read yet."""
        self.say(ev="crashed", error=error)
        if self._out:  # otherwise it may be closed already, as the host has read all
            self._channel.settimeout(0.2)
            try:
                self._channel.sendall(self._out)
            except OSError:
                pass  # the host does not read
            self._out.clear()
