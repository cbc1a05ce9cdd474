"""Keeps the two fixed processes of a sandbox for its monitor, PID 1 and the spawner, and sends jobs to the spawner.

Every answer is an event. A spawner that a guest killed or stopped is replaced; its late answer has no effect (J17).
"""

from __future__ import annotations

import errno
import os
import select
import time

from ringfence.shared import children, fast_stdlib, proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from socket import socket

    from ringfence.guest.guestd.job import Job
    from ringfence.guest.guestd.protocols import Keeper
else:
    from _collections import deque  # `collections`, which exports it, would be 3 ms of every start

_SPAWN_S = 5.0
_LOOK_S = 0.1  # how often a spawner that owes an answer is checked: a stopped spawner never answers
_KILL_S = 1.0
_TRIES = 2
_TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc/<pid>/stat
_PF_EXITING = 4  # a flag of /proc/<pid>/stat
_INLINE = 1 << 16


class Inside:
    def __init__(self, monitor: Keeper, number: int, freezer: int, on_reaped: Callable[[], None]) -> None:
        self._monitor = monitor
        self._number = number
        self._freezer = freezer
        self._words = _words_of(freezer)
        self.init_pid = 0
        self.ready = False
        self._init: socket | None = None
        self._init_pidfd = -1
        self._spawner: socket | None = None
        self._spawner_pidfd = -1
        self._spawner_inner = 0
        self._children: set[int] = set()  # pidfds of our children that are to be reaped here
        self._awaited = 1  # answers of the forker: the first is to the order that made this sandbox
        self._dying = False
        self._on_init_gone: Callable[[], None] = _nothing
        self._on_reaped = on_reaped
        self._on_ready: Callable[[str | None], None] | None = None
        self._waiting: deque[tuple[Job, bytes, list[int]]] = deque()
        self._asked: tuple[Job, bytes, list[int]] | None = None
        self._tries = 0
        self._answer_by: float | None = None
        self._look_at = 0.0
        self.expects_since = boot_time()  # the start of the oldest process that is not reported yet
        self._kills_by: deque[float] = deque()
        self._kills: list[Callable[[], None]] = []  # to be called when the requested job has its answer
        self._on_stuck: Callable[[], None] = _nothing

    # how it comes to be

    def built(
        self, fds: list[int], init_pid: int, on_init_gone: Callable[[], None], on_ready: Callable[[str | None], None]
    ) -> None:
        self._awaited -= 1
        self._init_pidfd, init_fd, *spawner = fds
        self.init_pid = init_pid
        self._init = fast_stdlib.from_fd(init_fd, fast_stdlib.SOCK_SEQPACKET)
        self._init.setblocking(False)
        self._on_init_gone = on_init_gone
        self._on_ready = on_ready
        self._adopt(self._init_pidfd, self._init_ended)
        self._monitor.watch(init_fd, select.EPOLLIN, self._on_killed)
        self._take_spawner(spawner)
        if self._dying:
            self._kill_all()

    def respawned(self, fds: list[int]) -> None:
        self._awaited -= 1
        self._take_spawner(fds)
        if self._dying:
            self._kill_all()

    def maker_gone(self) -> None:
        """Note that no answer of the forker will come any more."""
        self._awaited = 0
        if self._asked is not None and self._spawner is None:
            self._answered(errno.EIO, "the forker is gone")

    def take_ruins(self, pidfds: list[int]) -> None:
        """End and reap what there is of a sandbox that could not be built."""
        self._awaited -= 1
        for pidfd in pidfds:
            children.signal(pidfd, fast_stdlib.SIGKILL)
            self._adopt(pidfd, _nothing)

    def _take_spawner(self, fds: list[int]) -> None:
        socket_fd, self._spawner_pidfd, *helpers = fds
        self._spawner = fast_stdlib.from_fd(socket_fd, fast_stdlib.SOCK_SEQPACKET)
        self._spawner.setblocking(False)
        self._spawner_inner = 0
        self._monitor.watch(socket_fd, select.EPOLLIN, self._on_spawner)
        self._adopt(self._spawner_pidfd, self._spawner_ended)
        for pidfd in helpers:
            self._adopt(pidfd, _nothing)

    def _adopt(self, pidfd: int, then: Callable[[], None]) -> None:
        """Reap a child when it ends, and then call `then`."""

        def ended(_: int) -> None:
            try:
                if children.wait(pidfd, os.WEXITED | os.WNOHANG) is None:
                    return
            except ChildProcessError:
                pass  # reaped as a stray, before it was reported
            self._monitor.unwatch(pidfd)
            self._children.discard(pidfd)
            children.close(pidfd)
            then()
            self._on_reaped()

        self._children.add(pidfd)
        self._monitor.watch(pidfd, select.EPOLLIN, ended)

    def pidfds(self) -> list[int]:
        return list(self._children)

    @property
    def gone(self) -> bool:
        return not self._children and self._awaited == 0

    # jobs

    def spawn(self, job: Job, body: bytes, fds: list[int]) -> None:
        """Ask the spawner to start a job; `started` or `refused` follows. `fds` are closed once they are sent."""
        self._waiting.append((job, body, fds))
        self._ask_next()

    def become(self, job: Job, body: bytes, fds: list[int]) -> None:
        """Turn the spawner into the guest, for a one-shot run."""
        pidfd = self._spawner_pidfd
        if self._spawner is None or not self._spawner_inner or not self._hand_over(job, body, fds, become=True):
            job.refused(errno.ESRCH, "the spawner is gone")
            return
        self._monitor.unwatch(pidfd)
        self._children.discard(pidfd)
        self._spawner_pidfd = -1
        self._drop_socket()
        job.started(pidfd, self._spawner_inner)

    def _ask_next(self) -> None:
        if self._asked is not None or not self._waiting or self._kills_by:  # PID 1 would take a new job for a victim
            return
        self._asked = self._waiting.popleft()
        self.expects_since = boot_time()
        self._tries = 0
        self._ask()

    def _ask(self) -> None:
        assert self._asked is not None
        self._tries += 1
        if self._tries > _TRIES:
            self._answered(errno.EIO, "the spawner does not answer")
            return
        self._start_clock()
        if self._spawner is None:
            self._order_spawner()
        elif self._spawner_inner and not self._hand_over(*self._asked, become=False):
            self._replace_spawner()

    def _start_clock(self) -> None:
        now = time.monotonic()
        self._answer_by = now + _SPAWN_S
        self._look_at = now + _LOOK_S

    def _hand_over(self, job: Job, body: bytes, fds: list[int], *, become: bool) -> bool:
        assert self._spawner is not None
        packet = {"become": become, "pty": job.terminal, "body": None}
        try:
            if len(body) <= _INLINE:
                fast_stdlib.send_fds(self._spawner, fast_stdlib.dumps({**packet, "body": body.decode()}), fds)
                return True
            memory = os.memfd_create("job", os.MFD_CLOEXEC)
            with open(memory, "wb") as file:
                file.write(body)
                file.flush()
                fast_stdlib.send_fds(self._spawner, fast_stdlib.dumps(packet), [*fds, memory])
        except OSError:
            return False
        return True

    def _on_spawner(self, _: int) -> None:
        assert self._spawner is not None
        try:
            data, fds = fast_stdlib.recv_fds(self._spawner, 1 << 12, 2)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            fds = []
        if not data or data.startswith(b"!"):
            self._lose_spawner(data.decode("utf-8", "replace").lstrip("!"))
            return
        answer = fast_stdlib.loads(data)
        if not self._spawner_inner:
            self._spawner_inner = answer["pid"]
            self._is_ready()
        elif self._asked is None:
            for fd in fds:
                os.close(fd)
        elif "pid" in answer:
            job = self._asked[0]
            self._answered(None, "")
            handle = fds.pop(0) if answer["pidfd"] else children.adopt(answer["pid"])
            job.started(handle, answer["pid"], *fds)
            self._after_answer()
        else:
            number = answer["errno"]
            self._answered(number, os.strerror(number))

    def _is_ready(self) -> None:
        if self._on_ready is not None:
            tell, self._on_ready = self._on_ready, None
            self.ready = True
            tell(None)
        elif self._asked is not None:
            self._tries -= 1
            self._ask()

    def _answered(self, number: int | None, error: str) -> None:
        """Take the answer about the job that was requested.

        `number`: the errno of a refusal; None where the job started.
        """
        assert self._asked is not None
        job, _, fds = self._asked
        self._asked = None
        self._answer_by = None
        for fd in fds:
            os.close(fd)
        if number is not None:
            job.refused(number, error)
            self._after_answer()

    def _after_answer(self) -> None:
        kills, self._kills = self._kills, []
        for kill in kills:
            kill()
        self._ask_next()

    def give_up(self, job: Job) -> None:
        """Give up a job that was not started in its time."""
        for entry in list(self._waiting):
            if entry[0] is job:
                self._waiting.remove(entry)
                for fd in entry[2]:
                    os.close(fd)
        if self._asked is not None and self._asked[0] is job:
            for fd in self._asked[2]:
                os.close(fd)
            self._asked = None
            self._answer_by = None
            self._replace_spawner()  # the old spawner's answer may still come
            self._after_answer()

    # a spawner that was lost

    def _lose_spawner(self, said: str) -> None:
        self._drop_socket()
        if self._on_ready is not None:
            tell, self._on_ready = self._on_ready, None
            tell(f"the spawner ended while it fenced itself: {said or self._how_it_ended()}")
        elif self._asked is not None:
            self._ask()

    def _how_it_ended(self) -> str:
        info = children.wait(self._spawner_pidfd, os.WEXITED | os.WNOWAIT) if self._spawner_pidfd >= 0 else None
        if info is not None and info.si_code != os.CLD_EXITED:
            return f"killed by signal {info.si_status}"
        return f"status {info.si_status}" if info is not None else "no word"

    def _spawner_ended(self) -> None:
        self._spawner_pidfd = -1

    def _replace_spawner(self) -> None:
        if self._spawner_pidfd >= 0:
            children.signal(self._spawner_pidfd, fast_stdlib.SIGKILL)
            self._spawner_pidfd = -1
        self._take_late_answer()
        self._drop_socket()
        if self._asked is not None:
            self._order_spawner()

    def _take_late_answer(self) -> None:
        """End and reap what a lost spawner started without reporting it."""
        try:
            data, fds = fast_stdlib.recv_fds(self._spawner, 1 << 12, 2) if self._spawner is not None else (b"", [])
        except OSError:
            data = b""
            fds = []
        answer = fast_stdlib.loads(data) if data and not data.startswith(b"!") else {}
        if "pid" in answer and "pidfd" in answer:
            handle = fds.pop(0) if answer["pidfd"] else children.adopt(answer["pid"])
            children.signal(handle, fast_stdlib.SIGKILL)
            self._adopt(handle, _nothing)
        for terminal in fds:
            os.close(terminal)

    def _order_spawner(self) -> None:
        self._awaited += 1
        if not self._monitor.order("spawner", self._number):
            self.no_spawner(errno.EIO, "the forker is gone")

    def no_spawner(self, number: int, error: str) -> None:
        self._awaited -= 1
        if self._asked is not None:
            self._answered(number, error)

    def _drop_socket(self) -> None:
        if self._spawner is not None:
            self._monitor.unwatch(self._spawner.fileno())
            self._spawner.close()
            self._spawner = None

    # clocks

    @property
    def answer_by(self) -> float | None:
        """Return when an answer is late, or the spawner is to be checked."""
        ends = [self._kills_by[0]] if self._kills_by else []
        if self._answer_by is not None:
            ends.append(min(self._answer_by, self._look_at))
        return min(ends) if ends else None

    def late(self) -> bool:
        """Act on a late answer, at `answer_by`. Return False when PID 1 did not kill: the sandbox has to end."""
        now = time.monotonic()
        if self._kills_by and now >= self._kills_by[0]:
            return False
        if self._answer_by is not None and now >= min(self._answer_by, self._look_at):
            self._look_at = now + _LOOK_S
            if now >= self._answer_by or self._spawner_is_stopped():
                self._retry_or_fail_job()
        return True

    def _retry_or_fail_job(self) -> None:
        self._tries += 1
        if self._tries > _TRIES:
            self._answered(errno.EIO, "the spawner does not answer")
        else:
            self._start_clock()
            self._replace_spawner()

    def _spawner_is_stopped(self) -> bool:
        """Return whether a guest has stopped the spawner (D09)."""
        if self._spawner_pidfd < 0:
            return False
        try:
            return proc.process(children.number_of(self._spawner_pidfd)).state == b"T"
        except OSError:
            return False  # the spawner has ended, which is another event

    # pausing

    def freeze(self, *, asked: bool) -> bool:  # noqa: ARG002  # who asks makes no difference here
        """Stop every process inside that is not ours. Return False where there is no freezer."""
        if self._freezer < 0:
            return False
        os.write(self._freezer, self._words[1])
        return True

    def thaw(self) -> None:
        if self._freezer >= 0:
            os.write(self._freezer, self._words[0])

    # killing

    def kill(self) -> None:
        """Kill PID 1: the kernel then kills everything inside."""
        if self._init_pidfd >= 0:
            children.signal(self._init_pidfd, fast_stdlib.SIGKILL)

    def kill_all_but(
        self, kept: Callable[[], list[int]], *, since: float, sessions: list[int], on_stuck: Callable[[], None]
    ) -> None:
        """Kill what was started inside from `since` on (seconds since boot), but not the trees of `kept`.

        Calls `on_stuck` when a process does not die. A job that is just being started is waited for, because it is to
        be kept.
        """
        if self._asked is not None:
            self._kills.append(lambda: self.kill_all_but(kept, since=since, sessions=sessions, on_stuck=on_stuck))
            return
        self._on_stuck = on_stuck
        if self._init is None:  # PID 1 was killed, and everything inside with it
            on_stuck()
            return
        try:
            self._init.send(
                fast_stdlib.dumps(
                    {
                        "alone": [self._spawner_inner],
                        "trees": kept(),
                        "since": int(since * _TICKS),
                        "sessions": sessions,
                    }
                )
            )
        except OSError:
            on_stuck()
            return
        self._kills_by.append(time.monotonic() + _KILL_S)

    def _on_killed(self, _: int) -> None:
        assert self._init is not None
        try:
            left = self._init.recv(64)
        except BlockingIOError:
            return
        except OSError:
            left = b""
        if not left:
            self._drop_init()
            return
        if self._kills_by:
            self._kills_by.popleft()
        if left != b"0":
            self._on_stuck()
        elif not self._kills_by:
            self._ask_next()

    def close(self) -> None:
        """Kill everything; the children are reaped as they end.

        On cgroup v1 a frozen process takes no SIGKILL, so it is thawed first (D18).
        """
        if self._freezer >= 0:
            os.write(self._freezer, self._words[0])
            os.close(self._freezer)
            self._freezer = -1
        self._dying = True
        self._kill_all()
        self._kills_by.clear()
        self._answer_by = None
        for entry in (*self._waiting, *([self._asked] if self._asked is not None else [])):
            for fd in entry[2]:
                os.close(fd)
        self._waiting.clear()
        self._kills.clear()
        self._asked = None

    def _kill_all(self) -> None:
        self.kill()
        for pidfd in self._children:
            children.signal(pidfd, fast_stdlib.SIGKILL)
        self._drop_socket()
        self._drop_init()

    def _drop_init(self) -> None:
        if self._init is not None:
            self._monitor.unwatch(self._init.fileno())
            self._init.close()
            self._init = None

    def _init_ended(self) -> None:
        self._init_pidfd = -1
        self._on_init_gone()

    def has_children(self) -> bool:
        """Return whether PID 1 has children, as orphans become. A host that does not say counts as yes."""
        try:
            fd = os.open(f"/proc/{self.init_pid}/task/{self.init_pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return bool(os.read(fd, 16))
        except OSError:
            return True
        finally:
            os.close(fd)

    def init_is_ending(self) -> bool:
        """Return whether PID 1 is exiting or gone. Only then does the kernel kill the others, so the answer is exact.

        Where /proc does not show PID 1, only its end can be seen: no descriptor is free, or the host hides processes
        that one may not trace (hidepid).
        """
        if self._init_pidfd < 0:
            return True
        try:
            return bool(proc.process(self.init_pid).flags & _PF_EXITING)
        except OSError:
            return children.has_ended(self._init_pidfd)


def boot_time() -> float:
    """Return the seconds since boot: the clock of the start times in /proc."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _nothing() -> None:
    return


def _words_of(freezer: int) -> tuple[bytes, bytes]:
    """Return the words that thaw and freeze: v2's cgroup.freeze reads as a number, v1's freezer.state as a word."""
    if freezer >= 0 and os.pread(freezer, 16, 0).strip().isdigit():
        return b"0", b"1"
    return b"THAWED", b"FROZEN"
