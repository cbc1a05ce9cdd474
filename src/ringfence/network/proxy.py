"""The proxy inside a sandbox: HTTP requests for URLs, CONNECT and SOCKS5 on one port, told apart by the first byte."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ringfence.network import refusing, rules, socks
from ringfence.network.plain import KEPT_S, Exchange, Head, absolute, check_host, read_head
from ringfence.network.serving import serve_tunnel
from ringfence.network.splicing import reset
from ringfence.network.targets import Client, Refusal
from ringfence.policy.hosts import canonical_host, split_port

if TYPE_CHECKING:
    import socket

    from ringfence.network.registration import Open, Registration
    from ringfence.network.rules import Verdict

_FIRST_S = 15.0
_READ = 1 << 16


async def serve_proxy(registration: Registration, one: Open, sock: socket.socket) -> None:
    """One connection to the proxy, until it ends or has become a tunnel."""
    client = Client(sock)
    try:
        async with asyncio.timeout(_FIRST_S):
            client.received = await asyncio.get_running_loop().sock_recv(sock, _READ)
    except TimeoutError:
        reset(sock)
        return
    if client.received[:1] == b"\x05":
        await _serve_socks(registration, one, client)
    elif client.received:
        await _serve_http(registration, one, client)


# HTTP


async def _serve_http(registration: Registration, one: Open, client: Client) -> None:
    exchange = Exchange(registration, one)
    within = _FIRST_S
    named = ("(proxy)", 0)
    try:
        while (head := await read_head(client, within)) is not None:
            if head.method == "CONNECT":
                named = _authority(head)
                await _connect(registration, one, client, head, named)
                return
            named, path = absolute(head.target)
            verdict = _decide(registration, one, named)
            if verdict.refusal is not None:
                raise verdict.refusal
            _check_is_http(verdict)
            check_host(head, verdict.target)
            if not await exchange.forward(client, head, verdict.target, path):
                return
            within = KEPT_S
    except Refusal as refusal:
        registration.deny(*named, refusal)
        await refusing.say_and_close(client.sock, refusing.http_response(refusal))
    finally:
        exchange.close()


def _decide(registration: Registration, one: Open, named: tuple[str, int]) -> Verdict:
    verdict = registration.rules.decide(*named)
    one.verdict = verdict
    return verdict


def _check_is_http(verdict: Verdict) -> None:
    if verdict.protocol not in ("any", "http"):
        host = verdict.target.name
        line = f'protocol = "http" in the rule for {host}'
        raise Refusal("net.protocol", f"{host} is permitted for {verdict.protocol} only, not http", allow=line)


def _authority(head: Head) -> tuple[str, int]:
    try:
        name, port = split_port(head.target)
        host = canonical_host(name)
    except ValueError as error:
        raise Refusal("net.name", f"CONNECT is not for a host: {error}") from None
    if port is None:
        raise Refusal("net.bad-request", "CONNECT names no port")
    return host, port


async def _connect(registration: Registration, one: Open, client: Client, head: Head, named: tuple[str, int]) -> None:
    """Permitted and reached first, then 200: what follows is a stream like any other to that name."""
    verdict = _decide(registration, one, named)
    if verdict.refusal is not None:
        raise verdict.refusal
    client.received = head.conn.trailing_data[0]
    upstream = await _reached(registration, verdict)
    try:
        await asyncio.get_running_loop().sock_sendall(client.sock, b"HTTP/1.1 200 Connection established\r\n\r\n")
    except BaseException:
        if upstream is not None:
            upstream.close()
        raise
    await serve_tunnel(registration, one, client, upstream)


async def _reached(registration: Registration, verdict: Verdict) -> socket.socket | None:
    """Connected before the client is told so; where requests are looked at, whoever looks connects."""
    if rules.intercepted(verdict.target, registration.vault):
        return None
    return await registration.dial(verdict.target)


# SOCKS5


async def _serve_socks(registration: Registration, one: Open, client: Client) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_FIRST_S):
            wanted = await _socks_request(client)
    except TimeoutError:
        reset(client.sock)
        return
    except socks.BadSocks as error:
        registration.deny("(proxy)", 0, Refusal("net.socks", f"SOCKS: {error}"))
        await refusing.say_and_close(client.sock, error.reply)
        return
    verdict = _decide(registration, one, (wanted.host, wanted.port))
    try:
        if verdict.refusal is not None:
            raise verdict.refusal
        upstream = await _reached(registration, verdict)
    except Refusal as refusal:
        registration.deny(wanted.host, wanted.port, refusal)
        await refusing.say_and_close(client.sock, socks.reply(_socks_code(refusal)))
        return
    try:
        await loop.sock_sendall(client.sock, socks.reply(socks.OK))
    except BaseException:
        if upstream is not None:
            upstream.close()
        raise
    await serve_tunnel(registration, one, client, upstream)


async def _socks_request(client: Client) -> socks.Wanted:
    loop = asyncio.get_running_loop()
    while (offered := socks.greeting(client.received)) is None:
        await _more(client)
    without_password, used = offered
    if not without_password:
        raise socks.BadSocks("no way without a password is offered", socks.NO_METHOD)
    client.received = client.received[used:]
    await loop.sock_sendall(client.sock, socks.METHOD)
    while (found := socks.request(client.received)) is None:
        await _more(client)
    wanted, used = found
    client.received = client.received[used:]
    return wanted


async def _more(client: Client) -> None:
    data = await asyncio.get_running_loop().sock_recv(client.sock, _READ)
    if not data:
        raise socks.BadSocks("the client closed within a request")
    client.received += data


def _socks_code(refusal: Refusal) -> int:
    if refusal.verdict == "denied":
        return socks.NOT_ALLOWED
    return socks.UNREACHABLE if refusal.code in ("net.unresolved", "net.unreachable") else socks.FAILED
