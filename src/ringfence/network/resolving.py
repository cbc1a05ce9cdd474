"""Answers the guest's DNS queries for one sandbox, by UDP and TCP. No query of a guest's goes anywhere (G09)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ringfence.network import dns
from ringfence.network.names import MOST_NAMES
from ringfence.network.targets import Refusal
from ringfence.policy.hosts import canonical_host

if TYPE_CHECKING:
    import socket

    from ringfence.network.registration import Registration

_AT_ONCE = 64  # datagrams before others have their turn
_STREAM_S = 10.0
_STREAM_QUERIES = 100
_LONGEST_SHOWN = 255
NUMBER_BYTES = 4  # before a message that a relay passes on


def on_datagrams(registration: Registration, sock: socket.socket) -> None:
    """A reader of the loop's: answer what has come."""
    for _ in range(_AT_ONCE):
        try:
            data, peer = sock.recvfrom(dns.LONGEST + 1)
        except OSError:  # BlockingIOError: that was all
            return
        reply = reply_to(registration, data)
        if reply is not None:
            with contextlib.suppress(OSError):  # it does not wait for it any more
                sock.sendto(reply, peer)


def on_relayed(registration: Registration, sock: socket.socket) -> None:
    """The same for messages that a relay has numbered; an answer has the number of its query."""
    for _ in range(_AT_ONCE):
        try:
            data = sock.recv(NUMBER_BYTES + dns.LONGEST + 1)
        except OSError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(sock.fileno())  # the sandbox has ended
            return
        reply = reply_to(registration, data[NUMBER_BYTES:])
        if reply is not None:
            with contextlib.suppress(OSError):
                sock.send(data[:NUMBER_BYTES] + reply)


def reply_to(registration: Registration, data: bytes) -> bytes | None:
    """The answer to one message; None where there is nobody to answer, or the guest asks too much."""
    if not registration.queries_rate.take():
        return None
    try:
        query = dns.parse(data)
    except dns.Malformed as error:
        return error.answer
    if query.name is None:
        _deny(registration, "(bytes that are no name)", Refusal("net.name", "what was looked up is not a host name"))
    return dns.answer(query, lambda name: lookup(registration, name))


def lookup(registration: Registration, asked: str) -> str | None:
    """The address inside of a permitted name; else None, and the denial is in the log."""
    try:
        name = canonical_host(asked)
    except ValueError:
        if not _is_about_service(registration, asked):
            shown = "".join(char if char.isprintable() else "?" for char in asked[:_LONGEST_SHOWN])
            _deny(registration, shown, Refusal("net.name", f"{shown} is not a host name"))
        return None
    if not registration.rules.resolves(name):
        _deny(registration, name, registration.rules.decide(name, 0).refusal)
        return None
    address = registration.names.address_of(name)
    if address is None:
        message = f"the sandbox has looked up {MOST_NAMES} names, the most it may"
        _deny(registration, name, Refusal("net.names", message))
    return address


def _is_about_service(registration: Registration, asked: str) -> bool:
    """`_http._tcp.a.com`, which programs ask for by habit: that there is none is no news about a permitted host."""
    labels = asked.split(".")
    while labels and labels[0].startswith("_"):
        labels = labels[1:]
    try:
        return registration.rules.resolves(canonical_host(".".join(labels)))
    except ValueError:
        return False


def _deny(registration: Registration, name: str, refusal: Refusal | None) -> None:
    assert refusal is not None
    registration.deny(name, 0, refusal)


async def serve_stream(registration: Registration, sock: socket.socket) -> None:
    """DNS over TCP: a few queries on one connection, each with its length before it."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_STREAM_S):
            for _ in range(_STREAM_QUERIES):
                size = int.from_bytes(await _exactly(sock, 2), "big")
                reply = reply_to(registration, await _exactly(sock, size)) if size <= dns.LONGEST else None
                if reply is None:
                    return
                await loop.sock_sendall(sock, len(reply).to_bytes(2, "big") + reply)
    except (OSError, TimeoutError, EOFError):
        return
    finally:
        sock.close()


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(sock, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
