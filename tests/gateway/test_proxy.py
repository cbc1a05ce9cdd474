"""What the proxy reads itself: CONNECT, URLs of requests, and SOCKS5."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.world import World, codes
from ringfence.gateway import proxy
from ringfence.gateway.http.request import LARGEST_HEAD
from ringfence.gateway.proxy import (
    BadSocks,
    SocksRequest,
    _more,
    absolute,
    connect_request,
    socks_greeting,
    socks_request,
)
from ringfence.gateway.types import Refusal
from ringfence.policy.hosts import canonical_host


def connect(target: str, rest: str = "") -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n{rest}".encode("latin-1")


def test_connect_names_a_host_and_a_port() -> None:
    assert connect_request(connect("A.Test.:443", "more")) == (("a.test", 443), b"more")
    assert connect_request(connect("[2001:DB8::1]:443")) == (("[2001:db8::1]", 443), b"")


@pytest.mark.parametrize(
    "data",
    [
        connect("a.test"),
        connect("a.test:0"),
        connect("a.test:443:443"),
        connect("user@a.test:443"),
        connect("evil\0.a.test:443"),
        connect("0x7f.1:443"),
        connect("017700000001:443"),
        connect("[::ffff:127.0.0.1]:443"),
        connect("[::1%lo]:443"),
        connect("%61.test:443"),
        connect("http://a.test:443"),
        b"CONNECT a.test:443 HTTP/1.1\nHost: a\r\n\r\n",
        b"CONNECT a.test:443 HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"CONNECT a.test:443 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"CONNECT  a.test:443 HTTP/1.1\r\n\r\n",
        b"CONNECT a.test:443 HTTP/2.0\r\n\r\n",
        b"CONNECT a.test:443\r\n\r\n",
    ],
)
def test_another_connect_is_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        connect_request(data)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://a.test", (("a.test", 80), "/")),
        ("HTTP://A.test:8080/x?y", (("a.test", 8080), "/x?y")),
        ("http://a.test?y", (("a.test", 80), "/?y")),
    ],
)
def test_a_url_is_a_host_and_a_path(url: str, found: tuple[tuple[str, int], str]) -> None:
    assert absolute(url) == found


@pytest.mark.parametrize(
    "url",
    ["/x", "*", "https://a.test/", "ftp://a.test/", "http:///x", "http://u@a.test/", "http://a.test@evil.test/",
     "http://a.test:/", "http://a.test\\@evil.test/", "http://a.test#@evil.test/", "//a.test/", "http://0x7f.1/"],
)  # fmt: skip
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(Refusal):
        absolute(url)


@given(st.text(max_size=60))
def test_any_text_is_a_canonical_host_or_refused(text: str) -> None:
    try:
        (host, port), path = absolute(f"http://{text}")
    except Refusal:
        return
    assert canonical_host(host) == host
    assert 0 < port < 65536
    assert path.startswith("/")


def test_a_head_without_an_end_is_given_up_when_it_is_larger_than_one_can_be() -> None:
    async def fed(held: int) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(b"x" * 10)
            client = SimpleNamespace(sock=ours, received=b"x" * held)
            await _more(client)  # type: ignore[arg-type]  # has what is used of a Client
            return len(client.received)

    assert asyncio.run(fed(LARGEST_HEAD)) == LARGEST_HEAD + 10
    with pytest.raises(EOFError):
        asyncio.run(fed(LARGEST_HEAD + 1))


@pytest.mark.parametrize(
    ("sent", "answer", "code"),
    [
        (b"\x04\x01\x01\xbb\x00\x00\x00\x01me\x00a.test\x00", b"\x00\x5b" + bytes(6), "net.socks"),
        (b"\x16\x03\x01\x00\x05hello", b"\x15\x03\x03\x00\x02\x02\x31", "net.protocol"),
        (b"\x80\x2e\x01", b"reset", "net.protocol"),
    ],
    ids=["SOCKS4", "TLS", "something"],
)
def test_what_the_proxy_does_not_speak_is_refused_at_once_and_written_down(
    internet: World, sent: bytes, answer: bytes, code: str
) -> None:
    code_inside = f"""
import socket, sys
with socket.create_connection(("127.0.0.1", 3128), timeout=5) as one:
    one.sendall({sent!r})
    try: data = one.recv(100)
    except ConnectionResetError: data = b"reset"
sys.stdout.buffer.write(data)
"""
    with internet.sandbox(internet.policy("a.test")) as box:
        result = box.exec(["python3", "-c", code_inside])
    assert result.stdout_bytes == answer
    assert codes(result) == [("(proxy)", code)]


# ── SOCKS5: a name is one that the policy's grammar has ───


def socks_bytes(kind: int, address: bytes, port: int = 443, *, command: int = 1) -> bytes:
    return bytes([5, command, 0, kind]) + address + port.to_bytes(2, "big")


def socks_named(name: bytes) -> bytes:
    return socks_bytes(3, bytes([len(name)]) + name)


def test_a_greeting_says_whether_it_goes_without_a_password() -> None:
    assert socks_greeting(b"\x05\x02\x00\x02rest") == (True, 4)
    assert socks_greeting(b"\x05\x01\x02") == (False, 3)
    assert socks_greeting(b"\x05\x02\x00") is None
    with pytest.raises(BadSocks):
        socks_greeting(b"\x04\x01")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (socks_named(b"A.Test."), SocksRequest("a.test", 443)),
        (socks_bytes(1, bytes([192, 0, 2, 1])), SocksRequest("192.0.2.1", 443)),
        (socks_bytes(4, bytes.fromhex("20010db8000000000000000000000001")), SocksRequest("[2001:db8::1]", 443)),
    ],
)
def test_where_it_goes_is_canonical(data: bytes, wanted: SocksRequest) -> None:
    assert socks_request(data + b"more") == (wanted, len(data))
    assert socks_request(data[:-1]) is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (socks_bytes(1, bytes(4), command=2), proxy.NO_COMMAND),  # BIND
        (socks_bytes(1, bytes(4), command=3), proxy.NO_COMMAND),  # UDP ASSOCIATE
        (socks_bytes(9, bytes(4)), proxy.NO_ADDRESS_TYPE),
        (socks_named(b"evil.test\0.a.test"), proxy.NOT_ALLOWED),  # PEERS: a suffix match took the end for the name
        (socks_named(b"0x7f.1"), proxy.NOT_ALLOWED),
        (socks_named(b"2130706433"), proxy.NOT_ALLOWED),
        (socks_named(b"a_b.test"), proxy.NOT_ALLOWED),
        (socks_named(b"a.test@evil.test"), proxy.NOT_ALLOWED),
        (socks_named("ä.test".encode()), proxy.NOT_ALLOWED),
        (socks_named(b""), proxy.NOT_ALLOWED),
        (socks_bytes(4, bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])), proxy.NOT_ALLOWED),  # mapped
        (socks_bytes(1, bytes([192, 0, 2, 1]), 0), proxy.NOT_ALLOWED),
    ],
)
def test_what_is_not_served_is_refused_by_its_code(data: bytes, code: int) -> None:
    with pytest.raises(BadSocks) as caught:
        socks_request(data)
    assert caught.value.reply[:2] == bytes([5, code])


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused_and_names_are_canonical(data: bytes) -> None:
    for start in (b"", b"\x05\x01\x00\x03"):
        try:
            found = socks_request(start + data)
        except BadSocks:
            continue
        if found is not None:
            assert canonical_host(found[0].host) == found[0].host
            assert 0 < found[0].port < 65536
