"""Owns the monitor: the process that keeps a view's sandboxes, as parent of all processes, outside all namespaces.

The monitor is an event loop. What it does for a single sandbox is in `guestd`. It never waits for a guest, so that no
guest can hold up another. It forks only once, at its start: what passes through its memory later is in no process that
is made (H06).
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time

from ringfence.guest.launch import forker
from ringfence.shared import children, fast_stdlib, proc, syscalls
from ringfence.shared.event_loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import NoReturn

    from ringfence.guest.guestd.daemon import Guestd
    from ringfence.guest.guestd.protocols import GivenDescriptor, Launch, TemplateForm

_MAX_PACKET = 1 << 18
_MAX_ANSWER = 1 << 12
_MAX_FDS = 16
_MAX_WORDS = 200
_LOOK_S = 0.005
_END_S = 5.0  # for a killed sandbox to be gone
_NEVER = float("inf")
_TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc/<pid>/stat


def run(control: socket, request: TemplateForm, library: int, interpreter: forker.ZygoteInterpreter) -> NoReturn:
    """Make the forker, have the view built, then serve. Ends when the library is gone, or closed it and all ended."""
    syscalls.set_name("rf-monitor")
    fast_stdlib.default_signals(fast_stdlib.SIGCHLD, fast_stdlib.SIGINT)
    ours, theirs = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        control.close()
        ours.close()
        forker.run(theirs, request, interpreter)
    theirs.close()
    syscalls.no_new_privileges()
    if os.geteuid() == 0:
        syscalls.keep_monitor_capabilities()
    served = Monitor(control, ours, pid, library)
    try:
        served.serve()
    except BaseException as error:  # noqa: BLE001  # the last frame of this process: whatever it is, it is reported
        sys.excepthook(type(error), error, error.__traceback__)  # to the zygote's standard error
        served.crashed(_words(error))
        os._exit(1)
    os._exit(0)


class Monitor(Loop):
    def __init__(self, control: socket, maker: socket, maker_pid: int, library: int) -> None:
        super().__init__()
        self._control: socket | None = control
        self._requests = fast_stdlib.Receiver(control, _MAX_PACKET, _MAX_FDS)
        self._maker = maker
        self._answers = fast_stdlib.Receiver(maker, _MAX_ANSWER, _MAX_FDS)
        self._maker_pid = maker_pid
        self._boxes: dict[int, Guestd] = {}
        self._ending = False
        self._faulty: dict[int, float] = {}  # sandboxes with a fault in our code, and when each must be gone
        self.watch(control.fileno(), select.EPOLLIN, self._on_control)
        self.watch(maker.fileno(), select.EPOLLIN, self._on_view)
        self.watch(library, select.EPOLLIN, self._on_library_gone)
        self._library = library

    def serve(self) -> None:
        """Serve until the end.

        Clocks are read when a clock may have run out or a moment after an event, not at each event.
        """
        look_at = 0.0
        while self._boxes or not self._ending:
            now = time.monotonic()
            if now >= look_at:
                for number, box in list(self._boxes.items()):
                    try:
                        box.keep_clocks()
                    except Exception as error:  # noqa: BLE001  # as in SandboxKeeper
                        self.fault(number, error)
                self._check_faulty(now)
                look_at = now + self._next_wait()
            self.round(look_at - now if look_at < _NEVER else -1)
            look_at = min(look_at, time.monotonic() + _LOOK_S)

    def fault(self, number: int, error: Exception) -> None:
        """End a single sandbox after an error in our own code for that sandbox."""
        sys.excepthook(type(error), error, error.__traceback__)
        box = self._boxes.get(number)
        if box is not None:
            self._faulty.setdefault(number, time.monotonic() + _END_S)
            box.crashed(_words(error))
            box.close()

    def _check_faulty(self, now: float) -> None:
        """End this process if a sandbox with a fault did not end: the half-done work may keep it alive."""
        self._faulty = {number: end for number, end in self._faulty.items() if number in self._boxes}
        if any(now > end for end in self._faulty.values()):
            raise RuntimeError("a sandbox did not end after a fault")

    def crashed(self, error: str) -> None:
        """Report to every sandbox's owner that this process ends by an error of its own.

        What is inside dies with it.
        """
        for box in list(self._boxes.values()):
            try:
                box.crashed(error)
            except Exception as other:  # noqa: BLE001  # one whose state is broken must not keep the others from hearing
                sys.excepthook(type(other), other, other.__traceback__)

    def _next_wait(self) -> float:
        waits = [wait for box in self._boxes.values() if (wait := box.next_wait()) is not None]
        return min(waits, default=_NEVER) if not self._faulty else min(_LOOK_S * 20, *waits)

    # what sandboxes need of the monitor

    def order(self, op: str, number: int) -> bool:
        """Send an order to the forker. Return False when the forker is gone."""
        try:
            self._maker.send(fast_stdlib.dumps({"op": op, "box": number}))
        except OSError:
            return False
        return True

    def reap_strays(self) -> None:
        """Reap children that a spawner made and did not report before its end. They would keep PID 1 from ending.

        A child that may still be reported to another sandbox is left, because its status is owed. Such a child is
        younger than what that sandbox waits for; therefore a busy view delays this by no more than one answer takes.
        """
        if _first_ended() is None:
            return
        ours = [pidfd for box in self._boxes.values() for pidfd in box.pidfds()]
        known = {*(children.number_of(pidfd) for pidfd in ours), self._maker_pid}
        since = min((box.expects_since for box in self._boxes.values() if box.expects_children), default=None)
        for pid in _children():
            if pid not in known and (since is None or _started(pid) < since):
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue

    def gone(self, number: int) -> None:
        """Drop a sandbox of which nothing is left."""
        del self._boxes[number]
        self.order("forget", number)

    # the library

    def _on_control(self, _: int) -> None:
        assert self._control is not None
        try:
            data, fds = self._requests.receive()
        except OSError:
            data = b""
            fds = []
        if not data:
            self.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
            self._ending = True  # the running sandboxes go on: they belong to the library, which lives
            return
        request = fast_stdlib.loads(data)
        if "plan_id" in request:
            self._launch(request, fds)
        else:
            self._give(request, fds)

    def _give(self, request: GivenDescriptor, fds: list[int]) -> None:
        """Pass on a memory image for a sandbox's next session that asks for it, or paths to be protected again.

        The forker protects, because it has the rights, and answers by the descriptor that came along.
        """
        box = self._boxes.get(request["box"])
        if request["protect"] is not None:
            try:
                if box is not None:
                    fast_stdlib.send_fds(self._maker, fast_stdlib.dumps({**request, "op": "protect"}), fds)
            except OSError:
                pass  # the sandbox is gone; the library sees the descriptor closed
            for fd in fds:
                os.close(fd)
            return
        for fd in fds if box is None else fds[1:]:
            os.close(fd)
        if box is not None and fds:
            box.take_image(fds[0])

    def _launch(self, request: Launch, fds: list[int]) -> None:
        if len(fds) != len(request["fds"]):  # we are out of descriptors: the library sees its channel closed
            for fd in fds:
                os.close(fd)
            return
        named = list(zip(request["fds"], fds, strict=True))
        number = request["box"]
        channel = fast_stdlib.from_fd(dict(named)["channel"], fast_stdlib.SOCK_STREAM)
        owner = request["owner"] if os.geteuid() == 0 else None
        order = {
            "op": "build",
            "box": number,
            "owner": request["owner"],
            "affinity": request["affinity"],
            "waits": request["waits"],
            "plan_id": request["plan_id"],
            "plan": request["plan"],
            "listeners": "listeners" in request["fds"],
            "disk": "disk" in request["fds"],
            "into": "into" in request["fds"],
        }
        theirs = [fd for wanted in ("join", "disk", "listeners", "into") for name, fd in named if name == wanted]
        try:
            fast_stdlib.send_fds(self._maker, fast_stdlib.dumps(order), theirs)
            ordered = True
        except OSError:
            ordered = False
        from ringfence.guest.guestd.daemon import Guestd  # a command's forker builds meanwhile

        self._boxes[number] = Guestd(SandboxKeeper(self, number), number, channel, dict(named), owner=owner)
        if not ordered:
            self._boxes[number].maker_gone()
        for fd in theirs:
            os.close(fd)

    def _on_library_gone(self, _: int) -> None:
        self.unwatch(self._library)
        self._ending = True
        for box in list(self._boxes.values()):
            box.close()

    # the forker

    def _on_view(self, _: int) -> None:
        """Take the forker's first answer: whether the view could be built.

        Orders that came before wait with the forker.
        """
        try:
            answer = self._maker.recv(_MAX_PACKET)
        except ConnectionResetError:  # it ended with an order unread; its earlier answers are still read
            answer = self._maker.recv(_MAX_PACKET)
        answer = answer or b'{"error":"the forker ended","errno":null}'
        try:
            if self._control is not None:
                self._control.send(answer)
        except OSError:
            pass  # the sandbox is no longer wanted, which the next message says
        if "error" in fast_stdlib.loads(answer):
            os._exit(1)
        self.unwatch(self._maker.fileno())
        self.watch(self._maker.fileno(), select.EPOLLIN, self._on_maker)

    def _on_maker(self, _: int) -> None:
        try:
            data, fds = self._answers.receive()
        except OSError:
            data = b""
            fds = []
        if not data:
            self._lose_maker()
            return
        answer = fast_stdlib.loads(data)
        box = self._boxes.get(answer["box"])
        if box is None:
            for fd in fds:
                os.close(fd)
            return
        try:
            if "error" in answer:
                box.failed(answer["error"], answer["errno"], fds)
            elif len(fds) < (2 if "spawner" in answer else 4):  # we are out of descriptors: some did not arrive
                known = [] if "spawner" in answer else fds[:1]  # PID 1's handle comes first
                for fd in fds[len(known) :]:
                    os.close(fd)
                box.failed(os.strerror(errno.EMFILE), errno.EMFILE, known)
            elif "spawner" in answer:
                box.respawned(fds)
            else:
                box.built(fds, answer["init"])
        except Exception as error:  # noqa: BLE001  # as in SandboxKeeper
            self.fault(answer["box"], error)

    def _lose_maker(self) -> None:
        """Make no more sandboxes of this view; the sandboxes that run go on."""
        self.unwatch(self._maker.fileno())
        for box in list(self._boxes.values()):
            box.maker_gone()
        if self._control is not None:
            self.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
        self._ending = True


class SandboxKeeper:
    """The monitor as seen by a single sandbox: an error in our own code for a sandbox ends only that sandbox."""

    def __init__(self, monitor: Monitor, number: int) -> None:
        self._monitor = monitor
        self._number = number
        self.change = monitor.change
        self.unwatch = monitor.unwatch
        self.order = monitor.order
        self.reap_strays = monitor.reap_strays
        self.gone = monitor.gone

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        def fenced(events: int) -> None:
            try:
                handler(events)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is reported, and ends this sandbox
                if self._monitor.handler(fd) is fenced:
                    self._monitor.unwatch(fd)  # otherwise the event would come for ever
                self._monitor.fault(self._number, error)

        self._monitor.watch(fd, events, fenced)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_WORDS]


def _children() -> list[int]:
    """Return the children of this process, zombies too; where the kernel lists none, the first that ended."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        first = _first_ended()
        return [first] if first is not None else []


def _first_ended() -> int | None:
    """Return a child that ended and is not reaped, or None."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return info.si_pid if info is not None else None


def _started(pid: int) -> float:
    """Return when a process started, in seconds since boot, rounded up to a tick.

    Infinity for a process that is gone.
    """
    try:
        return (proc.process(pid).started + 1) / _TICKS
    except OSError:
        return float("inf")
