"""The channel to a sandbox for asyncio callers: the loop reads and writes, and wakes the tasks that wait."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ringfence.errors import SandboxError, SandboxLostError
from ringfence.shared import fast_stdlib
from ringfence.wire import frames
from ringfence.wire.inbox import WINDOW, Inbox, Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.contract import Box
    from ringfence.core.arguments import Call

_READ = 1 << 18


class AsyncLink:
    """The host's end of a sandbox's channel. Belongs to the event loop that it was made in."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._socket = box.channel
        self._socket.setblocking(False)
        self._switch = Switchboard()
        self._waiters: set[asyncio.Future[None]] = set()
        self._out = bytearray()  # whole frames, which are sent even when the task that added them is cancelled
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_readable)

    @property
    def over(self) -> str | None:
        return self._switch.over

    @property
    def paused(self) -> bool:
        return self._switch.paused

    def stood_still(self) -> float:
        return self._switch.stood_still()

    def open(self) -> Inbox:
        """Return a new inbox, with a number, for something that `start` will start."""
        return self._switch.open()

    async def start(self, call: Call, inbox: Inbox) -> None:
        await self._send(call.start(inbox.id, WINDOW))

    async def say(self, **request: object) -> None:
        await self._send(frames.message(**request))

    def note(self, **request: object) -> None:
        """Send a request like `say`, from code that cannot wait."""
        self._push(frames.message(**request))

    async def tell(self, inbox: Inbox, data: bytes, **request: object) -> None:
        """Send data to the interpreter behind `inbox` by the line, after an optional request about it to guestd."""
        inbox.stdin_in_flight += len(data)
        before = frames.message(**request) if request else b""
        await self._send(before + frames.pack(frames.LINE, inbox.id, data))

    async def write(self, inbox: Inbox, data: bytes) -> None:
        inbox.stdin_in_flight += len(data)
        await self._send(frames.pack(frames.STDIN, inbox.id, data))

    async def _send(self, data: bytes) -> None:
        """Send `data`. A cancelled call leaves no half frame: the data is queued before the first wait."""
        if asyncio.get_running_loop() is not self._loop:
            raise SandboxError(
                "this sandbox belongs to the event loop that it was started in, and this is another",
                code="event-loop",
                fix="start a sandbox in this loop, or use Sandbox, which any thread may call",
            )
        self._push(data)
        while self._out and self._switch.over is None:
            await self._wait_for_event(None)

    def _push(self, data: bytes) -> None:
        if self._switch.over is not None:
            return
        waiting = bool(self._out)
        self._out += data
        if not waiting:
            self._on_writable()
            if self._out and self._switch.over is None:
                self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        try:
            del self._out[: self._socket.send(self._out, fast_stdlib.NO_SIGNAL)]
        except BlockingIOError:
            return
        except OSError:
            self.poll()  # guestd's last messages may say why
            self.finish("lost")
            return
        if not self._out:
            self._loop.remove_writer(self._socket)
            self._wake()

    async def wait(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until `ready()` returns True; return False at the deadline.

        `ready` is called whenever something arrived.
        """
        while not ready():
            if self._switch.over is not None:
                raise SandboxLostError("the sandbox is gone")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self.poll()
                return ready()
            await self._wait_for_event(left)
        return True

    async def _wait_for_event(self, left: float | None) -> None:
        """Wait until something happened or `left` seconds are over.

        Not wait_for: in Python 3.11 it may swallow a cancel.
        """
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        timer = None if left is None else self._loop.call_later(left, _finish, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()

    def poll(self) -> None:
        """Take what has arrived, without waiting."""
        while self._switch.over is None and self._on_readable():
            pass

    def _on_readable(self) -> bool:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._switch.feed(data)
        if self._switch.over == "protocol":
            self._box.kill()  # a sandbox that broke the format is not read again, and does not run on (J07)
        if self._switch.over is not None:
            self.finish(self._switch.over)
        self._wake()
        return True

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            _finish(waiter)

    def finish(self, why: str) -> None:
        if self._socket.fileno() >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._switch.finish(why)
        self._wake()


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
