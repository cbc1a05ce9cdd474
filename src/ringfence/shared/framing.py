"""guestd's half of the wire: frames of length, type and stream, then the payload. The host's half is ringfence.wire."""

from __future__ import annotations

import struct

from ringfence.shared.fast_stdlib import dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


HEADER = struct.Struct("<IBI")  # payload length, type, stream
JSON, STDIN, STDOUT, STDERR, LINE = 0, 1, 2, 3, 4
# For connections that are relayed to the gateway: the target, bytes, room for more, the end; a DNS message.
OPEN, DATA, CREDIT, END, PACKET = 16, 17, 18, 19, 20


def pack(kind: int, stream: int, payload: bytes | memoryview) -> bytes:
    return HEADER.pack(len(payload), kind, stream) + payload


def message(**data: object) -> bytes:
    return pack(JSON, 0, dumps(data))


class FrameCutter:
    """Cuts a byte stream into frames. DATA comes in pieces as it arrives: views of the input, not copies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._rest = 0  # bytes of a DATA frame that are still to come
        self._stream = 0  # the stream of that frame

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
        """Yield (type, stream, payload) of each frame. To be used up before `data` changes."""
        fresh = memoryview(data)
        while fresh:
            if self._rest:
                piece = fresh[: self._rest]
                self._rest -= len(piece)
                fresh = fresh[len(piece) :]
                yield DATA, self._stream, piece  # type: ignore[misc]  # a view, which is sent as bytes are
                continue
            held = self._buffer
            if len(held) < HEADER.size:
                missing = HEADER.size - len(held)
                held += fresh[:missing]
                fresh = fresh[missing:]
                if len(held) < HEADER.size:
                    return
            length, kind, stream = HEADER.unpack_from(held)
            if kind == DATA:
                self._rest = length
                self._stream = stream
                held.clear()
                continue
            missing = HEADER.size + length - len(held)
            held += fresh[:missing]
            fresh = fresh[missing:]
            if len(held) < HEADER.size + length:
                return
            payload = bytes(memoryview(held)[HEADER.size :])
            self._buffer = bytearray()
            yield kind, stream, payload


# ── numbers that both sides of a sandbox count with ───────────────────────────────────────────────

# Processes of the sandbox that are ours and count against RLIMIT_NPROC: PID 1, spawner.
OURS = 2
# What the spawner may start beyond the guest's limit, so that a guest at its limit can still be served (F07).
RESERVE = 5
# Variables of guestd's own environment in a container: the path of its socket, and the key that it sends there first.
DOOR, KEY = "RINGFENCE_DOOR", "RINGFENCE_KEY"
GREETING = b"listeners"  # the packet that brings a sandbox's listening sockets
BESIDES = 3  # listeners of the resolver and the proxy, beside those of the ports
# A sandbox that got no request for so long is a spare: it may do ahead what a run will need.
QUIET_S = 0.005
