"""Checks of upload, download and archives of whole files and trees. A refused transfer leaves nothing."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence import Limits, Policy, Sandbox
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TREE = "mkdir -p t/a/b t/empty; echo one > t/f; echo two > t/a/b/g; ln -s a/b/g t/l; chmod 750 t/f; chmod 700 t/a"


def shown(folder: str) -> list[tuple[str, int, str]]:
    """Return every entry below a host folder: path, mode, and content or target."""
    found = []
    for path in sorted(Path(folder).rglob("*")):
        mode = path.lstat().st_mode & 0o7777
        what = f"-> {path.readlink()}" if path.is_symlink() else "" if path.is_dir() else path.read_text()
        found.append((path.relative_to(folder).as_posix(), 0 if path.is_symlink() else mode, what))
    return found


def listed(box: Sandbox, path: str = ".") -> list[tuple[str, str, int]]:
    return [(i.path, i.kind, i.mode) for i in box.files.list(path, recursive=True)]


EXPECTED = [
    ("a", 0o700, ""),
    ("a/b", 0o755, ""),
    ("a/b/g", 0o644, "two\n"),
    ("empty", 0o755, ""),
    ("f", 0o750, "one\n"),
    ("l", 0, "-> a/b/g"),
]


def a_folder_comes_out_and_goes_in_again_as_it_was(box: Sandbox) -> None:
    box.exec(["sh", "-c", TREE]).check()
    with tempfile.TemporaryDirectory() as folder:
        box.files.download("t", f"{folder}/out")
        assert shown(f"{folder}/out") == EXPECTED
        box.files.upload(f"{folder}/out", "new/place")
        assert listed(box, "new/place") == listed(box, "t")
        assert box.files.read_text("new/place/l") == "two\n"
        assert os.listdir(folder) == ["out"]


def a_file_comes_out_and_goes_in_under_a_new_name_or_into_a_folder(box: Sandbox) -> None:
    box.files.write("f", "text", mode=0o640)
    with tempfile.TemporaryDirectory() as folder:
        box.files.download("f", f"{folder}/named")
        box.files.download("f", folder)
        assert shown(folder) == [("f", 0o640, "text"), ("named", 0o640, "text")]
        box.files.upload(f"{folder}/named", "other")
        box.files.upload(f"{folder}/named", ".")
        box.files.upload(f"{folder}/named", "new/parents/f")
    assert listed(box) == [
        ("f", "file", 0o640),
        ("named", "file", 0o640),
        ("new", "directory", 0o755),
        ("other", "file", 0o640),
        ("new/parents", "directory", 0o755),
        ("new/parents/f", "file", 0o640),
    ]


def what_is_there_is_joined_and_replaced(box: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "d").mkdir()
        Path(folder, "d/kept").write_text("kept")
        Path(folder, "d/new").write_text("old")
        box.files.write("t/d/new", "new")
        box.files.download("t", folder)
        assert shown(folder) == [("d", 0o755, ""), ("d/kept", 0o644, "kept"), ("d/new", 0o644, "new")]
        Path(folder, "d/new").write_text("newer")
        box.files.write("t/d/inside", "stays")
        box.files.upload(folder, "t")
        assert [box.files.read_text(f"t/d/{name}") for name in ("inside", "kept", "new")] == ["stays", "kept", "newer"]


def a_file_where_a_folder_is_to_be_stops_it_before_anything_moved(box: Sandbox) -> None:
    box.exec(["sh", "-c", "mkdir t; echo 1 > t/a; mkdir t/d; echo 2 > t/d/f"]).check()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "d").write_text("a file")
        with raises(NotADirectoryError):
            box.files.download("t", folder)
        assert shown(folder) == [("d", 0o644, "a file")]
        box.files.write("u/a/x", "a folder")
        Path(folder, "a").write_text("a file")
        with raises(IsADirectoryError):
            box.files.upload(folder, "u")
        assert [path for path, *_ in listed(box, "u")] == ["a", "a/x"]


def progress_is_told_up_to_the_whole(box: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").mkdir()
        for name, size in (("a", 700_000), ("b", 5), ("c", 0)):
            Path(folder, "in", name).write_bytes(b"x" * size)
        seen: list[tuple[int, int | None]] = []

        def keep(done: int, total: int | None) -> None:
            seen.append((done, total))

        box.files.upload(f"{folder}/in", "t", on_progress=keep)
        up, seen = seen, []
        box.files.download("t", f"{folder}/out", on_progress=keep)
    for progress in (up, seen):
        assert progress[-1] == (700_005, 700_005)
        assert progress == sorted(progress)
        assert {total for _, total in progress} == {700_005}


def a_caller_who_stops_leaves_nothing_on_either_side(box: Sandbox) -> None:
    def stop(*_: object) -> None:
        raise ZeroDivisionError

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").mkdir()
        Path(folder, "in/f").write_bytes(b"x" * 3_000_000)
        for target in ("new/t", "."):
            with raises(ZeroDivisionError):
                box.files.upload(f"{folder}/in", target, on_progress=stop)
            with raises(ZeroDivisionError):
                box.files.upload(f"{folder}/in/f", f"{target}/x/f", on_progress=stop)
            deadline = time.monotonic() + 5  # the worker that was stopped tidies up on a busy host too
            while listed(box) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert listed(box) == []
        box.files.write("t/f", b"x" * 3_000_000)
        for target in (f"{folder}/new", folder):
            with raises(ZeroDivisionError):
                box.files.download("t", target, on_progress=stop)
        assert sorted(os.listdir(folder)) == ["in"]


def an_upload_too_big_for_the_disk_is_no_space_and_leaves_nothing(make: MakeSandbox) -> None:
    with make(policy=Policy(limits=Limits(disk="1M"))) as box, tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            Path(folder, str(number)).write_bytes(os.urandom(400_000))
        with raises(OSError) as caught:
            box.files.upload(folder, "t")
        assert caught.value.errno == errno.ENOSPC
        assert (listed(box), box.files.usage().bytes) == ([], 0)


def names_of_any_bytes_cross_both_ways(box: Sandbox) -> None:
    odd = [b"new\nline", b"\xff\xfe", b"-rf", b" ", b"a" * 255, b"\x1b[31m", "é".encode(), b"..."]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").mkdir()
        for name in odd:
            Path(folder, "in", os.fsdecode(name)).write_bytes(name)
        box.files.upload(f"{folder}/in", "t")
        box.files.download("t", f"{folder}/out")
        back = {
            name: Path(folder, "out", os.fsdecode(name)).read_bytes() for name in os.listdir(f"{folder}/out".encode())
        }
    assert back == {name: name for name in odd}


def a_sparse_file_stays_one_and_a_huge_one_is_refused_before_a_byte(box: Sandbox) -> None:
    """A26: the file is refused by its size, without reading."""
    box.exec(["sh", "-c", "mkdir t; truncate -s 30M t/holes; echo end >> t/holes; truncate -s 1T huge"]).check()
    with tempfile.TemporaryDirectory() as folder:
        box.files.download("t", folder)
        info = os.stat(f"{folder}/holes")
        assert (info.st_size, info.st_blocks < 10_000) == ((30 << 20) + 4, True)
        with raises(OSError, match="too much to transfer") as caught:
            box.files.download("huge", f"{folder}/huge")
        assert (caught.value.errno, os.listdir(folder)) == (errno.EFBIG, ["holes"])
    calls: list[Callable[[], bytes]] = [lambda: box.files.read("huge"), lambda: b"".join(box.files.pack("huge"))]
    for call in calls:
        with raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EFBIG
    assert box.files.read("huge", offset=1 << 39, size=4) == bytes(4)


def set_user_bits_and_hard_links_do_not_cross(box: Sandbox) -> None:
    box.exec(["sh", "-c", "mkdir t; echo x > t/a; ln t/a t/b; chmod 777 t/a; chmod 1777 t"]).check()
    with tempfile.TemporaryDirectory() as folder:
        old = os.umask(0o022)
        try:
            box.files.download("t", folder)
        finally:
            os.umask(old)
        infos = [os.stat(f"{folder}/{name}") for name in ("a", "b")]
        assert [(info.st_mode & 0o7777, info.st_nlink) for info in infos] == [(0o755, 1), (0o755, 1)]


def links_that_lead_out_pipes_and_sockets_are_not_downloaded(box: Sandbox) -> None:
    for make in (
        "ln -s /etc/passwd t/l",
        "ln -s ../../x t/l",
        "ln -s . t/a; ln -s a/../.. t/b",
        "mkfifo t/p",
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('t/s')\"",
    ):
        box.exec(["sh", "-c", f"rm -rf t; mkdir t; echo 1 > t/0; {make}"]).check()
        with tempfile.TemporaryDirectory() as folder:
            with raises(OSError, match="refused, nothing was written"):
                box.files.download("t", f"{folder}/out")
            assert os.listdir(folder) == []


def host_trouble_is_said_before_anything_starts(box: Sandbox) -> None:
    box.files.write("f", "x")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_text("")
        os.mkfifo(f"{folder}/pipe")
        cases: list[tuple[type[OSError], Callable[[], object]]] = [
            (FileNotFoundError, lambda: box.files.upload(f"{folder}/none", "x")),
            (FileNotFoundError, lambda: box.files.download("f", f"{folder}/no/parent")),
            (FileNotFoundError, lambda: box.files.download("none", folder)),
            (NotADirectoryError, lambda: box.files.download("f", f"{folder}/file/x")),
            (NotADirectoryError, lambda: box.files.download(".", f"{folder}/file")),
            (OSError, lambda: box.files.upload(f"{folder}/pipe", "x")),
            (OSError, lambda: box.files.upload(folder, "x")),
        ]
        for kind, call in cases:
            with raises(kind):
                call()
        assert sorted(os.listdir(folder)) == ["file", "pipe"]
    assert [path for path, *_ in listed(box)] == ["f"]


# ── archives ─────────────────────────────────────────────────────────────────────────────────────


def archives_are_what_other_programs_read(box: Sandbox) -> None:
    box.exec(["sh", "-c", TREE]).check()
    box.files.write(f"t/{'n' * 120}", "long")
    with tarfile.open(fileobj=io.BytesIO(b"".join(box.files.pack("t")))) as tar:
        found = {m.name: (m.mode, m.linkname, m.isdir()) for m in tar}
    assert found == {
        ".": (0o755, "", True),
        "a": (0o700, "", True),
        "a/b": (0o755, "", True),
        "a/b/g": (0o644, "", False),
        "empty": (0o755, "", True),
        "f": (0o750, "", False),
        "l": (0o777, "a/b/g", False),
        "n" * 120: (0o644, "", False),
    }
    with zipfile.ZipFile(io.BytesIO(b"".join(box.files.pack("t", format="zip")))) as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == ["a/", "a/b/", "a/b/g", "empty/", "f", "l", "n" * 120]
        assert archive.read("a/b/g") == b"two\n"
    assert box.files.exists("t")


def what_was_packed_can_be_unpacked(box: Sandbox) -> None:
    box.exec(["sh", "-c", TREE]).check()
    formats: tuple[Any, ...] = ("tar", "zip")
    for form in formats:
        box.files.unpack(box.files.pack("t", format=form), form, format=form)
        assert listed(box, form) == listed(box, "t")
        box.files.unpack(box.files.pack("t/f", format=form), f"{form}1", format=form)
        assert box.files.read_text(f"{form}1/f") == "one\n"


def tars_of_every_dialect_are_unpacked(box: Sandbox) -> None:
    for dialect in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w", format=dialect) as tar:
            for name in ("f", "dir/" * 30 + "deep", "x" * 99 + "/" + "y" * 99):
                info = tarfile.TarInfo(name)
                info.size, info.mode = 3, 0o640
                tar.addfile(info, io.BytesIO(b"abc"))
            hard = tarfile.TarInfo("hard")
            hard.type, hard.linkname = tarfile.LNKTYPE, "f"
            tar.addfile(hard)
        target = f"d{dialect}"
        box.files.unpack(data.getvalue(), target)
        read = [box.files.read(f"{target}/{n}") for n in ("f", "dir/" * 30 + "deep", "x" * 99 + "/" + "y" * 99, "hard")]
        assert read == [b"abc"] * 4
        assert box.files.stat(f"{target}/f").mode == 0o640


def _tar(*members: tuple[str, bytes, str]) -> bytes:
    """Return a tar of entries given as name, type and link target. Files hold one byte."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            info.size = 1 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"x"))
    return data.getvalue()


FILE, LINK, HARD, DIRECTORY = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
FIRST = ("first", FILE, "")
HOSTILE = {
    "dot-dot": [FIRST, ("../out", FILE, "")],
    "dot-dot within": [FIRST, ("a/../../out", FILE, "")],
    "absolute": [FIRST, ("/workspace/out", FILE, "")],
    "a link out": [FIRST, ("l", LINK, "/workspace")],
    "a link up": [FIRST, ("a/l", LINK, "../../out")],
    "through a link": [FIRST, ("a", LINK, "b"), ("a/out", FILE, "")],
    "a hard link out": [FIRST, ("h", HARD, "/etc/passwd")],
    "a hard link up": [FIRST, ("h", HARD, "../kept")],
    "a hard link to a link": [FIRST, ("l", LINK, "first"), ("h", HARD, "l")],
    "a device": [FIRST, ("d", tarfile.CHRTYPE, "")],
    "a pipe": [FIRST, ("p", tarfile.FIFOTYPE, "")],
    "twice": [FIRST, FIRST],
    "a folder over a file": [FIRST, ("first/x", FILE, "")],
    "a link over a folder": [("d", DIRECTORY, ""), ("d", LINK, "first")],
    "no name": [FIRST, ("./", FILE, "")],
}


def a_hostile_tar_is_refused_whole(box: Sandbox) -> None:
    """K01: nothing is written, nor beside the target, and the sandbox goes on."""
    box.files.write("kept", "kept")
    for name, members in HOSTILE.items():
        with raises(OSError, match="refused, nothing was written") as caught:
            box.files.unpack(_tar(*members), "new/t")
        assert caught.value.errno == errno.EINVAL, name
        assert [path for path, *_ in listed(box)] == ["kept"], name
    for data in (b"", b"no tar" * 200, _tar(FIRST)[:700], _tar(FIRST) + b"x" * 512):
        with raises(OSError, match="refused, nothing was written"):
            box.files.unpack(data)
    assert box.files.read_text("kept") == "kept"


def _zip(*members: tuple[str, int, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, mode, content in members:
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, mode << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def a_hostile_zip_is_refused_whole(box: Sandbox) -> None:
    """K02."""
    plain = _zip(("first", 0o100644, b"hello"))
    cases: dict[str, bytes] = {
        "dot-dot": _zip(("first", 0o100644, b"x"), ("../out", 0o100644, b"x")),
        "absolute": _zip(("/out", 0o100644, b"x")),
        "backslash": _zip(("a\\..\\out", 0o100644, b"x")),
        "drive": _zip(("c:out", 0o100644, b"x")),
        "a link out": _zip(("l", 0o120777, b"/etc")),
        "through a link": _zip(("a", 0o120777, b"b"), ("a/out", 0o100644, b"x")),
        "a device": _zip(("d", 0o020644, b"")),
        "two names": plain.replace(b"first", b"other", 1),
        "encrypted": plain.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"),
        "another size": _lie(plain, 24, 3),
        "another sum": _lie(plain, 16, 3),
        "cut short": plain[:-4],
        "something before": b"MZ" + plain,
        "nothing": b"",
    }
    for name, data in cases.items():
        with raises(OSError, match="refused, nothing was written") as caught:
            box.files.unpack(data, "t", format="zip")
        assert caught.value.errno == errno.EINVAL, name
        assert listed(box) == [], name
    box.files.unpack(plain, "t", format="zip")
    assert box.files.read("t/first") == b"hello"


def _lie(archive: bytes, field: int, value: int) -> bytes:
    """Return the zip with another number in its directory, and in the entry's own header if the number is there too."""
    at = archive.index(b"PK\x01\x02") + field
    local = archive.index(b"PK\x03\x04") + field - 2
    number = value.to_bytes(4, "little")
    return archive[:local] + number + archive[local + 4 : at] + number + archive[at + 4 :]


def bombs_end_at_the_quota_or_before(make: MakeSandbox) -> None:
    """F21: 50 MB in 50 kB, and an archive with more entries than the limit of files."""
    with make(policy=Policy(limits=Limits(disk="2M", disk_files=100))) as box:
        with raises(OSError) as caught:
            box.files.unpack(_zip(("same", 0o100644, b"x" * (50 << 20))), "t", format="zip")
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        with raises(OSError) as caught:
            box.files.unpack(_tar(*[(f"f{n}", FILE, "") for n in range(200)]), "t")
        assert caught.value.errno == errno.ENOSPC
        assert (listed(box), box.files.usage().bytes, box.files.usage().files) == ([], 0, 0)


def an_archive_that_stops_coming_leaves_nothing(box: Sandbox) -> None:
    def pieces() -> Iterator[bytes]:
        yield _tar(FIRST, ("d", DIRECTORY, ""))[:1024]
        raise ZeroDivisionError

    formats: tuple[Any, ...] = ("tar", "zip")
    for form in formats:
        with raises(ZeroDivisionError):
            box.files.unpack(pieces(), "new/t", format=form)
        assert listed(box) == []


def wrong_arguments_start_nothing(box: Sandbox) -> None:
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: list(box.files.pack(format="rar"))),  # type: ignore[arg-type]  # a wrong one is the point
        (ValueError, lambda: box.files.unpack(b"", format="tgz")),  # type: ignore[arg-type]  # a wrong one is the point
        (TypeError, lambda: box.files.unpack("text")),  # type: ignore[arg-type]  # a wrong one is the point
        (TypeError, lambda: box.files.unpack(None)),  # type: ignore[arg-type]  # a wrong one is the point
        (TypeError, lambda: list(box.files.search(b"x"))),  # type: ignore[arg-type]  # a wrong one is the point
        (ValueError, lambda: list(box.files.search(""))),
        (ValueError, lambda: list(box.files.search("(", regex=True))),
        (ValueError, lambda: list(box.files.search("x", limit=0))),
        (TypeError, lambda: list(box.files.list(pattern=5))),  # type: ignore[arg-type]  # a wrong one is the point
    ]
    for kind, call in wrong:
        with raises(kind):
            call()
    assert listed(box) == []


CHECKS = (
    in_box(a_folder_comes_out_and_goes_in_again_as_it_was),
    in_box(a_file_comes_out_and_goes_in_under_a_new_name_or_into_a_folder),
    in_box(what_is_there_is_joined_and_replaced),
    in_box(a_file_where_a_folder_is_to_be_stops_it_before_anything_moved),
    in_box(progress_is_told_up_to_the_whole),
    in_box(a_caller_who_stops_leaves_nothing_on_either_side),
    with_maker(an_upload_too_big_for_the_disk_is_no_space_and_leaves_nothing, "disk-quota"),
    in_box(names_of_any_bytes_cross_both_ways),
    in_box(a_sparse_file_stays_one_and_a_huge_one_is_refused_before_a_byte),
    in_box(set_user_bits_and_hard_links_do_not_cross),
    in_box(links_that_lead_out_pipes_and_sockets_are_not_downloaded),
    in_box(host_trouble_is_said_before_anything_starts),
    in_box(archives_are_what_other_programs_read),
    in_box(what_was_packed_can_be_unpacked),
    in_box(tars_of_every_dialect_are_unpacked),
    in_box(a_hostile_tar_is_refused_whole),
    in_box(a_hostile_zip_is_refused_whole),
    with_maker(bombs_end_at_the_quota_or_before, "disk-quota"),
    in_box(an_archive_that_stops_coming_leaves_nothing),
    in_box(wrong_arguments_start_nothing),
)
