"""Moves bytes between a guest's connection and the network without looking at them: small ones by copy, many by splice.

One `Splice` for a connection, in the gateway's loop. It owns both sockets from its start; `close` closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

from ringfence.gateway.relay.socket import Relayed
from ringfence.gateway.types import OverBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.gateway.budget import Totals
    from ringfence.gateway.registration import Registration
    from ringfence.gateway.types import Entry

IDLE_S = 900.0  # without a byte either way
HALF_OPEN_S = 120.0  # the same, when one side has said that it is done
_COPY = 1 << 16
_COPIED_FIRST = 1 << 18  # then a pipe pays
_PIPE = 1 << 20
_TURNS = 8  # before others have theirs
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_F_SETPIPE_SZ = 1031


def reset(sock: socket.socket) -> None:
    """Close it so that the other side sees a reset, not an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Splice:
    """`first` was read from the guest already and goes to the network before anything else."""

    def __init__(
        self, guest: socket.socket, network: socket.socket, context: Registration, entry: Entry, first: bytes = b""
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = (guest, network)
        self._entry = entry
        self.totals: Totals = context.totals
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._up = _Flow(self, guest, network, self._count_up(context), first)
        self._down = _Flow(self, network, guest, self._count_down(context), b"")
        self.moved_at = time.monotonic()
        self._timer = self._loop.call_later(min(IDLE_S, HALF_OPEN_S) / 4, self._watch)

    def _count_up(self, context: Registration) -> Callable[[int], None]:
        def count(size: int) -> None:
            context.count_up(size)
            self._entry.sent += size

        return count

    def _count_down(self, context: Registration) -> Callable[[int], None]:
        def count(size: int) -> None:
            context.count_down(size)
            self._entry.received += size

        return count

    async def run(self) -> None:
        """Until both sides are done. Raises OverBudget. The caller closes it, when it has written down why it ended."""
        self._up.begin()
        self._down.step()
        self._up.step()
        await self.done

    def ended(self, error: Exception | None) -> None:
        """A flow has ended; with an error, or with the other one, so has the whole."""
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
        """Both sockets; a side that was not done sees a reset."""
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
    """One direction."""

    def __init__(
        self, owner: Splice, source: socket.socket, sink: socket.socket, count: Callable[[int], None], first: bytes
    ) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._count = count
        self._held = memoryview(first)  # copied, not yet sent
        self._piped = 0  # in the pipe, not yet sent
        self._pipe: tuple[int, int] | None = None
        self._moved = 0
        self._reading = self._writing = False
        self.over = False

    def begin(self) -> None:
        """Raises OverBudget for what was read already."""
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
        """Take from the source; False when there is nothing now, or nothing more."""
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
            if isinstance(self._source, Relayed):
                self._source.check_end()
            self._finish()
            return False
        self._moved += size
        self._owner.moved_at = time.monotonic()
        return True

    def _flush(self) -> bool:
        """Give to the sink; False when it takes no more now."""
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
        """None: the process has no descriptors to spare, and bytes are copied for a while more."""
        if self._pipe is None:
            try:
                self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if self._owner.totals.may_pipe() else None
            except OSError:
                pass  # others have used them up
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
        """The source is done; the sink is told."""
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
