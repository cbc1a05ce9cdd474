"""A box that an engine isolates: guestd is inside, its channel is a socket, and the engine ends the box on request."""

from __future__ import annotations

import threading
import time
import weakref

from ringfence.errors import SandboxLostError, StartTimeoutError, UnsupportedError
from ringfence.host import lifecycle
from ringfence.results import Usage
from ringfence.shared import fast_stdlib, framing
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from socket import socket
    from typing import Protocol

    from ringfence.backends.contract import Outlet
    from ringfence.plan.model import Fence, Outlets
    from ringfence.results import Denial, Enforcement
    from ringfence.shared.mount_check import Meant
else:
    Protocol = object


class Wall(Protocol):
    """What isolates one sandbox, as the engine that made it knows it: a container, a process of runsc, an unshare."""

    def said(self) -> str:
        """Return the last line that the engine or guestd wrote to the error stream; "" without one."""

    def how_it_ended(self) -> str | None:
        """Return what is known of why the channel is gone without a word."""

    def usage(self) -> tuple[Usage, int]:
        """Return the use as measured from outside, and how often the memory limit killed a process."""

    @property
    def can_freeze(self) -> bool:
        """Whether `freeze` can stop everything inside, guestd too."""

    def freeze(self) -> bool:
        """Stop everything inside. Returns False where there is no freezer."""

    def thaw(self) -> None:
        """Let everything inside run again. Does nothing to a sandbox that runs."""

    def kill(self) -> None:
        """Kill everything inside, without waiting. Idempotent."""

    def remove(self) -> None:
        """Wait for the end, and remove all that was made for the sandbox. Called once, after `kill`, in a thread."""

    def after_fork(self) -> None:
        """In a forked child of the caller: close this copy of each descriptor. Takes no lock (D17)."""


_boxes: weakref.WeakSet[EngineBox] = weakref.WeakSet()  # of this process


def _forget_all() -> None:
    for box in list(_boxes):
        box.after_fork()
    _boxes.clear()


_MOST_LISTENERS = 253  # descriptors in one packet


class EngineBox:
    """A box that an engine isolates.

    Not safe from two threads at once: the layers above hold one lock for each sandbox.
    """

    def __init__(
        self, name: str, wall: Wall, channel: socket, *, enforcement: Enforcement, env: Mapping[str, str]
    ) -> None:
        self.backend = name
        self.channel = channel
        self.enforcement = enforcement
        self.env: Mapping[str, str] = env
        self.outlet: Outlet | None = None
        self.listeners: list[int] = []  # from guestd, for the gateway; without any, guestd relays
        self.python: Mapping[str, object] = {}
        self._wall = wall
        self._closed = False
        self._destroyed = threading.Event()
        self.on_destroyed: list[Callable[[], None]] = []  # after its last process
        self._findings: list[Denial] = []
        self.is_unprotected = False
        self._guestd = channel  # the gateway may replace `channel` with its own relay
        lifecycle.after_fork(_forget_all)
        _boxes.add(self)

    def begin(
        self,
        fence: Fence,
        deadline: float,
        *,
        outlets: Outlets | None,
        hands: bool = False,
        cpu: int = -1,
        meant: Meant | None = None,
        gvisor: bool = False,
    ) -> None:
        """Send guestd the fence of guests and the gateway's ports, and wait until guestd is ready.

        `hands`: the channel takes descriptors, and guestd hands its listeners over by it; else it relays.
        `meant`: what it is to find mounted, else it ends.
        `cpu`: one for guestd, to read the CPU time of the whole box from.
        `gvisor`: the kernel inside is gVisor's, which makes no siblings and counts processes in its own cgroup.
        Raises SandboxLostError or StartTimeoutError.
        """
        try:
            listens = None if outlets is None else outlets.encoded()
            message = frames.message(fence=fence.encoded(), outlets=listens, hands=hands, meant=meant, gvisor=gvisor)
            if cpu >= 0:
                fast_stdlib.send_fds(self.channel, message[:1], [cpu])
                message = message[1:]
            self.channel.sendall(message, fast_stdlib.NO_SIGNAL)
            if hands and outlets is not None:
                self._wait(deadline)
                self._take_listeners(outlets)
        except OSError:
            raise self._lost() from None
        reader = frames.FrameReader()
        while True:
            self._wait(deadline)
            data = self._received()
            if not data:
                raise self._lost()
            try:
                arrived = [frames.event(frame.payload) for frame in reader.feed(data)]
            except frames.WireError as error:
                raise SandboxLostError(f"guestd sent {error}", fix="try again") from None
            if arrived:
                if arrived[0]["ev"] != "ready":
                    raise SandboxLostError(f"the sandbox could not be built: {arrived[0].get('error')}")
                return

    def _wait(self, deadline: float) -> None:
        if not fast_stdlib.readable(self.channel, max(0.0, deadline - time.monotonic())):
            raise StartTimeoutError(f"the {self.backend} sandbox did not start in time", fix="try again")

    def _take_listeners(self, outlets: Outlets) -> None:
        """Receive guestd's listening sockets. No guest exists yet, so that they can only be guestd's own."""
        greeting, self.listeners = fast_stdlib.recv_fds(self.channel, len(framing.GREETING), _MOST_LISTENERS)
        if (greeting, len(self.listeners)) != (framing.GREETING, len(outlets.ports) + framing.BESIDES):
            raise ConnectionError("not the listeners")

    def _received(self) -> bytes:
        try:
            return self.channel.recv(1 << 12)
        except ConnectionError:
            return b""

    def _lost(self) -> SandboxLostError:
        said = self._wall.said()
        why = f": {said}" if said else ""
        return SandboxLostError(f"the {self.backend} sandbox ended while it was built{why}", fix="ringfence doctor")

    @property
    def generation(self) -> object:
        return self  # no other box has the same addresses

    @property
    def memory_bytes(self) -> int:
        return 0  # this memory is never copied

    def owns(self, pid: int) -> bool:  # noqa: ARG002  # of the contract
        return False  # the processes belong to the engine

    def give_image(self, fd: int) -> None:  # noqa: ARG002  # of the contract
        raise UnsupportedError(f"the {self.backend} backend cannot copy memory", code="fork")

    @property
    def can_freeze(self) -> bool:
        return self._wall.can_freeze

    def freeze(self) -> bool:
        return self._wall.freeze()

    def thaw(self) -> None:
        self._wall.thaw()

    def how_it_ended(self) -> str | None:
        return self._wall.how_it_ended()

    def usage(self) -> tuple[Usage, int]:
        used, ooms = (Usage(), 0) if self._closed else self._wall.usage()
        return used if self.outlet is None else self.outlet.add_to(used), ooms

    def kill(self) -> None:
        self._wall.kill()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._wall.kill()
            if self.outlet is not None:
                self.outlet.close()
        finally:  # even when one of them fails or the caller is interrupted: `close` does nothing the next time
            threading.Thread(target=self._destroy, name="ringfence-remove", daemon=True).start()

    def _destroy(self) -> None:
        try:
            self.channel.close()
            self._wall.remove()
        finally:
            try:
                for act in self.on_destroyed:
                    act()
            finally:
                self._destroyed.set()

    def after_fork(self) -> None:
        """Close this copy of the channel in a forked child of the library, which must not keep the sandbox alive."""
        self._closed = True
        self.channel.close()
        self._guestd.close()
        if self.outlet is not None:
            self.outlet.after_fork()
            self.outlet = None
        self._wall.after_fork()

    def wait_destroyed(self, timeout_s: float) -> bool:
        return self._destroyed.wait(timeout_s)

    def hold_still(self) -> bool:
        """Return False: no process of ours could use a pause to mend mounts that an engine has made."""
        return False

    def let_go_on(self) -> None:
        """Do nothing: `hold_still` never stops anything."""

    def protect_again(self, paths: list[tuple[str, int, int]]) -> str:
        """Return why no path can be made read-only again."""
        return f"{self.backend} makes its mounts when it starts: {paths[0][0]} cannot be made read-only again"

    def findings(self) -> tuple[Denial, ...]:
        return tuple(self._findings)

    def stop_unprotected(self, found: tuple[Denial, ...]) -> None:
        """Kill everything inside because a protected path is not protected any more. `found` says which."""
        self.add_findings(found)
        self.is_unprotected = True
        self.kill()

    def add_findings(self, found: tuple[Denial, ...]) -> None:
        self._findings.extend(found)
