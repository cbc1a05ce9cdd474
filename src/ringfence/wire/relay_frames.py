"""Parses the frames by which connections inside a sandbox reach the gateway, strictly; separates all other frames.

`gateway/relay` keeps the connections and decides what they may reach. Anything that guestd never sends is a WireError.
"""

from __future__ import annotations

import struct

from ringfence.shared.credit import MOST
from ringfence.wire.frames import HEADER, MAX_PAYLOAD, WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

OPEN, DATA, CREDIT, END, PACKET = 16, 17, 18, 19, 20
OTHER = -1
MOST_DATA = 1 << 21
LONGEST_QUERY = 4096
ENDED = b"\0"  # no more bytes
BROKEN = b"\1"  # broken off
GONE = b"\2"  # no more bytes, and no process reads; never sent from inside
_PLACE = struct.Struct(">4sH")
_CREDIT = struct.Struct("<I")
_SIZES: Final = {OPEN: (6, 6), DATA: (1, MOST_DATA), CREDIT: (4, 4), END: (1, 1), PACKET: (1, LONGEST_QUERY)}


class Sorter:
    """A reader that cuts a byte stream into frames. Keeps at most one incomplete frame, and no payload of DATA."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._rest = 0  # bytes of a DATA frame that have not arrived
        self._stream = 0  # the stream of this DATA frame

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
        """Yield kind, stream and payload of each relay frame; yield any other frame whole, with the kind OTHER.

        DATA is yielded in pieces as it arrives, uncopied. Only the length of other frames is checked here; their reader
        checks the rest. Raises WireError.
        """
        fresh = memoryview(data)
        while fresh:
            if self._rest:
                piece = fresh[: self._rest]
                self._rest -= len(piece)
                fresh = fresh[len(piece) :]
                yield DATA, self._stream, piece  # type: ignore[misc]  # a view, which is sent as bytes are
                continue
            fresh = self._fill(fresh, HEADER.size)
            if len(self._buffer) < HEADER.size:
                return
            length, kind, stream = HEADER.unpack_from(self._buffer)
            _check_header(length, kind, stream)
            if kind == DATA:
                self._rest, self._stream = length, stream
                self._buffer.clear()
                continue
            fresh = self._fill(fresh, HEADER.size + length)
            if len(self._buffer) < HEADER.size + length:
                return
            whole, self._buffer = bytes(self._buffer), bytearray()
            if kind < OPEN:
                yield OTHER, 0, whole
            else:
                yield kind, stream, whole[HEADER.size :]

    def _fill(self, fresh: memoryview, wanted: int) -> memoryview:
        missing = max(0, wanted - len(self._buffer))
        self._buffer += fresh[:missing]
        return fresh[missing:]


class Cutter:
    """A reader that cuts the library's own bytes into whole frames, so that relay frames can go between."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return every frame that is complete now."""
        held = self._buffer
        held += data
        start = 0
        while len(held) - start >= HEADER.size:
            end = start + HEADER.size + HEADER.unpack_from(held, start)[0]
            if len(held) < end:
                break
            start = end
        whole = bytes(held[:start])
        del held[:start]
        return whole


def _check_header(length: int, kind: int, stream: int) -> None:
    if kind < OPEN:
        if length > MAX_PAYLOAD:
            raise WireError(f"a frame of {length} bytes: the most is {MAX_PAYLOAD}")
        return
    if kind not in _SIZES or not stream:
        raise WireError(f"a frame of unknown type {kind}, or without a stream")
    least, most = _SIZES[kind]
    if not least <= length <= most:
        raise WireError(f"a relay frame of {length} bytes")


def place(payload: bytes) -> tuple[str, int]:
    """Return the address and port of an OPEN, to which the guest connected."""
    address, port = _PLACE.unpack(payload)
    return ".".join(map(str, address)), port


def credit(payload: bytes) -> int:
    """Return the count of a CREDIT. Raises WireError for an impossible count."""
    (count,) = _CREDIT.unpack(payload)
    if not 0 < count <= MOST:
        raise WireError(f"credit for {count} bytes")
    return int(count)


def pack_credit(count: int) -> bytes:
    return _CREDIT.pack(count)


def is_end(payload: bytes) -> bool:
    """Return True for an END that ended and False for one broken off. Raises WireError for any other payload."""
    if payload not in (ENDED, BROKEN):
        raise WireError("an end of no known kind")
    return payload == ENDED
