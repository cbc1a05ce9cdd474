"""A hello is read the same however it is cut; what could name two servers is refused."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from types import FrameType
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import hellos
from ringfence.gateway import tls_hello
from ringfence.gateway.connection import Connection
from ringfence.gateway.tls_hello import BadHello, ClientHello
from ringfence.gateway.tunnel import _check_hello
from ringfence.gateway.types import Refusal, Target

if TYPE_CHECKING:
    from _typeshed import TraceFunction

    from ringfence.gateway.interfaces import Uplink

REAL = hellos.real("a.test")


def test_a_real_hello_names_its_server() -> None:
    assert tls_hello.parse(REAL) == ClientHello("a.test", encrypted=False)
    assert tls_hello.parse(hellos.real(None)) == ClientHello(None, encrypted=False)


@given(st.integers(1, 300), st.integers(0, 3000))
def test_a_hello_cut_into_records_and_segments_is_the_same(size: int, cut: int) -> None:
    whole = hellos.records(hellos.message_of(REAL), size)
    assert tls_hello.parse(whole) == ClientHello("a.test", encrypted=False)
    if cut < len(whole):
        assert tls_hello.parse(whole[:cut]) is None


@given(st.lists(st.integers(1, 50), max_size=5), st.integers(1, 300))
def test_a_hello_that_comes_in_pieces_is_the_same_as_a_whole_one(cuts: list[int], size: int) -> None:
    rest = hellos.records(hellos.message_of(REAL), size) + b"early data"
    gathering = tls_hello.Gathering()
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        assert gathering.feed(piece) is None
    assert gathering.feed(rest) == ClientHello("a.test", encrypted=False)


def test_what_follows_a_hello_in_its_record_is_refused_even_before_it_has_come() -> None:
    message = hellos.message_of(REAL)
    with pytest.raises(BadHello, match="follows"):
        tls_hello.parse(b"\x16\x03\x01" + struct.pack("!H", len(message) + 1) + message)


def _lines_run(size: int) -> int:
    """How many lines of the parser a hello costs that has so many records of a byte and comes byte by byte."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal count
        del argument
        if frame.f_code.co_filename != tls_hello.__file__:
            return None
        count += event == "line"
        return trace

    async def check() -> None:
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a byte sent is a byte read
        with theirs, ours:
            ours.setblocking(False)
            data = hellos.records(b"\x01\x00\xff\x00" + bytes(size - 4), 1)
            connection = Connection(ours, cast("Uplink", None))
            connection.received = data[:1]
            work = asyncio.create_task(_check_hello(connection, Target("a.test", 443, None)))
            for at in range(1, len(data)):
                theirs.send(data[at : at + 1])
                if at % 50 == 0:
                    await asyncio.sleep(0)
            theirs.close()
            with pytest.raises(Refusal) as caught:
                await work
            assert caught.value.code == "net.closed"

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        asyncio.run(check())
    finally:
        sys.settrace(before)
    return count


def test_a_hello_of_small_records_in_small_pieces_costs_what_it_is_long() -> None:
    """Else a guest's hellos hold up the connections of all sandboxes, which share the loop."""
    assert _lines_run(200) < 3 * _lines_run(100)


@pytest.mark.parametrize("kind", [0xFE0D, 0xFFCE, 0xFF02])
def test_an_encrypted_hello_is_seen(kind: int) -> None:
    data = hellos.made(hellos.server_name(b"a.test"), struct.pack("!H", kind) + hellos.vector(2, b"x"))
    assert tls_hello.parse(data) == ClientHello("a.test", encrypted=True)


@pytest.mark.parametrize(
    "data",
    [
        hellos.made(hellos.server_name(b"a.test"), hellos.server_name(b"b.test")),
        hellos.made(hellos.server_name(b"a.test", b"b.test")),
        hellos.made(hellos.server_name(b"a.test", kind=1)),
        hellos.made(hellos.server_name(b"")),
        hellos.made(hellos.server_name("ä".encode())),
        hellos.made(hellos.server_name(b"a.test")[:-1]),
        hellos.records(b"\x02" + hellos.message_of(REAL)[1:]),
        hellos.records(hellos.message_of(REAL) + b"\x01"),  # a second message in the same record
        hellos.records(b"\x01\xff\xff\xff" + b"x" * 100),
        b"\x16\x03\x01\x00\x00",
        b"\x16\x02\x01\x00\x05hello",
        b"\x80\x2e\x01\x03\x01",  # SSL 2
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_one_hello_with_one_name_is_refused(data: bytes) -> None:
    with pytest.raises(BadHello):
        tls_hello.parse(data)


def test_a_hello_that_never_ends_is_refused() -> None:
    piece = b"\x16\x03\x01\x00\x01"
    with pytest.raises(BadHello):
        tls_hello.parse((piece + b"\x01") + (piece + b"\x00") * 20_000)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x50\x01\x00\x00\x4c\x03\x03"):
        try:
            tls_hello.parse(start + data)
        except BadHello:
            continue


@given(st.integers(0, len(REAL) - 1), st.integers(0, 255))
def test_a_changed_byte_never_hides_the_name(at: int, value: int) -> None:
    """A hello that is accepted has the name somewhere in its bytes, as a server would read the name."""
    changed = REAL[:at] + bytes([value]) + REAL[at + 1 :]
    try:
        found = tls_hello.parse(changed)
    except BadHello:
        return
    if found is not None and found.server_name is not None:
        assert hellos.vector(2, found.server_name.encode()) in changed
