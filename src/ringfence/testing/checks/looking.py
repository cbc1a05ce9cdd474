"""Checks of files.search and files.watch: the content of files, and changes to files."""

from __future__ import annotations

import threading
import time

from ringfence import Limits, Policy, Sandbox
from ringfence.events import FileEvent
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker
from ringfence.types import Match

_TREE = """
mkdir -p src/deep .hidden
printf 'import os\\nprint(1)\\n' > src/a.py
printf 'no match\\nimport re  \\r\\nimport\\n' > src/deep/b.py
printf 'import me' > notes.txt
printf 'import \\0 binary' > blob
printf 'import hidden' > .hidden/x.py
ln -s src/a.py link.py
mkfifo pipe
"""


def lines_are_found_in_the_order_of_a_sorted_walk(box: Sandbox) -> None:
    box.exec(["sh", "-c", _TREE]).check()
    assert list(box.files.search("import")) == [
        Match("notes.txt", 1, "import me"),
        Match(".hidden/x.py", 1, "import hidden"),
        Match("src/a.py", 1, "import os"),
        Match("src/deep/b.py", 2, "import re  "),
        Match("src/deep/b.py", 3, "import"),
    ]
    assert list(box.files.search("^import .+e", "src", regex=True)) == [Match("deep/b.py", 2, "import re  ")]
    assert [m.path for m in box.files.search("import", pattern="*.py", limit=2)] == [".hidden/x.py", "src/a.py"]
    assert list(box.files.search("import", "notes.txt")) == [Match("notes.txt", 1, "import me")]
    assert list(box.files.search("IMPORT")) == []
    assert [m.line for m in box.files.search("(?i)IMPORT", "src/a.py", regex=True)] == [1]
    with raises(FileNotFoundError):
        list(box.files.search("x", "none"))


def long_lines_are_cut_and_found_nonetheless(box: Sandbox) -> None:
    box.files.write("f", b"a" * 300_000 + b"needle" + b"b" * 300_000 + b"\nneedle\n" + b"\xff needle")
    found = list(box.files.search("needle"))
    assert [(m.line, len(m.text) <= 1000) for m in found] == [(1, True), (2, True), (3, True)]
    assert found[1:] == [Match("f", 2, "needle"), Match("f", 3, "\ufffd needle")]


def more_matches_than_the_limit_end_there(box: Sandbox) -> None:
    box.files.write("f", "x\n" * 5000)
    assert len(list(box.files.search("x"))) == 1000
    assert len(list(box.files.search("x", limit=4999))) == 4999


def an_expression_that_runs_away_is_ended_and_the_sandbox_works_on(make: MakeSandbox) -> None:
    """F23: the expression is the caller's, the text the guest's; together they can take for ever."""
    with make(policy=Policy(limits=Limits(timeout_s=1))) as box:
        box.files.write("f", "a" * 40)
        started = time.monotonic()
        with raises(TimeoutError, match="limits.timeout_s"):
            list(box.files.search("(a*)*b", regex=True))
        assert time.monotonic() - started < 10
        assert [m.line for m in box.files.search("a{40}", regex=True)] == [1]


# ── watching ─────────────────────────────────────────────────────────────────────────────────────


def _events(box: Sandbox, script: str, count: int, *, recursive: bool) -> list[FileEvent]:
    """Return the events of a watch of the folder `w` while a script runs in the folder."""
    with box.files.watch("w", recursive=recursive) as watch:
        box.exec(["sh", "-c", script], cwd="w").check()
        return [next(watch) for _ in range(count)]


def every_kind_of_change_is_told(box: Sandbox) -> None:
    box.files.write("w/old", "x")
    script = (
        "echo 1 > f; chmod 600 f; mv f g; rm g; ln -s x l; mkdir d; echo 2 >> old; mv old ..; mv ../old new; rmdir d"
    )
    assert _events(box, script, 11, recursive=False) == [
        FileEvent("create", "f"),
        FileEvent("write", "f"),
        FileEvent("chmod", "f"),
        FileEvent("rename", "g", "f"),
        FileEvent("remove", "g"),
        FileEvent("create", "l"),
        FileEvent("create", "d"),
        FileEvent("write", "old"),
        FileEvent("remove", "old"),
        FileEvent("create", "new"),
        FileEvent("remove", "d"),
    ]


def of_what_the_host_puts_there_only_the_arrival_is_told(box: Sandbox) -> None:
    """The temporary name of a file that is not yet whole is not reported. A guest's own name of that form is."""
    box.files.write("w/old", "x")
    packed = b"".join(box.files.pack("w"))
    with box.files.watch("w", recursive=True) as watch:
        box.files.write("w/new", "1")
        box.files.write("w/old", "2")
        box.files.write("w/#7", "3")
        box.files.unpack(packed, "w/made")
        box.exec(["sh", "-c", "echo 4 > '#8'"], cwd="w").check()
        events = [next(watch) for _ in range(7)]
    assert events == [
        FileEvent("create", "new"),
        FileEvent("create", "old"),
        FileEvent("create", "#7"),
        FileEvent("create", "made"),
        FileEvent("create", "made/old"),
        FileEvent("create", "#8"),
        FileEvent("write", "#8"),
    ]


def without_recursive_only_the_folder_itself_is_watched(box: Sandbox) -> None:
    box.files.mkdir("w/d")
    script = "echo 1 > d/f; mkdir e; echo 1 > e/f; echo end > end"
    assert _events(box, script, 2, recursive=False) == [FileEvent("create", "e"), FileEvent("create", "end")]


def new_folders_are_watched_and_what_was_in_them_before_is_told(box: Sandbox) -> None:
    """A thousand files made at once in new folders: none is lost, none is reported twice."""
    box.files.mkdir("w/there/already")
    many = "    os.makedirs(f'n{i}/d')\n    for j in range(20): open(f'n{i}/d/{j}', 'w').close()\n"
    code = f"import os\nfor i in range(50):\n{many}"
    with box.files.watch("w", recursive=True) as watch:
        box.exec(["python3", "-c", code + "open('there/already/end', 'w').close()"], cwd="w").check()
        created = []
        for event in watch:
            if event.kind == "create":
                created.append(event.path)
            if event.path == "there/already/end":
                break
    wanted = [f"n{i}{rest}" for i in range(50) for rest in ("", "/d", *(f"/d/{j}" for j in range(20)))]
    assert sorted(created) == sorted([*wanted, "there/already/end"])


def a_folder_that_moves_keeps_its_watch(box: Sandbox) -> None:
    box.files.write("w/a/b/f", "x")
    script = "mv a c; echo 1 >> c/b/f; mv c/b .; echo 2 > b/g; mv b ..; echo 3 > ../b/g; echo end > end"
    assert _events(box, script, 7, recursive=True) == [
        FileEvent("rename", "c", "a"),
        FileEvent("write", "c/b/f"),
        FileEvent("rename", "b", "c/b"),
        FileEvent("create", "b/g"),
        FileEvent("write", "b/g"),
        FileEvent("remove", "b"),
        FileEvent("create", "end"),
    ]


def a_flood_that_nobody_reads_is_told_as_an_overflow(box: Sandbox) -> None:
    """F15: the queue is the kernel's and has an end; the host holds no more than its window."""
    box.files.mkdir("w")
    code = (
        "import os\nfor i in range(40_000):\n    os.close(os.open(f'f{i % 500}', os.O_CREAT)); os.remove(f'f{i % 500}')"
    )
    with box.files.watch("w") as watch:
        box.exec(["python3", "-c", code], cwd="w").check()
        kinds = set()
        for event in watch:
            kinds.add(event.kind)
            if event.kind == "overflow":
                break
    assert kinds == {"create", "remove", "overflow"}
    assert _events(box, "echo 1 > f", 1, recursive=False) == [FileEvent("create", "f")]


def a_watch_ends_with_its_folder_and_with_close(box: Sandbox) -> None:
    box.files.mkdir("w")
    with box.files.watch("w") as watch:
        box.files.remove("w")
        assert list(watch) == [FileEvent("remove", ".")]
    other = box.files.watch()
    other.close()
    other.close()
    assert list(other) == []
    third = box.files.watch()
    closer = threading.Timer(0.3, third.close)
    closer.start()
    assert list(third) == []
    closer.join()
    with raises(FileNotFoundError):
        box.files.watch("none")
    box.files.write("f", "")
    with raises(NotADirectoryError):
        box.files.watch("f")


def sixteen_watches_are_too_many_and_that_is_said(box: Sandbox) -> None:
    """F33: inotify objects are few inside; the error is the kernel's, and closing makes room."""
    held = []
    with raises(OSError):
        for _ in range(200):
            held.append(box.files.watch())  # noqa: PERF401  # the watches before the last must be closed
    for watch in held:
        watch.close()
    with box.files.watch():
        assert box.exec(["true"]).ok


CHECKS = (
    in_box(lines_are_found_in_the_order_of_a_sorted_walk),
    in_box(long_lines_are_cut_and_found_nonetheless),
    in_box(more_matches_than_the_limit_end_there),
    with_maker(an_expression_that_runs_away_is_ended_and_the_sandbox_works_on),
    in_box(every_kind_of_change_is_told),
    in_box(of_what_the_host_puts_there_only_the_arrival_is_told),
    in_box(without_recursive_only_the_folder_itself_is_watched),
    in_box(new_folders_are_watched_and_what_was_in_them_before_is_told),
    in_box(a_folder_that_moves_keeps_its_watch),
    in_box(a_flood_that_nobody_reads_is_told_as_an_overflow, "watch-overflow"),
    in_box(a_watch_ends_with_its_folder_and_with_close),
    in_box(sixteen_watches_are_too_many_and_that_is_said),
)
