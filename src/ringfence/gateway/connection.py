"""A guest's connection: socket, bytes read, verdict, and how to refuse and end the connection.

A refusal is sent in the client's own protocol: a 403 with a reason, a TLS alert, a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

from ringfence.gateway.http.request import refusal_body, refusal_headers, status_of

if TYPE_CHECKING:
    from ringfence.gateway.interfaces import Uplink
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.types import Refusal

_ACCESS_DENIED, _INTERNAL_ERROR, _UNRECOGNIZED_NAME = 49, 80, 112  # TLS alerts
_ALERT_BY_CODE = {"net.sni": _UNRECOGNIZED_NAME, "net.no-sni": _UNRECOGNIZED_NAME}
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 18


class Connection:
    """An accepted, non-blocking connection of a guest, which the gateway's loop owns."""

    def __init__(self, sock: socket.socket, uplink: Uplink) -> None:
        self.sock = sock
        self.uplink = uplink
        self.received = b""  # read from the socket and not yet consumed: for TLS the whole ClientHello
        self.verdict: Verdict | None = None  # None while the target is not known
        self.cut: Refusal | None = None  # why the gateway ended it
        self.task: asyncio.Task[None] | None = None  # serves the connection

    def stop(self, why: Refusal | None = None) -> None:
        """Cancel the task that serves the connection; the log gives `why` as the reason."""
        self.cut = self.cut or why
        if self.task is not None:
            self.task.cancel()

    async def refuse(self, refusal: Refusal) -> None:
        """Refuse the client in the protocol of its first bytes, and close."""
        if self.received[:1] == b"\x16":
            await self.say_and_close(tls_alert(refusal))
        elif self.received[:1].isalpha():
            await self.say_and_close(http_response(refusal))
        else:
            self.reset()

    async def say_and_close(self, words: bytes) -> None:
        """Send the last words, then read for a moment what still comes: a reset would take the words back."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await loop.sock_sendall(self.sock, words)
                self.sock.shutdown(socket.SHUT_WR)
                left = _LINGER_BYTES
                while left > 0 and (data := await loop.sock_recv(self.sock, 1 << 14)):
                    left -= len(data)
        self.sock.close()

    def reset(self) -> None:
        """Close the connection so that the client sees a reset, not an end. Idempotent; harmless after a close."""
        reset(self.sock)

    def after_fork(self) -> None:
        """Close a forked child's copy, which would keep the parent's connection from ending."""
        close_copy(self.sock)


def reset(sock: socket.socket) -> None:
    """Close a socket so that its peer sees a reset, not an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def close_copy(sock: socket.socket) -> None:
    """Close a forked child's copy of a descriptor, without the other effects of the socket's own `close`."""
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)


def http_response(refusal: Refusal) -> bytes:
    """Return a whole response that refuses a request, after which the connection ends."""
    content = refusal_body(refusal)
    lines = [b"HTTP/1.1 %d Refused by Ringfence" % status_of(refusal)]
    lines += [name + b": " + value for name, value in refusal_headers(content)]
    return b"\r\n".join([*lines, b"connection: close", b"", content])


def tls_alert(refusal: Refusal) -> bytes:
    """Return a fatal TLS alert, in a record of its own."""
    kind = _ALERT_BY_CODE.get(refusal.code, _ACCESS_DENIED if refusal.verdict == "denied" else _INTERNAL_ERROR)
    return bytes([21, 3, 3, 0, 2, 2, kind])
