"""guestd as PID 1 of a box that another program isolates: a container, gVisor, a virtual machine.

Exit statuses then come from inside. Therefore guests must not be able to touch this process: it is not dumpable, every
guest is a Landlock domain deeper where the kernel has Landlock, and it opens nothing that a guest names. The engine
enforces the limits. The channel is a socket that the host shows inside until guestd has connected, or standard input
and output; no other process has it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import _socket
import errno
import os
import select

from ringfence.guest import job_modules
from ringfence.guest.guestd import daemon, listeners
from ringfence.guest.guestd.job import make_terminal
from ringfence.guest.guestd.supervisor import Inside
from ringfence.guest.interpreter import exec_commands
from ringfence.guest.launch import pid1, spawner
from ringfence.shared import children, fast_stdlib, framing, proc, syscalls
from ringfence.shared.event_loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from ringfence.guest.guestd.job import Job
    from ringfence.guest.guestd.protocols import FenceForm, FirstFrame, SparedProcesses, SpawnPacket


_PLACE = "/sys"  # covered by a mount for a moment
_GROUP = f"{_PLACE}/guests"
_READ = 1 << 16
_BUFFER = 1 << 21
_NUMBER = 1  # there is only one sandbox
_QUIET_S = 0.03
_MOST_JOBS = 48  # at once, where the kernel enforces no such limit and a job too many ends it
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> NoReturn:
    """Run guestd as PID 1. Never returns: the end of the channel ends every process here."""
    _check_place()
    syscalls.set_name("rf-guestd")
    channel = _Streams(*_ends())
    setup, handed = _read_setup(channel)
    _check_mounts(setup)
    _prepare()
    syscalls.set_dumpable(0)
    alone = Alone(channel, setup, handed)
    alone.serve()
    os._exit(0)


def _check_place() -> None:
    """Refuse to run anywhere but as PID 1.

    Guestd ends by killing every process it may, on a host as root all processes.
    """
    if os.getpid() != 1:
        os.write(2, b"guestd is PID 1 of a box, and runs nowhere else\n")
        os._exit(1)


def _ends() -> tuple[int, int]:
    """Return the channel's descriptors to read and to write, moved to numbers that no process made later inherits."""
    door, key = os.environ.pop(framing.DOOR, ""), os.environ.pop(framing.KEY, "")
    if door:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        sock.connect(door)
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 1 << 20)
        sock.sendall(key.encode())
        ends = (syscalls.high(sock.fileno()),) * 2
        sock.close()
    else:
        ends = (syscalls.high(0), syscalls.high(1))
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return ends


def _read_setup(channel: _Streams) -> tuple[FirstFrame, list[int]]:
    """Read the first frame: what guests are to give up here, and what to listen on for the gateway.

    A descriptor of the file where the engine counts CPU time may come with the frame. What this kernel does not know is
    left out, and the host has asked about that before.
    """
    reader = framing.FrameCutter()
    handed: list[int] = []
    while True:
        data = channel.recv(_READ) if handed else channel.recv_handed(handed)
        if not data:
            os._exit(0)
        for _, _, payload in reader.feed(data):
            setup: FirstFrame = fast_stdlib.loads(payload)
            fence = setup["fence"]
            fence["landlock_abi"] = min(fence["landlock_abi"], syscalls.landlock_abi())
            return setup, handed


def _check_mounts(setup: FirstFrame) -> None:
    """Check the mounts before there is a guest. A wrong mount ends this process."""
    if setup["meant"] is not None:
        from ringfence.shared import mount_check

        found = mount_check.wrong(setup["meant"], "/proc/self", "/")
        if found is not None:
            os.write(2, f"{found}\n".encode("utf-8", "backslashreplace"))
            os._exit(1)


def _prepare() -> None:
    """Load what jobs need into this process's memory, and so into theirs, before there is a guest."""
    if not __spec__.loader_state:  # read from files; in a bundle, all code is in memory already
        job_modules.load()
    exec_commands.prepare()


class _Streams:
    """Two descriptors, which may be the same, as the socket that guestd takes for its channel."""

    def __init__(self, coming: int, going: int) -> None:
        self._in = coming
        self._out = going
        self._buffer = memoryview(bytearray(_BUFFER))  # shared: a new one would be most of a read's cost

    def fileno(self) -> int:
        return self._in

    @property
    def out(self) -> int:
        return self._out

    def setblocking(self, flag: bool) -> None:  # the signature of a socket
        for fd in (self._in, self._out):
            os.set_blocking(fd, flag)

    def settimeout(self, _: float) -> None:
        self.setblocking(True)

    def recv(self, _: int) -> memoryview:
        """Receive into the shared buffer. The result is to be used before the next call."""
        return self._buffer[: os.readv(self._in, [self._buffer])]

    def recv_handed(self, handed: list[int]) -> bytes | memoryview:
        """Receive as `recv` does, and add a descriptor that came along."""
        if self._in != self._out:
            return self.recv(_READ)  # pipes bring no descriptors
        sock = fast_stdlib.from_fd(os.dup(self._in), fast_stdlib.SOCK_STREAM)
        data, fds = fast_stdlib.recv_fds(sock, _READ, 1)
        sock.close()
        handed += [syscalls.high(fd) for fd in fds]
        return data

    def send(self, data: bytes | bytearray | memoryview) -> int:
        return os.write(self._out, data)

    def sendmsg(self, parts: list[bytes | memoryview]) -> int:
        return os.writev(self._out, parts)

    def sendall(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def close(self) -> None:
        for fd in {self._in, self._out}:
            os.close(fd)


class Counted:
    """The count of guest processes and of their CPU time inside gVisor.

    gVisor's kernel knows no RLIMIT_NPROC, and has cgroups with the controllers pids and cpuacct. The hierarchy is
    mounted, its files are opened, and it is unmounted before there is a guest: no process inside has a path to it.
    Raises OSError where the kernel has no such controller, or guestd has no right to it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        syscalls.mount("none", _PLACE, "cgroup", syscalls.MS_NOSUID | syscalls.MS_NODEV, "pids,cpuacct")
        try:
            os.mkdir(_GROUP)
            _write(f"{_GROUP}/pids.max", most)
            self.join = _held(f"{_GROUP}/cgroup.procs", os.O_WRONLY)  # a process joins by writing 0
            self.cpu = _held(f"{_GROUP}/cpuacct.usage", os.O_RDONLY)  # nanoseconds, of ended processes too
            self._current = _held(f"{_GROUP}/pids.current", os.O_RDONLY)
        finally:
            syscalls.umount(_PLACE)

    @property
    def full(self) -> bool:
        return int(os.pread(self._current, 32, 0)) >= self._most


def _held(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        return syscalls.high(fd)
    finally:
        os.close(fd)


def _write(path: str, number: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(number).encode())
    finally:
        os.close(fd)


class Alone(Loop):
    """The loop of guestd as PID 1: does for its only sandbox what a monitor does for many."""

    def __init__(self, channel: _Streams, setup: FirstFrame, handed: list[int]) -> None:
        super().__init__()
        self._channel = channel
        self._fence = setup["fence"]
        self._ended = False
        self._orders: list[Callable[[], None]] = []
        woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(self._wake)
        _signal.signal(fast_stdlib.SIGCHLD, _nothing)
        self.watch(woken, select.EPOLLIN, lambda _: self._on_child(woken))
        siblings = not setup["gvisor"] and _can_make_siblings()
        self.counted = Counted(self._fence["processes"]) if setup["gvisor"] else None
        counts = handed if self.counted is None else [self.counted.cpu]
        files = dict(zip(("cpu",), counts, strict=False))
        self._box = daemon.Guestd(self, _NUMBER, channel, files, owner=None, inside=_Within if siblings else _Forking)
        self._let_out(setup)
        if setup["gvisor"] or setup["outlets"] is not None:
            syscalls.drop_capabilities()  # kept until here for the count of processes and for loopback's address
        if setup["gvisor"]:
            os.dup2(0, 2)  # fd 2 was a file of the host, which a guest could open by /proc/1/fd and fill (F16)
        self._box.built(self._spawner() if siblings else [], os.getpid())

    def _let_out(self, setup: FirstFrame) -> None:
        """Make the listeners for the gateway, before there is a guest."""
        if setup["outlets"] is None:
            return
        if setup["hands"]:
            listeners.hand_over(setup["outlets"], self._channel.fileno())
        else:
            from ringfence.guest.guestd.relay import Relaying

            self._box.relaying = Relaying(self, self._box, setup["outlets"])

    def serve(self) -> None:
        if not fast_stdlib.readable(self._channel.fileno(), _QUIET_S):
            job_modules.load()  # while there is no request yet, so that the first is faster
        while not self._ended:
            orders, self._orders = self._orders, []
            for order in orders:
                order()
            wait = self._box.next_wait()
            self.round(0 if self._orders else -1 if wait is None else wait)
            self._box.keep_clocks()

    def _on_child(self, woken: int) -> None:
        try:
            os.read(woken, 4096)
        except BlockingIOError:
            return
        children.look()
        self.reap_strays()

    def change(self, fd: int, events: int) -> None:
        """Change what the channel is watched for. Its two directions may be two descriptors."""
        out = self._channel.out
        if fd != self._channel.fileno() or fd == out:
            super().change(fd, events)
        elif events & select.EPOLLOUT and out not in self._handlers:
            self.watch(out, select.EPOLLOUT, self._handlers[fd])
        elif not events & select.EPOLLOUT:
            self.unwatch(out)

    def unwatch(self, fd: int) -> None:
        super().unwatch(fd)
        if fd == self._channel.fileno():
            super().unwatch(self._channel.out)

    def order(self, op: str, _: int) -> bool:
        if op == "spawner":
            self._orders.append(lambda: self._box.respawned(self._spawner()))
        return True

    @property
    def fence(self) -> FenceForm:
        return self._fence

    def _spawner(self) -> list[int]:
        ours, theirs = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _signal.set_wakeup_fd(-1)
            fast_stdlib.default_signals(fast_stdlib.SIGCHLD)
            syscalls.close_all_but([theirs.fileno()])
            spawner.run_within(theirs, self._fence)
        theirs.close()
        return [ours.detach(), children.adopt(pid)]

    def reap_strays(self) -> None:
        """Reap orphans, which are our children here, but no child that a watcher waits for."""
        known = {children.number_of(handle) for handle in self._box.pidfds()}
        if self._box.expects_children:
            return
        for pid in proc.children_of(os.getpid()):
            if pid not in known:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue

    def gone(self, _: int) -> None:
        self._ended = True


class _Within(Inside):
    """The supervisor where this process itself is PID 1."""

    _stopped = False

    def built(
        self, fds: list[int], init_pid: int, on_init_gone: Callable[[], None], on_ready: Callable[[str | None], None]
    ) -> None:
        self._awaited -= 1
        self.init_pid = init_pid
        self._on_init_gone = on_init_gone
        self._on_ready = on_ready
        self._take_spawner(fds)

    def kill(self) -> None:
        """Kill every process but this one."""
        self._signal_all(fast_stdlib.SIGKILL)

    def _signal_all(self, number: int) -> None:
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return

    def kill_all_but(
        self, kept: Callable[[], list[int]], *, since: float, sessions: list[int], on_stuck: Callable[[], None]
    ) -> None:
        if self._asked is not None:
            self._kills.append(lambda: self.kill_all_but(kept, since=since, sessions=sessions, on_stuck=on_stuck))
            return
        spared: SparedProcesses = {
            "alone": [self._spawner_inner],
            "trees": kept(),
            "since": int(since * _TICKS),
            "sessions": sessions,
        }
        if pid1.kill_all_but(spared):
            on_stuck()

    def freeze(self, *, asked: bool) -> bool:
        """Stop the guests here, unless the host asked: the engine then freezes everything, this process too."""
        self._stopped = not asked
        if self._stopped:
            self._signal_all(fast_stdlib.SIGSTOP)
        return True

    def thaw(self) -> None:
        if self._stopped:
            self._stopped = False
            self._signal_all(fast_stdlib.SIGCONT)

    def has_children(self) -> bool:
        return False  # the whole box ends with its last job

    def init_is_ending(self) -> bool:
        return False


class _Forking(_Within):
    """The supervisor where the kernel makes no siblings: each guest is a fork of this very process."""

    _monitor: Alone

    def built(
        self, _: list[int], init_pid: int, on_init_gone: Callable[[], None], on_ready: Callable[[str | None], None]
    ) -> None:
        self._awaited -= 1
        self.init_pid = init_pid
        self._on_init_gone = on_init_gone
        self.ready = True
        on_ready(None)

    def spawn(self, job: Job, body: bytes, fds: list[int]) -> None:
        ends: list[int] = []
        counted = self._monitor.counted
        full = counted is not None and not job.alone and counted.full
        if full or len(proc.children_of(os.getpid())) >= _MOST_JOBS:
            for fd in fds:
                os.close(fd)
            job.refused(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return
        try:
            if job.terminal is not None:
                ends += make_terminal(job.terminal["cols"], job.terminal["rows"])
            pid = os.fork()
        except OSError as error:
            job.refused(error.errno or errno.EAGAIN, str(error.strerror))
            return
        if pid == 0:
            _signal.set_wakeup_fd(-1)
            fast_stdlib.default_signals(fast_stdlib.SIGCHLD)
            handed: SpawnPacket = {"become": False, "pty": job.terminal, "body": body.decode()}
            join = -1 if counted is None else counted.join
            spawner.become_guest(handed, [*ends[1:] * 3, *fds[3:]] if ends else fds, self._monitor.fence, join)
        for fd in [*fds, *ends[1:]]:
            os.close(fd)
        job.started(children.adopt(pid), pid, *ends[:1])

    def become(self, job: Job, body: bytes, fds: list[int]) -> None:
        self.spawn(job, body, [os.dup(fd) for fd in fds])


def _can_make_siblings() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            sibling = syscalls.clone(syscalls.CLONE_PARENT, hooks=False)[0]
        except OSError:
            os._exit(1)
        os._exit(0 if sibling else 2)
    made = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for sibling in proc.children_of(os.getpid()):
        os.waitpid(sibling, 0)
    return made


def _nothing(*_: object) -> None:
    """Do nothing: with a handler, the signal wakes the loop."""
