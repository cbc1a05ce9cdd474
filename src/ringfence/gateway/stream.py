"""Byte streams of the gateway: a plain socket, and TLS. Every wait has a deadline.

Certificates of servers are checked against the system's trusted roots, always, with the name that the policy
permits. Nothing switches that off.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from typing import TYPE_CHECKING, Protocol

from ringfence.gateway.types import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringfence.gateway.interfaces import Uplink
    from ringfence.gateway.types import Target

CHUNK = 1 << 16
HANDSHAKE_S = 15.0
STALL_S = 600.0  # without a byte from a peer that is waited for: a model may think that long
SEND_S = 120.0  # a peer that takes nothing
_READS_A_TURN = 8  # of bytes that have come already
_RECORDS = 1 << 14  # bytes of TLS that are read at a time: 600 key updates are as much work as a megabyte
_MOST_FRUITLESS = 1 << 16  # bytes of TLS in a row that carry no data


class ByteStream(Protocol):
    """A connection. `receive` and `send` may wait at the same time, in two tasks."""

    async def receive(self, timeout_s: float = STALL_S) -> bytes:
        """Return the next bytes; empty at the end. Raises TimeoutError, OSError."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`. Raises TimeoutError, OSError."""

    def is_stale(self) -> bool:
        """Return whether an idle connection has something to read: then the peer closed or is out of step."""

    def is_gone(self) -> bool:
        """Return whether the peer has closed the connection, or half of it, whatever is still to be read."""

    def close(self) -> None: ...


def _free(size: int) -> None:
    del size


class _ReadTurns:
    """Lets other connections run now and then, as a peer that never stops sending would keep the loop busy."""

    def __init__(self) -> None:
        self._reads = 0

    async def give(self) -> None:
        """Let other connections run if it is time. Called before a read: a task cancelled here has read nothing."""
        self._reads += 1
        if self._reads % _READS_A_TURN == 0:
            await asyncio.sleep(0)


class Plain:
    """A connected, non-blocking socket, and the bytes that were read before."""

    def __init__(
        self,
        sock: socket.socket,
        received: bytes = b"",
        *,
        count_up: Callable[[int], None] = _free,
        count_down: Callable[[int], None] = _free,
    ) -> None:
        self._sock = sock
        self._received = received
        self._count_up = count_up
        self._count_down = count_down
        self._loop = asyncio.get_running_loop()
        self._turns = _ReadTurns()

    async def receive(self, timeout_s: float = STALL_S) -> bytes:
        await self._turns.give()
        if self._received:
            data, self._received = self._received, b""
            self._count_down(len(data))
            return data
        try:
            data = self._sock.recv(CHUNK)  # bytes that have come already need no deadline
        except BlockingIOError:
            async with asyncio.timeout(timeout_s):
                data = await self._loop.sock_recv(self._sock, CHUNK)
        self._count_down(len(data))
        return data

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._count_up(len(part))
            part = part[self._send_some(part) :]
            if part:
                async with asyncio.timeout(SEND_S):
                    await self._loop.sock_sendall(self._sock, part)

    def _send_some(self, part: memoryview) -> int:
        try:
            return self._sock.send(part)
        except BlockingIOError:
            return 0

    def is_stale(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return bool(self._received)
        except OSError:
            return True
        return True

    def is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._sock.close()


class Tls:
    """TLS over another stream. `handshake` must be called first."""

    def __init__(self, under: ByteStream, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        self._under = under
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._sending = asyncio.Lock()
        self._turns = _ReadTurns()
        self._unread = memoryview(b"")  # bytes that have come and were not decrypted
        self._fruitless = 0

    @property
    def alpn(self) -> str | None:
        return self._tls.selected_alpn_protocol()

    async def handshake(self) -> None:
        """Do the handshake. Raises ssl.SSLError, TimeoutError, OSError."""
        async with asyncio.timeout(HANDSHAKE_S):
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._more(HANDSHAKE_S)
                except ssl.SSLError:
                    await self._flush()  # the alert
                    raise
            self._fruitless = 0
            await self._flush()

    async def receive(self, timeout_s: float = STALL_S) -> bytes:
        await self._turns.give()
        while True:
            try:
                data = self._tls.read(CHUNK)
                self._fruitless = 0
                return data
            except ssl.SSLWantReadError:
                await self._flush()  # an answer to a key update, perhaps
                if self._fruitless > _MOST_FRUITLESS:
                    raise ConnectionAbortedError("the peer's records carry nothing") from None
                await self._turns.give()
                await self._more(timeout_s)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLEOFError:
                # Closed without a goodbye: the reader sees by the length of its message that something is missing.
                return b""

    async def send(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
        await self._flush()

    def is_stale(self) -> bool:
        read = self._tls.pending() + self._incoming.pending + len(self._unread)
        return read > 0 or self._under.is_stale()

    def is_gone(self) -> bool:
        return self._under.is_gone()

    def close(self) -> None:
        self._under.close()

    async def end(self) -> None:
        """Say goodbye, so that the peer knows that all was sent; then close."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # the peer's goodbye is not waited for
        try:
            await self._flush()
        except (OSError, TimeoutError):
            pass  # the peer is gone already
        self.close()

    async def _more(self, timeout_s: float) -> None:
        if not self._unread:
            self._unread = memoryview(await self._under.receive(timeout_s))
        part, self._unread = self._unread[:_RECORDS], self._unread[_RECORDS:]
        if part:
            self._incoming.write(part)
            self._fruitless += len(part)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        if not self._outgoing.pending:
            return
        async with self._sending:  # taken inside: records go out in the order of their encryption
            await self._under.send(self._outgoing.read())


def trusted_roots(context: ssl.SSLContext) -> None:
    """Load the system's trusted roots. Tests put another function here; no setting does."""
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)


_contexts: dict[tuple[object, tuple[str, ...]], ssl.SSLContext] = {}  # loading the roots takes some 10 ms


def client_context(alpn: Sequence[str]) -> ssl.SSLContext:
    """Return a context that checks the server's certificate and name."""
    key = (trusted_roots, tuple(alpn))
    if key not in _contexts:
        if len(_contexts) >= 8:
            _contexts.clear()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # the server stays the server that was checked
        context.set_alpn_protocols(list(alpn))
        trusted_roots(context)
        _contexts[key] = context
    return _contexts[key]


async def open_plain(uplink: Uplink, target: Target) -> Plain:
    """Open a plain stream to the target, by a checked address. Raises Refusal."""
    sock = await uplink.dial(target)
    return Plain(sock, count_up=uplink.count_up, count_down=uplink.count_down)


async def open_tls(uplink: Uplink, target: Target, alpn: Sequence[str]) -> Tls:
    """Open TLS to the target, by a checked address, and verify that the certificate is the name's. Raises Refusal."""
    plain = await open_plain(uplink, target)
    try:
        stream = Tls(plain, client_context(alpn), server_name=target.name.strip("[]"))
        await stream.handshake()
    except ssl.SSLCertVerificationError as error:
        plain.close()
        message = f"the certificate of {target} does not verify: {error.verify_message}"
        raise Refusal("net.tls-unverified", message, verdict="failed") from None
    except (OSError, TimeoutError) as error:
        plain.close()
        what = "took too long" if isinstance(error, TimeoutError) else "failed"
        raise Refusal("net.tls-handshake", f"the TLS handshake with {target} {what}", verdict="failed") from None
    except BaseException:
        plain.close()
        raise
    return stream
