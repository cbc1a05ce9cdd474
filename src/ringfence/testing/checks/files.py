"""Checks of `files`: the guest's files, with Python's own errors."""

from __future__ import annotations

import errno
import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ringfence import Limits, Policy, PolicyError, Sandbox
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker
from ringfence.types import FileInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def names(box: Sandbox, path: str = ".", *, recursive: bool = False, pattern: str | None = None) -> list[str]:
    return [info.path for info in box.files.list(path, recursive=recursive, pattern=pattern)]


def bytes_and_text_go_in_and_come_out(box: Sandbox) -> None:
    box.files.write("b", bytes(range(256)))
    box.files.write("t", "grüße 🦊\n")
    assert box.files.read("b") == bytes(range(256))
    assert box.files.read_text("t") == "grüße 🦊\n"
    assert box.exec(["cat", "t"]).stdout == "grüße 🦊\n"
    with raises(UnicodeDecodeError):
        box.files.read_text("b")
    assert box.files.read_text("b", encoding="latin-1") == bytes(range(256)).decode("latin-1")


def anything_that_gives_bytes_can_be_written(box: Sandbox) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"a"
        yield b""
        yield b"b" * 100_000

    box.files.write("file", io.BytesIO(b"from a file"))
    box.files.write("pieces", pieces())
    box.files.write("array", bytearray(b"xyz"))  # type: ignore[arg-type]  # works, beyond what the surface promises
    box.files.write("empty", b"")
    sizes = [box.files.stat(name).size for name in ("file", "pieces", "array", "empty")]
    assert sizes == [11, 100_001, 3, 0]


def other_data_is_a_type_error_and_leaves_nothing(box: Sandbox) -> None:
    wrong: list[Any] = [5, None, io.StringIO("text"), ["str", 5], object()]
    for data in wrong:
        with raises(TypeError):
            box.files.write("f", data)
        assert names(box) == []


def an_iterator_that_raises_leaves_the_old_file(box: Sandbox) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"new" * 100_000
        raise ZeroDivisionError

    box.files.write("f", "old")
    with raises(ZeroDivisionError):
        box.files.write("f", pieces())
    assert box.files.read_text("f") == "old"


def aborting_a_write_leaves_other_processes_of_the_guest_alone(box: Sandbox) -> None:
    pid = box.exec(["sh", "-c", "setsid sleep 300 & echo $!"]).stdout.strip()
    with raises(TypeError):
        box.files.write("f", ["x", 5])  # type: ignore[list-item]  # a wrong one is the point
    assert box.exec(["kill", "-0", pid]).ok


def ranges_of_a_file(box: Sandbox) -> None:
    box.files.write("f", "0123456789")
    read = box.files.read
    assert [read("f", offset=3), read("f", size=4), read("f", offset=8, size=5), read("f", offset=99)] == [
        b"3456789",
        b"0123",
        b"89",
        b"",
    ]
    assert (read("f", size=0), b"".join(box.files.chunks("f", offset=7))) == (b"", b"789")
    for bad in (-1, True, "1", 1.5):
        with raises(ValueError, match="offset"):
            read("f", offset=bad)  # type: ignore[arg-type]  # a wrong one is the point


def appending(box: Sandbox) -> None:
    box.files.write("new/f", "a", append=True)
    info = box.files.write("new/f", "b", append=True)
    assert (box.files.read_text("new/f"), info.size) == ("ab", 2)


def modes_are_set_kept_and_default_to_0644(box: Sandbox) -> None:
    assert box.files.write("f", "1").mode == 0o644
    assert box.files.write("f", "2", mode=0o750).mode == 0o750
    assert box.files.write("f", "3").mode == 0o750
    box.files.chmod("f", 0o400)
    assert (box.files.stat("f").mode, box.files.read_text("f")) == (0o400, "3")
    for bad in (0o4755, 0o2755, -1, "755", True):
        with raises(ValueError, match="mode"):
            box.files.chmod("f", bad)  # type: ignore[arg-type]  # a wrong one is the point


def a_write_replaces_as_a_whole_so_that_a_reader_never_sees_half(box: Sandbox) -> None:
    box.files.write("f", "old")
    watcher = "import time\nf = open('f')\nprint('open', flush=True)\ninput()\nprint(f.read(), open('f').read())"
    with box.spawn(["python3", "-c", watcher]) as process:
        next(iter(process))
        box.files.write("f", "new")
        process.write("\n")
        assert process.wait().stdout == "open\nold new\n"
    assert names(box) == ["f"]


def a_write_through_a_link_replaces_its_target(box: Sandbox) -> None:
    box.exec(["sh", "-c", "mkdir d; echo old > d/target; ln -s d/target link; ln -s link twice"]).check()
    box.files.write("twice", "new")
    assert box.files.read_text("d/target") == "new"
    assert [(i.path, i.kind, i.target) for i in box.files.list() if i.kind == "symlink"] == [
        ("link", "symlink", "d/target"),
        ("twice", "symlink", "link"),
    ]


def parents_are_made_however_many(box: Sandbox) -> None:
    box.files.write("a/b/c/f", "x")
    deep = "/".join("d" * 1 for _ in range(1500))
    box.files.write(f"{deep}/f", "deep")
    assert box.files.read_text(f"{deep}/f") == "deep"


def fifty_megabytes_both_ways(make: MakeSandbox) -> None:
    data = hashlib.sha256(b"seed").digest() * (50 << 15)
    with make(policy=Policy(limits=Limits(disk="60M"))) as box:
        assert box.files.write("big", data).size == 50 << 20
        assert hashlib.sha256(box.files.read("big")).digest() == hashlib.sha256(data).digest()


def a_file_too_big_for_the_disk_is_no_space_and_leaves_nothing(make: MakeSandbox) -> None:
    with make(policy=Policy(limits=Limits(disk="1M"))) as box:
        with raises(OSError, match="No space left on device") as caught:
            box.files.write("big", b"x" * (3 << 20))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "big")
        assert (names(box), box.files.usage().bytes) == ([], 0)
        box.files.write("old", "kept")
        with raises(OSError, match="No space left"):
            box.files.write("old", b"x" * (3 << 20))
        assert box.files.read_text("old") == "kept"


def failures_are_pythons_own_errors_with_the_path_that_was_asked_for(box: Sandbox) -> None:
    box.files.write("file", "")
    box.files.write("dir/inner", "")
    files = box.files
    cases: list[tuple[type[OSError], str, Callable[[], object]]] = [
        (FileNotFoundError, "none", lambda: files.read("none")),
        (FileNotFoundError, "none", lambda: files.stat("none")),
        (FileNotFoundError, "none", lambda: list(files.list("none"))),
        (FileNotFoundError, "none", lambda: files.remove("none")),
        (FileNotFoundError, "none", lambda: files.chmod("none", 0o600)),
        (FileNotFoundError, "none", lambda: files.rename("none", "other")),
        (FileNotFoundError, "no/parents", lambda: files.mkdir("no/parents", parents=False)),
        (IsADirectoryError, "dir", lambda: files.read("dir")),
        (IsADirectoryError, "dir", lambda: files.write("dir", "x")),
        (NotADirectoryError, "file/x", lambda: files.write("file/x", "x")),
        (NotADirectoryError, "file/x", lambda: files.read("file/x")),
        (NotADirectoryError, "file", lambda: list(files.list("file"))),
        (FileExistsError, "dir", lambda: files.mkdir("dir", exist_ok=False)),
        (FileExistsError, "file", lambda: files.mkdir("file")),
        (OSError, "/etc/passwd", lambda: files.chmod("/etc/passwd", 0o777)),
        (OSError, "/etc/x", lambda: files.write("/etc/x", "x")),
        (OSError, "dir", lambda: files.remove("dir")),
        (OSError, "/proc/self/mem", lambda: files.write("/proc/self/mem", "x")),
    ]
    seen = []
    for kind, path, call in cases:
        with raises(kind) as caught:
            call()
        assert isinstance(caught.value, OSError)
        seen.append((path, caught.value.filename))
    assert [filename for _, filename in seen] == [path for path, _ in seen]
    assert sorted(names(box, recursive=True)) == ["dir", "dir/inner", "file"]


def devices_pipes_and_sockets_are_not_read(box: Sandbox) -> None:
    box.exec(["mkfifo", "pipe"]).check()
    for path in ("pipe", "/dev/zero", "/dev/null"):
        with raises(OSError, match=r"Invalid argument|No such device"):
            box.files.read(path)
    assert [info.kind for info in box.files.list()] == ["other"]


def a_path_that_can_be_none_is_a_policy_error(box: Sandbox) -> None:
    for path in ("", "a\0b", "x" * 5000, "\ud800"):
        with raises(PolicyError):
            box.files.read(path)


def a_path_of_another_type_is_a_type_error(box: Sandbox) -> None:
    wrong: list[Any] = [5, b"bytes", None]
    for path in wrong:
        with raises(TypeError, match="path"):
            box.files.read(path)


def a_list_is_sorted_and_says_what_each_is(box: Sandbox) -> None:
    box.exec(["sh", "-c", "mkdir b; echo hi > c; ln -s /etc a; mkdir b/z; touch b/y; chmod 600 c"]).check()
    infos = list(box.files.list())
    assert [(i.path, i.kind, i.size, i.target) for i in infos if i.kind != "directory"] == [
        ("a", "symlink", 4, "/etc"),
        ("c", "file", 3, None),
    ]
    assert [(i.path, i.kind, i.mode) for i in infos][1:] == [("b", "directory", 0o755), ("c", "file", 0o600)]
    assert all(abs(i.modified_at.timestamp() - box.files.stat("c").modified_at.timestamp()) < 60 for i in infos)
    assert names(box, recursive=True) == ["a", "b", "c", "b/y", "b/z"]
    assert names(box, "b") == ["y", "z"]
    assert names(box, recursive=True, pattern="[yz]") == ["b/y", "b/z"]
    assert names(box, PurePosixPath("/workspace/b").as_posix()) == ["y", "z"]


def links_are_shown_and_never_followed(box: Sandbox) -> None:
    box.exec(["sh", "-c", "ln -s . loop; ln -s /proc/self/root root"]).check()
    assert names(box, recursive=True) == ["loop", "root"]


def a_directory_with_more_entries_than_a_page_and_more_folders_than_descriptors(box: Sandbox) -> None:
    box.exec(
        [
            "python3",
            "-c",
            "import os\nfor i in range(1500):\n    os.mkdir(f'd{i:04}')\n    open(f'd{i:04}/f', 'w').close()",
        ]
    ).check()
    listed = names(box, recursive=True)
    assert (len(listed), len(set(listed))) == (3000, 3000)
    assert names(box) == [f"d{i:04}" for i in range(1500)]


DEEP = """
import os
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
open("bottom", "w").close()
"""


def a_tree_of_three_thousand_levels_is_listed_and_removed(box: Sandbox) -> None:
    """A27: deeper than paths go, than Python recurses and than descriptors last."""
    box.exec(["python3", "-c", DEEP]).check()
    listed = names(box, recursive=True)
    assert (len(listed), listed[-1].count("/"), listed[-1][-6:]) == (3001, 3000, "bottom")
    box.files.remove("d", recursive=True)
    assert names(box) == []
    assert box.files.usage().files == 0


def a_tree_without_rights_is_removed(box: Sandbox) -> None:
    box.exec(["sh", "-c", "mkdir -p a/b/c; touch a/b/f; chmod 000 a/b/c a/b/f a/b a"]).check()
    box.files.remove("a", recursive=True)
    assert names(box) == []


def removing_follows_no_link(box: Sandbox) -> None:
    box.exec(["sh", "-c", "mkdir keep tree; touch keep/f; ln -s ../keep tree/link; ln -s keep top"]).check()
    box.files.remove("tree", recursive=True)
    box.files.remove("top")
    assert names(box, recursive=True) == ["keep", "keep/f"]
    box.files.remove("none", missing_ok=True)
    box.files.remove("no/parent", missing_ok=True)


def renaming_files_and_directories_makes_parents_and_replaces(box: Sandbox) -> None:
    box.files.write("a", "1")
    box.files.write("b", "2")
    box.files.rename("a", "b")
    box.files.rename("b", "new/place/c")
    box.files.rename("new", "moved")
    assert (names(box, recursive=True), box.files.read_text("moved/place/c")) == (
        ["moved", "moved/place", "moved/place/c"],
        "1",
    )


def stat_of_files_links_and_the_roots(box: Sandbox) -> None:
    box.exec(["sh", "-c", "echo x > f; ln -s none dangling"]).check()
    link = box.files.stat("dangling")
    assert (link.path, link.kind, link.target) == ("dangling", "symlink", "none")
    assert [box.files.stat(path).kind for path in (".", "/", "..", "/workspace", "/tmp/", "f")] == [
        *["directory"] * 5,
        "file",
    ]
    assert isinstance(link, FileInfo)
    assert [box.files.exists(path) for path in ("f", "none", "f/x", "dangling", ".")] == [
        True,
        False,
        False,
        True,
        True,
    ]


ODD = [
    "new\nline",
    "\u202etxt.exe",
    "-rf",
    " ",
    "a" * 255,
    "é" * 127,
    "\x1b[31m",
    "...",
    "*",
    "日本",
    "a'\"\\b",
    "\x01",
]


def odd_names_work_everywhere(box: Sandbox) -> None:
    for name in ODD:
        box.files.write(name, name)
    assert sorted(names(box)) == sorted(ODD)
    assert [box.files.read_text(name) for name in ODD] == ODD
    for name in ODD:
        box.files.rename(name, f"moved/{name}")
        box.files.chmod(f"moved/{name}", 0o600)
        box.files.remove(f"moved/{name}")
    assert names(box, recursive=True) == ["moved"]


def a_name_that_is_no_text_is_listed_and_can_be_used(box: Sandbox) -> None:
    box.exec(
        ["python3", "-c", "import os\nopen(b'bad\\xff\\xfe', 'w').write('x')\nos.symlink(b'to\\xff', b'link')"]
    ).check()
    listed = list(box.files.list())
    assert [info.path for info in listed] == ["bad\udcff\udcfe", "link"]
    assert listed[1].target == "to\udcff"
    assert box.files.read_text("bad\udcff\udcfe") == "x"
    box.files.remove("bad\udcff\udcfe")
    assert names(box) == ["link"]


def a_name_longer_than_a_name_may_be_is_the_kernels_error(box: Sandbox) -> None:
    with raises(OSError, match="File name too long"):
        box.files.write("a" * 256, "x")


def paths_with_dots_stay_inside(box: Sandbox) -> None:
    box.files.write("../workspace/../../../../tmp/f", "x")
    assert box.exec(["cat", "/tmp/f"]).stdout == "x"
    assert box.files.read_text("/../../../tmp/f") == "x"


def several_threads_use_files_at_once(box: Sandbox) -> None:
    def work(number: int) -> list[str]:
        found = []
        for turn in range(5):
            box.files.write(f"{number}/{turn}", f"{number}.{turn}" * 1000)
            found.append(box.files.read_text(f"{number}/{turn}"))
        return found

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert results == [[f"{number}.{turn}" * 1000 for turn in range(5)] for number in range(6)]


CHECKS = (
    in_box(bytes_and_text_go_in_and_come_out),
    in_box(anything_that_gives_bytes_can_be_written),
    in_box(other_data_is_a_type_error_and_leaves_nothing),
    in_box(an_iterator_that_raises_leaves_the_old_file),
    in_box(aborting_a_write_leaves_other_processes_of_the_guest_alone),
    in_box(ranges_of_a_file),
    in_box(appending),
    in_box(modes_are_set_kept_and_default_to_0644),
    in_box(a_write_replaces_as_a_whole_so_that_a_reader_never_sees_half),
    in_box(a_write_through_a_link_replaces_its_target),
    in_box(parents_are_made_however_many),
    with_maker(fifty_megabytes_both_ways),
    with_maker(a_file_too_big_for_the_disk_is_no_space_and_leaves_nothing, "disk-quota"),
    in_box(failures_are_pythons_own_errors_with_the_path_that_was_asked_for),
    in_box(devices_pipes_and_sockets_are_not_read),
    in_box(a_path_that_can_be_none_is_a_policy_error),
    in_box(a_path_of_another_type_is_a_type_error),
    in_box(a_list_is_sorted_and_says_what_each_is),
    in_box(links_are_shown_and_never_followed),
    in_box(a_directory_with_more_entries_than_a_page_and_more_folders_than_descriptors),
    in_box(a_tree_of_three_thousand_levels_is_listed_and_removed),
    in_box(a_tree_without_rights_is_removed),
    in_box(removing_follows_no_link),
    in_box(renaming_files_and_directories_makes_parents_and_replaces),
    in_box(stat_of_files_links_and_the_roots),
    in_box(odd_names_work_everywhere),
    in_box(a_name_that_is_no_text_is_listed_and_can_be_used),
    in_box(a_name_longer_than_a_name_may_be_is_the_kernels_error),
    in_box(paths_with_dots_stay_inside),
    in_box(several_threads_use_files_at_once),
)
