"""Parses the frames by which connections inside a box reach the gateway, strictly, and parts them from all others.

Which connections there are, and what they may reach, is `network`'s. Anything but what guestd sends is a WireError.
"""

from __future__ import annotations

import struct

from ringfence.wire.frames import HEADER, MAX_PAYLOAD, Frame, WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

OPEN, DATA, CREDIT, END, PACKET = 16, 17, 18, 19, 20
WINDOW = 1 << 17  # bytes of one stream that are under way in one direction; guestd has the same number
MOST_DATA = 1 << 16
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
    """Cuts a byte stream. Holds at most one frame that is not complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> tuple[list[Frame], list[bytes]]:
        """The relay's frames that are complete now, and all others as they came. Raises WireError.

        Of the others only the length is checked here: whoever reads them does the rest.
        """
        held = self._buffer
        held += data
        ours: list[Frame] = []
        others: list[bytes] = []
        start = 0
        with memoryview(held) as buffer:
            while len(buffer) - start >= HEADER.size:
                length, kind, stream = HEADER.unpack_from(buffer, start)
                _check_header(length, kind, stream)
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                if kind < OPEN:
                    others.append(bytes(buffer[start:end]))
                else:
                    ours.append(Frame(kind, stream, bytes(buffer[start + HEADER.size : end])))
                start = end
        del held[:start]
        return ours, others


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
    if not 0 < count <= WINDOW:
        raise WireError(f"credit for {count} bytes")
    return int(count)


def pack_credit(count: int) -> bytes:
    return _CREDIT.pack(count)


def is_end(payload: bytes) -> bool:
    """Of an END: whether it is one, and not a break. Raises WireError for what is neither."""
    if payload not in (ENDED, BROKEN):
        raise WireError("an end of no known kind")
    return payload == ENDED
