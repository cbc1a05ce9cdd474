"""ClientHellos for tests: what a real TLS library sends, and ones made by hand."""

from __future__ import annotations

import ssl
import struct


def real(name: str | None) -> bytes:
    """Return a hello as OpenSSL sends it."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    context.verify_mode = ssl.CERT_NONE if name is None else ssl.CERT_REQUIRED
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass  # it waits for an answer, so it has spoken
    return outgoing.read()


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def server_name(*names: bytes, kind: int = 0) -> bytes:
    listed = b"".join(bytes([kind]) + vector(2, name) for name in names)
    return struct.pack("!H", 0) + vector(2, vector(2, listed))


def made(*extensions: bytes) -> bytes:
    """Return a whole hello in a single record."""
    body = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, b"\x13\x01") + vector(1, b"\0")
    return records(b"\x01" + vector(3, body + vector(2, b"".join(extensions))))


def records(message: bytes, size: int = 1 << 14) -> bytes:
    cut = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + vector(2, part) for part in cut)


def message_of(hello: bytes) -> bytes:
    """Return the content of a hello's records, joined."""
    joined, at = b"", 0
    while at < len(hello):
        size = int.from_bytes(hello[at + 3 : at + 5], "big")
        joined += hello[at + 5 : at + 5 + size]
        at += 5 + size
    return joined
