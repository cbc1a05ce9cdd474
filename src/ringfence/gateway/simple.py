"""The plainest HTTP/1.1 messages, read at one look: a strict part of what h11 and our own rules take. Pure.

What is not of this form is no error here: h11 reads it, and stays the judge. A test holds the two together: what is
taken here, h11 takes, and reads in the same way (G12).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ringfence.gateway.http.request import MOST_HEADERS

LONGEST = 1 << 13  # of a request
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_LINES = rb"((?:" + _TOKEN + rb": [!-~][ -~]*+\r\n)*+)"
_REQUEST = re.compile(rb"(GET|HEAD) ([!-~]++) HTTP/1\.1\r\n" + _LINES + rb"\r\n")
_RESPONSE = re.compile(rb"HTTP/1\.1 ([2-5][0-9][0-9] [ -~]*+\r\n)" + _LINES + rb"\r\n")
_LINE = re.compile(rb"([^:]++): ([^\r]++)\r\n")
_BODILESS = (b"204", b"304")
_DROPPED = frozenset((b"keep-alive", b"proxy-connection"))  # for one connection only
# They say something about the message's end, its protocol or its connection: h11's matter, all of them.
_OTHERS = frozenset(
    b"content-length transfer-encoding te trailer expect upgrade http2-settings proxy-authorization "
    b"proxy-authenticate".split()
)


class Request(NamedTuple):
    """`rest` are its headers as they go on, without Host, as lines."""

    method: str
    target: str
    host: str
    rest: bytes
    closes: bool  # the client wants no other after it


class Response(NamedTuple):
    """`words` are for the client, all of them."""

    status: int
    words: bytes
    keeps: bool  # the server will take another request


def request(data: bytes) -> Request | None:
    """A whole request without a body, and nothing after it. None: not of this form, or not whole."""
    if len(data) > LONGEST or (found := _REQUEST.fullmatch(data)) is None:
        return None
    lines = _LINE.findall(found[3])
    hosts: list[bytes] = []
    connection: list[bytes] = []
    kept: list[bytes] = []
    for name, value in lines:
        lower = name.lower()
        if lower in _OTHERS or value[-1] == 0x20:
            return None
        if lower == b"host":
            hosts.append(value)
        elif lower == b"connection":
            connection.append(value.lower())
        elif lower not in _DROPPED:
            kept.append(name + b": " + value + b"\r\n")
    closes = connection == [b"close"]
    if len(hosts) != 1 or len(lines) > MOST_HEADERS or not (closes or connection in ([], [b"keep-alive"])):
        return None
    return Request(found[1].decode(), found[2].decode(), hosts[0].decode(), b"".join(kept), closes)


def written(asked: Request, path: str) -> bytes:
    """The request as it goes to the server."""
    return f"{asked.method} {path} HTTP/1.1\r\nHost: {asked.host}\r\n".encode() + asked.rest + b"\r\n"


def response(data: bytes, asked: Request) -> Response | None:
    """A whole response of a said length, and nothing after it. None: not of this form, or not whole."""
    if (found := _RESPONSE.match(data)) is None or found[1][:3] in _BODILESS:
        return None
    lengths: list[bytes] = []
    connection: list[bytes] = []
    kept: list[bytes] = [b"HTTP/1.1 ", found[1]]
    for name, value in _LINE.findall(found[2]):
        lower = name.lower()
        if value[-1] == 0x20:
            return None
        if lower == b"content-length":
            lengths.append(value)
        elif lower in _OTHERS:
            return None
        elif lower == b"connection":
            connection.append(value.lower())
            continue
        elif lower in _DROPPED or lower == b"alt-svc":
            continue
        kept.append(name + b": " + value + b"\r\n")
    if len(lengths) != 1 or len(lengths[0]) > 6 or not lengths[0].isdigit():
        return None
    length = 0 if asked.method == "HEAD" else int(lengths[0])
    if len(data) != found.end() + length or connection not in ([], [b"close"], [b"keep-alive"]):
        return None
    kept += [b"Connection: close\r\n\r\n" if asked.closes else b"\r\n", data[found.end() :]]
    return Response(int(found[1][:3]), b"".join(kept), not connection or connection == [b"keep-alive"])
