"""Owns a running sandbox from just outside it: starts what the host asks for, relays streams, waits, keeps the clocks.

On the process backend this process is the monitor: in the sandbox's namespaces except its pid namespace, so no guest
can name it. It believes nothing from inside: exit statuses come from waitid on its own children, pipe bytes are relayed
unread, reports are passed on as text.
"""

from __future__ import annotations

import errno
import os
import select
import time

from . import counts, frames, lean, place
from .job import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from .shapes import Plan, Request

_READ = 1 << 16
_SEND_BUFFER_STOP = 1 << 20  # stop reading guests while the host is this far behind
_CPU_POLL_S = 0.05


def monitor(plan: Plan, fds: list[int], library: int, proc: int) -> None:
    """Build the sandbox, then serve it. Never returns."""
    channel = lean.from_fd(fds[0], lean.SOCK_STREAM)
    try:
        named = list(zip(plan["fds"], fds, strict=True))
        inside = place.build(plan, named, proc)
    except (OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        channel.sendall(frames.message(ev="failed", error=str(error), errno=number))
        os._exit(1)
    guestd = Guestd(channel, inside, library, cpu_fd=dict(named).get("cpu", -1))
    try:
        guestd.serve()
    finally:
        inside.destroy()
        os._exit(0)


class Guestd:
    def __init__(self, channel: socket, inside: place.Place, library: int, *, cpu_fd: int) -> None:
        self._channel = channel
        self._place = inside
        self._library = library
        self._cpu_fd = cpu_fd
        self._reader = frames.Reader()
        self._out = bytearray()
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._jobs: dict[int, Job] = {}
        self._lifetime_at: float | None = None
        self._idle_s: float | None = None
        self._idle_since = time.monotonic()
        self._ending = False

    def serve(self) -> None:
        """Until the host closes the channel, the library dies, PID 1 dies or a clock runs out."""
        self._channel.setblocking(False)
        self._watch(self._channel.fileno(), select.EPOLLIN, self._on_channel)
        self._watch(self._library, select.EPOLLIN, self._on_end)
        self._watch(self._place.init_pidfd, select.EPOLLIN, self._on_init_lost)
        self._watch(self._place.spawner_pidfd, select.EPOLLIN, self._on_spawner_ended)
        self.say(ev="ready", init=self._place.init_pid)
        if not lean.readable(self._channel, counts.QUIET_S):
            self._rehearse()
        while not self._ending:
            for fd, events in self._epoll.poll(self._next_wait()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler(events)
            self._keep_clocks()
        self._flush_before_end()

    def _rehearse(self) -> None:
        """Touch what every job touches, while nobody waits: the first write to a page after a fork copies it."""
        work = {"kind": "python", "code": "x" * 100, "env": dict.fromkeys("abcdefgh", "x" * 50), "cwd": "/"}
        request = {"op": "start", "id": 0, "one_shot": True, "job": work, "stdin": False, "credit": 1}
        clocks = {"timeout_s": 1.5, "cpu_s": 1.5}
        for _, _, payload in frames.Reader().feed(frames.message(**request, **clocks)):
            job = Job(self, 0, lean.loads(payload))
            job.rehearse()

    # the channel

    def say(self, **data: object) -> None:
        self._send(frames.message(**data))

    def _send(self, data: bytes) -> None:
        if not self._out:
            try:
                sent = self._channel.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._ending = True
                return
            data = data[sent:]
        if data:
            self._out += data
            self._epoll.modify(self._channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _on_channel(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._drain_out()
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = self._channel.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ending = True
            return
        for kind, stream, payload in self._reader.feed(data):
            if kind == frames.STDIN:
                job = self._jobs.get(stream)
                if job is not None:
                    job.write(payload)
            else:
                self._request(lean.loads(payload))

    def _drain_out(self) -> None:
        try:
            sent = self._channel.send(self._out)
        except BlockingIOError:
            return
        except OSError:
            self._ending = True
            return
        del self._out[:sent]
        if not self._out:
            self._epoll.modify(self._channel.fileno(), select.EPOLLIN)
            for job in list(self._jobs.values()):
                job.resume()

    def _flush_before_end(self) -> None:
        self._channel.settimeout(1)
        try:
            self._channel.sendall(self._out)
        except OSError:
            return

    @property
    def congested(self) -> bool:
        return len(self._out) > _SEND_BUFFER_STOP

    # what jobs need of us

    def _watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._watch(fd, events, handler)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def relay(self, kind: int, stream: int, data: bytes) -> None:
        self._send(frames.pack(kind, stream, data))

    def finished(self, job: Job, **outcome: object) -> None:
        self._jobs.pop(job.id, None)
        self._idle_since = time.monotonic()
        lost = outcome["signal"] == lean.SIGKILL and job.why is None and self._place.init_is_ending()
        if lost:
            outcome["why"] = "lost"  # PID 1 was killed, and the kernel killed the guest with it
        if job.one_shot:
            self._place.end_all()  # before the host hears of it: nothing outlives a one-shot run
        self.say(ev="exit", id=job.id, **outcome)
        if lost:
            self._end("init-lost")

    # requests of the host

    def _request(self, request: Request) -> None:
        op = request["op"]
        if op == "start":
            self._start(request)
        elif op == "clocks":
            self._set_clocks(request)
        elif op == "close":
            self._ending = True
        else:
            job = self._jobs.get(request["id"])
            if job is not None:
                self._for_job(job, op, request)

    def _for_job(self, job: Job, op: object, request: Request) -> None:
        if op == "credit":
            job.add_credit(int(request["bytes"]))
        elif op == "eof":
            job.close_stdin()
        elif op == "signal":
            job.signal(int(request["signal"]))
        elif op == "kill":
            self._end_job(job, str(request["why"]))

    def _start(self, request: Request) -> None:
        job = Job(self, request["id"], request)
        self.unwatch(self._place.spawner_pidfd)  # it becomes the job, or may be replaced
        try:
            job.start(self._place)
        except OSError as error:
            job.abandon()
            if self._place.init_is_ending():
                self._end("init-lost")
                return
            self.say(ev="refused", id=job.id, errno=error.errno or errno.EIO, error=str(error))
            return
        finally:
            if not job.one_shot and self._place.spawner_pidfd >= 0:
                self._watch(self._place.spawner_pidfd, select.EPOLLIN, self._on_spawner_ended)
        self._jobs[job.id] = job
        self._start_clocks(job, request)

    def _start_clocks(self, job: Job, request: Request) -> None:
        now = time.monotonic()
        if request["timeout_s"] is not None:
            job.deadline = now + float(request["timeout_s"])
        if request["cpu_s"] is not None and self._cpu_fd >= 0:
            job.cpu_deadline = self._cpu_used() + float(request["cpu_s"])

    def _set_clocks(self, request: Request) -> None:
        self._lifetime_at = time.monotonic() + float(request["lifetime_s"])
        self._idle_s = float(request["idle_s"])
        self._idle_since = time.monotonic()

    # clocks

    def _next_wait(self) -> float:
        now = time.monotonic()
        ends = [job.deadline for job in self._jobs.values() if job.deadline is not None]
        if any(job.cpu_deadline is not None for job in self._jobs.values()):
            ends.append(now + _CPU_POLL_S)
        if self._lifetime_at is not None:
            ends.append(self._lifetime_at)
        if self._idle_s is not None and not self._jobs:
            ends.append(self._idle_since + self._idle_s)
        return max(0.0, min(ends) - now) if ends else -1

    def _keep_clocks(self) -> None:
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                self._end_job(job, "timeout")
            elif job.cpu_deadline is not None and self._cpu_used() >= job.cpu_deadline:
                self._end_job(job, "cpu")
        if self._lifetime_at is not None and now >= self._lifetime_at:
            self._end("lifetime")
        elif self._idle_s is not None and not self._jobs and now >= self._idle_since + self._idle_s:
            self._end("idle")

    def _cpu_used(self) -> float:
        text = os.pread(self._cpu_fd, 256, 0)
        if text.startswith(b"usage_usec"):  # cgroup v2 cpu.stat
            return int(text.split()[1]) / 1e6
        return int(text) / 1e9  # cgroup v1 cpuacct.usage

    def _end_job(self, job: Job, why: str) -> None:
        """Kill its whole tree, daemonised children included (D10, D11)."""
        if not job.exited:
            job.why = job.why or why
        job.deadline = job.cpu_deadline = None
        if job.alone:
            job.signal(lean.SIGKILL)
            return
        if job.one_shot:
            self._place.kill_init()
            return
        others = [j.inner_pid for j in self._jobs.values() if j is not job]
        if not self._place.kill_all_but(others, since=job.started):
            self._end("tree-stuck")

    def _end(self, why: str) -> None:
        self.say(ev="end", why=why)
        self._ending = True

    def _on_end(self, _: int) -> None:
        self._ending = True

    def _on_spawner_ended(self, _: int) -> None:
        """A guest killed it, or PID 1 died and the kernel did. The next job gets another, if there is still a PID 1."""
        self.unwatch(self._place.spawner_pidfd)
        self._place.reap_spawner()

    def _on_init_lost(self, _: int) -> None:
        """PID 1 is gone and with it every process inside. Jobs end by their own pidfds; the sandbox is over."""
        self.unwatch(self._place.init_pidfd)
        if not any(job.one_shot for job in self._jobs.values()):
            for job in list(self._jobs.values()):
                job.why = job.why or "lost"
            self._end("init-lost")
