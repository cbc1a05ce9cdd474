"""Parses the records in which a worker inside reports a sandbox's files, and packs the orders that change files.

The bytes come from inside and are hostile: a record's kind, length and place in the stream are checked before its
content is read, JSON must hold exactly the expected fields, and everything else is a WireError.
`ringfence.snapshots.manifest` checks the rows of files; `ringfence.snapshots.take` decides which content may be named.
"""

from __future__ import annotations

from ringfence.shared.stamps import (
    AGAIN,
    CHUNK,
    DATA,
    DONE,
    END,
    ENTRY,
    GONE,
    ORDER,
    RECORD,
    STAMP,
    UNKNOWN,
)
from ringfence.wire.frames import WireError, strict_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_JSON = 1 << 18
_MOST = {ENTRY: _MAX_JSON, GONE: _MAX_JSON, DATA: CHUNK, END: 0, AGAIN: 0, DONE: _MAX_JSON}
_HEX = frozenset("0123456789abcdef")


class RecordReader:
    """A reader that cuts a stream into records. Content must follow an entry that announces it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._in_content = False
        self._is_done = False

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield kind and payload of each record that is complete. Raises WireError at the first wrong one.

        The caller passes the payload of an ENTRY to `scanned` before it asks for the next record.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= RECORD.size:
            kind, size = RECORD.unpack_from(buffer, start)
            if size > _MOST.get(kind, -1):
                raise WireError("a record of unknown kind, or too long")
            end = start + RECORD.size + size
            if len(buffer) < end:
                break
            self._check_place(kind)
            yield kind, bytes(buffer[start + RECORD.size : end])
            start = end
        del buffer[:start]

    def _check_place(self, kind: bytes) -> None:
        if self._is_done:
            raise WireError("a record after the end")
        if (kind in (DATA, END, AGAIN)) != self._in_content:
            raise WireError("content without a file, or a file without content")
        if kind in (END, AGAIN):
            self._in_content = False
        self._is_done = kind == DONE

    def scanned(self, payload: bytes) -> tuple[list[object], bytes, bool]:
        """Return an ENTRY's row with unchecked fields, its stamp, and whether content follows.

        Content follows the row of a file without a digest. Raises WireError.
        """
        said = _object(payload)
        row = said.get("row")
        if not isinstance(row, list) or len(said) != 2:
            raise WireError("a row with wrong fields")
        self._in_content = row[1:2] == ["f"] and row[-1:] == [""]
        return row, stamp(said.get("stamp")), self._in_content

    def finish(self) -> None:
        """Raise WireError where the stream ends before its last record."""
        if not self._is_done or self._buffer:
            raise WireError("a report without an end")


def names_gone(payload: bytes) -> list[object]:
    """Return the names of a GONE, which are not checked. Raises WireError when they are no list."""
    names = _object(payload).get("names")
    if not isinstance(names, list):
        raise WireError("an answer without names")
    return names


def report(payload: bytes) -> dict[str, object]:
    """Return the fields of a DONE. Raises WireError for anything but a JSON object."""
    return _object(payload)


def stamp(said: object) -> bytes:
    """Return the stamp that hexadecimal digits spell; UNKNOWN, which matches no file, for "". Raises WireError."""
    if not isinstance(said, str) or len(said) not in (0, 2 * STAMP.size) or not _HEX.issuperset(said):
        raise WireError("a malformed stamp")
    return bytes.fromhex(said) or UNKNOWN


def _object(payload: bytes) -> dict[str, object]:
    try:
        data = strict_json(payload)
    except WireError as error:
        raise WireError(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise WireError("an answer that is no object")
    return data


# ── orders for the worker ────────────────────────────────────────────────────────────────────────


def order(text: bytes) -> bytes:
    """Pack an order, which is a JSON object."""
    return RECORD.pack(ORDER, len(text)) + text


def content(chunk: bytes) -> Iterator[bytes]:
    """Pack a part of a file's content, in records of at most CHUNK bytes."""
    for start in range(0, len(chunk), CHUNK):
        part = chunk[start : start + CHUNK]
        yield RECORD.pack(DATA, len(part)) + part


def content_end() -> bytes:
    """Pack the end of a file's content."""
    return RECORD.pack(END, 0)
