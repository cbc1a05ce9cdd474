"""An address on the host's loopback that reaches one port inside, for asyncio callers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ringfence.errors import RingfenceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from ringfence._async.connection import AsyncConnection

_PIECE = 1 << 16
MOST_CONNECTIONS = 64


class AsyncAddress:
    """A local address that reaches one port inside. Closed with the sandbox."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.url = ""
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def _open(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MOST_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._pass(reader, writer)
        except (OSError, RingfenceError, asyncio.CancelledError):
            return  # one side is gone, or the address was closed, or no connection inside can be made now
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await self._connect()
        sending = asyncio.ensure_future(_send(reader, inner))
        try:
            while data := await inner.read():
                writer.write(data)
                await writer.drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await inner.end()

    async def close(self) -> None:
        """Accept no new connections and end the open connections. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.close()


async def _send(reader: asyncio.StreamReader, inner: AsyncConnection) -> None:
    try:
        while data := await reader.read(_PIECE):
            await inner.write(data)
        await inner.close_stdin()
    except (OSError, RingfenceError):
        # The client broke off, or the server is gone. A silent server would keep the connection open for ever.
        await inner.break_off()


async def opened(connect: Callable[[], Awaitable[AsyncConnection]]) -> AsyncAddress:
    return await AsyncAddress(connect)._open()
