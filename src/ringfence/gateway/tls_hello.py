"""Reads the server name of a TLS ClientHello, however the hello is cut into records and segments (G10).

The parser is strict: bytes that a server could read in two ways are refused. Nothing is decrypted or kept.
"""

from __future__ import annotations

from ringfence.values import Struct, final

LONGEST = 1 << 16  # of a hello with its records: post-quantum keys and tickets fit many times
_RECORD_HEAD = 5
_HANDSHAKE = b"\x16\x03"  # the kind of record, and the first half of any version
_CLIENT_HELLO = 1
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_OLD_ENCRYPTED = (0xFFCE, 0xFF02, 0xFF03)  # of its drafts


@final
class ClientHello(Struct):
    """The readable part of a hello. `server_name` is as sent, ASCII; None if the hello has no name."""

    server_name: str | None
    encrypted: bool  # the hello carries an encrypted hello, which may name another server


class BadHello(Exception):  # noqa: N818  # what a guest sent, not our error
    """Bytes that are not a ClientHello, or have more than one meaning."""


def looks_like_tls(first: bytes) -> bool:
    """Return whether the first byte is that of a TLS handshake: no HTTP method starts with it."""
    return first[:1] == b"\x16"


def parse(data: bytes) -> ClientHello | None:
    """Return the hello at the start of `data`; None when more is needed. Linear in `data`. Raises BadHello."""
    return Gathering().feed(data)


class Gathering:
    """A hello that comes in pieces. Each byte is read once.

    A reader that began again with every piece would let a guest hold up all sandboxes, by records of a byte (G10).
    """

    def __init__(self) -> None:
        self._head = bytearray()  # of a record, while it is not whole
        self._left = 0  # of a record, after its head
        self._message = bytearray()
        self._taken = 0

    def feed(self, data: bytes) -> ClientHello | None:
        """Return the hello, None while more is needed; what follows its last record is ignored. Raises BadHello."""
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                self._message += part
                if self._is_whole():
                    return _read(_HelloReader(bytes(self._message[4:])))
            else:
                part = data[at : at + _RECORD_HEAD - len(self._head)]
                self._head += part
                self._begin_record()
            at += len(part)
        self._taken += len(data)
        if self._taken > LONGEST:
            raise BadHello("the hello is too long")
        return None

    def _begin_record(self) -> None:
        head = self._head
        if not _HANDSHAKE.startswith(head[:2]):
            raise BadHello("not a TLS handshake")
        if len(head) == _RECORD_HEAD:
            self._left = int.from_bytes(head[3:], "big")
            if not 0 < self._left <= 1 << 14:
                raise BadHello("not a TLS handshake")
            head.clear()

    def _is_whole(self) -> bool:
        message = self._message
        if message[0] != _CLIENT_HELLO:
            raise BadHello("not a ClientHello")
        if len(message) < 4:
            return False
        whole = 4 + int.from_bytes(message[1:4], "big")
        if whole > LONGEST:
            raise BadHello("the hello is too long")
        if len(message) > whole or (self._left and len(message) == whole):
            raise BadHello("something follows the hello in its record")
        return len(message) == whole


class _HelloReader:
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


def _read(reader: _HelloReader) -> ClientHello:
    reader.take(2 + 32)  # version, random
    if len(reader.vector(1)) > 32:
        raise BadHello("the session id is too long")
    suites = reader.vector(2)
    compressions = reader.vector(1)
    if not suites or len(suites) % 2 or not compressions:
        raise BadHello("it offers no cipher suites")
    if reader.done():
        return ClientHello(None, encrypted=False)
    extensions = _HelloReader(reader.vector(2))
    if not reader.done():
        raise BadHello("something follows the extensions")
    return _extensions(extensions)


def _extensions(extensions: _HelloReader) -> ClientHello:
    seen: set[int] = set()
    name = None
    encrypted = False
    while not extensions.done():
        kind = extensions.number(2)
        content = extensions.vector(2)
        if kind in seen:
            raise BadHello("an extension comes twice")  # servers differ in which of two names they take
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(_HelloReader(content))
        encrypted = encrypted or kind == _ENCRYPTED_HELLO or kind in _OLD_ENCRYPTED
    return ClientHello(name, encrypted)


def _server_name(content: _HelloReader) -> str:
    names = _HelloReader(content.vector(2))
    if not content.done() or names.done():
        raise BadHello("the server name is malformed")
    kind = names.number(1)
    name = names.vector(2)
    if kind != 0 or not names.done() or not 0 < len(name) <= 255:
        raise BadHello("there is not exactly one server name")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise BadHello("the server name is not ASCII") from None
