"""A connection to one port inside: bytes that pass, in both directions at once. None of the bytes are kept (O21)."""

from __future__ import annotations

import time

from ringfence.errors import SandboxLostError
from ringfence.wire import frames
from ringfence.wire.inbox import STDIN_WINDOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence._async.process import Place
    from ringfence.core.arguments import Call

_KILL_S = 3.0


class AsyncConnection:
    """A worker inside whose standard streams are the two directions. A task can read while another task writes.

    The connection is no process of the caller: it has no events and no result, and bytes that were read are not kept.
    Bytes that wait to be read fit in the window of the inbox, and credit is given for bytes that were taken: a server
    inside waits for its client (F17), and however much passes, the host holds no more.
    """

    def __init__(self, place: Place, call: Call) -> None:
        self._place = place
        self._call = call
        self._inbox = place.link.open()
        self._broken = False

    async def begin(self) -> AsyncConnection:
        """Start the connection and return it.

        When the caller is interrupted meanwhile, the connection is ended first.
        """
        try:
            await self._place.link.start(self._call, self._inbox)
        except BaseException:
            await self.break_off()
            raise
        return self

    async def read(self) -> bytes:
        """Return the next bytes from the server; return b"" when no more will come, also where no server listens."""
        inbox = self._inbox
        while True:
            ended = inbox.end is not None  # read first: what came before the end is in the inbox by then
            while (item := inbox.take()) is not None:
                await self._grant()
                if item[0] == frames.STDOUT:
                    return item[1]
            if ended:
                return b""
            await self._wait(lambda: bool(inbox.items) or inbox.end is not None)

    async def _grant(self) -> None:
        """Let guestd send as many bytes again as were taken."""
        credit = self._inbox.credit()
        if credit and self._inbox.end is None:
            await self._place.link.say(op="credit", id=self._inbox.id, bytes=credit)

    async def write(self, data: bytes) -> None:
        """Write to the server. Raise BrokenPipeError when the server takes no more.

        Only the reader takes bytes from the server: bytes that a writer took would have to be kept.
        """
        inbox = self._inbox
        if inbox.stdin_closed or inbox.end is not None:
            raise BrokenPipeError(f"the connection to port {self._call.argv[1]} inside is closed")
        await self._place.link.write(inbox, data)
        await self._wait(
            lambda: inbox.stdin_in_flight < STDIN_WINDOW or inbox.stdin_closed or inbox.end is not None,
        )

    async def close_stdin(self) -> None:
        """Send the server an end of input. What the server sends still arrives."""
        if self._inbox.end is None:
            self._inbox.stdin_closed = True
            await self._place.link.say(op="eof", id=self._inbox.id)

    async def break_off(self) -> None:
        """Kill the connection without waiting. Its reader then sees the end and cleans up. Safe while a task reads.

        Idempotent.
        """
        if self._inbox.end is None and not self._broken:
            self._broken = True
            await self._place.link.say(op="kill", id=self._inbox.id, why="caller")

    async def end(self) -> None:
        """Break the connection off and wait until it is gone. For the reader alone: the end comes after all output."""
        await self.break_off()
        inbox, deadline = self._inbox, time.monotonic() + _KILL_S
        try:
            while inbox.end is None:
                if not await self._place.link.wait(lambda: bool(inbox.items) or inbox.end is not None, deadline):
                    self._place.box.kill()
                    inbox.end = {"ev": "over", "why": "caller"}
                while inbox.take() is not None:
                    pass
                await self._grant()
        except SandboxLostError:
            return  # the connection ended with everything inside

    async def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait without a deadline: a connection may be idle for hours, and ends with its client, server or sandbox."""
        try:
            await self._place.link.wait(ready, None)
        except SandboxLostError:
            return  # the inbox has an end, which the caller sees
