"""Moves bytes, unseen, between a guest's connection and the network: a few by copy, many by splice.

A connection has one `Splice`, in the gateway's loop, which owns both sockets from its start; `close` closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import time
from typing import TYPE_CHECKING

from ringfence.gateway.connection import reset
from ringfence.gateway.relay.socket import RelayedSocket
from ringfence.gateway.types import OverBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.gateway.connection import Connection
    from ringfence.gateway.types import LogEntry

IDLE_S = 900.0  # without a byte either way
HALF_OPEN_S = 120.0  # without a byte, when one side is done
_COPY = 1 << 16
_COPIED_FIRST = 1 << 18  # bytes that are copied; after that a pipe is faster
_PIPE = 1 << 20
_TURNS = 8  # reads before other connections have their turn
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_F_SETPIPE_SZ = 1031


class Splice:
    """The two sockets of a connection, and the flow of bytes each way."""

    def __init__(self, connection: Connection, upstream: socket.socket, entry: LogEntry) -> None:
        """Take both sockets over. Bytes that were read from the guest before go to the network first."""
        uplink = connection.uplink
        guest = connection.sock
        self._loop = asyncio.get_running_loop()
        self._sockets = (guest, upstream)
        self.totals = uplink.totals
        self.done: asyncio.Future[None] = self._loop.create_future()

        def count_up(size: int) -> None:
            uplink.count_up(size)
            entry.sent += size

        def count_down(size: int) -> None:
            uplink.count_down(size)
            entry.received += size

        self._up = _Flow(self, guest, upstream, count_up, connection.received)
        self._down = _Flow(self, upstream, guest, count_down, b"")
        self.moved_at = time.monotonic()
        self._timer = self._loop.call_later(min(IDLE_S, HALF_OPEN_S) / 4, self._watch)

    async def run(self) -> None:
        """Move bytes until both sides are done. Raises OverBudget. The caller logs the end, then calls `close`."""
        self._up.begin()
        self._down.step()
        self._up.step()
        await self.done

    def ended(self, error: Exception | None) -> None:
        """Note that a flow has ended; the splice ends with an error, or when both flows have ended."""
        if self.done.done():
            return
        if isinstance(error, OverBudget):
            self.done.set_exception(error)
        elif error is not None or (self._up.over and self._down.over):
            self.done.set_result(None)

    def _watch(self) -> None:
        limit = HALF_OPEN_S if self._up.over or self._down.over else IDLE_S
        if time.monotonic() - self.moved_at > limit:
            self.ended(TimeoutError())
            return
        self._timer = self._loop.call_later(limit / 4, self._watch)

    def close(self) -> None:
        """Close both sockets; a side that was not done sees a reset."""
        self._timer.cancel()
        for flow in (self._up, self._down):
            flow.close()
        clean = self._up.over and self._down.over
        for sock in self._sockets:
            if clean:
                sock.close()
            else:
                reset(sock)


class _Flow:
    """One direction of a splice: bytes from `source` to `sink`."""

    def __init__(
        self, owner: Splice, source: socket.socket, sink: socket.socket, count: Callable[[int], None], first: bytes
    ) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._sink = sink
        self._count = count
        self._held = memoryview(first)  # copied, not yet sent
        self._piped = 0  # in the pipe, not yet sent
        self._pipe: tuple[int, int] | None = None
        self._moved = 0
        self._reading = self._writing = False
        self.over = False

    def begin(self) -> None:
        """Count what was read before the splice began. Raises OverBudget."""
        if self._held:
            self._count(len(self._held))

    def step(self) -> None:
        """Move what can be moved now, and wait for the side that cannot."""
        try:
            for _ in range(_TURNS):
                if not self._flush():
                    self._wait(reading=False, writing=True)
                    return
                if not self._fill():
                    if not self.over:
                        self._wait(reading=True, writing=False)
                    return
            self._wait(reading=not self._pending(), writing=self._pending())
        except (OSError, OverBudget) as error:
            self._stop()
            self._owner.ended(error)

    def _pending(self) -> bool:
        return bool(self._held) or bool(self._piped)

    def _fill(self) -> bool:
        """Take from the source; return False when there is nothing now, or nothing more."""
        try:
            if self._moved < _COPIED_FIRST:
                data = self._source.recv(_COPY)
                size = len(data)
                if size:
                    self._count(size)
                    self._held = memoryview(data)
            else:
                pipe = self._writable_end()
                if pipe is None:
                    return self._fill()
                size = os.splice(self._source.fileno(), pipe, _PIPE, flags=_FLAGS)
                self._piped = size
                if size:
                    self._count(size)
        except BlockingIOError:
            return False
        if size == 0:
            if isinstance(self._source, RelayedSocket):
                self._source.check_end()
            self._finish()
            return False
        self._moved += size
        self._owner.moved_at = time.monotonic()
        return True

    def _flush(self) -> bool:
        """Give to the sink; return False when the sink takes no more now."""
        try:
            while self._held:
                self._held = self._held[self._sink.send(self._held) :]
            while self._piped:
                assert self._pipe is not None
                self._piped -= os.splice(self._pipe[0], self._sink.fileno(), self._piped, flags=_FLAGS)
        except BlockingIOError:
            return False
        self._owner.moved_at = time.monotonic()
        return True

    def _writable_end(self) -> int | None:
        """Return the pipe's writable end; None without descriptors to spare: then bytes are copied for longer."""
        if self._pipe is None:
            try:
                self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if self._owner.totals.may_pipe() else None
            except OSError:
                pass  # the process has used them up
            if self._pipe is None:
                self._moved = 0
                return None
            self._owner.totals.pipes += 1
            with contextlib.suppress(OSError):  # an ordinary user has only so many pages for pipes; a small one works
                fcntl.fcntl(self._pipe[1], _F_SETPIPE_SZ, _PIPE)
        return self._pipe[1]

    def _wait(self, *, reading: bool, writing: bool) -> None:
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._loop.add_reader(self._source.fileno(), self.step)
            else:
                self._loop.remove_reader(self._source.fileno())
        if writing != self._writing:
            self._writing = writing
            if writing:
                self._loop.add_writer(self._sink.fileno(), self.step)
            else:
                self._loop.remove_writer(self._sink.fileno())

    def _finish(self) -> None:
        """Pass the end of the source on to the sink."""
        self._stop()
        self.over = True
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        self._owner.ended(None)

    def _stop(self) -> None:
        self._wait(reading=False, writing=False)

    def close(self) -> None:
        self._stop()
        if self._pipe is not None:
            for fd in self._pipe:
                os.close(fd)
            self._pipe = None
            self._owner.totals.pipes -= 1
