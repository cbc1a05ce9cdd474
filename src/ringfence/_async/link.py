"""A sandbox's channel for asyncio callers: the loop reads, waiters are woken when something arrived."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ringfence.errors import SandboxLostError
from ringfence.wire import frames
from ringfence.wire.switchboard import WINDOW, Inbox, Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.base import Box
    from ringfence.calls import Call

_READ = 1 << 17


class AsyncLink:
    """Belongs to the event loop it was made in."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._socket = box.channel
        self._socket.setblocking(False)
        self._switch = Switchboard()
        self._waiters: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_readable)
        self._sending = asyncio.Lock()

    @property
    def over(self) -> str | None:
        return self._switch.over

    async def start(self, call: Call) -> Inbox:
        inbox = self._switch.open()
        await self._send(call.start(inbox.id, WINDOW))
        return inbox

    async def say(self, **request: object) -> None:
        await self._send(frames.message(**request))

    async def write(self, inbox: Inbox, data: bytes) -> None:
        inbox.stdin_in_flight += len(data)
        await self._send(frames.pack(frames.STDIN, inbox.id, data))

    async def _send(self, data: bytes) -> None:
        try:
            async with self._sending:
                await self._loop.sock_sendall(self._socket, data)
        except OSError:
            self.finish("lost")

    async def wait(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Until `ready()`, or False at the deadline. `ready` is asked whenever something arrived."""
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._switch.over is not None:
                raise SandboxLostError("the sandbox is gone")
            waiter = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, left)
            except TimeoutError:
                continue
            finally:
                self._waiters.discard(waiter)
        return True

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._switch.feed(data)
        if self._switch.over is not None:
            self._loop.remove_reader(self._socket)
        if self._switch.over == "protocol":
            self._box.kill()  # what broke the format is not read again, and does not run on (J07)
        self._wake()

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def finish(self, why: str) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._switch.finish(why)
        self._wake()
