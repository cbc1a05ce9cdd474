"""Serves a connection to a host: finds the protocol, checks that the rules permit it, and passes the bytes on.

A connection to an address of 127.0.0.0/8 means the name that has the address; a connection to the proxy says where it
goes, and comes here afterwards.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ringfence.gateway import rules, tls_hello
from ringfence.gateway.splice import Splice
from ringfence.gateway.types import Refusal
from ringfence.policy.hosts import canonical_host, is_address

if TYPE_CHECKING:
    import socket
    from typing import Literal

    from ringfence.gateway.connection import Connection
    from ringfence.gateway.interfaces import Directory
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.types import Target

    _Way = Literal["refused", "unseen", "http", "intercepted"]

HELLO_S = 10.0  # from the connection to the end of the hello
_READ = 1 << 14
_SILENT_S = 1.0  # how long a refused client has to show its protocol


def verdict_on(directory: Directory, sock: socket.socket) -> Verdict | None:
    """Return the rules' verdict on a connection to the sandbox's own loopback; None when its address means no host."""
    address, port = sock.getsockname()
    name = directory.name_of(address)
    if name is not None:
        return directory.decide(name, port)
    words = f"{address}:{port} stands for no host: connect by name"
    directory.deny(address, port, Refusal("net.no-name", words))
    return None


async def serve_tunnel(connection: Connection, upstream: socket.socket | None) -> None:
    """Serve a stream to the one target of the connection's verdict. Owns `upstream`, the target's socket, if given."""
    verdict = connection.verdict
    assert verdict is not None
    way: _Way = "refused"
    try:
        way = await _way(connection, verdict)
    finally:
        if upstream is not None and way != "unseen":
            upstream.close()  # a reader of requests connects itself, for each request
    if way == "unseen":
        await _pass(connection, verdict.target, upstream)
    elif way == "http":
        await _serve_http(connection, verdict.target)
    elif way == "intercepted":
        from ringfence.gateway.http.intercept import intercept

        await intercept(connection, verdict.target)


async def _way(connection: Connection, verdict: Verdict) -> _Way:
    """Return how the connection is served, by what the client sends first; "refused" when the client was refused."""
    if verdict.refusal is not None:
        await _hear_and_refuse(connection, verdict.target, verdict.refusal)
        return "refused"
    if verdict.protocol == "tcp":
        return "unseen"
    try:
        first = await _first_bytes(connection)
        is_tls = tls_hello.looks_like_tls(first)
        _check_protocol(verdict, first, is_tls=is_tls)
        if is_tls:
            await _check_hello(connection, verdict.target)
    except Refusal as refusal:
        await _refuse(connection, verdict.target, refusal)
        return "refused"
    if not is_tls:
        return "http"
    return "intercepted" if rules.intercepted(verdict.target, connection.uplink.vault) else "unseen"


async def _serve_http(connection: Connection, target: Target) -> None:
    """Serve requests to a single target, which each request must name (G11)."""
    try:
        from ringfence.gateway.http.intercept import fixed, serve_plain
    except ImportError:
        await _refuse(connection, target, without_parser())
        return
    await serve_plain(connection, fixed(target))


def without_parser() -> Refusal:
    """Return the refusal of plain HTTP where h11 is missing: what cannot be read is not passed on (G12)."""
    words = "plain HTTP needs the package h11 on the host: pip install 'ringfence-sandbox[network]'; https needs none"
    return Refusal("net.unsupported", words, verdict="failed")


async def _first_bytes(connection: Connection) -> bytes:
    if not connection.received:
        try:
            async with asyncio.timeout(HELLO_S):
                connection.received = await asyncio.get_running_loop().sock_recv(connection.sock, _READ)
        except TimeoutError:
            raise Refusal("net.silent", "the client said nothing; a protocol in which the server speaks first needs "
                          'a rule with protocol = "tcp"') from None  # fmt: skip
        except OSError:
            raise Refusal("net.closed", "the client is gone", verdict="failed") from None
    if not connection.received:
        raise Refusal("net.closed", "the client closed without a word", verdict="failed")
    return connection.received


def _check_protocol(verdict: Verdict, first: bytes, *, is_tls: bool) -> None:
    host = verdict.target.name
    if not is_tls and not first[:1].isalpha():
        line = f'network.rules = [..., {{host = "{verdict.target}", protocol = "tcp"}}]'
        raise Refusal("net.protocol", f"what was sent to {host} is neither TLS nor HTTP", allow=line)
    wanted = "tls" if is_tls else "http"
    if verdict.protocol not in ("any", wanted):
        line = f'protocol = "{wanted}" in the rule for {host}'
        raise Refusal("net.protocol", f"{host} is permitted for {verdict.protocol} only, not {wanted}", allow=line)


async def _check_hello(connection: Connection, target: Target) -> None:
    """Read on until the hello is whole, and check that it names the host that the connection is for (G10)."""
    loop = asyncio.get_running_loop()
    gathering = tls_hello.Gathering()
    received = bytearray(connection.received)
    more = connection.received
    try:
        async with asyncio.timeout(HELLO_S):
            while (found := gathering.feed(more)) is None:
                more = await loop.sock_recv(connection.sock, _READ)
                if not more:
                    raise Refusal("net.closed", "the client closed within its hello", verdict="failed")
                received += more
    except TimeoutError:
        raise Refusal("net.slow", "the TLS hello did not come in time", verdict="failed") from None
    except tls_hello.BadHello as error:
        raise Refusal("net.hello", f"the TLS hello is malformed: {error}") from None
    except OSError:
        raise Refusal("net.closed", "the client is gone", verdict="failed") from None
    connection.received = bytes(received)
    _check_name(found, target)


def _check_name(found: tls_hello.ClientHello, target: Target) -> None:
    unseen = f'network.rules = [..., {{host = "{target}", protocol = "tcp"}}]'  # passes bytes unseen
    if found.encrypted:
        raise Refusal("net.ech", "an encrypted hello may name another server, and is refused", allow=unseen)
    if found.server_name is None:
        if is_address(target.name):
            return
        raise Refusal("net.no-sni", "the TLS hello names no server", allow=unseen)
    try:
        named = canonical_host(found.server_name)
    except ValueError:
        named = ""
    if named != target.name:
        raise Refusal("net.sni", f"the TLS hello names another server than {target.name}")


async def _pass(connection: Connection, target: Target, upstream: socket.socket | None) -> None:
    """Move bytes, unseen, in both directions."""
    uplink = connection.uplink
    entry = uplink.log(target)
    try:
        if upstream is None:
            upstream = await uplink.dial(target)
    except Refusal as refusal:
        uplink.finish(entry, refusal=refusal)
        await connection.refuse(refusal)
        return
    except BaseException:
        connection.reset()
        uplink.finish(entry, refusal=connection.cut)
        raise
    splice = Splice(connection, upstream, entry)
    try:
        await splice.run()
    except Refusal as refusal:
        uplink.finish(entry, refusal=refusal)
    finally:
        uplink.finish(entry, refusal=connection.cut)
        splice.close()


async def _hear_and_refuse(connection: Connection, target: Target, refusal: Refusal) -> None:
    """Wait a moment for the first bytes, whose protocol the refusal uses, then refuse."""
    if not connection.received:
        try:
            async with asyncio.timeout(_SILENT_S):
                connection.received = await asyncio.get_running_loop().sock_recv(connection.sock, _READ)
        except (TimeoutError, OSError):
            connection.received = b""
    await _refuse(connection, target, refusal)


async def _refuse(connection: Connection, target: Target, refusal: Refusal) -> None:
    connection.uplink.deny(target.name, target.port, refusal)
    await connection.refuse(refusal)
