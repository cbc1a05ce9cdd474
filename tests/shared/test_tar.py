"""The strict reader of tar: what transfers and images refuse alike, since one class reads the headers of both (K01)."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.images.tar_reader import TarError, TarStream
from ringfence.shared.tar import BLOCK, END, Member, Refused, TarReader

NAME = "name-" * 30  # longer than a header has room for


def block(name: str, flag: bytes, data: bytes = b"") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), flag
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def pax(key: str, value: str, flag: bytes = b"x") -> bytes:
    line = f" {key}={value}\n"
    length = next(n for n in range(len(line), len(line) + 5) if len(str(n)) + len(line) == n)
    return block("pax", flag, f"{length}{line}".encode())


def transferred(data: bytes, step: int = 1 << 20) -> list[tuple[str, int]] | str:
    """Return names and sizes as a transfer reads them, or the word of its refusal."""
    reader = TarReader()
    try:
        pieces = [each for at in range(0, len(data), step) for each in reader.feed(data[at : at + step])]
        reader.finish()
    except Refused as error:
        return error.why
    return [(each.name.decode(), each.size) for each in pieces if isinstance(each, Member)]


def imported(data: bytes) -> list[tuple[str, int]] | None:
    """Return names and sizes as an image is read; None when it is refused."""
    try:
        return [(each.name, each.size) for each in TarStream(io.BytesIO(data).read)]
    except TarError:
        return None


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (block("././@LongLink", b"L", b"a\0b\0") + block("x", b"0"), "name"),
        (block("././@LongLink", b"L", b"\0") + block("x", b"0"), "name"),
        (block("././@LongLink", b"L", b"") + block("x", b"0"), "header"),
        (block("././@LongLink", b"L", b"a" * (1 << 21)) + block("x", b"0"), "header"),
        (block("././@LongLink", b"L", b"a\0") + pax("path", "b") + block("x", b"0"), "two-names"),
        (block("././@LongLink", b"K", b"a\0") + pax("linkpath", "b") + block("x", b"2"), "two-names"),
        (pax("path", "a\0b") + block("x", b"0"), "name"),
        (pax("path", "a", flag=b"g") + block("x", b"0"), "global"),
        (pax("size", "7", flag=b"g") + block("x", b"0"), "global"),
        (pax("mtime", "1") * 9 + block("x", b"0"), "headers"),
        (pax("path", "a"), "cut-short"),
        (pax("GNU.sparse.major", "1") + block("x", b"0"), "sparse"),
        (b"0" * BLOCK, "not-tar"),
    ],
)
def test_a_header_that_says_two_things_or_nothing_is_refused_everywhere(data: bytes, word: str) -> None:
    assert transferred(data + END) == word
    assert imported(data + END) is None


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (block("././@LongLink", b"L", NAME.encode() + b"\0") + block("x", b"0", b"12"), [(NAME, 2)]),
        (pax("path", NAME) + block("x", b"0", b"12") + block("y", b"0"), [(NAME, 2), ("y", 0)]),
        (pax("comment", "a revision", flag=b"g") + block("x", b"0"), [("x", 0)]),
        (pax("size", "3") + block("x", b"0") + b"123" + bytes(509), [("x", 3)]),
        (pax("mtime", "1") * 8 + block("x", b"0"), [("x", 0)]),
    ],
)
def test_a_name_or_size_of_an_extension_counts_for_one_entry(data: bytes, found: list[tuple[str, int]]) -> None:
    assert transferred(data + END) == transferred(data + END, step=1) == imported(data + END) == found


def test_a_transfer_refuses_what_follows_the_end_and_a_missing_end() -> None:
    assert transferred(block("x", b"0") + END + block("y", b"0")) == "after-the-end"
    assert transferred(block("x", b"0")) == "cut-short"


@pytest.mark.parametrize("value", ["", "v" * 4000])
def test_global_headers_are_bounded_together(value: str) -> None:
    """They count until the end of the archive: a reader that kept all would grow with what it is sent."""
    few = b"".join(pax(f"k{number % 10}", value, flag=b"g") + block(f"d{number}/", b"5") for number in range(300))
    assert len(transferred(few + END)) == len(imported(few + END) or ()) == 300
    many = b"".join(pax(f"k{number}", value, flag=b"g") + block(f"d{number}/", b"5") for number in range(1100))
    assert transferred(many + END) == "globals"
    assert imported(many + END) is None


_PIECES = st.sampled_from(
    [
        block("././@LongLink", b"L", b"long\0"),
        block("././@LongLink", b"K", b"to\0"),
        pax("path", "p"),
        pax("size", "3"),
        pax("mtime", "5", flag=b"g"),
        block("f", b"0", b"123"),
        block("d/", b"5"),
        block("l", b"2"),
        bytes(BLOCK),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_PIECES, max_size=8), st.integers(1, 700))
def test_the_two_readers_never_see_different_files_in_one_archive(pieces: list[bytes], step: int) -> None:
    data = b"".join(pieces) + END
    one, other = transferred(data, step), imported(data)
    if isinstance(one, list) and other is not None:
        assert one == other
