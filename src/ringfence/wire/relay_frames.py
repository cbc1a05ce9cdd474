"""Parses the frames by which connections inside a box reach the gateway, strictly, and parts them from all others.

Which connections there are, and what they may reach, is `network`'s. Anything but what guestd sends is a WireError.
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
ENDED, BROKEN, GONE = (
    b"\0",
    b"\1",
    b"\2",
)  # no more bytes; broken off; no more bytes, and nobody reads (never from inside)
_PLACE = struct.Struct(">4sH")
_CREDIT = struct.Struct("<I")
_SIZES: Final = {OPEN: (6, 6), DATA: (1, MOST_DATA), CREDIT: (4, 4), END: (1, 1), PACKET: (1, LONGEST_QUERY)}


class Sorter:
    """Cuts a byte stream. Holds at most one frame that is not complete, and of DATA none."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._rest = 0  # of a DATA frame
        self._stream = 0  # its

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
        """Kind, stream and payload of each of the relay's frames; kind OTHER: any other frame, whole, as it came.

        DATA comes in pieces as it arrives, uncopied. Raises WireError. Of the others only the length is checked here:
        whoever reads them does the rest.
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
    """Of what the library sends: whole frames, so that others can go between them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Every frame that is complete now."""
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
    """Of an OPEN: address and port that were connected to."""
    address, port = _PLACE.unpack(payload)
    return ".".join(map(str, address)), port


def credit(payload: bytes) -> int:
    """Raises WireError for more than there can be."""
    (count,) = _CREDIT.unpack(payload)
    if not 0 < count <= MOST:
        raise WireError(f"credit for {count} bytes")
    return int(count)


def pack_credit(count: int) -> bytes:
    return _CREDIT.pack(count)


def is_end(payload: bytes) -> bool:
    """Of an END: whether it is one, and not a break. Raises WireError for what is neither."""
    if payload not in (ENDED, BROKEN):
        raise WireError("an end of no known kind")
    return payload == ENDED
