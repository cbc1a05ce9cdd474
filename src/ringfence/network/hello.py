"""Reads a TLS ClientHello far enough to know the name it asks for, however it is cut into records and segments (G10).

Strict: what a server could read in two ways is refused. Nothing is decrypted, nothing is kept.
"""

from __future__ import annotations

from ringfence.values import Struct, final

LONGEST = 1 << 16  # of a hello with its records: post-quantum keys and tickets fit many times
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_OLD_ENCRYPTED = (0xFFCE, 0xFF02, 0xFF03)  # drafts of the same


@final
class Hello(Struct):
    """What a hello says in clear. `server_name` is as sent, ASCII; None: it has none."""

    server_name: str | None
    encrypted: bool  # it carries an encrypted hello, which may name another server


class BadHello(Exception):  # noqa: N818  # what a guest sent, not an error of ours
    """Not a ClientHello, or one with more than one meaning."""


def looks_like_tls(first: bytes) -> bool:
    """By the first byte: no HTTP method starts with it."""
    return first[:1] == b"\x16"


def parse(data: bytes) -> Hello | None:
    """The hello at the start of `data`; None when more is needed. Raises BadHello. Costs what `data` is long."""
    message = _message(data)
    if message is None:
        if len(data) > LONGEST:
            raise BadHello("the hello is too long")
        return None
    return _read(_Reader(message))


def _message(data: bytes) -> bytes | None:
    """The handshake message, joined from its records."""
    joined = bytearray()
    at = 0
    while True:
        if len(data) < at + 5:
            _check_start(data[at:])
            return None
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != _HANDSHAKE or major != 3 or not 0 < size <= 1 << 14:
            raise BadHello("not a TLS handshake")
        joined += data[at + 5 : at + 5 + size]
        if joined and joined[0] != _CLIENT_HELLO:
            raise BadHello("not a ClientHello")
        if len(joined) >= 4:
            whole = 4 + int.from_bytes(joined[1:4], "big")
            if whole > LONGEST:
                raise BadHello("the hello is too long")
            if len(joined) > whole:
                raise BadHello("something follows the hello in its record")
            if len(joined) == whole:
                return bytes(joined[4:])
        if len(data) < at + 5 + size:
            return None
        at += 5 + size


def _check_start(head: bytes) -> None:
    if head[:1] not in (b"", b"\x16") or head[1:2] not in (b"", b"\x03"):
        raise BadHello("not a TLS handshake")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise BadHello("the hello is cut short")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    def done(self) -> bool:
        return self.at == len(self.data)


def _read(reader: _Reader) -> Hello:
    reader.take(2 + 32)  # version, random
    if len(reader.vector(1)) > 32:
        raise BadHello("the session id is too long")
    suites, compressions = reader.vector(2), reader.vector(1)
    if not suites or len(suites) % 2 or not compressions:
        raise BadHello("it offers no cipher suites")
    if reader.done():
        return Hello(None, encrypted=False)
    extensions = _Reader(reader.vector(2))
    if not reader.done():
        raise BadHello("something follows the extensions")
    return _extensions(extensions)


def _extensions(extensions: _Reader) -> Hello:
    seen: set[int] = set()
    name, encrypted = None, False
    while not extensions.done():
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in seen:
            raise BadHello("an extension comes twice")  # which of two names a server takes is its own affair
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(_Reader(content))
        encrypted = encrypted or kind == _ENCRYPTED_HELLO or kind in _OLD_ENCRYPTED
    return Hello(name, encrypted)


def _server_name(content: _Reader) -> str:
    names = _Reader(content.vector(2))
    if not content.done() or names.done():
        raise BadHello("the server name is malformed")
    kind, name = names.number(1), names.vector(2)
    if kind != 0 or not names.done() or not 0 < len(name) <= 255:
        raise BadHello("there is not exactly one server name")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise BadHello("the server name is not ASCII") from None
