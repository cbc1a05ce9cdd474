"""Which programs of the host are run by us: none that anybody but root and the caller can have put there (L18)."""

from __future__ import annotations

import grp
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from accounts import OrdinaryUser
from programs import read_program
from ringfence import Mount, Policy, Sandbox
from ringfence.doctor import examine
from ringfence.host import programs

NAME = "rf-test-program"


@pytest.fixture(autouse=True)
def own_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder above all others, in which no other test's mounts are noted; and outside the working directory."""
    monkeypatch.setattr(programs, "_writable", set())
    monkeypatch.setattr(programs, "_known", set())
    monkeypatch.setattr(programs, "_note", lambda: str(tmp_path / "note"))
    monkeypatch.setattr(programs, "_noted", lambda: programs._read_note(str(tmp_path / "note")))
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path / "system"),))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return tmp_path


def place(folder: Path) -> str:
    """Make a program in the folder, which comes first in PATH, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / NAME
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return str(program)


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def test_the_callers_own_is_taken_where_the_system_has_none(tmp_path: Path) -> None:
    mine = place(tmp_path / "mine")
    assert programs.look_up(NAME) == programs.LookedUp(mine, ())


def test_a_group_that_nobody_else_is_in_may_write(tmp_path: Path) -> None:
    """Such groups are a user's own group, used with the umask 002, and Debian's `staff`, which owns /usr/local."""
    mine = place(tmp_path / "mine")
    for path in (tmp_path / "mine", Path(mine)):
        path.chmod(0o775)
        if os.geteuid() == 0:
            os.chown(path, -1, grp.getgrnam("staff").gr_gid)
    assert programs.find(NAME) == mine


def test_the_systems_own_comes_first_whatever_path_says(tmp_path: Path) -> None:
    system = place(tmp_path / "system")
    place(tmp_path / "mine")
    assert programs.find(NAME) == system


def open_folder(top: Path) -> str:
    mine = place(top / "mine")
    (top / "mine").chmod(0o777)
    return mine


def give_to_a_group(path: str | Path) -> None:
    """Give a path to an unknown group, which any user may be in."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to a group that it is not in")
    os.chown(path, -1, 54321)
    os.chmod(path, 0o775)


def of_a_group(top: Path) -> str:
    mine = place(top / "mine")
    give_to_a_group(mine)
    return mine


def above_it(top: Path) -> str:
    mine = place(top / "above" / "mine")
    give_to_a_group(top / "above")
    return mine


def behind_a_link(top: Path) -> str:
    target = Path(place(top / "elsewhere"))
    (top / "elsewhere").chmod(0o777)
    (top / "mine").mkdir()
    (top / "mine" / NAME).symlink_to(target)
    os.environ["PATH"] = str(top / "mine")
    return str(top / "mine" / NAME)


def of_another(top: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    mine = place(top / "mine")
    os.chown(mine, 12345, 12345)
    return mine


def in_a_virtual_environment(top: Path) -> str:
    mine = place(top / ".venv" / "bin")
    (top / ".venv" / "pyvenv.cfg").write_text("")
    return mine


def named_by_virtual_env(top: Path) -> str:
    os.environ["VIRTUAL_ENV"] = str(top / "env")
    return place(top / "env" / "bin")


def of_node(top: Path) -> str:
    return place(top / "node_modules" / ".bin")


def here(top: Path) -> str:
    os.chdir(top)
    return place(top / "bin")


def linked_from_here(top: Path) -> str:
    target = place(top / "project" / "tools")
    os.chdir(top / "project")
    (top / "mine").mkdir()
    (top / "mine" / NAME).symlink_to(target)
    os.environ["PATH"] = str(top / "mine")
    return str(top / "mine" / NAME)


def by_a_relative_entry(top: Path) -> str:
    place(top / "bin")
    os.chdir(top)
    os.environ["PATH"] = "bin"
    return f"bin/{NAME}"


WAYS: list[tuple[Callable[[Path], str], str]] = [
    (open_folder, "mine can be written by others"),
    (of_a_group, f"{NAME} can be written by others"),
    (above_it, "above can be written by others"),
    (behind_a_link, "elsewhere can be written by others"),
    (of_another, "belongs to user 12345"),
    (in_a_virtual_environment, "it belongs to a virtual environment"),
    (named_by_virtual_env, "it belongs to the environment that VIRTUAL_ENV names"),
    (of_node, "it belongs to a project's node_modules"),
    (here, "it is below the working directory"),
    (linked_from_here, "it is below the working directory"),
    (by_a_relative_entry, "depends on the working directory"),
]


@pytest.mark.parametrize(("prepare", "why"), WAYS, ids=lambda each: getattr(each, "__name__", ""))
def test_one_that_others_may_have_put_there_is_passed_over_and_the_reason_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], str], why: str
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("VIRTUAL_ENV", "")
    program = prepare(tmp_path)
    found = programs.look_up(NAME)
    assert (found.path, [each.path for each in found.passed_over]) == (None, [program])
    assert why in found.passed_over[0].why
    assert found.remark.startswith(f" ({program} was passed over: ")


def test_what_is_named_absolutely_is_run_out_of_a_project_and_not_where_others_can_write(tmp_path: Path) -> None:
    mine = in_a_virtual_environment(tmp_path)
    assert (programs.find(NAME), programs.find(mine)) == (None, mine)
    os.chmod(mine, 0o757)
    assert programs.find(mine) is None


def test_a_sticky_folder_is_no_reason_where_all_in_it_is_the_callers(tmp_path: Path) -> None:
    mine = place(tmp_path / "sticky" / "mine")
    (tmp_path / "sticky").chmod(0o1777)
    assert programs.find(NAME) == mine


def test_what_a_mount_of_this_process_shows_writable_is_passed_over_by_any_of_its_names(tmp_path: Path) -> None:
    mine = place(tmp_path / "proj" / "tools")
    assert programs.find(NAME) == mine
    programs.note_writable([str(tmp_path / "proj")])
    assert "guests could write to" in programs.look_up(NAME).remark
    (tmp_path / "proj").rename(tmp_path / "renamed")
    os.environ["PATH"] = str(tmp_path / "renamed" / "tools")
    assert "guests could write to" in programs.look_up(NAME).remark


def test_a_system_folder_that_a_guest_could_write_is_no_longer_one(tmp_path: Path) -> None:
    place(tmp_path / "system")
    other = place(tmp_path / "mine")
    programs.note_writable([str(tmp_path / "system")])
    found = programs.look_up(NAME)
    assert (found.path, len(found.passed_over)) == (other, 1)


def test_the_note_of_folders_stays_small_and_keeps_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    programs.note_writable([str(tmp_path / "kept")])
    monkeypatch.setattr(programs, "_MOST_NOTED", 2000)
    for number in range(60):
        gone = tmp_path / f"gone-{number}"
        gone.mkdir()
        programs.note_writable([str(gone)])
        gone.rmdir()
    note = tmp_path / "note"
    assert note.stat().st_size < 3000
    assert str(tmp_path / "kept") in programs._read_note(str(note))


def test_a_later_process_knows_what_guests_of_an_earlier_one_could_write(tmp_path: Path, own_note: Path) -> None:
    (tmp_path / "proj").mkdir()
    with Sandbox(policy=Policy(mounts=[Mount(str(tmp_path / "proj"), mode="rw")])) as box:
        box.exec(["true"])
    place(tmp_path / "proj" / "bin")
    programs._writable.clear()
    assert "guests could write to" in programs.look_up(NAME).remark


def test_the_environment_of_a_program_has_no_folder_of_the_callers_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "LD_PRELOAD", "NODE_OPTIONS", "GIT_DIR", "SOME_TOKEN"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("https_proxy", "http://proxy.example.org")
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.example.org")
    mine = place(tmp_path / "mine")
    system = programs.SYSTEM_FOLDERS[0]
    found = programs.environment(mine, "PIP_*")
    assert found["PATH"] == f"{tmp_path / 'mine'}:{system}"
    assert programs.environment(f"{system}/x")["PATH"] == system
    assert (found["https_proxy"], found["PIP_INDEX_URL"]) == ("http://proxy.example.org", "http://index.example.org")
    assert {"PYTHONPATH", "LD_PRELOAD", "NODE_OPTIONS", "GIT_DIR", "SOME_TOKEN"} & set(found) == set()


def test_doctor_says_which_program_is_never_run_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "proj" / "runsc"
    planted.parent.mkdir()
    planted.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    planted.chmod(0o755)
    monkeypatch.setenv("PATH", str(planted.parent))
    programs.note_writable([str(planted.parent)])
    (report,) = examine(backends=["gvisor"]).backends
    said = [detail for what, _, detail, _ in report.lines if what == "passed over"]
    assert said == [f"{planted}: guests could write to {planted.parent}, which was mounted rw"]
    assert str(planted) in report.lines[0][2]  # there is no other: the first line says so as well
    assert not (tmp_path / "ran").exists()


_AS_USER = read_program("host/programs_as_user.py")


def test_an_ordinary_users_own_program_is_taken_until_a_guest_could_write_it(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(_AS_USER)
    subprocess.run(["/bin/rm", "-rf", f"{ordinary_user.home}/rf-host-programs"], check=True)
    assert done.returncode == 0, done.stderr
    own, shell, remark = json.loads(done.stdout)
    assert own == f"{ordinary_user.home}/rf-host-programs/mine/rf-test-own"
    assert shell.startswith(("/usr/", "/bin/"))
    assert "guests could write to" in remark


_OUTSIDE = (
    "import json; from ringfence.host import programs as host_programs; print(json.dumps(host_programs.find('true')))"
)


def test_where_the_hosts_root_is_no_user_of_this_namespace_its_programs_are_still_taken(
    ordinary_user: OrdinaryUser,
) -> None:
    """In a user namespace that maps only the caller, root's files belong to the user "nobody"."""
    code = f"import os, sys; os.execv('/usr/bin/unshare', ['unshare', '--user', sys.executable, '-c', {_OUTSIDE!r}])"
    done = ordinary_user.run(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) in ("/usr/bin/true", "/bin/true")


def test_a_pip_is_looked_for_without_what_its_settings_have_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python = …` in `pip.conf`, which a guest with the home could write, is started by every pip that runs."""
    from ringfence.images import packages

    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho ran > {tmp_path}/witness\n")
    program.chmod(0o755)
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text(f"[global]\npython = {program}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert packages._python_with_pip()
    assert not (tmp_path / "witness").exists()
