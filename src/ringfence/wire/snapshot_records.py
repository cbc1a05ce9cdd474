"""Parse the records in which a worker inside reports a sandbox's files, and pack those that order it to change them.

The bytes come from inside and are hostile: a record's kind, length and place in the stream are checked before its
content is looked at, JSON holds exactly the fields that it must, and everything else is a WireError. What a row says
of a file is checked by `ringfence.snapshots.manifest`; `ringfence.snapshots.take` decides which content may be named.
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


class Reader:
    """Cuts a stream into records. Content follows an entry that announces it, and stands nowhere else."""

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
                raise WireError("a record that is none, or too long")
            end = start + RECORD.size + size
            if len(buffer) < end:
                break
            self._check_place(kind)
            yield kind, bytes(buffer[start + RECORD.size : end])
            start = end
        del buffer[:start]

    def _check_place(self, kind: bytes) -> None:
        if self._is_done:
            raise WireError("something after its end")
        if (kind in (DATA, END, AGAIN)) != self._in_content:
            raise WireError("content without a file, or a file without content")
        if kind in (END, AGAIN):
            self._in_content = False
        self._is_done = kind == DONE

    def scanned(self, payload: bytes) -> tuple[list[object], bytes, bool]:
        """Return an ENTRY's row, whose fields nobody has checked, its stamp, and whether content follows it.

        It does where the row is a file's and names no digest. Raises WireError.
        """
        said = _object(payload)
        row = said.get("row")
        if not isinstance(row, list) or len(said) != 2:
            raise WireError("a row with other fields than it has")
        self._in_content = row[1:2] == ["f"] and row[-1:] == [""]
        return row, stamp(said.get("stamp")), self._in_content

    def finish(self) -> None:
        """Raise WireError where the stream ends before its last record."""
        if not self._is_done or self._buffer:
            raise WireError("no end of what was reported")


def names_gone(payload: bytes) -> list[object]:
    """Return the names of a GONE. Raises WireError when it is no list; the names themselves are not checked."""
    names = _object(payload).get("names")
    if not isinstance(names, list):
        raise WireError("an answer that is none")
    return names


def report(payload: bytes) -> dict[str, object]:
    """Return the fields of a DONE. Raises WireError when it is no JSON object."""
    return _object(payload)


def stamp(said: object) -> bytes:
    """Return the stamp that hexadecimal digits spell; UNKNOWN, which never holds, for none. Raises WireError."""
    if not isinstance(said, str) or len(said) not in (0, 2 * STAMP.size) or not _HEX.issuperset(said):
        raise WireError("a stamp that is none")
    return bytes.fromhex(said) or UNKNOWN


def _object(payload: bytes) -> dict[str, object]:
    try:
        data = strict_json(payload)
    except WireError as error:
        raise WireError(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise WireError("an answer that is none")
    return data


# ── orders for the worker ────────────────────────────────────────────────────────────────────────


def order(text: bytes) -> bytes:
    """Pack one order, a JSON object."""
    return RECORD.pack(ORDER, len(text)) + text


def content(chunk: bytes) -> Iterator[bytes]:
    """Pack a part of a file's content, in records of at most CHUNK bytes."""
    for start in range(0, len(chunk), CHUNK):
        part = chunk[start : start + CHUNK]
        yield RECORD.pack(DATA, len(part)) + part


def content_end() -> bytes:
    """Pack the end of a file's content."""
    return RECORD.pack(END, 0)
