"""The reader of zips that runs inside, fed with archives that are broken in ways no writer breaks them (K02, F21)."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.guest.files import zip_stream
from ringfence.shared.tar import Refused
from ringfence.shared.tree_pack import TransferCaps

if TYPE_CHECKING:
    from typing_extensions import Buffer

CONTENT = {"a": b"hello" * 50, "d/b": os.urandom(300), "empty": b""}


def made(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in CONTENT.items():
            archive.writestr(name, content)
    return data.getvalue()


@pytest.fixture
def fd() -> Iterator[int]:
    memory = os.memfd_create("zip")
    yield memory
    os.close(memory)


def read(fd: int, data: bytes, most: int = 100) -> dict[str, bytes]:
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    return {member.name.decode("latin-1"): b"".join(content) for member, content in zip_stream.members(fd, most)}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_python_writes_is_read(fd: int, method: int) -> None:
    assert read(fd, made(method)) == CONTENT


def test_a_zip_from_a_stream_and_one_with_64_bit_sizes_are_read(fd: int) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise io.UnsupportedOperation

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("a", "w", force_zip64=True) as file:
            file.write(b"x" * 1000)
    assert read(fd, pipe.getvalue()) == {"a": b"x" * 1000}


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_methods_are_refused(fd: int, method: int) -> None:
    with pytest.raises(Refused, match="method"):
        read(fd, made(method))


def test_more_entries_than_may_be_are_refused_before_they_are_looked_at(fd: int) -> None:
    with pytest.raises(Refused, match="files"):
        read(fd, made(), most=2)


@pytest.mark.parametrize("names", [[], ["a"]])
def test_what_lies_before_an_archive_is_refused(fd: int, names: list[str]) -> None:
    """Bytes before an archive are no part of the archive, even where the offsets leave room for them."""
    data = io.BytesIO(b"#!/bin/sh\n")
    with zipfile.ZipFile(data, "a") as archive:
        for name in names:
            archive.writestr(name, "x")
    with pytest.raises(Refused, match="not-zip"):
        read(fd, data.getvalue())


@pytest.mark.parametrize(
    ("date", "clock", "told"),
    [
        (46 << 9 | 11 << 5 | 16, 15 << 11 | 7 << 5 | 21, "2026-11-16T15:07:42"),
        (0, 0, "1980-01-01T00:00:00"),
        (127 << 9 | 15 << 5 | 31, 31 << 11 | 63 << 5 | 31, "2108-01-01T08:04:02"),
    ],
    ids=["a time", "none", "impossible"],
)
def test_an_entry_has_the_time_that_the_archive_says(fd: int, date: int, clock: int, told: str) -> None:
    data = made()
    at = data.index(b"PK\1\2") + 12
    os.pwrite(fd, data[:at] + struct.pack("<HH", clock, date) + data[at + 4 :], 0)
    member, _ = next(zip_stream.members(fd, 100))
    assert datetime.fromtimestamp(member.mtime, UTC).isoformat() == f"{told}+00:00"


def test_a_file_that_shrinks_while_it_is_packed_is_no_whole_file(fd: int) -> None:
    class Shrinking(io.BytesIO):
        def write(self, data: Buffer) -> int:
            os.ftruncate(fd, 10)
            return super().write(data)

    os.pwrite(fd, b"x" * 1000, 0)
    with pytest.raises(Refused, match="changed"):
        zip_stream.write_file(fd, b"f", Shrinking(), TransferCaps(None, None))


def test_entries_that_share_their_bytes_are_refused(fd: int) -> None:
    """The bomb without nesting: many entries of the directory, one stretch of packed bytes."""
    data = bytearray(made(zipfile.ZIP_STORED))
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    struct.pack_into("<L", data, second + 42, 0)
    with pytest.raises(Refused, match=r"overlap|mismatch"):
        read(fd, bytes(data))
    same = bytearray(made(zipfile.ZIP_STORED).replace(b"d/b", b"a\0\0"))
    struct.pack_into("<L", same, second + 42, 0)
    with pytest.raises(Refused):
        read(fd, bytes(same))


def test_more_bytes_than_announced_end_at_the_announced_number(fd: int) -> None:
    """The packed bytes hold a thousand times as much as both headers say."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", b"x" * (10 << 20))
    bomb = bytearray(data.getvalue())
    struct.pack_into("<L", bomb, 22, 100)
    struct.pack_into("<L", bomb, bomb.index(b"PK\x01\x02") + 24, 100)
    with pytest.raises(Refused, match="bomb"):
        read(fd, bytes(bomb))


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused(data: bytes) -> None:
    memory = os.memfd_create("zip")
    try:
        with pytest.raises(Refused):
            read(memory, data)
    finally:
        os.close(memory)


_GOOD = made()


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_an_archive_with_some_bytes_changed_is_refused_or_holds_what_it_held(data: st.DataObject) -> None:
    """Names may differ where both headers were hit; contents do not: their checksum stands in the directory."""
    changed = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    memory = os.memfd_create("zip")
    try:
        found = read(memory, bytes(changed))
    except Refused:
        return
    finally:
        os.close(memory)
    assert all(len(content) <= 300 for content in found.values())
    assert not any(name.startswith("/") or ".." in name.split("/") for name in found)
