"""guestd's half of the wire: frames of length, type and stream, then the payload. The host's half is ringfence.wire."""

from __future__ import annotations

import struct

from .lean import dumps

HEADER = struct.Struct("<IBI")  # payload length, type, stream
JSON, STDIN, STDOUT, STDERR, LINE = 0, 1, 2, 3, 4
# Of connections that are relayed to the gateway: where one is for, its bytes, room for more, its end; a DNS message.
OPEN, DATA, CREDIT, END, PACKET = 16, 17, 18, 19, 20


def pack(kind: int, stream: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind, stream) + payload


def message(**data: object) -> bytes:
    return pack(JSON, 0, dumps(data))


class Reader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        held = self._buffer
        held += data
        frames = []
        start = 0
        with memoryview(held) as buffer:
            while len(buffer) - start >= HEADER.size:
                length, kind, stream = HEADER.unpack_from(buffer, start)
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                frames.append((kind, stream, bytes(buffer[start + HEADER.size : end])))
                start = end
        del held[:start]
        return frames
