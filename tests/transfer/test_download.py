"""The host's side of a download against tar streams that no honest worker sends: no file is made outside the folder."""

from __future__ import annotations

import errno
import io
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.policy import host_paths
from ringfence.shared import tar as tarstream
from ringfence.shared.tree_pack import TransferCaps
from ringfence.transfer.download import Landing


def tar(*members: tuple[str, bytes, str], size: int = 1) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            info.size = size if kind == tarfile.REGTYPE else 0
            info.mode = 0o6777
            archive.addfile(info, io.BytesIO(b"x" * size))
    return data.getvalue()


def land(target: Path, *pieces: bytes, folder: bool = True) -> None:
    landing = Landing(target, "src/name", folder=folder, caps=TransferCaps(1 << 20, 50))
    try:
        landing.feed(pieces)
        landing.finish()
    finally:
        landing.give_up()


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


F, L, H, D = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
FIRST = ("first", F, "")


@pytest.mark.parametrize(
    "members",
    [
        [FIRST, ("../out", F, "")],
        [FIRST, ("a/../../out", F, "")],
        [FIRST, ("/tmp/ringfence-out", F, "")],
        [FIRST, ("l", L, "/etc/passwd")],
        [FIRST, ("a/l", L, "../../victim")],
        [FIRST, ("a", L, "."), ("b", L, "a/../victim")],
        [FIRST, ("a", L, "b"), ("a/out", F, "")],
        [("d", D, ""), ("d/l", L, ".."), ("d/l/out", F, "")],
        [FIRST, ("h", H, "first")],
        [FIRST, ("h", H, "../victim")],
        [FIRST, ("c", tarfile.CHRTYPE, "")],
        [FIRST, ("b", tarfile.BLKTYPE, "")],
        [FIRST, ("p", tarfile.FIFOTYPE, "")],
        [FIRST, ("s", tarfile.GNUTYPE_SPARSE, "")],
        [FIRST, FIRST],
        [FIRST, ("./first", F, "")],
        [FIRST, ("first/x", F, "")],
        [("x" * 256, F, "")],
        [(f"{n}", F, "") for n in range(60)],
    ],
)
def test_a_hostile_stream_is_refused_and_nothing_is_written(
    tmp_path: Path, members: list[tuple[str, bytes, str]]
) -> None:
    """K01, K04."""
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / "place").mkdir()
    with pytest.raises(OSError, match=r"refused, nothing was written|too much to transfer"):
        land(tmp_path / "place", tar(*members))
    assert (everything(tmp_path), (tmp_path / "victim").read_text()) == (["place", "victim"], "as it was")


def test_a_plain_stream_is_taken_without_its_special_bits(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        land(tmp_path / "new", tar(("d", D, ""), ("d/f", F, ""), ("d/l", L, "../d/f"), ("g", F, "")))
    finally:
        os.umask(old)
    assert everything(tmp_path) == ["new", "new/d", "new/d/f", "new/d/l", "new/g"]
    assert [(tmp_path / f"new/{name}").stat().st_mode & 0o7777 for name in ("d", "d/f", "g")] == [0o755] * 3
    assert (tmp_path / "new/d/l").readlink() == Path("../d/f")


def test_more_bytes_than_agreed_are_refused_before_they_come(tmp_path: Path) -> None:
    """A26, F21: a header alone is enough."""
    head = tarstream.header(b"f", tarstream.FILE, size=1 << 40, mode=0o644, mtime=0)
    landing = Landing(tmp_path, "src", folder=True, caps=TransferCaps(1 << 20, 50))
    with pytest.raises(OSError, match="too much to transfer") as caught:
        landing.feed([head])
    landing.give_up()
    assert (caught.value.errno, everything(tmp_path)) == (errno.EFBIG, [])


def _number(field: slice, value: bytes) -> bytes:
    block = bytearray(tarstream.header(b"f", tarstream.FILE, size=0, mode=0o644, mtime=0))
    block[field] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + tarstream.END


SIZE, MTIME = slice(124, 136), slice(136, 148)


@pytest.mark.parametrize(
    "data",
    [
        _number(SIZE, b"\xff" * 12),
        _number(SIZE, b"\x80" + b"\xff" * 11),
        _number(SIZE, b"-0000000001\0"),
        _number(SIZE, b"99999999999\0"),
        _number(SIZE, b"0x10\0\0\0\0\0\0\0\0"),
        b"\0" * 100,
        tar(FIRST)[:600],
        tar(FIRST) + tar(FIRST),
        tar(FIRST)[:300] + b"?" + tar(FIRST)[301:],
    ],
    ids=["negative", "huge", "signed", "not octal", "hex", "short", "cut", "two archives", "another checksum"],
)
def test_numbers_and_streams_that_are_not_right_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(OSError, match="refused, nothing was written"):
        land(tmp_path, data)
    assert everything(tmp_path) == []


def extension(flag: str, body: bytes) -> bytes:
    """Return an extension header of a tar, with its bytes."""
    block = bytearray(tarstream.header(b"x", tarstream.FILE, size=len(body), mode=0o644, mtime=0))
    block[156] = ord(flag)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + body + tarstream.padding(len(body))


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (extension("x", record("path", "a") + record("path", "b")), "malformed"),
        (extension("x", b"".join(record(f"k{number}", "") for number in range(1001))), "malformed"),
        (extension("x", record("comment", "c" * (1 << 16))), "too long"),
        (extension("L", b"n" * (1 << 16) + b"\0"), "too long"),
        (extension("L", b""), "empty or too long"),
        (extension("L", b"one\0") + extension("x", record("path", "two")), "two names"),
        (extension("K", b"one\0") + extension("x", record("linkpath", "two")), "two names"),
        (b"".join(extension("x", record(f"k{number}", "")) for number in range(9)), "too many headers"),
    ],
    ids=["twice", "records", "large record", "long name", "no name", "two names", "two links", "without end"],
)
def test_a_header_of_a_header_that_is_not_right_is_refused(tmp_path: Path, before: bytes, why: str) -> None:
    with pytest.raises(OSError, match=f"refused, nothing was written: .*{why}"):
        land(tmp_path, before + tar(FIRST))
    assert everything(tmp_path) == []


def test_headers_of_headers_at_their_limits_are_taken(tmp_path: Path) -> None:
    many = b"".join(record(f"k{number}", "") for number in range(999)) + record("path", "named")
    more = b"".join(extension("x", record(f"n{number}", "")) for number in range(6))
    land(tmp_path, extension("x", many) + extension("x", record("comment", "c" * 65_000)) + more + tar(FIRST))
    assert everything(tmp_path) == ["named"]


def test_a_negative_time_is_the_first_there_is(tmp_path: Path) -> None:
    land(tmp_path, _number(MTIME, b"\xff" * 12))
    assert (tmp_path / "f").stat().st_mtime == 0


def pax(**records: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("harmless")
        info.pax_headers = records
        archive.addfile(info)
    return data.getvalue()


@pytest.mark.parametrize(
    "records",
    [{"path": "../out"}, {"path": "/out"}, {"size": "-5"}, {"size": "9" * 30}, {"GNU.sparse.major": "1"}, {"path": ""}],
)
def test_an_extended_header_overrides_into_the_same_checks(tmp_path: Path, records: dict[str, str]) -> None:
    with pytest.raises(OSError, match="refused, nothing was written"):
        land(tmp_path, pax(**records))
    assert everything(tmp_path) == []


def test_a_single_file_is_called_as_the_caller_says_whatever_the_stream_says(tmp_path: Path) -> None:
    land(tmp_path / "mine", tar(("theirs", F, "")), folder=False)
    assert everything(tmp_path) == ["mine"]
    for stream in (tar(("d", D, "")), tar(("l", L, "x")), tar(("a", F, ""), ("b", F, ""))):
        with pytest.raises(OSError, match="refused"):
            land(tmp_path / "other", stream, folder=False)
    assert everything(tmp_path) == ["mine"]


def _link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def _socket(place: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place))


@pytest.mark.parametrize("make", [_link, lambda place, _: os.mkfifo(place), _socket])
def test_what_stands_at_the_destination_is_replaced_and_never_opened(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """K04: the destination itself may have been made by a guest, in a shared folder."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    place = tmp_path / "place"
    place.mkdir()
    make(place / "first", victim)
    land(place, tar(FIRST))
    assert (victim.read_text(), (place / "first").read_text(), (place / "first").is_symlink()) == (
        "as it was",
        "x",
        False,
    )


def test_a_folder_that_is_a_link_is_not_gone_through(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    place = tmp_path / "place"
    place.mkdir()
    (place / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(NotADirectoryError):
        land(place, tar(("d", D, ""), ("d/f", F, "")))
    assert (os.listdir(tmp_path / "outside"), os.listdir(place)) == ([], ["d"])


def test_a_target_that_is_a_link_or_lies_behind_one_is_refused(tmp_path: Path) -> None:
    """L17: a guest could have left it there, in a sandbox that is long gone."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "place").symlink_to(tmp_path / "outside")
    (tmp_path / "file").symlink_to(tmp_path / "outside/file")
    for target in ("place", "place/in", "file"):
        for folder in (True, False):
            with pytest.raises(host_paths.LinkError, match="is a link to"):
                land(tmp_path / target, tar(FIRST), folder=folder)
    assert (os.listdir(tmp_path / "outside"), sorted(os.listdir(tmp_path))) == ([], ["file", "outside", "place"])


def test_names_that_are_one_to_the_file_system_are_refused(tmp_path: Path) -> None:
    """K03: every name is made anew, so that the file system itself says what is the same."""
    land(tmp_path, tar(("a", F, ""), ("A", F, "")))
    assert everything(tmp_path) == ["A", "a"]


@given(st.lists(st.binary(max_size=1500), max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_refused_or_taken_and_leave_no_staging(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    place = tmp_path_factory.mktemp("place")
    try:
        land(place, *pieces)
    except OSError:
        assert everything(place) == []
    assert everything(place) == []


_GOOD = tar(("d", D, ""), ("d/f", F, ""), ("d/" + "n" * 150, F, ""), ("l", L, "d/f"), size=700)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_stream_with_some_bytes_changed_never_leaves_its_folder(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The checksum is made right again, so that what is behind it is met."""
    stream = bytearray(_GOOD)
    block = data.draw(st.integers(0, len(stream) // 512 - 1)) * 512
    for _ in range(data.draw(st.integers(1, 4))):
        stream[block + data.draw(st.integers(0, 511))] = data.draw(st.integers(0, 255))
    stream[block + 148 : block + 156] = b" " * 8
    stream[block + 148 : block + 156] = b"%06o\0 " % sum(stream[block : block + 512])
    top = tmp_path_factory.mktemp("top")
    place = top / "place"
    place.mkdir()
    try:
        land(place, bytes(stream))
    except OSError:
        assert everything(top) == ["place"]
    assert os.listdir(top) == ["place"]
    for path in place.rglob("*"):
        assert path.resolve().is_relative_to(place)
        assert not path.name.startswith(".ringfence")


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_it_does_not_matter_how_a_stream_is_cut(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    place = tmp_path_factory.mktemp("place")
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(_GOOD[at : at + cut])
        at += cut
    land(place, *pieces, _GOOD[at:])
    assert everything(place) == ["d", "d/f", f"d/{'n' * 150}", "l"]
    assert (place / "l").read_bytes() == b"x" * 700


@pytest.mark.parametrize(
    ("parts", "target", "stays"),
    [
        (["l"], "f", True),
        (["l"], "./d/../f", False),
        (["l"], "..", False),
        (["d", "l"], "..", True),
        (["d", "l"], "../f", True),
        (["d", "l"], "../../f", False),
        (["a", "b", "l"], "../../x", True),
        (["l"], "/f", False),
        (["l"], "", False),
        (["l"], "a/b/c", True),
        (["d", "l"], "x/..", False),
    ],
)
def test_which_links_stay(parts: list[str], target: str, stays: bool) -> None:
    assert tarstream.link_stays([part.encode() for part in parts], target.encode()) is stays
