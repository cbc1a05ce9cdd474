"""What happens to one connection of a guest's: to which name, by which protocol, and whether that is permitted.

A connection to an address of 127.0.0.0/8 means the name that has it; the proxy's connections say where they go.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ringfence.gateway import rules, tls_hello
from ringfence.gateway.refuse import refuse
from ringfence.gateway.splice import Splice, reset
from ringfence.gateway.types import Client, Refusal
from ringfence.policy.hosts import canonical_host, is_address

if TYPE_CHECKING:
    import socket

    from ringfence.gateway.registration import Open, Registration
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.types import Entry, Target

HELLO_S = 10.0  # from the connection to the end of the hello
_READ = 1 << 14
_SILENT_S = 1.0  # a client that is refused anyway: how long we wait to hear in which protocol


def named(registration: Registration, sock: socket.socket) -> Verdict | None:
    """What the rules say to a connection to a port of the sandbox's own loopback; None when it stands for no host."""
    address, port = sock.getsockname()
    name = registration.names.name_of(address)
    if name is not None:
        return registration.rules.decide(name, port)
    words = f"{address}:{port} stands for no host: connect by name"
    registration.deny(address, port, Refusal("net.no-name", words))
    return None


async def serve_tunnel(registration: Registration, one: Open, client: Client, upstream: socket.socket | None) -> None:
    """A stream to one target, whose verdict `one` has. `upstream` is connected already, or not yet."""
    verdict = one.verdict
    assert verdict is not None
    try:
        if verdict.refusal is not None:
            await _hear_and_refuse(registration, client, verdict.target, verdict.refusal)
        elif verdict.protocol == "tcp":
            await _pass(registration, one, client, upstream)
            upstream = None
        else:
            kept, upstream = upstream, None
            await _look(registration, one, client, kept)
    finally:
        if upstream is not None:
            upstream.close()


async def _look(registration: Registration, one: Open, client: Client, upstream: socket.socket | None) -> None:
    verdict = one.verdict
    assert verdict is not None
    try:
        first = await _first_bytes(client)
        is_tls = tls_hello.looks_like_tls(first)
        _check_protocol(verdict, first, is_tls=is_tls)
        if is_tls:
            await _check_hello(client, verdict.target)
    except Refusal as refusal:
        if upstream is not None:
            upstream.close()
        await _refuse(registration, client, verdict.target, refusal)
        return
    except BaseException:
        if upstream is not None:
            upstream.close()
        raise
    if not is_tls:
        if upstream is not None:
            upstream.close()  # whoever reads requests connects for each as it needs
        await serve_http(registration, client, verdict.target)
    elif rules.intercepted(verdict.target, registration.vault):
        if upstream is not None:
            upstream.close()
        from ringfence.gateway.http.intercept import intercept

        await intercept(client, verdict.target, registration)
    else:
        await _pass(registration, one, client, upstream)


async def serve_http(registration: Registration, client: Client, target: Target) -> None:
    """Requests to one target; its name is checked again for each (G11)."""
    try:
        from ringfence.gateway.http.intercept import fixed, serve_plain
    except ImportError:
        await _refuse(registration, client, target, without_parser())
        return
    await serve_plain(client, registration, fixed(target))


def without_parser() -> Refusal:
    """Return the refusal of plain HTTP where h11 is missing: what cannot be read is not passed on (G12)."""
    words = "plain HTTP needs the package h11 on the host: pip install 'ringfence[network]'; https needs none"
    return Refusal("net.unsupported", words, verdict="failed")


async def _first_bytes(client: Client) -> bytes:
    if not client.received:
        try:
            async with asyncio.timeout(HELLO_S):
                client.received = await asyncio.get_running_loop().sock_recv(client.sock, _READ)
        except TimeoutError:
            raise Refusal("net.silent", "the client said nothing; a protocol in which the server speaks first needs "
                          'a rule with protocol = "tcp"') from None  # fmt: skip
        except OSError:
            raise Refusal("net.closed", "the client is gone", verdict="failed") from None
    if not client.received:
        raise Refusal("net.closed", "the client closed without a word", verdict="failed")
    return client.received


def _check_protocol(verdict: Verdict, first: bytes, *, is_tls: bool) -> None:
    host = verdict.target.name
    if not is_tls and not first[:1].isalpha():
        line = f'network.rules = [..., {{host = "{verdict.target}", protocol = "tcp"}}]'
        raise Refusal("net.protocol", f"what was sent to {host} is neither TLS nor HTTP", allow=line)
    wanted = "tls" if is_tls else "http"
    if verdict.protocol not in ("any", wanted):
        line = f'protocol = "{wanted}" in the rule for {host}'
        raise Refusal("net.protocol", f"{host} is permitted for {verdict.protocol} only, not {wanted}", allow=line)


async def _check_hello(client: Client, target: Target) -> None:
    """Read on until the hello is whole; its name must be the one that the connection is for (G10)."""
    loop = asyncio.get_running_loop()
    gathering, received, more = tls_hello.Gathering(), bytearray(client.received), client.received
    try:
        async with asyncio.timeout(HELLO_S):
            while (found := gathering.feed(more)) is None:
                more = await loop.sock_recv(client.sock, _READ)
                if not more:
                    raise Refusal("net.closed", "the client closed within its hello", verdict="failed")
                received += more
    except TimeoutError:
        raise Refusal("net.slow", "the TLS hello did not come in time", verdict="failed") from None
    except tls_hello.BadHello as error:
        raise Refusal("net.hello", f"the TLS hello is malformed: {error}") from None
    except OSError:
        raise Refusal("net.closed", "the client is gone", verdict="failed") from None
    client.received = bytes(received)
    _check_name(found, target)


def _check_name(found: tls_hello.Hello, target: Target) -> None:
    unseen = f'network.rules = [..., {{host = "{target}", protocol = "tcp"}}]'  # whose bytes nobody looks at
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


async def _pass(registration: Registration, one: Open, client: Client, upstream: socket.socket | None) -> None:
    """Bytes, unseen, in both directions."""
    verdict = one.verdict
    assert verdict is not None
    entry = registration.log(verdict.target)
    try:
        if upstream is None:
            upstream = await registration.dial(verdict.target)
    except Refusal as refusal:
        registration.finish(entry, refusal=refusal)
        await refuse(client.sock, client.received, refusal)
        return
    except BaseException:
        reset(client.sock)
        registration.finish(entry, refusal=one.cut)
        raise
    await _splice(registration, one, entry, Splice(client.sock, upstream, registration, entry, client.received))


async def _splice(registration: Registration, one: Open, entry: Entry, splice: Splice) -> None:
    try:
        await splice.run()
    except Refusal as refusal:
        registration.finish(entry, refusal=refusal)
    finally:
        registration.finish(entry, refusal=one.cut)
        splice.close()


async def _hear_and_refuse(registration: Registration, client: Client, target: Target, refusal: Refusal) -> None:
    """What the client speaks decides how it is told."""
    if not client.received:
        try:
            async with asyncio.timeout(_SILENT_S):
                client.received = await asyncio.get_running_loop().sock_recv(client.sock, _READ)
        except (TimeoutError, OSError):
            client.received = b""
    await _refuse(registration, client, target, refusal)


async def _refuse(registration: Registration, client: Client, target: Target, refusal: Refusal) -> None:
    registration.deny(target.name, target.port, refusal)
    await refuse(client.sock, client.received, refusal)
