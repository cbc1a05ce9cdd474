"""The count of what is left sees each kind of thing, and an ordinary user is one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import leftovers
import ringfence
import suite
from accounts import OrdinaryUser, let_others_through
from ringfence import Sandbox
from ringfence.backends.process import pool


def test_nothing_is_left_when_nothing_happened() -> None:
    before = leftovers.count()
    assert leftovers.wait_for_nothing(before, within_s=0) == []


def test_a_spare_that_ends_between_two_looks_is_not_counted_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in the pool's account and not among the processes: a later count found one spawner too many."""
    kept = leftovers.stock()
    accounts = iter([kept._replace(spares=kept.spares + 1), kept, kept])
    monkeypatch.setattr(leftovers, "stock", lambda: next(accounts))
    assert leftovers._stock_and_descendants()[0] == kept


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
        assert leftovers.difference(before, leftovers.count()) == [f"descriptor {fd} (/dev/null)"]
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


def after_a_run() -> leftovers.Leftovers:
    """Return the count after a run, when its leftovers are removed and its spare is made again."""
    pool.close_all()
    nothing = leftovers.count()
    ringfence.run("1")
    (one,) = pool._pools.values()
    deadline = time.monotonic() + 5
    while any(len(shelf.spares) < shelf.wanted for shelf in one._shelves.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert leftovers.wait_for_nothing(nothing) == []
    return leftovers.count()


def test_a_sandbox_that_nobody_closed_is_seen_and_the_spares_are_not() -> None:
    before = after_a_run()
    box = Sandbox().start()
    try:
        seen = leftovers.wait_for_nothing(before, within_s=1)
        assert seen[:2] == ["1 rf-init more than the pools keep", "1 rf-spawner more than the pools keep"]
        assert seen[2].startswith("descriptor ")
    finally:
        box.close()
    ringfence.run("1")
    assert leftovers.wait_for_nothing(before) == []


def test_a_template_that_nobody_ends_is_seen() -> None:
    before = after_a_run()
    one = next(iter(pool._pools.values()))
    (view, template), *_ = one._templates._of_view.items()
    del one._templates._of_view[view]
    for shelf in one._shelves.values():
        shelf.wanted = 0  # until the next run: no spare is to be built, of a new template, while we look
        while shelf.spares:
            shelf.spares.pop().close()
    seen = leftovers.wait_for_nothing(before, within_s=1)
    template.close()
    assert "1 rf-monitor more than the pools keep" in seen
    assert leftovers.wait_for_nothing(before) == []


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


def test_who_is_let_through_to_a_folder_of_a_test_finds_all_above_it_as_it_was(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    own = shared / "pytest-of-root" / "pytest-0" / "test"
    own.mkdir(parents=True)
    for path, mode in ((shared, 0o1777), (shared / "pytest-of-root", 0o700), (own.parent, 0o700), (own, 0o700)):
        path.chmod(mode)
    let_others_through(own)
    modes = [path.stat().st_mode & 0o7777 for path in (shared, shared / "pytest-of-root", own.parent, own)]
    assert modes == [0o1777, 0o755, 0o755, 0o755]


ORPHAN = """
import subprocess, time, leftovers
before = leftovers.count()
subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & exec sleep 0.2"])
print([line.split()[2] for line in leftovers.difference(before, leftovers.count())])
"""


@pytest.mark.skipif(not suite.can_be_apart(), reason="scripts/apart takes root")
def test_a_process_of_any_name_that_pid_1_has_inherited_is_seen_apart() -> None:
    paths = os.pathsep.join([str(suite.TESTS), str(suite.ROOT / "src")])
    done = subprocess.run(
        [suite.ROOT / "scripts" / "apart", sys.executable, "-c", ORPHAN],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[\"'sleep'\"]\n", "")
