"""SOCKS5: CONNECT by name or address, and nothing else; a name is one that the policy's grammar has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.gateway import socks
from ringfence.gateway.socks import BadSocks, SocksRequest
from ringfence.policy.hosts import canonical_host


def request(kind: int, address: bytes, port: int = 443, *, command: int = 1) -> bytes:
    return bytes([5, command, 0, kind]) + address + port.to_bytes(2, "big")


def named(name: bytes) -> bytes:
    return request(3, bytes([len(name)]) + name)


def test_a_greeting_says_whether_it_goes_without_a_password() -> None:
    assert socks.greeting(b"\x05\x02\x00\x02rest") == (True, 4)
    assert socks.greeting(b"\x05\x01\x02") == (False, 3)
    assert socks.greeting(b"\x05\x02\x00") is None
    with pytest.raises(BadSocks):
        socks.greeting(b"\x04\x01")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (named(b"A.Test."), SocksRequest("a.test", 443)),
        (request(1, bytes([192, 0, 2, 1])), SocksRequest("192.0.2.1", 443)),
        (request(4, bytes.fromhex("20010db8000000000000000000000001")), SocksRequest("[2001:db8::1]", 443)),
    ],
)
def test_where_it_goes_is_canonical(data: bytes, wanted: SocksRequest) -> None:
    assert socks.request(data + b"more") == (wanted, len(data))
    assert socks.request(data[:-1]) is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (request(1, bytes(4), command=2), socks.NO_COMMAND),  # BIND
        (request(1, bytes(4), command=3), socks.NO_COMMAND),  # UDP ASSOCIATE
        (request(9, bytes(4)), socks.NO_ADDRESS_TYPE),
        (named(b"evil.test\0.a.test"), socks.NOT_ALLOWED),  # PEERS: a suffix match took the end for the name
        (named(b"0x7f.1"), socks.NOT_ALLOWED),
        (named(b"2130706433"), socks.NOT_ALLOWED),
        (named(b"a_b.test"), socks.NOT_ALLOWED),
        (named(b"a.test@evil.test"), socks.NOT_ALLOWED),
        (named("ä.test".encode()), socks.NOT_ALLOWED),
        (named(b""), socks.NOT_ALLOWED),
        (request(4, bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])), socks.NOT_ALLOWED),  # mapped
        (request(1, bytes([192, 0, 2, 1]), 0), socks.NOT_ALLOWED),
    ],
)
def test_what_is_not_served_is_refused_by_its_code(data: bytes, code: int) -> None:
    with pytest.raises(BadSocks) as caught:
        socks.request(data)
    assert caught.value.reply[:2] == bytes([5, code])


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused_and_names_are_canonical(data: bytes) -> None:
    for start in (b"", b"\x05\x01\x00\x03"):
        try:
            found = socks.request(start + data)
        except BadSocks:
            continue
        if found is not None:
            assert canonical_host(found[0].host) == found[0].host
            assert 0 < found[0].port < 65536
