"""The proxy inside a sandbox: HTTP requests for URLs, CONNECT and SOCKS5 on one port, told apart by the first byte.

Of SOCKS5 only CONNECT without a password is served, by name or address (G15).
"""

from __future__ import annotations

import asyncio
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING

from ringfence.gateway import rules
from ringfence.gateway.connection import http_response
from ringfence.gateway.http.request import LARGEST_HEAD, check_raw_head, malformed
from ringfence.gateway.tunnel import serve_tunnel, without_parser
from ringfence.gateway.types import Refusal
from ringfence.policy.hosts import canonical_host, split_port
from ringfence.values import Struct, final

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ringfence.gateway.connection import Connection
    from ringfence.gateway.interfaces import Directory
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.types import Target

_FIRST_S = 15.0
_READ = 1 << 16
_CONNECT = b"CONNECT "

# SOCKS: versions, codes of replies, answers to a greeting, kinds of address.
_SOCKS5, _SOCKS4 = 5, 4
OK, FAILED, NOT_ALLOWED, UNREACHABLE, NO_COMMAND, NO_ADDRESS_TYPE = 0, 1, 2, 4, 7, 8
_NO_METHOD = b"\x05\xff"
_METHOD = b"\x05\x00"
_SOCKS4_REFUSED = b"\x00\x5b" + bytes(6)  # in the words of version 4
_SOCKS_CONNECT, _IPV4, _NAME, _IPV6 = 1, 1, 3, 4


async def serve_proxy(directory: Directory, connection: Connection) -> None:
    """Serve a connection to the proxy, until its end."""
    sock = connection.sock
    try:
        async with asyncio.timeout(_FIRST_S):
            if not connection.received:
                connection.received = await asyncio.get_running_loop().sock_recv(sock, _READ)
            while connection.received and connection.received != _CONNECT and _CONNECT.startswith(connection.received):
                await _more(connection)  # "CONNECT" itself may come in pieces
    except (TimeoutError, EOFError):
        connection.reset()
        return
    if connection.received[:1] == b"\x05":
        await _serve_socks(directory, connection)
    elif connection.received[:1].isalpha():
        await _serve_http(directory, connection)
    elif connection.received:
        await _refuse_other(connection)


async def _refuse_other(connection: Connection) -> None:
    """Refuse at once a client that speaks another protocol: the end of its request might never come."""
    if connection.received[0] == _SOCKS4:
        connection.uplink.deny("(proxy)", 0, Refusal("net.socks", "SOCKS: version 4 is not served; use version 5"))
        await connection.say_and_close(_SOCKS4_REFUSED)
        return
    refusal = Refusal("net.protocol", "what was sent to the proxy is neither plain HTTP nor SOCKS5")
    connection.uplink.deny("(proxy)", 0, refusal)
    await connection.refuse(refusal)


# HTTP


async def _serve_http(directory: Directory, connection: Connection) -> None:
    if connection.received.startswith(_CONNECT):
        await _serve_connect(directory, connection)
        return
    try:
        from ringfence.gateway.http.intercept import serve_plain
    except ImportError:
        refusal = without_parser()
        connection.uplink.deny("(proxy)", 0, refusal)
        await connection.say_and_close(http_response(refusal))
        return
    await serve_plain(connection, chooser(directory, connection))


def chooser(directory: Directory, connection: Connection) -> Callable[[str, list[str]], tuple[Target, str]]:
    """Return the function by which `intercept.serve_plain` chooses the target of each request."""

    def choose(asked: str, _hosts: list[str]) -> tuple[Target, str]:
        """Return the target and path of a request by its URL. The caller compares Host with the target (G11)."""
        named, path = absolute(asked)
        verdict = _decide(directory, connection, named)
        refusal = verdict.refusal or not_http(verdict)
        if refusal is not None:
            refusal.asked_for = verdict.target, path
            raise refusal
        return verdict.target, path

    return choose


def absolute(url: str) -> tuple[tuple[str, int], str]:
    """Return (host, port) and path with query of `http://host:port/path`. Raises Refusal for other forms (G12)."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme.lower() != "http":
        raise malformed("a proxy is asked for an http:// URL; for https, by CONNECT")
    cut = min([rest.index(char) for char in "/?" if char in rest], default=len(rest))
    authority = rest[:cut]
    path = rest[cut:]
    try:
        name, port = split_port(authority)
        found = canonical_host(name), 80 if port is None else port
    except ValueError as error:
        raise malformed(f"the URL's host is not one: {error}") from None
    return found, path if path.startswith("/") else f"/{path}"


def _decide(directory: Directory, connection: Connection, named: tuple[str, int]) -> Verdict:
    verdict = directory.decide(*named)
    connection.verdict = verdict
    return verdict


def not_http(verdict: Verdict) -> Refusal | None:
    """Return the refusal of plain HTTP to a host that is permitted for another protocol, else None."""
    if verdict.protocol in ("any", "http"):
        return None
    host = verdict.target.name
    line = f'protocol = "http" in the rule for {host}'
    return Refusal("net.protocol", f"{host} is permitted for {verdict.protocol} only, not http", allow=line)


async def _serve_connect(directory: Directory, connection: Connection) -> None:
    """Serve a CONNECT: check and reach the host first, then say 200; what follows is a stream to that name."""
    named = ("(proxy)", 0)
    try:
        async with asyncio.timeout(_FIRST_S):
            while b"\r\n\r\n" not in connection.received:
                await _more(connection)
        named, connection.received = connect_request(connection.received)
        verdict = _decide(directory, connection, named)
        if verdict.refusal is not None:
            raise verdict.refusal
        upstream = await _reached(connection, verdict)
    except Refusal as refusal:
        connection.uplink.deny(*named, refusal)
        await connection.say_and_close(http_response(refusal))
        return
    except (TimeoutError, EOFError):
        connection.reset()
        return
    await _open_tunnel(connection, upstream, b"HTTP/1.1 200 Connection established\r\n\r\n")


def connect_request(data: bytes) -> tuple[tuple[str, int], bytes]:
    """Return (host, port) of a CONNECT with a whole head, and the bytes after the head. Raises Refusal."""
    head, _, rest = data.partition(b"\r\n\r\n")
    check_raw_head(head + b"\r\n\r\n")
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3 or words[0] != b"CONNECT" or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise malformed("it is not a CONNECT of HTTP/1.1")
    try:
        name, port = split_port(words[1].decode("ascii"))
        host = canonical_host(name)
    except ValueError as error:
        raise Refusal("net.name", f"CONNECT is not for a host: {error}") from None
    if port is None:
        raise malformed("CONNECT names no port")
    return (host, port), rest


async def _open_tunnel(connection: Connection, upstream: socket.socket | None, word: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(connection.sock, word)
    except BaseException:
        if upstream is not None:
            upstream.close()
        raise
    await serve_tunnel(connection, upstream)


async def _reached(connection: Connection, verdict: Verdict) -> socket.socket | None:
    """Return a socket to the target, before the client gets an answer; None if each request will be dialled."""
    if rules.intercepted(verdict.target, connection.uplink.vault):
        return None
    return await connection.uplink.dial(verdict.target)


# SOCKS5


async def _serve_socks(directory: Directory, connection: Connection) -> None:
    try:
        async with asyncio.timeout(_FIRST_S):
            wanted = await _read_socks_request(connection)
    except (TimeoutError, EOFError):
        connection.reset()
        return
    except BadSocks as error:
        connection.uplink.deny("(proxy)", 0, Refusal("net.socks", f"SOCKS: {error}"))
        await connection.say_and_close(error.reply)
        return
    verdict = _decide(directory, connection, (wanted.host, wanted.port))
    try:
        if verdict.refusal is not None:
            raise verdict.refusal
        upstream = await _reached(connection, verdict)
    except Refusal as refusal:
        connection.uplink.deny(wanted.host, wanted.port, refusal)
        await connection.say_and_close(_socks_reply(_socks_code(refusal)))
        return
    await _open_tunnel(connection, upstream, _socks_reply(OK))


async def _read_socks_request(connection: Connection) -> SocksRequest:
    loop = asyncio.get_running_loop()
    while (offered := socks_greeting(connection.received)) is None:
        await _more(connection)
    without_password, used = offered
    if not without_password:
        raise BadSocks("no way without a password is offered", _NO_METHOD)
    connection.received = connection.received[used:]
    await loop.sock_sendall(connection.sock, _METHOD)
    while (found := socks_request(connection.received)) is None:
        await _more(connection)
    wanted, used = found
    connection.received = connection.received[used:]
    return wanted


async def _more(connection: Connection) -> None:
    data = await asyncio.get_running_loop().sock_recv(connection.sock, _READ)
    if not data or len(connection.received) > LARGEST_HEAD:
        raise EOFError
    connection.received += data


def _socks_code(refusal: Refusal) -> int:
    if refusal.verdict == "denied":
        return NOT_ALLOWED
    return UNREACHABLE if refusal.code in ("net.unresolved", "net.unreachable") else FAILED


@final
class SocksRequest(Struct):
    """Where the guest wants to go. `host` is canonical."""

    host: str
    port: int


class BadSocks(Exception):  # noqa: N818  # what a guest sent, not our error
    """Bytes that are not SOCKS5, or ask for a part that is not served. `reply` is the answer before the end, if any."""

    def __init__(self, message: str, reply: bytes = b"") -> None:
        super().__init__(message)
        self.reply = reply


def socks_greeting(data: bytes) -> tuple[bool, int] | None:
    """Return whether "no password" is offered, and the greeting's length; None when more bytes are needed."""
    if data[:1] not in (b"", b"\x05"):
        raise BadSocks("not SOCKS5")
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return 0 in data[2 : 2 + data[1]], 2 + data[1]


def socks_request(data: bytes) -> tuple[SocksRequest, int] | None:
    """Return where to connect, and the request's length; None when more bytes are needed. Raises BadSocks."""
    if len(data) < 5:
        if data[:1] not in (b"", b"\x05"):
            raise BadSocks("not SOCKS5")
        return None
    version, command, reserved, kind, length = data[:5]
    if version != _SOCKS5 or reserved != 0:
        raise BadSocks("not a SOCKS5 request")
    if command != _SOCKS_CONNECT:
        raise BadSocks("only CONNECT is served", _socks_reply(NO_COMMAND))
    size = {_IPV4: 4, _NAME: 1 + length, _IPV6: 16}.get(kind)
    if size is None:
        raise BadSocks("an unknown kind of address", _socks_reply(NO_ADDRESS_TYPE))
    if len(data) < 4 + size + 2:
        return None
    host = _socks_host(kind, data[4 : 4 + size])
    (port,) = struct.unpack_from("!H", data, 4 + size)
    if port == 0:
        raise BadSocks("port 0", _socks_reply(NOT_ALLOWED))
    return SocksRequest(host, port), 4 + size + 2


def _socks_host(kind: int, content: bytes) -> str:
    if kind == _IPV4:
        return str(IPv4Address(content))
    try:
        if kind == _IPV6:
            return canonical_host(f"[{IPv6Address(content)}]")
        return canonical_host(content[1:].decode("ascii"))
    except ValueError:
        raise BadSocks("not a host name", _socks_reply(NOT_ALLOWED)) from None


def _socks_reply(code: int) -> bytes:
    """Return a SOCKS reply; the address in it means nothing."""
    return bytes([_SOCKS5, code, 0, _IPV4, 0, 0, 0, 0, 0, 0])
