"""SOCKS5 as a guest speaks it: CONNECT without a password, by name or address, and nothing else (G15)."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

from ringfence.policy.hosts import canonical_host
from ringfence.values import Struct, final

VERSION, OLD_VERSION = 5, 4
OK, FAILED, NOT_ALLOWED, UNREACHABLE, REFUSED, NO_COMMAND, NO_ADDRESS_TYPE = 0, 1, 2, 4, 5, 7, 8
NO_METHOD = b"\x05\xff"
METHOD = b"\x05\x00"
OLD_REFUSED = b"\x00\x5b" + bytes(6)  # in the words of version 4
_CONNECT, _IPV4, _NAME, _IPV6 = 1, 1, 3, 4


@final
class SocksRequest(Struct):
    """Where the guest wants to go. `host` is canonical."""

    host: str
    port: int


class BadSocks(Exception):  # noqa: N818  # what a guest sent, not our error
    """Bytes that are not SOCKS5, or ask for a part that is not served. `reply` is the answer before the end, if any."""

    def __init__(self, message: str, reply: bytes = b"") -> None:
        super().__init__(message)
        self.reply = reply


def greeting(data: bytes) -> tuple[bool, int] | None:
    """Return whether "no password" is offered, and the greeting's length; None when more bytes are needed."""
    if data[:1] not in (b"", b"\x05"):
        raise BadSocks("not SOCKS5")
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return 0 in data[2 : 2 + data[1]], 2 + data[1]


def request(data: bytes) -> tuple[SocksRequest, int] | None:
    """Return where to connect, and the request's length; None when more bytes are needed. Raises BadSocks."""
    if len(data) < 5:
        if data[:1] not in (b"", b"\x05"):
            raise BadSocks("not SOCKS5")
        return None
    version, command, reserved, kind, length = data[:5]
    if version != VERSION or reserved != 0:
        raise BadSocks("not a SOCKS5 request")
    if command != _CONNECT:
        raise BadSocks("only CONNECT is served", reply(NO_COMMAND))
    size = {_IPV4: 4, _NAME: 1 + length, _IPV6: 16}.get(kind)
    if size is None:
        raise BadSocks("an unknown kind of address", reply(NO_ADDRESS_TYPE))
    if len(data) < 4 + size + 2:
        return None
    host = _host(kind, data[4 : 4 + size])
    (port,) = struct.unpack_from("!H", data, 4 + size)
    if port == 0:
        raise BadSocks("port 0", reply(NOT_ALLOWED))
    return SocksRequest(host, port), 4 + size + 2


def _host(kind: int, content: bytes) -> str:
    if kind == _IPV4:
        return str(IPv4Address(content))
    try:
        if kind == _IPV6:
            return canonical_host(f"[{IPv6Address(content)}]")
        return canonical_host(content[1:].decode("ascii"))
    except ValueError:
        raise BadSocks("not a host name", reply(NOT_ALLOWED)) from None


def reply(code: int) -> bytes:
    """Return an answer; its address means nothing."""
    return bytes([VERSION, code, 0, _IPV4, 0, 0, 0, 0, 0, 0])
