"""A single loop serves every sandbox: however much a read brings, other connections get a turn after a few events."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import cast

import h11
import pytest

from gateway.desk import HOST, Desk, open_desk, wait_until
from gateway.servers import Loop, Server
from gateway.world import listening
from ringfence.gateway.http.request import LONGEST_JUDGED, permitted

MANY = 500
HEAD = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
CHUNKS = b"1\r\nx\r\n" * MANY + b"0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class _Port:
    def __init__(self, port: int) -> None:
        self.port = port


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (HEAD + CHUNKS, LAST),
        (HEAD.replace(b" / ", b" /other ") + CHUNKS, b""),  # which is refused, and its body is taken all the same
        (f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(), b"HTTP/1.1 102 Processing\r\n\r\n" * MANY + LAST),
        (
            f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        ),
    ],
    ids=["body", "refused body", "1xx", "response"],
)
def test_many_small_parts_in_one_read_leave_others_their_turns(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, asked: bytes, answered: bytes
) -> None:
    """A body in chunks of one byte held the gateway up for half a minute, for all sandboxes."""
    turn, events, over = 0, Counter[int](), False
    next_event = h11.Connection.next_event

    def counted(self: h11.Connection) -> object:
        events[turn] += 1
        return next_event(self)

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not over:
            asyncio.get_running_loop().call_soon(tick)

    def serve(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"\r\n\r\n") or (asked.endswith(CHUNKS) and not data.endswith(b"0\r\n\r\n")):
            data += connection.recv(65_536)
        connection.sendall(answered)
        connection.recv(1)

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    with listening(serve) as port:
        desk = Desk(cast("Server", _Port(port)))
        if b"/other" in asked:
            monkeypatch.setattr(desk, "dial", None)  # it is refused before: Host is another's
            asked = asked.replace(HOST.encode(), b"other.example.com")
        with open_desk(loop, desk, tls=False), socket.create_connection(("127.0.0.1", desk.port), timeout=5) as one:
            loop.loop.call_soon_threadsafe(tick)
            one.sendall(asked)
            wait_until(lambda: bool(desk.lines))
            one.shutdown(socket.SHUT_WR)
            while one.recv(65_536):
                pass
            over = True
    assert sum(events.values()) > MANY
    assert max(events.values()) <= 20


def test_a_path_that_would_take_long_to_judge_is_not_permitted() -> None:
    assert permitted("/v1/" + "%25" * ((LONGEST_JUDGED - 4) // 3), ["/v1/"])
    with pytest.raises(ValueError, match="longer than"):
        permitted("/v1/" + "%25" * LONGEST_JUDGED, ["/v1/"])
