"""Requests that a guest writes by hand: what two parsers could read in two ways is refused, what is left is HTTP."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from gateway.desk import HOST, Desk, open_desk, trusting, wait_until
from gateway.servers import Loop, Roots, Server, echo, frame, serving
from ringfence.gateway.connection import Connection
from ringfence.gateway.http.http1 import Route, serve_http1
from ringfence.gateway.http.intercept import fixed
from ringfence.gateway.stream import ByteStream
from ringfence.gateway.types import Target
from ringfence.policy.model import Rule
from ringfence.policy.secrets import Secret

VALUE = "sk-test/9f+3a=Zq7-canary"
TOKEN = Secret("TOKEN", VALUE, hosts=[HOST])


@pytest.fixture
def server(loop: Loop, roots: Roots) -> Iterator[Server]:
    with serving(loop, roots.server(HOST)) as made, trusting(roots.path):
        yield made


def _raw(desk: Desk, data: bytes, *, alpn: str = "http/1.1") -> bytes:
    """Return the answer to raw bytes, until the gateway closes the connection or nothing more comes."""
    context = ssl.create_default_context(cadata=desk.authority.certificate.decode())
    context.set_alpn_protocols([alpn])
    with socket.create_connection(("127.0.0.1", desk.port), timeout=5) as plain:
        with context.wrap_socket(plain, server_hostname=HOST) as sock:
            got = b""
            try:
                sock.sendall(data)
                while more := sock.recv(65_536):
                    got += more
                    sock.settimeout(0.2)
            except OSError:
                pass  # the gateway said no more
            return got


HEAD = f"Host: {HOST}\r\n".encode()
SMUGGLED = {
    "length twice": b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "list of lengths": b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 3, 4\r\n\r\nabc",
    "odd coding": b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "folded": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A: b\r\n c\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A: b\nX-B: c\r\n\r\n",
    "all bare LF": b"GET / HTTP/1.1\nHost: " + HOST.encode() + b"\n\n",
    "space before colon": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A : b\r\n\r\n",
    "NUL": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A: b\0\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\n" + HEAD + HEAD + b"\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no path": b"GET evil HTTP/1.1\r\n" + HEAD + b"\r\n",
    "another scheme": b"GET ftp://" + HOST.encode() + b"/ HTTP/1.1\r\n" + HEAD + b"\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "not HTTP": b"\x00\x01\x02\x03\r\n\r\n",
    "a huge head": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A: b\r\n" * 300 + b"\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_request_that_two_parsers_could_read_in_two_ways_is_refused(loop: Loop, server: Server, name: str) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        got = _raw(desk, SMUGGLED[name] + b"GET /smuggled HTTP/1.1\r\n" + HEAD + b"\r\n")
    assert server.seen == []
    assert got.startswith(b"HTTP/1.1 400 "), got[:200]
    assert b'"code": "net.malformed"' in got


@pytest.mark.parametrize(
    "url", ["https://other.example.com/", f"https://{HOST}:444/", f"https://{HOST}@other.example.com/"]
)
def test_an_absolute_target_must_name_the_same_host(loop: Loop, server: Server, url: str) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        got = _raw(desk, f"GET {url} HTTP/1.1\r\n".encode() + HEAD + b"Connection: close\r\n\r\n")
        fine = _raw(desk, f"GET https://{HOST}/x HTTP/1.1\r\n".encode() + HEAD + b"Connection: close\r\n\r\n")
    assert got.split(b" ")[1] in (b"400", b"403")
    assert fine.startswith(b"HTTP/1.1 200 ")
    assert [seen.target for seen in server.seen] == ["/x"]


def test_pipelined_requests_are_answered_in_order_and_checked_one_by_one(loop: Loop, server: Server) -> None:
    with open_desk(loop, Desk(server, rule=Rule(HOST, paths=["/ok"]))) as desk:
        names = ["/ok1", "/no", "/ok2"]
        data = b"".join(f"GET {name} HTTP/1.1\r\n".encode() + HEAD + b"\r\n" for name in names)
        got = _raw(desk, data + b"GET /ok3 HTTP/1.1\r\nConnection: close\r\n" + HEAD + b"\r\n")
    assert [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]] == [200, 403, 200, 200]
    assert [seen.target for seen in server.seen] == ["/ok1", "/ok2", "/ok3"]


def test_a_websocket_carries_the_secret_and_is_scrubbed_but_not_under_a_path_rule(loop: Loop, server: Server) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        token = desk.vault.environment["TOKEN"].encode()
        got = _raw(desk, b"GET /ws HTTP/1.1\r\n" + HEAD + upgrade + b"Authorization: " + token + b"\r\n\r\nhello")
    assert got.startswith(b"HTTP/1.1 101 ")
    rest = frame(0x80, b"*" * (len(VALUE) - 6) + b"|")
    assert got.endswith(frame(0x01, b"*" * 6) + rest + frame(0x82, b"HELLO"))
    assert server.seen[0].header("authorization") == VALUE
    with open_desk(loop, Desk(server, rule=Rule(HOST, paths=["/"]))) as desk:
        got = _raw(desk, b"GET /ws HTTP/1.1\r\n" + HEAD + upgrade + b"\r\n")
    assert b'"code": "net.upgrade"' in got
    assert len(server.seen) == 1


def test_the_bytes_of_a_websocket_are_in_the_log(loop: Loop, server: Server) -> None:
    upgrade = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + HEAD + b"\r\n"
    with open_desk(loop, Desk(server)) as desk:
        got = _raw(desk, upgrade + b"x" * 100_000)
        wait_until(lambda: desk.lines)
        ((entry, status, refusal),) = desk.lines
        assert (status, refusal, got.count(b"X")) == (101, None, 100_000)
        assert (entry.sent - 100_000 < 300, entry.received - 100_000 < 300) == (True, True)
        assert (entry.sent >= 100_000, entry.received >= 100_000) == (True, True)


def test_a_websocket_that_uses_up_a_budget_is_a_denial(loop: Loop, server: Server) -> None:
    upgrade = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + HEAD + b"\r\n"
    with open_desk(loop, Desk(server)) as desk:
        desk.upload = 50_000
        _raw(desk, upgrade + b"x" * 100_000)
        wait_until(lambda: desk.lines)
        assert desk.said == [("GET", "/ws", 101, "net.upload")]


def test_a_secrets_host_that_speaks_something_else_than_a_websocket_is_cut_off(loop: Loop, server: Server) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        token = desk.vault.environment["TOKEN"].encode()
        got = _raw(desk, b"GET /not-ws HTTP/1.1\r\n" + HEAD + upgrade + b"Authorization: " + token + b"\r\n\r\n")
        wait_until(lambda: desk.lines)
        assert desk.said == [("GET", "/not-ws", 101, "secret.encoded-response")]
    assert got.endswith(b"\r\n\r\n")


class _Peer:
    """A stream that sends the test's words and keeps everything written to it."""

    def __init__(self, *words: bytes, takes: Callable[[bytes], bool] = lambda _: True) -> None:
        self._words = list(words)
        self._takes = takes
        self._may_speak = asyncio.Event()
        self.told = b""
        self.is_closed = False

    async def receive(self, timeout_s: float = 0.0) -> bytes:
        del timeout_s
        await self._may_speak.wait()
        if not self._words:
            await asyncio.Event().wait()  # for ever
        return self._words.pop(0)

    async def send(self, data: bytes) -> None:
        if b"\r\n\r\n" in data:
            self._may_speak.set()
        if not self._takes(data):
            await asyncio.Event().wait()
        self.told += data

    def speak(self) -> None:
        self._may_speak.set()

    def is_stale(self) -> bool:
        return False

    def is_gone(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


def _exchange(asked: bytes, servers: list[_Peer], *secrets: Secret) -> bytes:
    """Return the answer to a guest that sends all of `asked` at once; `servers` are the connections, in order."""
    guest, left = _Peer(asked, b""), list(servers)
    guest.speak()
    desk = Desk(Server(echo), *secrets)

    async def connect(target: Target) -> ByteStream:
        del target
        return left.pop(0)

    async def run() -> None:
        await serve_http1(
            guest, Route(Connection(cast("socket.socket", None), desk), fixed(desk.target), connect, verified=True)
        )

    asyncio.run(asyncio.wait_for(run(), 10))
    return guest.told


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
POST = b"POST /first HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
SECOND = b"GET /second HTTP/1.1\r\n" + HEAD + b"\r\n"


def test_a_server_that_answers_before_it_took_the_last_chunk_is_asked_nothing_more() -> None:
    first = _Peer(ANSWER + b"ok", takes=lambda data: data != b"0\r\n\r\n")
    second = _Peer(ANSWER + b"OK")
    told = _exchange(POST + SECOND, [first, second])
    assert first.told.endswith(b"3\r\nabc\r\n")
    assert first.is_closed
    assert second.told.startswith(b"GET /second ")
    assert (told.count(b"\r\n\r\nok"), told.count(b"\r\n\r\nOK")) == (1, 1)


def test_a_server_that_took_everything_is_asked_again() -> None:
    first = _Peer(ANSWER + b"ok", ANSWER + b"OK")
    told = _exchange(POST + SECOND, [first])
    assert first.told.endswith(b"abc\r\n0\r\n\r\nGET /second HTTP/1.1\r\n" + HEAD + b"\r\n")
    assert (told.count(b"\r\n\r\nok"), told.count(b"\r\n\r\nOK")) == (1, 1)


def test_a_server_whose_answer_was_refused_in_the_middle_is_asked_nothing_more() -> None:
    first = _Peer(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 99\r\n\r\n")
    second = _Peer(ANSWER + b"OK")
    told = _exchange(SECOND + SECOND, [first, second], TOKEN)
    assert first.told.count(b"GET /second ") == 1
    assert first.is_closed
    assert b"secret.encoded-response" in told
    assert told.endswith(b"\r\n\r\nOK")
