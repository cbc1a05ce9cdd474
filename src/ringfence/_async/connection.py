"""A connection to one port inside: bytes that pass, in both directions at once. Nothing of them is kept (O21)."""

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
    """A worker inside whose standard streams are the two directions. One reads while another writes.

    It is no process of the caller's: it has no events and no result, so what was read is gone from here. What waits to
    be read is within the window of its inbox, and credit is given for what was taken: a server inside waits for its
    client (F17), and however much passes, the host holds no more.
    """

    def __init__(self, place: Place, call: Call) -> None:
        self._place = place
        self._call = call
        self._inbox = place.link.open()
        self._broken = False

    async def begin(self) -> AsyncConnection:
        """Have it made. When the caller is interrupted here, it is ended first."""
        try:
            await self._place.link.start(self._call, self._inbox)
        except BaseException:
            await self.break_off()
            raise
        return self

    async def read(self) -> bytes:
        """The next bytes of the server's; b"" when there will be no more, also where nobody listens."""
        inbox = self._inbox
        while True:
            ended = inbox.end is not None  # looked at first: what came before the end is in the inbox by then
            while (item := inbox.take()) is not None:
                await self._grant()
                if item[0] == frames.STDOUT:
                    return item[1]
            if ended:
                return b""
            await self._wait(lambda: bool(inbox.items) or inbox.end is not None)

    async def _grant(self) -> None:
        """As much as was taken may come again."""
        credit = self._inbox.credit()
        if credit and self._inbox.end is None:
            await self._place.link.say(op="credit", id=self._inbox.id, bytes=credit)

    async def write(self, data: bytes) -> None:
        """To the server. Raises BrokenPipeError when it takes no more.

        Only the reader takes what the server says: what a writer took would have to be kept.
        """
        inbox = self._inbox
        if inbox.stdin_closed or inbox.end is not None:
            raise BrokenPipeError(f"the connection to port {self._call.argv[1]} inside is closed")
        await self._place.link.write(inbox, data)
        await self._wait(
            lambda: inbox.stdin_in_flight < STDIN_WINDOW or inbox.stdin_closed or inbox.end is not None,
        )

    async def close_stdin(self) -> None:
        """The server hears an end; what it says still comes."""
        if self._inbox.end is None:
            self._inbox.stdin_closed = True
            await self._place.link.say(op="eof", id=self._inbox.id)

    async def break_off(self) -> None:
        """Whoever reads it sees the end, and does the rest. Safe while another reads. Idempotent."""
        if self._inbox.end is None and not self._broken:
            self._broken = True
            await self._place.link.say(op="kill", id=self._inbox.id, why="caller")

    async def end(self) -> None:
        """Break it off, and see that it is gone. For the reader: the end is told after what was said before it."""
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
            return  # and everything inside with it

    async def _wait(self, ready: Callable[[], bool]) -> None:
        """However long: a connection may be idle for hours, and ends with its client, its server or its sandbox."""
        try:
            await self._place.link.wait(ready, None)
        except SandboxLostError:
            return  # the inbox has its end
