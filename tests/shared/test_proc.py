"""A single module reads /proc: other users choose the names of processes, and no such name misleads the reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.shared import proc


def test_a_process_is_read_whatever_it_calls_itself() -> None:
    name = b") Z 1 ("
    row = b"7 (" + name + b") S 5 7 6 0 -1 4194560 " + b"0 " * 10 + b"3 0 99 1 2\n"
    found = proc.ProcessStat(row)
    assert (found.state, found.parent, found.session, found.flags) == (b"S", 5, 6, 4194560)
    assert (found.threads, found.started, found.has_ended) == (3, 99, False)


def test_this_process_is_found_and_its_child_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in proc.children_of(os.getpid())
        assert proc.processes()[child.pid].parent == os.getpid()
        assert not proc.process(child.pid).has_ended
        child.communicate(b"\n")
    assert proc.process("self").session == os.getsid(0)


def test_a_zombie_has_ended_and_a_process_that_is_gone_is_an_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert proc.process(pid).has_ended
    os.waitpid(pid, 0)
    with pytest.raises(FileNotFoundError):
        proc.process(pid)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/a\\040b", "/a b"),
        ("/a\\011b\\012c", "/a\tb\nc"),
        ("/a\\043b", "/a#b"),
        ("/a\\134040", "/a\\040"),  # a backslash and three digits: no blank
        ("/a\\134\\040", "/a\\ "),
        ("/a\\", "/a\\"),
        ("/\udcff", "/\udcff"),
    ],
)
def test_a_mounts_paths_are_read_as_they_are(tmp_path: Path, written: str, path: str) -> None:
    file = tmp_path / "mountinfo"
    row = f"31 20 8:1 {written} {written} ro,nosuid shared:1 - ext4 /dev/x rw\n"
    file.write_text(row, encoding="utf-8", errors="surrogateescape")
    (mount,) = proc.mounts_in(str(file))
    assert (mount.root, mount.target) == (path, path)
    assert (mount.number, mount.parent, mount.device) == ("31", "20", "8:1")
    assert (mount.options, mount.kind) == (["ro", "nosuid"], "ext4")


def test_the_mounts_of_this_process_are_those_of_python() -> None:
    targets = {mount.target for mount in proc.mounts()}
    assert {"/", "/proc"} <= targets
    assert all(os.path.isabs(target) for target in targets)


def test_fields_are_those_of_the_kernel() -> None:
    with open(os.devnull, "rb") as file:
        assert proc.fields(f"/proc/self/fdinfo/{file.fileno()}")["pos"] == "0"
    assert proc.fields("/proc/self/status")["Pid"] == str(os.getpid())
