"""files where the process backend differs; what holds for every backend is in ringfence.testing.checks.files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from backends_declared import OURS
from ringfence import AsyncSandbox, Limits, Policy, Sandbox, SandboxError
from ringfence.events import FileEvent
from ringfence.transfer.download import Landing
from ringfence.transfer.upload import Leaving

pytestmark = pytest.mark.everywhere


def test_a_list_that_is_not_read_to_its_end_leaves_no_worker(box: Sandbox, everywhere: str) -> None:
    box.run("for i in range(3000): open(f'f{i}', 'w').close()").check()
    for _ in range(30):
        for info in box.files.list():
            assert info.kind == "file"
            break
    code = "import os\nsum(p.isdigit() for p in os.listdir('/proc'))"
    assert box.run(code).value == str(OURS[everywhere] + 1)


def test_a_file_whose_size_only_the_guest_chose_is_read_up_to_a_cap(box: Sandbox) -> None:
    """A file of holes costs the guest nothing. With a size named by the caller the read succeeds."""
    sizes = {"text": 1 << 24, "more-text": (1 << 24) + 1, "most": 1 << 26, "more": (1 << 26) + 1}
    code = f"import os\nfor name, size in {sizes!r}.items():"
    box.run(f"{code}\n    os.truncate(os.open(name, os.O_CREAT | os.O_RDWR), size)").check()
    assert (len(box.files.read("most")), len(box.files.read_text("text"))) == (1 << 26, 1 << 24)
    for read, name in ((box.files.read, "more"), (box.files.read_text, "more-text")):
        with pytest.raises(OSError, match="too large to be read as a whole") as caught:
            read(name)
        assert caught.value.errno == errno.EFBIG
    assert len(box.files.read("more", size=1 << 30)) == (1 << 26) + 1
    assert len(box.files.read("more", offset=1)) == 1 << 26


# Stops or kills every process of the sandbox that is younger than itself: file workers above all.
HUNTER = """
import os, signal, sys
print("ready", flush=True)
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) > os.getpid():
            try: os.kill(int(name), int(sys.argv[1]))
            except OSError: pass
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the times after which a worker is given up short enough for a test."""
    monkeypatch.setattr("ringfence._sync.worker.STALL_S", 1.5)
    monkeypatch.setattr("ringfence._sync.worker._SHORT_S", 1.0)


@pytest.mark.usefixtures("impatient")
def test_a_guest_that_stops_workers_delays_a_caller_and_holds_nobody(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    with Sandbox(policy=Policy(limits=Limits(timeout_s=1, disk="20M"))) as box:
        box.files.write("kept", b"x" * 3_000_000)
        with box.spawn(["python3", "-c", HUNTER, "19"], timeout_s=60) as hunter:
            next(iter(hunter))
            calls: list[Callable[[], object]] = [
                lambda: box.files.stat("kept"),
                lambda: box.files.read("kept"),
                lambda: box.files.upload(tmp_path / "f", "new"),
                lambda: box.files.download("kept", tmp_path / "out"),
            ]
            for call in calls:
                before = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    call()
                assert time.monotonic() - before < 9
        assert box.files.stat("kept").size == 3_000_000
        assert [path for path in os.listdir(tmp_path) if path.startswith(".")] == []
        assert {info.path for info in box.files.list()} <= {"kept", "new"}


@pytest.mark.usefixtures("impatient")
def test_what_a_stopped_worker_had_begun_is_swept(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / "in" / str(number)).write_bytes(b"x" * 300_000)
    once = HUNTER.replace("int(sys.argv[1]))", "19) or (print('stopped', flush=True), sys.exit(0))")
    with Sandbox(policy=Policy(limits=Limits(disk="20M"))) as box, box.spawn(["python3", "-c", once]) as hunter:
        next(iter(hunter))
        with pytest.raises(TimeoutError, match="stood still"):
            box.files.upload(tmp_path / "in", "tree", on_progress=_slow)
        assert [info.path for info in box.files.list(recursive=True)] in ([], ["tree"])
        box.files.upload(tmp_path / "in", "tree")
        assert len(list(box.files.list("tree"))) == 20


def test_a_guest_that_kills_workers_gets_a_clear_error_told() -> None:
    with Sandbox() as box:
        box.files.write("f", b"x" * 30_000_000)
        with box.spawn(["python3", "-c", HUNTER, "9"]) as hunter:
            next(iter(hunter))
            with pytest.raises((SandboxError, OSError)):
                _read_often(box)
        assert len(box.files.read("f")) == 30_000_000


def _read_often(box: Sandbox) -> None:
    for _ in range(200):
        box.files.read("f")


def test_the_watcher_being_killed_is_told(box: Sandbox, everywhere: str) -> None:
    watch = box.files.watch()
    kill = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p -gt $1 ] && [ $p != $$ ] && kill -9 $p; done; true"
    box.exec(["sh", "-c", kill, "sh", str(OURS[everywhere])])
    with pytest.raises(SandboxError, match="ended early"):
        list(watch)
    watch.close()


def test_ten_thousand_files_in_one_folder_are_listed_searched_packed_and_fetched(tmp_path: Path) -> None:
    """F22: the list comes in pages; no answer is a single message."""
    with Sandbox(policy=Policy(limits=Limits(disk_files=11_000, disk="60M"))) as box:
        box.run("for i in range(10_000): open(f'f{i:05}', 'w').write('needle' if i % 5000 == 0 else '.')").check()
        assert [info.path for info in box.files.list()] == [f"f{i:05}" for i in range(10_000)]
        assert [match.path for match in box.files.search("needle")] == ["f00000", "f05000"]
        box.files.download(".", tmp_path / "out")
        assert len(os.listdir(tmp_path / "out")) == 10_000


def test_a_tree_deeper_than_paths_go_comes_out_and_goes_in(tmp_path: Path) -> None:
    """A27: the tree is deeper than a path can be long."""
    deep = "import os\nfor _ in range(1200):\n    os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').close()"
    with Sandbox() as box:
        box.run(deep).check()
        box.files.download(".", tmp_path / "out")
        depth, directory = 0, os.open(tmp_path / "out", os.O_RDONLY)
        while os.listdir(directory) == ["d"]:
            below = os.open("d", os.O_RDONLY, dir_fd=directory)
            os.close(directory)
            directory, depth = below, depth + 1
        assert (os.listdir(directory), depth) == (["bottom"], 1200)
        os.close(directory)
        box.files.upload(tmp_path / "out", "again")
        assert len(list(box.files.list("again", recursive=True))) == 1201
    from ringfence.shared import tree_walk

    top = os.open(tmp_path, os.O_RDONLY)
    tree_walk.remove_tree(top, "out")
    os.close(top)


def test_a_cancelled_task_leaves_nothing_on_either_side(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with AsyncSandbox(policy=Policy(limits=Limits(disk="60M"))) as box:
            await box.files.write("big/f", b"x" * 50_000_000)
            jobs = [
                asyncio.ensure_future(box.files.write("new/f", endless())),
                asyncio.ensure_future(box.files.unpack(endless(), "other/t", format="zip")),
                asyncio.ensure_future(box.files.download("big", tmp_path / "out", on_progress=_slow)),
            ]
            await asyncio.sleep(0.3)
            for job in jobs:
                job.cancel()
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            assert [type(end) for end in ends] == [asyncio.CancelledError] * 3
            assert [info.path async for info in box.files.list(recursive=True)] == ["big", "big/f"]
            assert os.listdir(tmp_path) == []
            async with box.files.watch("big") as watch:
                await box.files.remove("big/f")
                assert await anext(watch) == FileEvent("remove", "f")

    asyncio.run(main())


def test_a_folder_that_its_owner_shut_stops_neither_a_list_nor_a_watch() -> None:
    """Names that can be listed, of files that cannot be examined; and links whose target the kernel does not show."""
    with Sandbox() as box:
        box.exec(["sh", "-c", "mkdir half none; touch half/in none/in; chmod 644 half; chmod 0 none"]).check()
        assert [info.path for info in box.files.list(recursive=True)] == ["half", "none"]
        with box.files.watch(recursive=True) as watch:
            box.exec(["sh", "-c", "mkdir -p /tmp/x; touch f"]).check()
            assert next(watch) == FileEvent("create", "f")
        told = {info.path: info.target for info in box.files.list("/proc", recursive=True)}
        assert told["1/cwd"] is None


def test_a_folder_by_a_link_is_there_and_a_rename_of_nothing_makes_none() -> None:
    with Sandbox() as box:
        box.exec(["sh", "-c", "mkdir real; ln -s real link; ln -s nowhere dangling; touch file"]).check()
        for there in (".", "/", "real", "link"):
            box.files.mkdir(there)
            with pytest.raises(OSError, match=r"exists|Invalid"):
                box.files.mkdir(there, exist_ok=False)
        for taken in ("file", "dangling"):
            with pytest.raises(FileExistsError):
                box.files.mkdir(taken)
        with pytest.raises(FileNotFoundError) as missing:
            box.files.rename("missing", "new/name")
        assert (missing.value.filename, box.files.exists("new")) == ("missing", False)
        with pytest.raises(NotADirectoryError):
            box.files.rename("real", "file/x")
        box.files.rename("dangling", "new/name")
        assert box.files.stat("new/name").target == "nowhere"


def test_a_task_that_is_cancelled_while_the_host_opens_its_side_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a thread opened for a cancelled caller have to be closed all the same."""
    opened = threading.Event()
    kinds: list[type[Landing] | type[Leaving]] = [Landing, Leaving]
    for kind in kinds:
        monkeypatch.setattr(kind, "__init__", _telling(kind.__init__, opened))
    (tmp_path / "in").write_text("x")
    (tmp_path / "out").mkdir()

    async def main() -> None:
        async with AsyncSandbox() as box:
            await box.files.write("big/f", "x")
            down, up = box.files.download("big", tmp_path / "out" / "new"), box.files.upload(tmp_path / "in", "in")
            for call in (down, up):
                opened.clear()
                job = asyncio.ensure_future(call)
                assert await asyncio.to_thread(opened.wait, 20)
                job.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await job
            here = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
            assert [path for path in here if path.startswith(str(tmp_path))] == []
            assert os.listdir(tmp_path / "out") == []

    asyncio.run(main())


def _telling(real: Callable[..., None], opened: threading.Event) -> Callable[..., None]:
    def made(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)
        opened.set()
        time.sleep(0.2)

    return made


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _slow(*_: object) -> None:
    time.sleep(0.02)


def test_a_hundred_megabytes_pass_in_little_memory(tmp_path: Path) -> None:
    """The window is the bound, not the file."""
    import tracemalloc

    with open(tmp_path / "in", "wb") as file:
        file.writelines(os.urandom(1 << 20) for _ in range(100))
    with Sandbox(policy=Policy(limits=Limits(disk="120M"))) as box:
        tracemalloc.start()
        try:
            box.files.upload(tmp_path / "in", "f")
            box.files.download("f", tmp_path / "out")
            sizes = [len(chunk) for chunk in box.files.chunks("f")]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (sum(sizes), peak < 12 << 20) == (100 << 20, True), peak
        assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


def test_a_magic_link_leads_nowhere(box: Sandbox) -> None:
    """J18: a magic link is the kernel's own way to a file, past every name on the path."""
    box.files.write("real", "content")
    for path in ("/proc/self/cwd/real", "/proc/self/root/etc/passwd", "/proc/self/exe", "/proc/1/root/etc/passwd"):
        with pytest.raises(OSError, match=r"symbolic links|Permission denied|not permitted"):
            box.files.read(path)
        with pytest.raises(OSError, match=r"symbolic links|Permission denied|not permitted|Read-only"):
            box.files.write(path, "changed")
    box.exec(["ln", "-s", "/proc/self/cwd/real", "behind"]).check()
    with pytest.raises(OSError, match="symbolic links"):
        box.files.read("behind")
    box.exec(["ln", "-s", "/workspace/real", "plain"]).check()
    assert box.files.read_text("plain") == "content"
