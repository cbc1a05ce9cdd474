"""A writable folder of the host while sandboxes use it: other users of the folder and the sandboxes do no harm."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from programs import read_program
from ringfence import Limits, Mount, Policy, Result, Sandbox, SandboxLostError, SandboxManager
from ringfence.host import cgroups
from ringfence.host.placeholders import is_placeholder
from ringfence.plan.rootfs.protected import HELD_DIRECTORIES, HELD_FILES

ALL = {*HELD_FILES, *HELD_DIRECTORIES}
# Names that a guest may not make, tried for as long as it runs.
SPIN = read_program("behaviour/placeholders_spin.py")


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a project folder that a guest with another uid may write to."""
    folder = tmp_path_factory.mktemp("project")
    for path in (folder, *folder.parents):
        if path == folder or path.name.startswith("pytest-"):
            path.chmod(0o755)
    folder.chmod(0o777)
    return folder


def policy(folder: Path) -> Policy:
    return Policy(mounts=[Mount(folder, mode="rw")], limits=Limits(timeout_s=30, cpu_time_s=30))


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@example.com", *words],
        check=True,
        capture_output=True,
    )


def can_stand_still() -> bool:
    tree = cgroups.find()
    return tree is not None and tree.has_freezer


# Elsewhere the sandbox is stopped: the tests of a replaced file are of that.
needs_freezer = pytest.mark.skipif(not can_stand_still(), reason="no freezer: a guest cannot be made to stand still")


def test_a_sandbox_outlives_those_that_came_and_went_before_and_beside_it(project: Path) -> None:
    """A set of notes lost the second sandbox's entries with the first's: placeholders of the third went, its guest
    wrote the files, and the third sandbox was killed though its guest had done no wrong."""
    first, second = Sandbox(policy=policy(project)).start(), Sandbox(policy=policy(project)).start()
    first.close()
    with Sandbox(policy=policy(project)) as third, third.spawn(["python3", "-c", SPIN, str(project), "1"]) as process:
        next(iter(process))
        second.close()
        assert second._box is not None
        second._box.wait_destroyed(5)
        assert process.wait().status == "ok"
    assert third.denials() == ()
    assert list(project.iterdir()) == []


def test_a_fork_that_was_dropped_takes_nothing_along(project: Path) -> None:
    with Sandbox(policy=policy(project)) as box:
        box.fork(memory=False).close()
        with Sandbox(policy=policy(project)) as other:
            box.close()
            assert other.exec(["python3", "-c", SPIN, str(project), "0.3"]).status == "ok"
    assert list(project.iterdir()) == []


def test_environments_of_a_manager_that_share_a_folder_end_one_by_one(project: Path) -> None:
    with SandboxManager(policy=policy(project)) as manager:
        one, two, three = (manager.environment(name) for name in ("one", "two", "three"))
        one.run("1")
        two.run("1")
        one.remove()
        ended: list[Result] = []
        thread = threading.Thread(target=lambda: ended.append(three.exec(["sleep", "0.6"])))
        thread.start()
        time.sleep(0.3)
        two.remove()
        thread.join()
        assert [result.status for result in ended] == ["ok"]
    assert list(project.iterdir()) == []


@needs_freezer
@pytest.mark.parametrize("words", [("clean", "-fdq"), ("stash", "-u")])
def test_placeholders_that_git_of_the_host_removes_are_put_back(project: Path, words: tuple[str, ...]) -> None:
    """`git clean` on the host used to end a sandbox after an hour's work."""
    git(project, "init", "-q")
    (project / "file").write_text("1")
    git(project, "add", "file")
    git(project, "commit", "-qm", "1")
    time.sleep(0.05)  # until it is older than a clock tick, as a project is when a sandbox starts
    with Sandbox(policy=policy(project)) as box:
        with box.spawn(["sleep", "1"]) as process:
            git(project, *words)
            result = process.wait()
        assert (result.status, result.denials) == ("ok", ())
        assert {path.name for path in project.iterdir()} >= ALL
        assert box.exec(["sh", "-c", f"echo x > {project}/.bashrc"]).stderr.rstrip().endswith("Read-only file system")
    told = {(one.code, os.path.basename(one.target)) for one in box.denials()}
    assert told == {("mount.protected-removed", name) for name in ALL}
    assert {path.name for path in project.iterdir()} == {".git", "file"}


@needs_freezer
def test_a_guest_that_is_faster_than_we_are_is_stopped(project: Path) -> None:
    """The guest writes in a loop to a name that the host removes again and again. After a write it is stopped."""
    with Sandbox(policy=policy(project)) as box, box.spawn(["python3", "-c", SPIN, str(project), "3"]) as process:
        next(iter(process))
        for _ in range(10):
            if not is_placeholder(f"{project}/.envrc"):
                break
            (project / ".envrc").unlink()
            time.sleep(0.2)
        result = process.wait()
    assert result.reason in ("done", "protection-lost")
    assert result.reason == "protection-lost" or list(project.iterdir()) == []


@needs_freezer
def test_one_that_a_caller_has_paused_stays_paused_while_its_names_are_put_back(project: Path) -> None:
    with Sandbox(policy=policy(project)) as box:
        box.pause()
        (project / ".envrc").unlink()
        time.sleep(0.2)
        assert (project / ".envrc").exists()
        assert box.state == "paused"
        box.resume()
        assert box.exec(["sh", "-c", f"echo x > {project}/.envrc"]).status == "error"
    assert list(project.iterdir()) == []


@needs_freezer
def test_two_sandboxes_on_one_folder_both_go_on_when_a_name_is_removed(project: Path) -> None:
    with Sandbox(policy=policy(project)) as one, Sandbox(policy=policy(project)) as two:
        processes = [box.spawn(["sleep", "0.6"]) for box in (one, two)]
        (project / ".mcp.json").unlink()
        assert [process.wait().status for process in processes] == ["ok", "ok"]
        for box in (one, two):
            assert box.exec(["sh", "-c", f"echo x > {project}/.mcp.json"]).status == "error"
    assert list(project.iterdir()) == []


@needs_freezer
def test_a_folder_that_is_mounted_twice_is_protected_again_in_both_places(project: Path) -> None:
    """The file was protected in one place only: the guest wrote in the other place, and nothing was reported."""
    mounts = [Mount(project, target=target, mode="rw") for target in ("/a", "/b")]
    with Sandbox(policy=Policy(mounts=mounts)) as box:
        (project / ".envrc").unlink()
        time.sleep(0.2)
        for target in ("/a", "/b"):
            assert box.exec(["sh", "-c", f"echo x > {target}/.envrc"]).stderr.rstrip().endswith("Read-only file system")
    assert list(project.iterdir()) == []


@needs_freezer
def test_a_pause_while_a_name_is_put_back_is_not_undone(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.host.mount_guard._QUIET_S", 0.3)
    spin = f"while :; do date +%s%N > {project}/tick; sleep 0.01; done"
    with Sandbox(policy=policy(project)) as box, box.spawn(["sh", "-c", spin]):
        time.sleep(0.2)
        (project / ".envrc").unlink()
        time.sleep(0.1)
        box.pause()
        time.sleep(0.4)
        before = (project / "tick").read_text()
        time.sleep(0.2)
        after = (project / "tick").read_text()
        box.resume()
        assert (before, box.denials()[0].code) == (after, "mount.protected-removed")


@needs_freezer
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_file_of_the_guests_with_the_placeholders_number_is_not_protected_for_it(project: Path) -> None:
    """The mount is in the guest's own /tmp: the guest moved the folder and made a file with the same inode number."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "none", project], check=True)
    guest = read_program("behaviour/placeholders_guest.py")
    try:
        with Sandbox(policy=Policy(mounts=[Mount(project, target="/tmp/x/p", mode="rw")])) as box:
            assert box.exec(["python3", "-c", guest]).status == "ok"
            (project / ".envrc").unlink()
            time.sleep(0.3)
            with pytest.raises(SandboxLostError, match="a protected path was replaced or removed from outside"):
                box.exec(["sh", "-c", "echo evil > /tmp/y/p/.envrc"])
        assert list(project.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", project], check=True)


def test_a_mount_that_was_exchanged_since_the_plan_is_a_lost_sandbox_and_no_raw_error(project: Path) -> None:
    box = Sandbox(policy=policy(project))
    box.plan()
    project.rename(f"{project}.moved")
    with pytest.raises(SandboxLostError, match="a mounted folder was changed while the sandbox was built") as caught:
        box.start()
    assert caught.value.code == "mounts-changed"
    assert list(Path(f"{project}.moved").iterdir()) == []


@needs_freezer
def test_the_guest_of_a_mount_around_another_ends_its_sandbox_at_most(project: Path) -> None:
    """The outer guest can remove the inner sandbox's placeholders. The inner guest still writes nothing."""
    inner = project / "inner"
    inner.mkdir()
    inner.chmod(0o777)
    unlink = f"""
import os, time
for _ in range(200):
    try: os.unlink({str(inner / ".envrc")!r})
    except OSError: pass
    time.sleep(0.005)
"""
    with Sandbox(policy=policy(inner)) as one, Sandbox(policy=policy(project)) as around:
        with one.spawn(["python3", "-c", SPIN, str(inner), "1"]) as process:
            next(iter(process))
            around.exec(["python3", "-c", unlink])
            result = process.wait()
        if result.reason == "protection-lost":
            # before it, the placeholder may have been put back once, which is a denial too
            assert any("by another sandbox that may write there" in each.message for each in result.denials)
    assert result.reason in ("done", "protection-lost")
    assert result.reason == "protection-lost" or list(inner.iterdir()) == []


def test_a_protected_file_that_the_host_replaces_stops_the_sandbox_and_says_so(project: Path) -> None:
    """A33. The report used to be "the guest took its own supervisor down", which no guest had done."""
    git(project, "init", "-q")
    with Sandbox(policy=policy(project)) as box:
        process = box.spawn(["sleep", "5"])
        git(project, "config", "a.b", "c")
        result = process.wait()
        assert (result.status, result.reason) == ("killed", "protection-lost")
        (denial,) = result.denials
        assert (denial.code, denial.target) == ("mount.protected-replaced", f"{project}/.git/config")
        assert "a protected path was replaced or removed from outside" in result.render()
        with pytest.raises(SandboxLostError, match="is lost: a protected path was replaced or removed from outside"):
            box.exec(["true"])


def test_an_environment_whose_protection_was_lost_says_so_and_goes_on_in_another_sandbox(project: Path) -> None:
    git(project, "init", "-q")
    with SandboxManager(policy=policy(project)) as manager:
        environment = manager.environment("one")
        timer = threading.Timer(0.5, git, (project, "config", "a.b", "c"))
        timer.start()
        result = environment.exec(["sleep", "5"])
        timer.join()
        assert (result.reason, result.denials[0].code) == ("protection-lost", "mount.protected-replaced")
        assert environment.exec(["true"]).status == "ok"
