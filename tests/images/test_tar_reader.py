"""The reader of images' tars: which tars are read, which are refused, and that no bytes cause anything else."""

from __future__ import annotations

import io
import random
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.images.tar_reader import ArchiveCaps, TarError, TarStream, parts
from ringfence.shared.tar import BLOCK


def header(name: str, *, kind: bytes = b"0", size: int = 0, **fields: object) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry.tobuf(tarfile.GNU_FORMAT)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return header("pax", kind=kind, size=len(records)) + records + bytes(-len(records) % BLOCK)


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode("utf-8", "surrogateescape")
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def file(name: str, data: bytes) -> bytes:
    return header(name, size=len(data)) + data + bytes(-len(data) % BLOCK)


END = bytes(2 * BLOCK)


def read(data: bytes, caps: ArchiveCaps | None = None) -> list[tuple[str, str, int, str, bytes]]:
    stream = TarStream(io.BytesIO(data).read, caps)
    return [(e.name, e.kind, e.mode, e.link, b"".join(bytes(p) for p in stream.data())) for e in stream]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_pythons_own_writer_writes_is_read_back(form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name in ("a", "d/" + "x" * 90 + "/" + "y" * 60, "ü"):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(name.encode()), 0o640
            tar.addfile(entry, io.BytesIO(name.encode()))
        link = tarfile.TarInfo("l")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    found = read(out.getvalue())
    long = "d/" + "x" * 90 + "/" + "y" * 60
    assert found == [
        ("a", "file", 0o640, "", b"a"),
        (long, "file", 0o640, "", long.encode()),
        ("ü", "file", 0o640, "", "ü".encode()),
        ("l", "symlink", 0o644, "/etc/passwd", b""),
    ]


def test_data_that_is_not_read_is_skipped() -> None:
    stream = TarStream(io.BytesIO(file("a", b"x" * 3000) + file("b", b"y") + END).read)
    assert [entry.name for entry in stream] == ["a", "b"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1600), min_size=1, max_size=6), st.lists(st.integers(0, 1500), min_size=1, max_size=5))
def test_pieces_of_any_size_read_the_same(pieces: list[int], sizes: list[int]) -> None:
    whole = b"".join(pax(record("path", f"p{i}")) + file("x", bytes([i]) * n) for i, n in enumerate(sizes)) + END
    source, turn = io.BytesIO(whole), iter(range(1 << 30))
    stream = TarStream(lambda _: source.read(pieces[next(turn) % len(pieces)]))
    found = [(e.name, b"".join(bytes(p) for p in stream.data())) for e in stream]
    assert found == [(f"p{i}", bytes([i]) * n) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1000, 1535])
def test_an_archive_cut_short_is_refused(count: int) -> None:
    whole = file("a", b"x" * 700) + END
    with pytest.raises(TarError, match="cut short"):
        read(whole[:count])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff" * 1024, "checksum|no number"),
        (header("s", kind=b"S") + END, "is of the type"),
        (header("v", kind=b"V") + END, "is of the type"),
        (pax(record("GNU.sparse.major", "1")) + file("a", b"") + END, "sparse"),
        (pax(b"99999 path=x\n") + file("a", b"") + END, "a malformed record"),
        (pax(b"path=x\n") + file("a", b"") + END, "a malformed record"),
        (pax(b"5 a=\x00") + file("a", b"") + END, "a malformed record"),
        (pax(record("path", "a\0b")) + file("a", b"") + END, "holds a NUL"),
        (pax(record("path", "a/" * 3000)) + file("a", b"") + END, "too long"),
        (pax(record("size", "-1")) + file("a", b"") + END, "is no number"),
        (pax(record("size", "9" * 30)) + file("a", b"") + END, "is no number"),
        (pax(record("path", "x"), kind=b"g") + file("a", b"") + END, "global PAX header"),
        (pax(record("path", "x")) + END, "belongs to the next entry"),
        (pax(record("mtime", "1")) * 20 + file("a", b"") + END, "too many extension"),
        (header("h", kind=b"1", linkname="") + END, "links to"),
        (header("d", kind=b"5", size=3) + b"abc" + bytes(509) + END, "with 3 bytes of data"),
        (header("x", kind=b"x", size=1 << 30), "extension header of"),
    ],
)
def test_what_is_strange_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(TarError, match=why):
        read(data)


def test_more_than_the_caps_is_refused_before_it_is_read() -> None:
    with pytest.raises(TarError, match="more than 2 entries"):
        read(file("a", b"") * 3 + END, ArchiveCaps(entries=2))
    with pytest.raises(TarError, match="larger than 100 bytes together"):
        read(header("a", size=1 << 40), ArchiveCaps(size=100))


def test_a_time_before_1970_or_far_away_is_the_nearest_that_is_one() -> None:
    data = b"".join(pax(record("mtime", text)) + file("a", b"") for text in ("-5.5", "7.9", "99999999999999"))
    stream = TarStream(io.BytesIO(data + END).read)
    assert [entry.mtime for entry in stream] == [0, 7, 1 << 33]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("./a//b/.", ("a", "b")), ("", ()), ("./", ()), ("a\\..\\b", ("a\\..\\b",)), ("...", ("...",))],
)
def test_a_name_has_one_safe_spelling(name: str, expected: tuple[str, ...]) -> None:
    assert parts(name, ArchiveCaps()) == expected


@pytest.mark.parametrize("name", ["/etc/passwd", "..", "a/../b", "a/..", "x" * 256, "ü" * 128, "a/" * 101, "ba" * 2100])
def test_a_name_that_leads_out_or_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(TarError):
        parts(name, ArchiveCaps())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=3000))
def test_no_bytes_do_anything_but_parse_or_be_refused(data: bytes) -> None:
    try:
        read(data)
    except TarError:
        pass  # refused


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_tar_with_changed_bytes_parses_or_is_refused(seed: int, changes: int) -> None:
    chance = random.Random(seed)
    whole = bytearray(pax(record("path", "p/q")) + file("a", b"x" * 600) + header("l", kind=b"2", linkname="x") + END)
    for _ in range(changes):
        whole[chance.randrange(len(whole))] = chance.randrange(256)
    try:
        read(bytes(whole))
    except TarError:
        pass  # refused


@pytest.mark.parametrize(("after", "taken"), [(10_240, True), (15 << 20, True), (1 << 40, False)])
def test_what_comes_after_the_end_is_read_up_to_a_bound(after: int, *, taken: bool) -> None:
    whole = io.BytesIO(file("a", b"1") + END)
    given = 0

    def more(count: int) -> bytes:
        nonlocal given
        data = whole.read(count) or bytes(min(count, after - given))
        given += len(data)
        assert given < 32 << 20, "it is read all the way"
        return data

    stream = TarStream(more)
    assert [entry.name for entry in stream] == ["a"]
    if taken:
        stream.drain()
        assert given == after
    else:
        with pytest.raises(TarError, match="goes on for more than 16,777,216 bytes after its end"):
            stream.drain()
