"""Placeholders: made where a protected name is missing, gone when the last sandbox that needs them is, never before."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from backends.process.children import Say, child
from ringfence.errors import SandboxError
from ringfence.host import placeholders, state
from ringfence.host.placeholders import Placeholders, is_placeholder, sweep
from ringfence.plan.rootfs.protected import CONTENT, HELD_DIRECTORIES, HELD_FILES, Protected, protection

ALL = {*HELD_FILES, *HELD_DIRECTORIES}


@pytest.fixture(autouse=True)
def ledgers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder for ledgers, so that only this test's sandboxes are in them."""
    place = tmp_path_factory.mktemp("state")
    place.chmod(0o700)
    root = place / "ringfence"
    monkeypatch.setattr(state, "disk_root", lambda: str(root))
    return root / "placeholders"


def protected(folder: Path, *extra: str) -> tuple[Protected, ...]:
    return protection(str(folder), "/data", extra, key="mounts[0].protect").paths


def made(folder: Path, *extra: str, outlives: bool = False) -> Placeholders:
    one = Placeholders(protected(folder, *extra), outlives=outlives)
    one.make()
    return one


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def left(ledgers: Path) -> set[str]:
    return tree(ledgers) - {"lock", "stakes"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a.txt").write_text("a\n")
    return tmp_path


def git_status(folder: Path) -> str:
    return subprocess.run(
        ["git", "-C", folder, "status", "--porcelain", "--ignored"], capture_output=True, text=True, check=True
    ).stdout


def test_placeholders_are_made_for_what_is_missing_and_removed_again(tmp_path: Path, ledgers: Path) -> None:
    (tmp_path / ".vscode").mkdir()
    one = made(tmp_path)
    assert tree(tmp_path) == ALL
    assert not is_placeholder(f"{tmp_path}/.vscode")
    assert all(is_placeholder(f"{tmp_path}/{name}") for name in ALL - {".vscode"})
    one.release()
    one.release()
    assert (tree(tmp_path), left(ledgers)) == ({".vscode"}, set())


def test_a_sandbox_that_misses_nothing_leaves_no_trace_in_the_ledgers(tmp_path: Path, ledgers: Path) -> None:
    for name in HELD_FILES:
        (tmp_path / name).write_text("mine")
    for name in HELD_DIRECTORIES:
        (tmp_path / name).mkdir()
    one = made(tmp_path)
    assert (one.fileno(), left(ledgers)) == (-1, set())
    one.release()
    assert tree(tmp_path) == ALL


def test_git_works_beside_placeholders_and_its_status_is_as_before(repository: Path) -> None:
    """An empty `commondir` would stop git; a file with "." means the same as no file."""
    before = git_status(repository), tree(repository)
    one = made(repository)
    assert (repository / ".git" / "commondir").read_text() == CONTENT["commondir"]
    subprocess.run(["git", "-C", repository, "log", "--all"], check=True, capture_output=True)
    one.release()
    assert (git_status(repository), tree(repository)) == before


def test_every_name_is_in_the_ledger_before_it_can_be_seen(
    tmp_path: Path, ledgers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL between two calls must not leave a file that no sweep knows of."""
    seen: list[set[str]] = []
    write = placeholders._write

    def watched(path: str, content: dict[str, object]) -> None:
        seen.append(tree(tmp_path))
        write(path, content)

    monkeypatch.setattr(placeholders, "_write", watched)
    made(tmp_path).release()
    assert seen[0] == set()


@pytest.mark.parametrize("moment", ["after the note", "half way", "after all"])
def test_what_a_killed_process_made_goes_with_the_next_sweep(tmp_path: Path, ledgers: Path, moment: str) -> None:
    def work(say: Say) -> None:
        make, count = placeholders._Ledger.make, [0]

        def counted(self: placeholders._Ledger, name: str) -> None:
            count[0] += 1
            if (moment, count[0]) in (("after the note", 1), ("half way", 9)):
                os.kill(os.getpid(), 9)
            make(self, name)

        placeholders._Ledger.make = counted  # type: ignore[method-assign]  # in a child that ends
        made(tmp_path)
        say("made")
        time.sleep(60)

    with child(work) as process:
        if moment == "after all":
            process.hear()
            assert sweep() == []
        else:
            process.wait()
        process.kill()
    assert len(tree(tmp_path)) == {"after the note": 0, "half way": 8, "after all": len(ALL)}[moment]
    assert set(sweep()) == {f"{tmp_path}/{name}" for name in ALL if moment == "after all"} or moment != "after all"
    assert (tree(tmp_path), left(ledgers)) == (set(), set())


def test_what_was_written_to_or_replaced_in_the_meantime_stays(tmp_path: Path, ledgers: Path) -> None:
    one = made(tmp_path)
    (tmp_path / ".envrc").write_text("export A=1\n")
    (tmp_path / "new").write_text("")
    (tmp_path / "new").rename(tmp_path / ".bashrc")
    (tmp_path / ".vscode" / "settings.json").write_text("{}")
    one.release()
    assert (tree(tmp_path), left(ledgers)) == ({".envrc", ".bashrc", ".vscode", ".vscode/settings.json"}, set())


def test_an_empty_file_of_the_users_own_is_not_taken_for_a_placeholder(tmp_path: Path) -> None:
    (tmp_path / ".envrc").write_text("")
    one, two = made(tmp_path), made(tmp_path)
    one.release()
    two.release()
    assert tree(tmp_path) == {".envrc"}


def test_a_name_that_somebody_else_made_in_the_same_moment_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = placeholders._Ledger.make

    def raced(self: placeholders._Ledger, name: str) -> None:
        if name in (".idea", ".envrc"):
            (tmp_path / name).mkdir() if name == ".idea" else (tmp_path / name).touch()
        make(self, name)

    monkeypatch.setattr(placeholders._Ledger, "make", raced)
    one = made(tmp_path)
    assert [is_placeholder(f"{tmp_path}/{name}") for name in (".idea", ".envrc", ".bashrc")] == [False, False, True]
    one.release()
    assert tree(tmp_path) == {".idea", ".envrc"}


def test_the_last_of_several_sandboxes_removes_them_whatever_the_order(tmp_path: Path, ledgers: Path) -> None:
    """The first starts, a second starts, the first ends, a third starts, the second ends: the third keeps placeholders.
    A set of notes lost the second's with the first's, and the third took the placeholders for the user's own files."""
    one = made(tmp_path)
    inodes = {name: os.stat(tmp_path / name).st_ino for name in ALL}
    two = made(tmp_path)
    one.release()
    three = made(tmp_path)
    two.release()
    assert {name: os.stat(tmp_path / name).st_ino for name in ALL} == inodes
    three.release()
    assert (tree(tmp_path), left(ledgers)) == (set(), set())


def test_each_placeholder_goes_with_the_last_that_needs_that_one(tmp_path: Path) -> None:
    one, two = made(tmp_path, "Makefile"), made(tmp_path)
    one.release()
    assert tree(tmp_path) == ALL
    two.release()
    assert tree(tmp_path) == set()


def test_a_guest_that_outlives_its_killed_library_keeps_them(tmp_path: Path) -> None:
    """The sandbox's monitor has the stake open too: until the monitor closes the stake, the sandbox counts."""
    one = made(tmp_path)
    monitors = os.dup(one.fileno())
    two = made(tmp_path)
    one.release()  # the library sees an end that the monitor does not
    two.release()
    assert tree(tmp_path) == ALL
    assert sweep() == []
    os.close(monitors)
    assert len(sweep()) == len(ALL)
    assert tree(tmp_path) == set()


def test_a_fork_of_the_caller_keeps_nobody_alive(tmp_path: Path) -> None:
    def work(say: Say) -> None:
        made(tmp_path)
        if os.fork() == 0:
            say("forked")
            time.sleep(3)
            os._exit(0)
        time.sleep(60)

    with child(work) as process:
        process.hear()
        process.kill()
    assert len(sweep()) == len(ALL)


def test_behind_an_engine_a_dead_library_counts_for_a_moment_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on the host shows when the guest of a dead library is gone."""

    def work(say: Say) -> None:
        made(tmp_path, outlives=True)
        say("made")
        time.sleep(60)

    with child(work) as process:
        process.hear()
        process.kill()
    assert (sweep(), tree(tmp_path)) == ([], ALL)
    monkeypatch.setattr(placeholders, "_OUTLIVES_S", 0.0)
    assert len(sweep()) == len(ALL)


def test_nothing_is_struck_that_could_not_be_removed(tmp_path: Path, ledgers: Path) -> None:
    """Out of descriptors, say: every error was taken for "it is gone"."""
    one = made(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        one.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert tree(tmp_path) == ALL
    placeholders.finish()
    assert (tree(tmp_path), left(ledgers)) == (set(), set())


def test_a_folder_that_was_renamed_meanwhile_is_still_cleared(tmp_path: Path, ledgers: Path) -> None:
    project, moved = tmp_path / "project", tmp_path / "moved"
    project.mkdir()
    one = made(project)
    project.rename(moved)
    project.mkdir()
    (project / ".envrc").write_text("")
    one.release()
    assert (tree(moved), tree(project), left(ledgers)) == (set(), {".envrc"}, set())


def test_after_a_reboot_the_devices_number_is_another_and_they_are_swept_all_the_same(
    tmp_path: Path, ledgers: Path
) -> None:
    one = made(tmp_path)
    (ledger,) = [path for path in ledgers.iterdir() if path.name not in ("lock", "stakes")]
    (stake,) = (ledgers / "stakes").iterdir()
    other = f"999-{ledger.name.partition('-')[2]}"
    ledger.rename(ledgers / other)
    stake.write_text(stake.read_text().replace(ledger.name, other))
    for fd in (one.fileno(), *one._held.values()):
        os.close(fd)
    assert len(sweep()) == len(ALL)
    assert (tree(tmp_path), left(ledgers)) == (set(), set())


def test_two_ways_to_one_folder_are_one_ledger(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one = made(tmp_path / "sub")
    two = made(tmp_path, "sub/.envrc")
    one.release()
    assert is_placeholder(f"{tmp_path}/sub/.envrc")
    two.release()
    assert tree(tmp_path) == {"sub"}


def test_a_folder_that_is_mounted_twice_has_each_placeholder_once(tmp_path: Path, ledgers: Path) -> None:
    """The second placeholder was taken for a file of another program, and neither was ever removed."""
    placeholders = Placeholders((*protected(tmp_path), *protected(tmp_path)))
    placeholders.make()
    assert set(os.listdir(tmp_path)) >= {".mcp.json", ".vscode"}
    placeholders.release()
    assert os.listdir(tmp_path) == []


def test_a_stake_that_does_not_fit_on_the_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, ledgers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a stake names no folder: after a SIGKILL nothing would be swept."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:30], offset))
    with pytest.raises(OSError, match="No space left"):
        Placeholders(protected(tmp_path)).make()
    assert os.listdir(tmp_path) == []


def test_a_ledger_that_a_power_cut_left_empty_stops_nobody(tmp_path: Path, ledgers: Path) -> None:
    made(tmp_path).release()
    folder = os.stat(tmp_path)
    (ledgers / f"{folder.st_dev}-{folder.st_ino}").write_text("")
    (ledgers / "stakes" / "0123456789ab").write_text('{"fol')
    made(tmp_path).release()
    sweep()
    assert (tree(tmp_path), set(os.listdir(ledgers / "stakes"))) == (set(), set())


def test_a_lock_that_nobody_lets_go_is_an_error_that_names_it(
    tmp_path: Path, ledgers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path).release()
    monkeypatch.setattr(placeholders, "_LOCK_S", 0.05)
    with open(ledgers / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SandboxError, match=f"{ledgers}/lock has been held") as caught:
            made(tmp_path)
    assert (caught.value.code, caught.value.fix) == (
        "placeholders-busy",
        f"continue or end the process that holds it: fuser {ledgers}/lock",
    )
    assert tree(tmp_path) == set()


def test_a_link_put_in_the_place_of_a_placeholder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    folder = tmp_path / "project"
    folder.mkdir()
    one = made(folder)
    (folder / ".envrc").unlink()
    (folder / ".envrc").symlink_to(victim)
    one.release()
    assert victim.exists()
    assert tree(folder) == {".envrc"}


def test_a_folder_exchanged_for_a_link_since_the_plan_gets_none(tmp_path: Path, ledgers: Path) -> None:
    """A guest of another sandbox exchanges the folder. The placeholders would be made where the link leads."""
    (tmp_path / "way" / "project").mkdir(parents=True)
    (tmp_path / "victim" / "project").mkdir(parents=True)
    one = Placeholders(protected(tmp_path / "way" / "project"))
    (tmp_path / "way").rename(tmp_path / "moved")
    (tmp_path / "way").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="is a link to"):
        one.make()
    assert tree(tmp_path / "victim") == {"project"}
    assert left(ledgers) == set()


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path, ledgers: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    one = Placeholders(protected(gone))
    gone.rmdir()
    with pytest.raises(OSError, match=f"{gone} cannot be protected: No such file or directory"):
        one.make()
    assert left(ledgers) == set()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    made(tmp_path).release()
    before = os.listdir("/proc/self/fd")
    one = made(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2  # the stake, and the folder
    one.release()
    assert os.listdir("/proc/self/fd") == before


def test_a_ledger_holds_names_of_files_and_numbers_alone(tmp_path: Path, ledgers: Path) -> None:
    one = made(tmp_path)
    (ledger,) = [path for path in ledgers.iterdir() if path.name not in ("lock", "stakes")]
    rows = json.loads(ledger.read_text())["placeholders"]
    assert {row[0] for row in rows} == ALL
    assert {path.stat().st_mode & 0o777 for path in ledgers.rglob("*") if path.is_file()} == {0o600}
    one.release()
