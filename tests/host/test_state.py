"""The state directory is ours alone, and what a killed process left is swept, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accounts import OrdinaryUser, let_others_through
from backends.process.children import Say, child, state_of
from programs import read_program
from ringfence.errors import SandboxClosedError, SandboxError, UnsupportedError
from ringfence.host import cgroups, process_id, state
from ringfence.host.state import SweepReport


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty state directory, so that reports name only this test's files."""
    place = tmp_path / "state"
    monkeypatch.setattr(state, "state_dir", lambda: state._own(str(place)))
    return place


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "remove_dead_owners", lambda _: [])
    monkeypatch.setattr(state, "_sweep_uids", lambda: 0)


# ── the directory (C09, C10) ─────────────────────────────────────────────────────────────────────


def test_a_state_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = state._own(str(tmp_path / "new"))
    assert (os.stat(path).st_mode & 0o7777, os.stat(path).st_uid) == (0o700, os.geteuid())
    assert state._own(path) == path


def test_a_link_a_file_and_an_open_directory_are_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir(0o755)
    for name in ("link", "file", "open"):
        with pytest.raises(UnsupportedError, match=f"/{name} cannot hold our state") as caught:
            state._own(str(tmp_path / name))
        assert caught.value.fix == f"look at it, then remove it: ls -ld {tmp_path}/{name}"


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", 2_070_001, 2_070_001)
    with pytest.raises(UnsupportedError, match="cannot hold our state"):
        state._own(str(tmp_path / "theirs"))


def test_an_ordinary_user_has_it_in_the_runtime_directory_or_at_home(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    let_others_through(tmp_path)
    run, home, loose = tmp_path / "run", tmp_path / "home", tmp_path / "loose"
    for path in (run, home, loose):
        path.mkdir(0o700)
        os.chown(path, 2_070_001, 2_070_001)
    loose.chmod(0o777)

    def ask(say: Say) -> None:
        os.environ["HOME"] = str(home)
        for runtime in (str(run), str(loose), "relative", ""):
            os.environ["XDG_RUNTIME_DIR"] = runtime
            say(state.state_dir())
        os.environ["HOME"] = "/nonexistent"  # a service's user
        for make in (state.state_dir, lambda: state.disk_directory("x")):
            try:
                make()
            except UnsupportedError as error:
                say(f"{error.code}: {error.fix}")

    with child(ask, uid=2_070_001) as user:
        at_home = f"{home}/.local/state/ringfence"
        assert [user.hear() for _ in range(4)] == [f"{run}/ringfence", at_home, at_home, at_home]
        fix = "state: set HOME to a folder that this user may write, or XDG_RUNTIME_DIR to one that is its own"
        assert [user.hear() for _ in range(2)] == [fix, fix]


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def test_a_record_says_what_was_noted_and_not_forgotten(own_state: Path) -> None:
    owner = state.register()
    owner.note("cgroup", path="/a")
    owner.note("file", path="/b", device=1, inode=2)
    owner.note("cgroup", path="/a")
    owner.forget("cgroup", path="/a")
    owner.forget("cgroup", path="/never")
    record = own_state / "owners" / process_id.name()
    assert state._read_record(str(record)) == [("file", (("device", 1), ("inode", 2), ("path", "/b")))]
    owner.forget("file", path="/b", device=1, inode=2)
    owner.close()
    assert list((own_state / "owners").iterdir()) == []


def test_a_record_with_something_in_it_outlives_close_and_is_taken_up_again(own_state: Path) -> None:
    owner = state.register()
    owner.note("cgroup", path="/a")
    owner.close()
    owner.close()
    again = state.register()
    again.forget("cgroup", path="/a")
    again.close()
    assert list((own_state / "owners").iterdir()) == []


def test_a_record_does_not_grow_with_what_is_forgotten(own_state: Path) -> None:
    owner = state.register()
    owner.note("cgroup", path="/kept")
    for number in range(3_000):
        owner.note("cgroup", path=f"/{number}")
        owner.forget("cgroup", path=f"/{number}")
    record = own_state / "owners" / process_id.name()
    assert record.stat().st_size < 200_000
    assert state._read_record(str(record)) == [("cgroup", (("path", "/kept"),))]
    owner.forget("cgroup", path="/kept")
    owner.close()
    assert list((own_state / "owners").iterdir()) == []


def test_a_half_written_last_line_is_passed_over(tmp_path: Path) -> None:
    record = tmp_path / "record"
    whole = state._line("note", ("cgroup", (("path", "/a"),)))
    record.write_bytes(whole + whole[:-5])
    assert state._read_record(str(record)) == [("cgroup", (("path", "/a"),))]


def test_a_process_registers_once(own_state: Path) -> None:
    owner = state.register()
    with pytest.raises(SandboxError, match="a process registers once"):
        state.register()
    owner.close()


def test_in_a_fork_the_record_is_a_dead_object_and_stays_the_parents(own_state: Path) -> None:
    owner = state.register()

    def use(say: Say) -> None:
        try:
            owner.note("cgroup", path="/a")
        except SandboxClosedError as error:
            say(error.code)
        owner.close()
        say("closed")

    with child(use) as fork:
        assert [fork.hear(), fork.hear()] == ["sandbox-closed", "closed"]
    assert [path.name for path in (own_state / "owners").iterdir()] == [process_id.name()]
    owner.close()


# ── the sweep ────────────────────────────────────────────────────────────────────────────────────


def _facts(path: str) -> dict[str, str | int]:
    found = os.stat(path)
    return {"path": path, "device": found.st_dev, "inode": found.st_ino}


def _leave_behind(project: Path) -> tuple[str, list[str]]:
    """Return the name of a killed process, and the paths that it made, last first: a folder with a file, and a file."""

    def work(say: Say) -> None:
        owner = state.register()
        Path(f"{project}/.git").mkdir()
        Path(f"{project}/.git/config").write_text("ours")
        Path(f"{project}/socket").write_text("bytes")
        owner.note("file", **_facts(f"{project}/.git"))
        owner.note("file", **_facts(f"{project}/.git/config"))
        owner.note("file", **_facts(f"{project}/socket"))
        say(process_id.name())
        time.sleep(60)

    with child(work) as owner:
        name = owner.hear()
        owner.kill()
    return name, [f"{project}/socket", f"{project}/.git/config", f"{project}/.git"]


def test_what_a_killed_process_noted_is_removed_and_reported(own_state: Path, no_groups: None, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "theirs").write_text("")
    name, left = _leave_behind(project)
    assert state.sweep() == SweepReport(owners=(name,), files=tuple(left))
    assert [path.name for path in project.iterdir()] == ["theirs"]
    assert state.sweep() == SweepReport()


def test_what_the_living_noted_is_left(own_state: Path, no_groups: None, tmp_path: Path) -> None:
    owner = state.register()
    Path(f"{tmp_path}/held").touch()
    owner.note("file", **_facts(f"{tmp_path}/held"))
    assert state.sweep() == SweepReport()
    assert (tmp_path / "held").exists()
    owner.forget("file", **_facts(f"{tmp_path}/held"))
    owner.close()


def test_a_record_from_another_pid_namespace_counts_as_dead_only_when_nobody_locks_it(
    own_state: Path, no_groups: None
) -> None:
    name = f"{os.getpid()}-1-{process_id.pid_namespace() + 1}"
    owner = state.OwnerRecord(f"{state.directory('owners')}/{name}")
    owner.note("cgroup", path="/sys/fs/cgroup/none")
    assert state.sweep() == SweepReport()
    owner.close()
    assert state.sweep() == SweepReport(owners=(name,))


def test_files_that_are_no_records_are_left(own_state: Path, no_groups: None) -> None:
    strange = Path(state.directory("owners")) / "README"
    strange.write_text("not ours")
    assert state.sweep() == SweepReport()
    assert strange.exists()


def test_two_sweeps_do_not_work_at_once(own_state: Path, no_groups: None, tmp_path: Path) -> None:
    import fcntl

    name, left = _leave_behind(tmp_path)
    lock = os.open(own_state / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert state.sweep(timeout_s=0.05) == SweepReport(busy=True)
    os.close(lock)
    assert state.sweep() == SweepReport(owners=(name,), files=tuple(left))


def test_a_sweep_with_nothing_to_do_is_cheap(own_state: Path) -> None:
    """About 0.05 of the start of a bare Python, on the same machine with the same load."""
    state.sweep()
    started = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    between = time.perf_counter()
    for _ in range(50):
        state.sweep()
    assert (time.perf_counter() - between) / 50 < 0.5 * (between - started)


def test_a_frozen_guest_of_a_killed_process_is_swept(own_state: Path) -> None:
    """D18: on cgroup v1 a frozen process survives SIGKILL, so the control arm sees it alive before the sweep."""
    tree = cgroups.find()
    if tree is None:
        pytest.skip("no cgroup this user may write")
    wait, ready = os.pipe()

    def work(say: Say) -> None:
        state.register().note("cgroup", path=tree.path or "/")
        group = tree.create("orphan", cgroups.GroupLimits(memory_bytes=64 << 20, processes=16, cpus=1.0))
        fds = group.join_fds()
        guest = os.fork()
        if guest == 0:
            for fd in fds:
                os.write(fd, b"0")
            os.write(ready, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(wait, 1)
        group.freeze()
        say([process_id.name(), guest])
        time.sleep(60)

    with child(work) as owner:
        name, guest = owner.hear()
        owner.kill()
        assert state_of(guest) in ("D", "S")
        report = state.sweep()
    os.close(wait)
    os.close(ready)
    assert report.owners == (name,)
    assert [path for path in report.cgroups if path.endswith(f"/ringfence/{name}")] != []
    assert state_of(guest) in ("gone", "Z")
    assert not any(os.path.isdir(path) for path in report.cgroups)


def test_a_tree_that_a_killed_process_noted_goes_with_all_that_a_guest_put_there(
    own_state: Path, no_groups: None, tmp_path: Path
) -> None:
    """No link is followed, and neither depth nor missing rights stop it (A27)."""
    kept_in = tmp_path / "ringfence" / "workspaces"
    kept_in.mkdir(0o700, parents=True)
    os.chmod(kept_in.parent, 0o700)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "host").write_text("host")
    tree = kept_in / "one"
    (tree / "shut").mkdir(parents=True)
    (tree / "out").symlink_to(outside)
    (tree / "shut" / "in").write_text("x")
    os.chmod(tree / "shut", 0)
    for path in (tree, outside):
        assert state._remove_noted_tree({"path": str(path)}) == (path == tree)
    assert (list(kept_in.iterdir()), (outside / "host").read_text()) == ([], "host")
    assert not state.remove_tree(str(tree)), "it was gone already"


_UMASK = read_program("host/state_umask.py")


def test_a_callers_umask_closes_nothing_to_the_sweep(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(_UMASK, f"{ordinary_user.home}/umask-{os.getpid()}")
    shutil.rmtree(f"{ordinary_user.home}/umask-{os.getpid()}", ignore_errors=True)
    assert (done.stdout, done.stderr) == ("0o700 0o600 0o755 [] 1\n[]\n", "")
