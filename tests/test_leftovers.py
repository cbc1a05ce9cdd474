"""The count of what is left sees each kind of thing, and an ordinary user is one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import leftovers
from accounts import OrdinaryUser


def test_nothing_is_left_when_nothing_happened() -> None:
    before = leftovers.count()
    assert leftovers.wait_for_nothing(before, within_s=0) == []


def test_a_process_that_runs_on_is_seen_and_its_end_too() -> None:
    before = leftovers.count()
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert leftovers.wait_for_nothing(before, within_s=0) == [f"process {child.pid} 'sleep'"]
    finally:
        child.kill()
        child.wait()
    assert leftovers.wait_for_nothing(before) == []


def test_a_zombie_is_seen() -> None:
    before = leftovers.count()
    pid = os.posix_spawn("/bin/true", ["true"], {})
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert [line.split()[:2] for line in leftovers.difference(before, leftovers.count())] == [["process", str(pid)]]
    finally:
        os.waitpid(pid, 0)


def test_a_descriptor_is_seen() -> None:
    before = leftovers.count()
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        assert leftovers.difference(before, leftovers.count()) == ["1 descriptors"]
    finally:
        os.close(fd)


def test_a_temporary_file_of_ours_is_seen() -> None:
    before = leftovers.count()
    path = Path("/tmp", f"ringfence-leftover-{os.getpid()}")
    path.touch()
    try:
        assert leftovers.difference(before, leftovers.count()) == [f"file {path}"]
    finally:
        path.unlink()


def test_an_ordinary_user_has_no_rights_and_reads_the_package(ordinary_user: OrdinaryUser) -> None:
    code = "import os, sys, ringfence.values as v; print(os.getuid(), os.getgroups(), sorted(os.environ), v.__file__)"
    done = ordinary_user.run(code)
    groups = [ordinary_user.gid] if os.geteuid() else []
    names = ["HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "USER"]
    assert (done.stdout, done.stderr) == (
        f"{ordinary_user.uid} {groups} {names} {ordinary_user.source}/ringfence/values.py\n",
        "",
    )
    assert ordinary_user.uid != 0
