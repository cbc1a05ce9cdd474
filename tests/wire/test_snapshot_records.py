"""A worker's report of files is hostile: what no honest worker sends is a WireError, and nothing after it is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.shared.stamps import AGAIN, CHUNK, DATA, DONE, END, ENTRY, GONE, RECORD, STAMP, UNKNOWN
from ringfence.wire import snapshot_records as records
from ringfence.wire.frames import WireError

A_STAMP = "5a" * STAMP.size
FILE = ["f", "f", 0o644, 0, 3, ""]
FOLDER = ["d", "d", 0o755, 0, 0, ""]


def record(kind: bytes, payload: bytes = b"") -> bytes:
    return RECORD.pack(kind, len(payload)) + payload


def entry(row: object, stamp: object = A_STAMP, **more: object) -> bytes:
    return record(ENTRY, json.dumps({"row": row, "stamp": stamp, **more}).encode())


def read(*pieces: bytes) -> list[tuple[bytes, bytes]]:
    """Every record, with entries taken as `Taking` takes them, and the end checked."""
    reader = records.RecordReader()
    found = []
    for piece in pieces:
        for kind, payload in reader.feed(piece):
            found.append((kind, payload))
            if kind == ENTRY:
                reader.scanned(payload)
    reader.finish()
    return found


WHOLE = entry(FOLDER) + entry(FILE) + record(DATA, b"abc") + record(END) + record(GONE, b"{}") + record(DONE, b"{}")


@given(st.lists(st.integers(0, len(WHOLE)), max_size=6).map(sorted))
def test_any_cut_of_the_stream_gives_the_same_records(cuts: list[int]) -> None:
    ends = [*cuts, len(WHOLE)]
    pieces = [WHOLE[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
    assert [kind for kind, _ in read(*pieces)] == [ENTRY, ENTRY, DATA, END, GONE, DONE]


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (RECORD.pack(b"?", 0), "a record of unknown kind, or too long"),
        (RECORD.pack(ENTRY, (1 << 18) + 1), "a record of unknown kind, or too long"),
        (RECORD.pack(DATA, CHUNK + 1), "a record of unknown kind, or too long"),
        (record(END, b"x"), "a record of unknown kind, or too long"),
        (record(DATA, b"x"), "content without a file, or a file without content"),
        (entry(FOLDER) + record(AGAIN), "content without a file, or a file without content"),
        (entry(FILE) + entry(FILE), "content without a file, or a file without content"),
        (entry(FILE) + record(DONE, b"{}"), "content without a file, or a file without content"),
        (entry(FILE) + record(END) + record(END), "content without a file, or a file without content"),
        (record(DONE, b"{}") + record(DONE, b"{}"), "a record after the end"),
        (record(DONE, b"{}") + b"x", "a report without an end"),
        (entry(FOLDER), "a report without an end"),
        (entry("row"), "a row with wrong fields"),
        (entry(FOLDER, more=1), "a row with wrong fields"),
        (entry(FOLDER, stamp="5A" * STAMP.size), "a malformed stamp"),
        (entry(FOLDER, stamp="5a"), "a malformed stamp"),
        (entry(FOLDER, stamp=None), "a malformed stamp"),
        (record(ENTRY, b"[]"), "an answer that is no object"),
        (record(ENTRY, b"{"), "no JSON"),
    ],
)
def test_what_no_honest_worker_sends_is_refused(stream: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        read(stream)


@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_a_wire_error(data: bytes) -> None:
    try:
        found = read(data)
    except WireError:
        return
    assert found[-1][0] == DONE


def test_names_and_stamps_are_of_their_types() -> None:
    assert records.names_gone(b'{"names": ["a", 5]}') == ["a", 5]
    assert records.stamp("") == UNKNOWN
    with pytest.raises(WireError, match="an answer without names"):
        records.names_gone(b'{"names": "a"}')


@given(st.binary(max_size=3 * CHUNK))
def test_content_is_packed_whole_in_records_of_the_permitted_size(data: bytes) -> None:
    packed = list(records.content(data))
    assert b"".join(part[RECORD.size :] for part in packed) == data
    assert all(RECORD.unpack_from(part) == (DATA, len(part) - RECORD.size) for part in packed)
    assert all(len(part) <= RECORD.size + CHUNK for part in packed)
