"""How a client is told no, in the words of its own protocol: a 403 with a reason, a TLS alert, a reset."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from ringfence.gateway.http.request import refusal_body, refusal_headers, status_of
from ringfence.gateway.splice import reset

if TYPE_CHECKING:
    from ringfence.gateway.types import Refusal

_ACCESS_DENIED, _INTERNAL_ERROR, _UNRECOGNIZED_NAME = 49, 80, 112
_BY_CODE = {"net.sni": _UNRECOGNIZED_NAME, "net.no-sni": _UNRECOGNIZED_NAME}
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 18


def http_response(refusal: Refusal) -> bytes:
    """A whole response, after which the connection ends."""
    content = refusal_body(refusal)
    lines = [b"HTTP/1.1 %d Refused by Ringfence" % status_of(refusal)]
    lines += [name + b": " + value for name, value in refusal_headers(content)]
    return b"\r\n".join([*lines, b"connection: close", b"", content])


def tls_alert(refusal: Refusal) -> bytes:
    """A fatal alert in a record of its own."""
    kind = _BY_CODE.get(refusal.code, _ACCESS_DENIED if refusal.verdict == "denied" else _INTERNAL_ERROR)
    return bytes([21, 3, 3, 0, 2, 2, kind])


async def say_and_close(sock: socket.socket, words: bytes) -> None:
    """Send the last words and read what still comes for a moment: a reset would take the words back."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await loop.sock_sendall(sock, words)
            sock.shutdown(socket.SHUT_WR)
            left = _LINGER_BYTES
            while left > 0 and (data := await loop.sock_recv(sock, 1 << 14)):
                left -= len(data)
    sock.close()


async def refuse(sock: socket.socket, first: bytes, refusal: Refusal) -> None:
    """In the protocol that `first`, what the client has sent so far, is of."""
    if first[:1] == b"\x16":
        await say_and_close(sock, tls_alert(refusal))
    elif first[:1].isalpha():
        await say_and_close(sock, http_response(refusal))
    else:
        reset(sock)
