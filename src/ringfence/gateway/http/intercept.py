"""Reads the requests of a TLS connection: where a rule names methods or paths, or a secret is for the host.

The guest's TLS ends here, with a certificate of its sandbox's own authority; the server's TLS is verified here.
Both sides speak the same HTTP: the server is asked first, and the guest is offered what it answered.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from ringfence.gateway.http.http1 import Route, serve_http1
from ringfence.gateway.http.request import check_authority, malformed
from ringfence.gateway.stream import Plain, Tls, open_plain, open_tls
from ringfence.gateway.types import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.gateway.connection import Connection
    from ringfence.gateway.interfaces import Uplink
    from ringfence.gateway.stream import ByteStream
    from ringfence.gateway.types import Target

_H1 = ("http/1.1",)
_H2 = ("h2", "http/1.1")


async def intercept(connection: Connection, target: Target) -> None:
    """Serve a TLS connection until either side ends, then close. Raises only what cancels the task.

    The caller has checked that the ClientHello in `connection.received` names the target.
    """
    guest = Plain(connection.sock, connection.received)
    try:
        await _intercept(guest, target, connection)
    except (OSError, TimeoutError):
        pass  # the guest is gone, or took nothing; the log has its requests
    except asyncio.CancelledError:
        connection.reset()  # the connection was cut: a plain end would look like the end of an answer
        raise
    except Exception as error:  # noqa: BLE001  # ours: a traceback on the host's terminal could quote a value (I03)
        connection.uplink.finish(connection.uplink.log(target), refusal=_ours(error))
    finally:
        guest.close()


async def serve_plain(connection: Connection, choose: Callable[[str, list[str]], tuple[Target, str]]) -> None:
    """Serve plain HTTP, by the same checks but without secrets, then close. Raises only what cancels the task.

    `choose` is called for each request, with its target and every Host, and gives the permitted target and the
    request target in origin form; it raises Refusal. For one fixed target: `fixed(target)`.
    """

    async def connect(target: Target) -> ByteStream:
        return await open_plain(connection.uplink, target)

    guest = Plain(connection.sock, connection.received)
    try:
        await serve_http1(guest, Route(connection, choose, connect, verified=False))
    except (OSError, TimeoutError):
        pass  # the guest is gone, or took nothing
    except asyncio.CancelledError:
        connection.reset()
        raise
    finally:
        guest.close()


def fixed(target: Target, scheme: str = "http") -> Callable[[str, list[str]], tuple[Target, str]]:
    """Return a chooser for a connection to one target, which a request target in absolute form must name (G11)."""

    def choose(asked: str, hosts: list[str]) -> tuple[Target, str]:
        del hosts
        start = f"{scheme}://"
        if not asked.lower().startswith(start):
            if asked.startswith("/") or asked == "*":
                return target, "/" if asked == "*" else asked
            raise malformed("its target is neither a path nor a URL of this host")
        authority, slash, path = asked[len(start) :].partition("/")
        check_authority(target, authority)
        return target, slash + path or "/"

    return choose


async def _intercept(guest: Plain, target: Target, connection: Connection) -> None:
    uplink = connection.uplink
    server = await _open(target, uplink, _H2 if b"\x02h2" in connection.received else _H1)
    try:
        offered = _H2 if isinstance(server, Tls) and server.alpn == "h2" else _H1
        above = Tls(guest, uplink.authority.server(target.name, offered))
        try:
            await above.handshake()
        except ssl.SSLError:
            uplink.finish(uplink.log(target), refusal=_distrusted(target))
            return
        if above.alpn == "h2" and isinstance(server, Tls):
            from ringfence.gateway.http.http2 import serve_http2

            await serve_http2(above, server, target, connection)
        else:
            first = _First(server, target, uplink)
            route = Route(connection, fixed(target, "https"), first.connect, verified=True)
            await serve_http1(above, route)
        await above.end()
    finally:
        if isinstance(server, Tls):
            server.close()


async def _open(target: Target, uplink: Uplink, alpn: tuple[str, ...]) -> Tls | Refusal:
    """Return TLS to the server, or the error, which is sent to the guest once TLS with the guest is up."""
    try:
        return await open_tls(uplink, target, alpn)
    except Refusal as refusal:
        return refusal


class _First:
    """A `connect` whose first call returns the stream that was opened before, or raises its error."""

    def __init__(self, first: Tls | Refusal, target: Target, uplink: Uplink) -> None:
        self._first: Tls | Refusal | None = first
        self._target = target
        self._uplink = uplink

    async def connect(self, target: Target) -> ByteStream:
        first, self._first = self._first, None
        if isinstance(first, Refusal):
            raise first
        if first is not None and first.alpn != "h2":
            return first
        return await open_tls(self._uplink, target, _H1)


def _ours(error: Exception) -> Refusal:
    """Return the refusal that reports a fault of the gateway: the error's kind, not its text."""
    return Refusal("net.internal", f"the gateway failed with {type(error).__name__}", verdict="failed")


def _distrusted(target: Target) -> Refusal:
    message = f"the program inside does not trust the sandbox's own certificate for {target}, or does not speak TLS"
    return Refusal("net.tls-distrusted", message, verdict="failed")
