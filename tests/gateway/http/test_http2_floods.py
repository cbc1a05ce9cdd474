"""Hostile HTTP/2 from inside: a flood ends only its own connection, in bounded memory; the next connection works."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hpack
import pytest

from gateway.desk import HOST, Desk, open_desk, trusting, wait_until
from gateway.servers import Answer, Loop, Roots, Seen, Server, serving
from ringfence.gateway.http import http2
from ringfence.gateway.types import LogEntry, OverBudget, Refusal
from ringfence.policy.model import Rule
from ringfence.policy.secrets import Secret

TOKEN = Secret("TOKEN", "sk-canary-0123456789", hosts=[HOST])
HEADERS = [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/a")]
ENHANCE_YOUR_CALM = 11
MANY = 90  # requests in one read; from 100 on, they would be too many at once


@pytest.fixture
def server(loop: Loop, roots: Roots) -> Iterator[Server]:
    with serving(loop, roots.server(HOST)) as made, trusting(roots.path):
        yield made


class Guest:
    """An HTTP/2 client that also sends what no client should."""

    def __init__(self, sock: ssl.SSLSocket, *, speaks: bool = True) -> None:
        self.sock = sock
        self.http = h2.connection.H2Connection(
            h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        if speaks:
            self.http.initiate_connection()
            self.flush()

    def flush(self) -> None:
        self.sock.sendall(self.http.data_to_send())

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.sock.sendall(
            struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
        )

    def ends(self) -> int | None:
        """Return the code of the GOAWAY that ends the connection; None for an end without. TimeoutError: no end."""
        code = None
        try:
            while data := self.sock.recv(65_536):
                for event in self.http.receive_data(data):
                    if isinstance(event, h2.events.ConnectionTerminated):
                        code = int(event.error_code or 0)
        except TimeoutError:
            raise
        except (OSError, h2.exceptions.ProtocolError):
            pass  # cut off without a word is an end too
        return code

    def answers(self, streams: int) -> list[tuple[int, bytes]]:
        """Status and body of so many streams, in the order they ended."""
        status: dict[int, int] = {}
        body: dict[int, bytes] = {}
        done: list[tuple[int, bytes]] = []
        while len(done) < streams and (data := self.sock.recv(65_536)):
            for event in self.http.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    status[event.stream_id] = int(dict(event.headers)[b":status"])
                    body[event.stream_id] = b""
                elif isinstance(event, h2.events.DataReceived):
                    body[event.stream_id] += event.data
                    self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    done.append((status[event.stream_id], body[event.stream_id]))
            self.flush()
        return done


@contextmanager
def guest(desk: Desk, alpn: str = "h2") -> Iterator[Guest]:
    context = ssl.create_default_context(cadata=desk.authority.certificate.decode())
    context.set_alpn_protocols([alpn])
    with socket.create_connection(("127.0.0.1", desk.port), timeout=5) as plain:
        with context.wrap_socket(plain, server_hostname=HOST) as sock:
            yield Guest(sock, speaks=alpn == "h2")


@pytest.mark.parametrize("alpn", ["http/1.1", "h2"])
def test_a_header_that_names_another_path_is_no_trailer_either(loop: Loop, server: Server, alpn: str) -> None:
    """G23-headers: some servers join the trailers of a request to its headers."""
    with open_desk(loop, Desk(server, rule=Rule(HOST, paths=["/a"]))) as desk, guest(desk, alpn) as one:
        if alpn == "h2":
            one.http.send_headers(1, [*HEADERS, ("te", "trailers"), ("trailer", "x-original-url")])
            one.http.send_data(1, b"body")
            one.http.send_headers(1, [("x-original-url", "/admin")], end_stream=True)
            one.flush()
            assert [status for status, _ in one.answers(1)] == [200]
        else:
            head = f"POST /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\nTrailer: X-Original-URL\r\n\r\n"
            one.sock.sendall(head.encode() + b"4\r\nbody\r\n0\r\nX-Original-URL: /admin\r\n\r\n")
            assert one.sock.recv(65_536).startswith(b"HTTP/1.1 200")
    assert [(seen.body, seen.header("x-original-url")) for seen in server.seen] == [(b"body", None)]


def _still_works(desk: Desk) -> None:
    with guest(desk) as one:
        one.http.send_headers(1, HEADERS, end_stream=True)
        one.flush()
        assert [status for status, _ in one.answers(1)] == [200]


def test_rapid_resets_end_the_connection(loop: Loop, server: Server) -> None:
    def slow(seen: Seen) -> Answer:
        return Answer(parts=[b"x"], pause_s=1.0)

    server.handler = slow
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with guest(desk) as one:
            try:
                for number in range(2000):
                    stream = 1 + 2 * number
                    one.http.send_headers(stream, HEADERS, end_stream=True)
                    one.http.reset_stream(stream, 8)
                    one.flush()
            except OSError:
                pass  # cut off in the middle of it
            assert one.ends() in (ENHANCE_YOUR_CALM, None)
        assert len(server.seen) < 300
        server.handler = lambda _: Answer(parts=[b"ok"])
        _still_works(desk)


@pytest.mark.parametrize(("kind", "payload"), [(6, bytes(8)), (4, b""), (2, bytes(5)), (0xBE, b"x")])
def test_frames_that_carry_nothing_end_the_connection(loop: Loop, server: Server, kind: int, payload: bytes) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with guest(desk) as one:
            try:
                for _ in range(5000):
                    one.frame(kind, 0, 1 if kind == 2 else 0, payload)
            except OSError:
                pass  # cut off in the middle of it
            assert one.ends() in (ENHANCE_YOUR_CALM, None)
        _still_works(desk)


def test_a_flood_of_continuation_frames_ends_the_connection_in_little_memory(loop: Loop, server: Server) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with guest(desk) as one:
            tracemalloc.start()
            try:
                one.frame(1, 0, 1, hpack.Encoder().encode(HEADERS))
                for _ in range(2000):
                    one.frame(9, 0, 1, b"\x40\x01a\x7f\x80\x7f" + b"a" * 16_000)
            except OSError:
                pass  # cut off in the middle of it
            assert one.ends() != 0
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 16 << 20
        _still_works(desk)
    assert [seen.target for seen in server.seen] == ["/a"]


def test_a_header_table_bomb_ends_the_connection(loop: Loop, server: Server) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with guest(desk) as one:
            block = bytearray(hpack.Encoder().encode(HEADERS))
            block += b"\x40\x01a\x7f" + bytes([0x80 | (3800 - 127) & 0x7F, (3800 - 127) >> 7]) + b"v" * 3800
            block += b"\xbe" * 12_000  # each byte stands for the 3 800 of the table: 45 MB
            one.frame(1, 5, 1, bytes(block))
            assert one.ends() != 0
        _still_works(desk)
    assert len(server.seen) == 1


def _indexed(value: bytes) -> bytes:
    """A literal header `a` that goes into the table."""
    assert 254 < len(value) < 127 + (1 << 14)
    return b"\x40\x01a\x7f" + bytes([0x80 | (len(value) - 127) & 0x7F, (len(value) - 127) >> 7]) + value


def test_a_small_request_that_names_a_large_header_many_times_ends_the_connection(loop: Loop, server: Server) -> None:
    """A single request stays below its limit; but a hundred requests, 3 KB in all, are six million bytes to look at."""
    with open_desk(loop, Desk(server, rule=Rule(HOST, paths=["/public/"]))) as desk:
        with guest(desk) as one:
            head = b"\x82\x87\x01" + bytes([len(HOST)]) + HOST.encode() + b"\x84"  # GET https: HOST /
            one.http.send_headers(1, HEADERS, end_stream=True)
            one.http.data_to_send()  # another one goes out
            one.frame(1, 5, 1, head + _indexed(b"v" * 3900))
            assert [status for status, _ in one.answers(1)] == [403]
            one.frame(1, 5, 3, head + b"\xbe" * 15)
            assert one.ends() == ENHANCE_YOUR_CALM
        assert desk.said == [("GET", "/", 403, "net.path")]


def test_a_client_may_name_all_of_its_header_table_in_every_request(loop: Loop, server: Server) -> None:
    headers = [*HEADERS, *((f"x-{number:02}", f"{number:02}" * 40) for number in range(30))]
    with open_desk(loop, Desk(server, TOKEN)) as desk, guest(desk) as one:
        for stream in range(1, 101, 2):
            one.http.send_headers(stream, headers, end_stream=True)
            one.flush()
        assert [status for status, _ in one.answers(50)] == [200] * 50


def test_a_guest_with_room_for_a_large_header_table_does_not_fill_the_hosts_memory(
    loop: Loop, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway's own table has the headers that it wrote, and each new header is looked for in the whole table."""
    sides: list[http2.Side] = []
    begin = http2.Side.begin

    def watched(side: http2.Side, most_streams: int) -> None:
        sides.append(side)
        begin(side, most_streams)

    def answer(seen: Seen) -> Answer:
        return Answer(headers=[(f"x-{number}".encode(), seen.target.encode() * 10) for number in range(20)])

    monkeypatch.setattr(http2.Side, "begin", watched)
    server.handler = answer
    with open_desk(loop, Desk(server, TOKEN)) as desk, guest(desk) as one:
        one.http.decoder.max_allowed_table_size = 1 << 31
        one.frame(4, 0, 0, struct.pack(">HI", 1, 1 << 31))
        for stream in range(1, 41, 2):
            one.http.send_headers(stream, [*HEADERS[:3], (":path", f"/{stream}")], end_stream=True)
            one.flush()
            assert one.answers(1) == [(200, b"")]
    tables = [side.http.encoder.header_table.dynamic_entries for side in sides]
    assert [sum(len(name) + len(value) for name, value in table) <= 4096 for table in tables] == [True, True]


class _Ticking(Desk):
    """A desk that records the turn of the loop in which each request ended."""

    turn = 0

    def __init__(self, server: Server, loop: Loop) -> None:
        super().__init__(server, rule=Rule(HOST, paths=["/public/"]))
        self.turns: list[int] = []
        loop.loop.call_soon_threadsafe(self._tick, loop.loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.turn += 1
        if len(self.turns) < MANY:
            loop.call_soon(self._tick, loop)

    def finish(self, entry: LogEntry, *, status: int | None = None, refusal: Refusal | None = None) -> None:
        super().finish(entry, status=status, refusal=refusal)
        self.turns.append(self.turn)


def test_many_requests_in_one_read_leave_others_their_turns(loop: Loop, server: Server) -> None:
    with open_desk(loop, _Ticking(server, loop)) as desk, guest(desk) as one:
        for stream in range(1, 2 * MANY, 2):
            one.http.send_headers(stream, HEADERS, end_stream=True)
        one.flush()
        wait_until(lambda: len(desk.lines) == MANY)
        assert isinstance(desk, _Ticking)
        assert max(Counter(desk.turns).values()) <= 8


def test_many_requests_of_http1_in_one_read_leave_others_their_turns(loop: Loop, server: Server) -> None:
    with open_desk(loop, _Ticking(server, loop)) as desk, guest(desk, "http/1.1") as one:
        one.sock.sendall(f"GET /a HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode() * MANY)
        wait_until(lambda: len(desk.lines) == MANY)
        assert isinstance(desk, _Ticking)
        assert max(Counter(desk.turns).values()) <= 2


def test_a_huge_header_list_is_refused(loop: Loop, server: Server) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with guest(desk) as one:
            one.http.send_headers(1, [*HEADERS, ("x-a", "a" * 100_000)], end_stream=True)
            one.flush()
            assert one.ends() != 0
        _still_works(desk)
    assert len(server.seen) == 1


BAD_HEADS = {
    "another authority": [
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "other.example.com"),
        (":path", "/"),
    ],
    "another port": [(":method", "GET"), (":scheme", "https"), (":authority", f"{HOST}:444"), (":path", "/")],
    "a method that is a request line": [(":method", "GET /secret HTTP/1.1"), *HEADERS[1:]],
    "no method": [(":method", ""), *HEADERS[1:]],
    "TRACE in lower case": [(":method", "trace"), *HEADERS[1:]],
    "another host": [*HEADERS, ("host", "other.example.com")],
    "http scheme": [(":method", "GET"), (":scheme", "http"), (":authority", HOST), (":path", "/")],
    "no authority": [(":method", "GET"), (":scheme", "https"), ("host", HOST), (":path", "/")],
    "an absolute path": [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "https://x/")],
    "a space in the path": [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/a b")],
    "a line break in the path": [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/a\r\nb")],
    "CONNECT": [(":method", "CONNECT"), (":authority", HOST)],
    "TRACE": [(":method", "TRACE"), *HEADERS[1:]],
    "a line break in a header": [*HEADERS, ("x-a", "b\r\nx-c: d")],
    "transfer-encoding": [*HEADERS, ("transfer-encoding", "chunked")],
    "connection": [*HEADERS, ("connection", "upgrade")],
    "a length and no body": [*HEADERS, ("content-length", "10")],
    "a length said twice": [*HEADERS, ("content-length", "0"), ("content-length", "0")],
    "two paths": [*HEADERS, (":path", "/b")],
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_head_that_http1_would_read_in_another_way_is_never_passed_on(loop: Loop, server: Server, name: str) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with guest(desk) as one:
            one.frame(1, 5, 1, hpack.Encoder().encode(BAD_HEADS[name]))
            one.sock.settimeout(1)
            try:
                statuses = [status for status, _ in one.answers(1)]
            except (OSError, h2.exceptions.ProtocolError):
                statuses = []
            assert statuses in ([], [400], [403])
        _still_works(desk)
    assert [seen.target for seen in server.seen] == ["/a"]


def test_what_a_guest_calls_a_method_or_path_is_written_down_in_printable_words(loop: Loop, server: Server) -> None:
    head = [(b":method", b"G\x1b[2J"), (b":scheme", b"https"), (b":authority", HOST.encode()), (b":path", b"/\x1b\xe9")]
    with open_desk(loop, Desk(server, TOKEN)) as desk, guest(desk) as one:
        one.frame(1, 5, 1, hpack.Encoder().encode(head))
        wait_until(lambda: desk.lines)
        assert desk.said == [("G\\x1b[2J", "/\\x1b\\xe9", 400, "net.malformed")]


def test_a_refused_stream_leaves_the_others_alone_even_when_its_body_still_comes(loop: Loop, server: Server) -> None:
    rule = Rule(HOST, methods=["GET", "POST"], paths=["/a"])
    with open_desk(loop, Desk(server, rule=rule)) as desk, guest(desk) as one:
        bad = [(":method", "POST"), *HEADERS[1:3], (":path", "/no")]
        one.http.send_headers(1, bad)
        one.http.send_data(1, b"x" * 10_000)
        one.http.send_headers(3, HEADERS, end_stream=True)
        one.flush()
        done = one.answers(2)
    assert sorted(status for status, _ in done) == [200, 403]
    assert [seen.target for seen in server.seen] == ["/a"]


def test_a_refused_request_is_answered_where_the_client_has_no_room_for_a_body(loop: Loop, server: Server) -> None:
    with open_desk(loop, Desk(server, rule=Rule(HOST, paths=["/public/"]))) as desk, guest(desk) as one:
        one.http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        one.http.send_headers(1, HEADERS, end_stream=True)
        one.flush()
        assert one.answers(1) == [(403, b"")]
        assert desk.said == [("GET", "/a", 403, "net.path")]


def test_a_budget_that_is_used_up_before_the_first_request_is_told_as_that(loop: Loop, server: Server) -> None:
    """The server is greeted before anything is asked for."""

    class Poor(Desk):
        def count_up(self, size: int) -> None:
            del size
            self.sends = getattr(self, "sends", 0) + 1
            if self.sends > 2:  # those of the handshake
                raise OverBudget("net.upload", "the sandbox has used up its upload")

    with open_desk(loop, Poor(server, TOKEN)) as desk, contextlib.suppress(OSError), guest(desk) as one:
        one.ends()
    wait_until(lambda: desk.lines)
    assert desk.said == [(None, None, None, "net.upload")]


def test_a_guest_that_never_reads_holds_up_nobody_and_little_memory(loop: Loop, server: Server) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk, guest(desk) as slow:
        tracemalloc.start()
        for stream in range(1, 41, 2):
            slow.http.send_headers(stream, [*HEADERS[:3], (":path", "/big")], end_stream=True)
        slow.flush()
        time.sleep(0.5)
        _still_works(desk)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 24 << 20, "twenty answers of 4 MB each wait at the server, not here"


@pytest.mark.parametrize(("size", "is_reset"), [(100, False), (1 << 20, True)])
def test_the_body_of_a_refused_request_is_taken_up_to_a_size(
    loop: Loop, server: Server, size: int, is_reset: bool
) -> None:
    """A reset right after the answer would make curl forget the answer; a body that never ends is reset."""
    with open_desk(loop, Desk(server, TOKEN)) as desk, guest(desk) as one:
        headers = [(":method", "TRACE"), *HEADERS[1:]]
        one.http.send_headers(1, headers)
        one.flush()
        assert [status for status, _ in one.answers(1)] == [403]
        seen: list[h2.events.Event] = []
        sent = 0
        while sent < size and not any(isinstance(event, h2.events.StreamReset) for event in seen):
            piece = min(size - sent, 8192, one.http.local_flow_control_window(1))
            if piece:
                one.http.send_data(1, bytes(piece), end_stream=sent + piece == size)
                one.flush()
                sent += piece
            else:
                seen += one.http.receive_data(one.sock.recv(65_536))
        resets = [event.error_code for event in seen if isinstance(event, h2.events.StreamReset)]
        assert resets == ([0] if is_reset else [])
        one.http.send_headers(3, HEADERS, end_stream=True)
        one.flush()
        assert [status for status, _ in one.answers(1)] == [200]
