"""The library's side of a process sandbox: channel, cgroup, uid, and the removal of all three."""

from __future__ import annotations

import _thread
import errno
import os
import select
import time

from ringfence.backends.process.zygote import explain_refusal
from ringfence.errors import SandboxLostError, StartTimeoutError
from ringfence.results import Usage
from ringfence.shared import fast_stdlib, framing, proc
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from socket import socket

    from ringfence.backends.contract import Outlet
    from ringfence.backends.process.zygote import Template
    from ringfence.host.cgroups.base import Group
    from ringfence.host.uids import HeldUid
    from ringfence.plan.model import LinuxPlan
    from ringfence.results import Denial, Enforcement

START_S = 10.0
MOST_LISTENERS = 250  # descriptors in one packet: the kernel's own limit is 253
_END_S = 5.0
_STAND_STILL_S = 1.0  # the most that a guest is stopped for while a protected path is put back


class ProcessBox:
    """A sandbox of the process backend.

    Not safe from two threads at once: the layers above hold one lock for each sandbox.
    """

    def __init__(
        self,
        plan: LinuxPlan,
        channel: socket,
        python: Mapping[str, object],
        *,
        group: Group | None,
        uid: HeldUid | None,
        retire: Callable[[ProcessBox], None],
        origin: tuple[Template, int],
    ) -> None:
        self.backend = "process"
        self.plan = plan
        self.channel = channel
        self.python = python
        self.enforcement: Enforcement = plan.enforcement
        self.env = plan.env
        self._group = group
        self._uid = uid
        self._retire = retire
        self.template, self._number = origin
        self._own_template = not plan.shared
        self._init_pidfd = -1
        self._closed = False
        self._until_destroyed = _thread.allocate_lock()
        self._until_destroyed.acquire()
        self._gone = False
        self.is_unprotected = False
        self._was_paused = False
        self._still = _thread.allocate_lock()  # held while a path is put back: a pause meanwhile would be undone
        self._findings: tuple[Denial, ...] = ()
        self.on_destroyed: list[Callable[[], None]] = []
        self.outlet_channel: socket | None = None  # with a network: the socket by which PID 1 sends the listeners
        self.outlet: Outlet | None = None
        self.listeners: list[int] = []  # resolver by UDP, by TCP, proxy, then each port of the plan; for the gateway

    def wait_ready(self, deadline: float) -> None:
        """Wait until the sandbox is built, with guestd ready.

        Raises UnsupportedError when the host refused a step, StartTimeoutError, or another SandboxError.
        """
        reader = frames.FrameReader()
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self._readable(left):
                raise StartTimeoutError("the sandbox did not start in time", fix="try again when the host is less busy")
            data = self.channel.recv(1 << 12)
            if not data:
                message = "the sandbox ended while it was built: its monitor or its forker was killed"
                raise SandboxLostError(message, fix="try again: new ones are started")
            try:
                arrived = [frames.event(frame.payload) for frame in reader.feed(data)]
            except frames.WireError as error:
                raise SandboxLostError(f"the sandbox's monitor sent {error}", fix="try again") from None
            if arrived:
                self._begin(arrived[0])
                if self.outlet_channel is not None:
                    self._take_listeners(self.outlet_channel)
                if len(arrived) > 1 or self._hung_up():  # a spare may have died while it waited
                    raise SandboxLostError("the sandbox ended before it was used", fix="try again")
                return

    def _begin(self, event: dict[str, object]) -> None:
        if event["ev"] == "failed":
            killed = self._group is not None and bool(self._group.usage().oom_kills)
            raise explain_refusal(str(event["error"]), event["errno"], out_of_memory=killed)
        if event["ev"] != "ready":
            raise SandboxLostError("the sandbox's monitor did not say that the sandbox is ready")
        pid = event["init"]
        assert isinstance(pid, int)
        try:
            self._init_pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):
            raise SandboxLostError("the sandbox ended as soon as it was built", fix="try again") from None

    def _take_listeners(self, channel: socket) -> None:
        """Receive the listening sockets, which PID 1 sent before the monitor said "ready"."""
        self.outlet_channel = None
        try:
            channel.setblocking(False)
            _, self.listeners = fast_stdlib.recv_fds(channel, 64, MOST_LISTENERS)
        except BlockingIOError:
            self.listeners = []
        finally:
            channel.close()
        assert self.plan.outlets is not None
        if len(self.listeners) == framing.BESIDES + len(self.plan.outlets.ports):
            return
        arrived, self.listeners = self.listeners, []
        for fd in arrived:
            os.close(fd)
        if arrived:  # this process had no room for all: the kernel hands over as many as fit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise SandboxLostError("the sandbox came without its listeners", fix="try again")

    @property
    def ready_now(self) -> bool:
        """Whether `wait_ready` has an answer without waiting."""
        return self._readable(0)

    def _hung_up(self) -> bool:
        waiter = select.poll()
        waiter.register(self.channel, select.POLLRDHUP)
        return bool(waiter.poll(0))

    def _readable(self, within_s: float) -> bool:
        waiter = select.poll()  # not select(): a process may hold more than 1024 descriptors
        waiter.register(self.channel, select.POLLIN)
        return bool(waiter.poll(within_s * 1000))

    def how_it_ended(self) -> str | None:
        return None

    def usage(self) -> tuple[Usage, int]:
        if self._group is None:
            return self._with_traffic(Usage()), 0
        used = self._group.usage()
        usage = Usage(cpu_s=used.cpu_s, memory_peak_bytes=used.memory_peak_bytes, processes_peak=used.processes_peak)
        return self._with_traffic(usage), used.oom_kills or 0

    def _with_traffic(self, usage: Usage) -> Usage:
        return usage if self.outlet is None else self.outlet.add_to(usage)

    @property
    def generation(self) -> object:
        """The zygote: all sandboxes forked from it have the same memory addresses."""
        return self.template.zygote

    @property
    def memory_bytes(self) -> int:
        return self.plan.memory_bytes

    def give_image(self, fd: int) -> None:
        """Hand over a memory image for the next session that asks for one."""
        self.template.give(self._number, fd)

    def owns(self, pid: int) -> bool:
        """Return whether a process belongs to this sandbox.

        The process must be stopped: the kernel may give the number of an ended process to another process.
        """
        try:
            status = proc.fields(f"/proc/{pid}/status")
            made_by_us = proc.fields(f"/proc/{status['PPid']}/status")["PPid"] == str(self.template.zygote.pid)
        except (OSError, KeyError, ValueError):
            return False
        inside = len(status["NSpid"].split()) > 1
        return made_by_us and inside and (self._uid is None or status["Uid"].split()[0] == str(self._uid.uid))

    def freeze(self) -> bool:
        """Stop everything inside. Returns False where that failed or no freezer exists."""
        try:
            with self._still:
                return self.can_freeze and self._group is not None and self._group.freeze()
        except FileNotFoundError:  # it has ended meanwhile
            return False

    @property
    def can_freeze(self) -> bool:
        return self._group is not None and self._group.can_freeze

    def thaw(self) -> None:
        """Wait until no path is being put back. guestd, which is not frozen, then lets the guest go on."""
        with self._still:
            pass  # the guest must not run while a protected path is put back

    def hold_still(self) -> bool:
        """Stop everything inside until `let_go_on`, and return whether that worked.

        A sandbox that its caller has paused stays paused afterwards.
        """
        self._still.acquire()
        group = self._group
        if group is None or not group.can_freeze:
            return False
        try:
            self._was_paused = group.is_frozen()
            return group.freeze(_STAND_STILL_S)
        except FileNotFoundError:  # it has ended meanwhile
            return False

    def let_go_on(self) -> None:
        """Undo `hold_still`, whatever it returned or raised."""
        try:
            if self._group is not None and self._group.can_freeze and not self._was_paused:
                self._group.thaw()
        finally:
            self._still.release()

    def protect_again(self, paths: list[tuple[str, int, int]]) -> str:
        """Make paths inside read-only once more. Each is path, device and inode. Returns "", or why it failed.

        To be called between `hold_still` and `let_go_on`. Notices a caller that let the guest go on meanwhile.
        """
        try:
            failure = self._ask_for_protection(paths)
        except (OSError, SandboxLostError) as error:
            return str(error)
        still = self._group is not None and self._group.is_frozen()
        return failure if failure or still else "the guest was let go on meanwhile"

    def _ask_for_protection(self, paths: list[tuple[str, int, int]]) -> str:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            self.template.protect_again(self._number, paths, theirs)
            os.close(theirs)
            theirs = -1
            waiter = select.poll()
            waiter.register(ours, select.POLLIN)
            answer = os.read(ours, 256) if waiter.poll(_STAND_STILL_S * 1000) else b"no answer"
        finally:
            os.close(ours)
            if theirs >= 0:
                os.close(theirs)
        return "" if answer == b"done" else answer.decode("utf-8", "replace") or "the forker is gone"

    def kill(self) -> None:
        """Kill PID 1 by pidfd (C08). The kernel then kills everything else inside."""
        if self._init_pidfd >= 0:
            fast_stdlib.signal_pidfd(self._init_pidfd, fast_stdlib.SIGKILL)

    def close(self) -> None:
        """Kill everything inside now; another thread cleans up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.kill()
            self._drop_outlet()
            self.channel.shutdown(1)
        except OSError:
            pass  # the monitor has gone
        finally:
            self._retire(self)  # even when the caller is interrupted: `close` does nothing the next time

    def _drop_outlet(self) -> None:
        """Close the gateway's side and the listeners. The network namespace lasts as long as the listeners do."""
        if self.outlet is not None:
            self.outlet.close()
        if self.outlet_channel is not None:
            self.outlet_channel.close()
        for fd in self.listeners:
            os.close(fd)
        self.listeners = []

    def destroy(self) -> None:
        """Wait for the end, then remove what is left. Called once, after `retire`, by the pool."""
        try:
            self._wait_for_the_end(time.monotonic() + _END_S)
        except OSError:
            pass  # the channel is gone already
        try:
            self.remove_group()
            if self._uid is not None:
                self._uid.release()
            if self.outlet is not None:
                self.outlet.wait_ended(_END_S)
        finally:
            if self._own_template:
                self.template.close()
            for done in self.on_destroyed:
                done()
            if not self._gone:
                self._gone = True
                self._until_destroyed.release()

    def _wait_for_the_end(self, deadline: float) -> None:
        """Wait until the monitor closes the channel, as it does when everything inside is gone."""
        try:
            self.channel.settimeout(_END_S)
            while time.monotonic() < deadline and self.channel.recv(1 << 16):
                pass
        finally:
            self.channel.close()
            if self._init_pidfd >= 0:
                os.close(self._init_pidfd)
                self._init_pidfd = -1

    def wait_destroyed(self, timeout_s: float) -> bool:
        """Return, after `close`, whether nothing is left."""
        gone = self._until_destroyed.acquire(timeout=max(0.0, timeout_s))
        if gone:
            self._until_destroyed.release()  # for other threads that wait
        return gone

    def disown_descriptors(self) -> None:
        """Drop every descriptor without closing any: the caller did that, and may have reused the numbers."""
        self._closed = True
        self.channel.detach()
        if self._own_template:
            self.template.disown_descriptors()
        self._init_pidfd = -1
        if self.outlet is not None:
            self.outlet.disown_descriptors()
        if self.outlet_channel is not None:
            self.outlet_channel.detach()
        if self._uid is not None:
            self._uid.disown_descriptors()

    def remove_group(self) -> None:
        """Kill the processes of the cgroup and remove it, where the sandbox has a cgroup."""
        if self._group is not None:
            self._group.remove()

    def after_fork(self) -> None:
        """Close this copy of every descriptor in a forked child of the library: the sandbox is the parent's."""
        self._closed = True
        self.channel.close()
        if self.outlet is not None:
            self.outlet.after_fork()
            self.outlet = None
        self._drop_outlet()
        if self._own_template:
            self.template.after_fork()
        if self._init_pidfd >= 0:
            os.close(self._init_pidfd)
            self._init_pidfd = -1
        if self._uid is not None:
            self._uid.release()  # only this copy of the lock: the parent still holds its own

    def findings(self) -> tuple[Denial, ...]:
        return self._findings

    def stop_unprotected(self, found: tuple[Denial, ...]) -> None:
        """Kill everything inside because a protected path is not protected any more. `found` says which."""
        self.add_findings(found)
        self.is_unprotected = True
        self.kill()

    def add_findings(self, found: tuple[Denial, ...]) -> None:
        self._findings += found
