"""Protected paths on the host's side: replaced files are noticed, the end scan reports."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.errors import PolicyError
from ringfence.host.mount_guard import Watch
from ringfence.host.mount_scan import end_scan, snapshot_before
from ringfence.host.placeholders import Placeholders
from ringfence.plan.rootfs.protected import Protected, protection


def protected(folder: Path, *extra: str) -> tuple[Protected, ...]:
    return protection(str(folder), "/data", extra, key="mounts[0].protect").paths


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a.txt").write_text("a\n")
    return tmp_path


# ── the watch ────────────────────────────────────────────────────────────────────────────────────


def readable(watch: Watch) -> bool:
    return bool(select.select([watch], [], [], 0.5)[0])


def test_a_protected_file_replaced_by_rename_is_noticed_once(repository: Path) -> None:
    """Kernel fact 10: the kernel takes the read-only mount off a name that is replaced on the host, as git does."""
    watch = Watch(protected(repository))
    subprocess.run(["git", "-C", repository, "config", "user.name", "x"], check=True)
    assert readable(watch)
    assert watch.check() == [f"{repository}/.git/config"]
    assert watch.check() == []
    watch.close()


def test_a_renamed_ancestor_is_noticed(repository: Path) -> None:
    watch = Watch(protected(repository))
    (repository / ".git").rename(repository / ".git2")
    assert readable(watch)
    assert f"{repository}/.git" in watch.check()
    watch.close()


def test_a_removed_placeholder_is_noticed(tmp_path: Path) -> None:
    placeholders = Placeholders(protected(tmp_path))
    placeholders.make()
    watch = Watch(protected(tmp_path))
    (tmp_path / ".mcp.json").unlink()
    assert watch.check() == [f"{tmp_path}/.mcp.json"]
    watch.close()
    placeholders.release()


def test_a_name_that_was_removed_and_made_anew_with_the_same_inode_is_noticed(tmp_path: Path) -> None:
    """A file system gives out the number again at once: the guest's file looked like the placeholder."""
    placeholders = Placeholders(protected(tmp_path))
    placeholders.make()
    watch = Watch(protected(tmp_path))
    (tmp_path / ".mcp.json").rename(tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / ".mcp.json")
    assert watch.check() == [f"{tmp_path}/.mcp.json"]
    watch.close()
    placeholders.release()


def test_what_we_did_ourselves_to_put_a_name_back_is_no_alarm(tmp_path: Path) -> None:
    placeholders = Placeholders(protected(tmp_path))
    placeholders.make()
    watch = Watch(protected(tmp_path))
    (tmp_path / ".mcp.json").unlink()
    lost = watch.check()
    placeholders.make_again([one for one in protected(tmp_path) if one.path in lost])
    watch.expect({path: (os.lstat(path).st_dev, os.lstat(path).st_ino) for path in lost})
    assert watch.check() == []
    (tmp_path / ".mcp.json").unlink()
    assert watch.check() == lost
    watch.close()
    placeholders.release()


def test_what_goes_again_before_it_is_expected_is_told(tmp_path: Path) -> None:
    """The removal was taken for the library's own: the sandbox went on, and nothing protected the name."""
    placeholders = Placeholders(protected(tmp_path))
    placeholders.make()
    watch = Watch(protected(tmp_path))
    (tmp_path / ".mcp.json").unlink()
    lost = watch.check()
    placeholders.make_again([one for one in protected(tmp_path) if one.path in lost])
    found = os.lstat(lost[0])
    (tmp_path / ".mcp.json").unlink()
    watch.expect({lost[0]: (found.st_dev, found.st_ino)})
    assert watch.check() == lost
    watch.close()
    placeholders.release()


def test_ordinary_work_in_the_folder_is_no_alarm(repository: Path) -> None:
    watch = Watch(protected(repository))
    (repository / "b.txt").write_text("b")
    (repository / "b.txt").rename(repository / "c.txt")
    subprocess.run(["git", "-C", repository, "add", "-A"], check=True)
    assert watch.check() == []
    watch.close()


def test_writing_into_a_protected_file_from_the_host_is_no_alarm(repository: Path) -> None:
    """The mount stays where it is: the name still leads to the same file."""
    watch = Watch(protected(repository))
    with open(repository / ".git" / "config", "a") as file:
        file.write("[x]\n")
    assert watch.check() == []
    watch.close()


def test_a_hidden_file_replaced_by_rename_is_noticed(tmp_path: Path) -> None:
    """The cover of a hidden file goes with the replaced name."""
    (tmp_path / ".env").write_text("TOKEN=1")
    hidden = Protected(root=str(tmp_path), path=f"{tmp_path}/.env", target="/data/.env", directory=False, hidden=True)
    watch = Watch((hidden,))
    (tmp_path / ".env.new").write_text("TOKEN=2")
    (tmp_path / ".env.new").rename(tmp_path / ".env")
    assert watch.check() == [f"{tmp_path}/.env"]
    watch.close()


def test_a_path_that_cannot_be_watched_is_an_error(tmp_path: Path) -> None:
    paths = protected(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(OSError, match="cannot be watched"):
        Watch(paths)


# ── the end scan ─────────────────────────────────────────────────────────────────────────────────


def scanned(folder: Path, *work: Callable[[], object]) -> list[tuple[str, str]]:
    before = snapshot_before(str(folder))
    for step in work:
        step()
    return [(one.code, os.path.relpath(one.target, folder)) for one in end_scan(str(folder), before)]


def settle() -> None:
    """Wait until the files are older than a clock tick, as a project's files are when a sandbox starts."""
    time.sleep(0.05)


def test_ordinary_files_are_not_reported(repository: Path) -> None:
    settle()
    assert scanned(repository, lambda: (repository / "new.py").write_text("")) == []


def test_protected_names_at_any_depth_are_reported(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / ".vscode"

    def work() -> None:
        deep.mkdir(parents=True)
        (deep / "tasks.json").write_text("{}")
        (tmp_path / "a" / ".mcp.json").write_text("{}")

    assert scanned(tmp_path, work) == [
        ("mount.protected-name", "a/.mcp.json"),
        ("mount.protected-name", "a/b/.vscode"),
        ("mount.protected-name", "a/b/.vscode/tasks.json"),
    ]


def test_what_every_python_runs_at_its_start_is_reported(tmp_path: Path) -> None:
    """L01: of a project that is installed with `pip install -e .` the next `ringfence` would run it."""
    (tmp_path / "src" / "sitecustomize").mkdir(parents=True)
    settle()

    def work() -> None:
        for name in ("sitecustomize.py", "usercustomize.so", "sitecustomize/__init__.py", "customize.py"):
            (tmp_path / "src" / name).write_text("evil")

    assert scanned(tmp_path, work) == [
        ("mount.protected-name", "src/sitecustomize"),
        ("mount.protected-name", "src/sitecustomize/__init__.py"),
        ("mount.protected-name", "src/sitecustomize.py"),
        ("mount.protected-name", "src/usercustomize.so"),
    ]


def test_a_repository_that_appeared_and_its_hooks_are_reported(tmp_path: Path) -> None:
    def work() -> None:
        subprocess.run(["git", "init", "-q", "--template=", tmp_path / "sub"], check=True)
        (tmp_path / "sub" / ".git" / "hooks").mkdir()
        (tmp_path / "sub" / ".git" / "hooks" / "pre-commit").write_text("evil")

    assert scanned(tmp_path, work) == [
        ("mount.protected-name", "sub/.git"),
        ("mount.protected-name", "sub/.git/config"),
        ("mount.protected-name", "sub/.git/hooks"),
        ("mount.protected-name", "sub/.git/hooks/pre-commit"),
    ]


def test_a_folder_that_git_would_take_for_a_repository_is_reported(tmp_path: Path) -> None:
    """A bare repository needs no `.git`: a user that runs git in that folder runs the repository's configuration."""

    def work() -> None:
        for name in ("objects", "refs"):
            (tmp_path / "docs" / name).mkdir(parents=True)
        (tmp_path / "docs" / "HEAD").write_text("ref: refs/heads/main\n")
        (tmp_path / "docs" / "config").write_text("[core]\n\tfsmonitor = evil\n")

    assert scanned(tmp_path, work) == [("mount.protected-name", "docs"), ("mount.protected-name", "docs/config")]


def prepared(folder: Path) -> None:
    """Make the files of a repository that an earlier run could have left."""
    (folder / "hooks").mkdir(parents=True)
    (folder / "hooks" / "pre-commit").write_text("evil")
    (folder / "config").write_text("[core]\n")
    settle()


def test_a_repository_that_became_one_by_its_name_is_reported(tmp_path: Path) -> None:
    """The repository's hooks are older than the sandbox."""
    prepared(tmp_path / "deep" / "x")
    moved = tmp_path / "deep" / ".git"
    assert scanned(tmp_path, lambda: (tmp_path / "deep" / "x").rename(moved)) == [("mount.protected-name", "deep/.git")]
    settle()
    assert scanned(tmp_path, lambda: (moved / "index").write_text("")) == []


@pytest.mark.parametrize("last", ["objects", "refs"])
def test_a_repository_that_was_made_whole_is_reported(tmp_path: Path, last: str) -> None:
    bare = tmp_path / "bare"
    prepared(bare)
    for name in {"objects", "refs"} - {last}:
        assert scanned(tmp_path, (bare / name).mkdir) == []
    settle()
    assert scanned(tmp_path, (bare / last).mkdir) == [("mount.protected-name", "bare")]
    settle()
    assert scanned(tmp_path, lambda: (bare / "HEAD").write_text("")) == [("mount.protected-name", "bare")]


def test_hooks_among_submodules_are_reported_before_there_is_a_repository(repository: Path) -> None:
    settle()
    work = repository / ".git" / "modules" / "x" / "y"
    found = scanned(repository, lambda: prepared(work))
    assert ("mount.protected-name", ".git/modules/x/y/hooks/pre-commit") in found


def test_work_in_a_repository_that_was_held_is_not_reported(repository: Path) -> None:
    settle()
    before = snapshot_before(str(repository))
    (repository / "new").write_text("")
    subprocess.run(["git", "-C", repository, "add", "."], check=True)
    assert end_scan(str(repository), before, known=frozenset([f"{repository}/.git"])) == ()
    assert [one.code for one in end_scan(str(repository), before)] == ["mount.protected-name"]


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes another user, whom a folder's mode stops")
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_folder_that_was_shut_is_said_not_to_have_been_looked_through(tmp_path: Path, mode: int) -> None:
    """A later run could open the folder again, and the files in it would then be old."""
    shut = tmp_path / "sub"
    shut.mkdir()
    os.chown(shut, 65534, 65534)
    tmp_path.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(tmp_path)
            os.setresuid(65534, 65534, 65534)
            found = scanned(Path(), lambda: os.chmod("sub", mode))
            os._exit(found != [("mount.scan-cut", "sub")])
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_was_there_before_and_did_not_change_is_not_reported(repository: Path) -> None:
    (repository / "sub" / ".claude").mkdir(parents=True)
    (repository / "sub" / ".claude" / "settings.json").write_text("{}")
    settle()
    assert scanned(repository) == []
    change = repository / "sub" / ".claude" / "settings.json"
    assert scanned(repository, lambda: change.write_text("[]")) == [
        ("mount.protected-name", "sub/.claude/settings.json")
    ]


def test_a_changed_file_cannot_pass_for_an_old_one(tmp_path: Path) -> None:
    """Any user can set mtime back, and no user ctime."""
    (tmp_path / ".envrc").write_text("old")
    settle()

    def work() -> None:
        (tmp_path / ".envrc").write_text("new")
        os.utime(tmp_path / ".envrc", (0, 0))

    assert scanned(tmp_path, work) == [("mount.protected-name", ".envrc")]


def test_set_uid_files_are_reported(tmp_path: Path) -> None:
    """A16, kernel fact 3"""

    def work() -> None:
        (tmp_path / "tool").write_text("")
        (tmp_path / "tool").chmod(0o4755)

    assert scanned(tmp_path, work) == [("mount.setuid", "tool")]


def test_a_changed_file_with_another_name_outside_is_reported(tmp_path: Path) -> None:
    """uv and pnpm link what they install to a cache, and so to every other project of the host."""
    folder, cache = tmp_path / "project", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    for name in ("changed.py", "same.py"):
        (cache / name).write_text("")
        os.link(cache / name, folder / name)
    (folder / "own.py").write_text("")
    settle()

    def work() -> None:
        (folder / "changed.py").write_text("evil")
        os.utime(folder / "changed.py", (0, 0))
        os.link(folder / "own.py", folder / "both names are inside")

    assert scanned(folder, work) == [("mount.linked", "changed.py")]


@pytest.mark.parametrize("held", [".git/config", ".git/hooks/pre-commit", ".vscode/tasks.json", "Makefile"])
def test_a_protected_file_with_a_second_name_in_the_mount_is_refused(repository: Path, held: str) -> None:
    file, other = repository / held, repository / "src" / "deep" / "other"
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    other.parent.mkdir(parents=True)
    os.link(file, other)
    (repository / "pyvenv.cfg").write_text("")  # what a guest could make
    with pytest.raises(PolicyError) as caught:
        protected(repository, "Makefile")
    said = f"{file} cannot be protected: {other} is the same file, and a guest could change it there"
    assert (str(caught.value), caught.value.key) == (said, "mounts[0].protect")


def test_a_protected_file_whose_other_names_no_guest_can_write_to_is_held(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = protected(repository)
    os.link(repository / ".git" / "config", tmp_path_factory.mktemp("outside") / "a backup of it")
    os.link(repository / ".git" / "config", repository / ".git" / "hooks" / "config")
    assert protected(repository) == before


def test_names_of_the_guest_are_printed_escaped(tmp_path: Path) -> None:
    """A28"""
    before = snapshot_before(str(tmp_path))
    odd = os.fsencode(tmp_path) + b"/\x1b[31m\xff\n"
    os.mkdir(odd)
    os.mkdir(odd + b"/.vscode")
    (denial,) = end_scan(str(tmp_path), before)
    assert denial.target == f"{tmp_path}/\\x1b[31m\\xff\\n/.vscode"
    assert denial.message.isprintable()


def test_a_tree_that_is_too_deep_is_cut_and_the_report_says_so(tmp_path: Path) -> None:
    """A27"""
    before = snapshot_before(str(tmp_path))
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert [one.code for one in end_scan(str(tmp_path), before)] == ["mount.scan-cut"]


def test_a_folder_that_cannot_be_opened_is_said_not_to_have_been_looked_through(tmp_path: Path) -> None:
    before = snapshot_before(str(tmp_path))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / ".envrc").write_text("hooks")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))
        for _ in range(3):  # two levels, and one to list the second
            os.close(taken.pop())
        found = end_scan(str(tmp_path), before=before)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert [(one.code, one.target) for one in found] == [("mount.scan-cut", f"{tmp_path}/a/b")]


def test_a_flood_of_findings_is_cut_and_the_report_says_so(tmp_path: Path) -> None:
    before = snapshot_before(str(tmp_path))
    for index in range(150):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / ".envrc").write_text("")
    found = end_scan(str(tmp_path), before)
    assert len(found) == 101
    assert found[-1].code == "mount.scan-cut"


def test_the_scan_leaves_no_descriptor_open(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / str(index) / "x").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    end_scan(str(tmp_path), snapshot_before(str(tmp_path)))
    assert len(os.listdir("/proc/self/fd")) == before
