"""The view of a guest: the layout of the root, and that the applied view works and shows nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plan.rootfs.rows import Rows, rows
from programs import read_program
from ringfence.plan.rootfs.host_view import view
from ringfence.plan.rootfs.interpreter import Interpreter, interpreter
from ringfence.policy.model import Policy
from ringfence.shared.paths import is_within
from ringfence.values import replace

Inside = Callable[..., str]

PLAIN = Interpreter(
    executable="/usr/bin/python3.11",
    command="/usr/bin/python3.11",
    version="3.11.2",
    prefix="/usr",
    base_prefix="/usr",
    stdlib=("/usr/lib/python3.11",),
    site_packages=(),
    sys_path=("/usr/lib/python3.11",),
    roots=(),
    programs=(),
)


def seen(policy: Policy | None = None, *, python: Interpreter = PLAIN, uid: int = 1000) -> Rows:
    return rows(view(policy or Policy(), python, uid=uid, home="/home/nobody-of-that-name"))


def targets(shown: Rows) -> set[str]:
    return {str(op[2] if op[0] in ("bind", "symlink") else op[1]) for op in (*shown.template, *shown.box)}


def binds(shown: Rows) -> list[tuple[str, str]]:
    return [(str(op[1]), str(op[2])) for op in (*shown.template, *shown.box) if op[0] == "bind"]


def test_the_default_view_binds_only_usr_and_named_parts_of_etc() -> None:
    sources = [source for source, _ in binds(seen())]
    assert "/usr" in sources
    assert [source for source in sources if not is_within(source, "/usr") and not is_within(source, "/etc")] == []
    assert "/etc" not in sources


@pytest.mark.parametrize(
    "name", ["shadow", "gshadow", "machine-id", "gitconfig", "npmrc", "pip.conf", "ssh", "sudoers"]
)
def test_no_account_token_or_host_name_of_etc_is_shown(name: str) -> None:
    assert f"etc/{name}" not in targets(seen())
    assert f"/etc/{name}" not in [source for source, _ in binds(seen())]


def test_every_bind_of_the_default_view_is_read_only() -> None:
    python = interpreter()
    options = [op[3] for op in seen(python=python).template if op[0] == "bind"]
    assert all(option == {"rw": False, "idmap": False, "exec": True} for option in options)


def test_accounts_inside_are_ours_and_name_nobody_of_the_host() -> None:
    files = {op[1]: op[2] for op in seen().template if op[0] == "file"}
    assert files["etc/passwd"] == (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        "user:x:1000:1000:user:/workspace:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    assert files["etc/hostname"] == "ringfence\n"
    assert os.uname().nodename not in str(files) or os.uname().nodename in ("localhost", "ringfence")


def test_the_six_harmless_devices_and_no_other() -> None:
    devices = [op[1] for op in seen().template if op[0] == "dev"]
    assert devices == ["null", "zero", "full", "random", "urandom", "tty"]


def test_an_interpreter_that_others_cannot_read_is_idmapped_for_root_only(tmp_path: Path) -> None:
    closed = tmp_path / "python"
    closed.mkdir(mode=0o700)
    python = replace(PLAIN, roots=(str(closed),))
    as_root = [op for op in seen(python=python, uid=0).box if op[0] == "bind"]
    as_user = [op for op in seen(python=python, uid=1000).box if op[0] == "bind"]
    assert as_root == [["bind", str(closed), str(closed)[1:], {"rw": False, "idmap": True, "exec": True}]]
    assert as_user == [["bind", str(closed), str(closed)[1:], {"rw": False, "idmap": False, "exec": True}]]


def test_configuration_below_usr_that_may_hold_tokens_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """npm reads /usr/etc/npmrc and /usr/local/etc/npmrc, whatever the user; both come with /usr."""
    (tmp_path / "npmrc").write_text("//registry.example.org/:_authToken=canary\n")
    monkeypatch.setattr("ringfence.plan.rootfs.host_view._TOKENS", (str(tmp_path), "/nonexistent"))
    shown = seen()
    assert [op for op in (*shown.template, *shown.box) if op[0] == "hide"] == [["hide", str(tmp_path)[1:]]]


def test_the_same_policy_and_host_give_the_same_view() -> None:
    assert seen() == seen()
    json.dumps([*seen().template, *seen().box])


# ── the interpreter ──────────────────────────────────────────────────────────────────────────────


def test_the_guest_gets_no_import_path_but_the_library_and_installed_packages() -> None:
    python = interpreter()
    assert python.sys_path == python.stdlib + python.site_packages
    assert "" not in python.sys_path
    assert str(Path(__file__).resolve().parents[3] / "src") not in python.sys_path
    assert all(path.endswith(("site-packages", "dist-packages")) for path in python.site_packages)


def test_the_executable_is_a_real_file_and_is_shown() -> None:
    python = interpreter()
    assert os.path.realpath(python.executable) == python.executable
    assert is_within(python.executable, "/usr") or any(is_within(python.executable, root) for root in python.roots)


def test_of_a_virtual_environment_only_its_own_files_are_shown() -> None:
    python = interpreter()
    if python.prefix == python.base_prefix:
        pytest.skip("a virtual environment is missing")
    inside = sorted(root for root in python.roots if is_within(root, python.prefix))
    library = f"{python.prefix}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    assert inside == sorted([f"{python.prefix}/bin", f"{python.prefix}/pyvenv.cfg", library])


def test_a_prefix_that_is_a_home_is_not_shown_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "someone"
    library = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    library.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin" / "python3").write_text("")
    (home / "private").write_text("")
    monkeypatch.setenv("HOME", str(home))
    for name in ("prefix", "base_prefix", "exec_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(home))
    monkeypatch.setattr(sys, "_base_executable", str(home / "bin" / "python3"))
    monkeypatch.setattr(sys, "_stdlib_dir", str(library))
    monkeypatch.setattr(sys, "platlibdir", "lib")
    assert interpreter().roots == (str(home / "bin" / "python3"), str(library))


# ── applied ──────────────────────────────────────────────────────────────────────────────────────

LOOK = """
import os, json
def names(path):
    return sorted(os.listdir(path)) if os.path.isdir(path) else None
print(json.dumps({path: names(path) for path in ("/root", "/home", "/var", "/run", "/tmp", "/srv", "/opt", "/dev")}))
"""


def _expected(path: str, python_roots: tuple[str, ...]) -> list[str]:
    """Return what a home or another closed folder may show: only the way down to the interpreter."""
    return sorted({root[len(path) :].strip("/").split("/")[0] for root in python_roots if is_within(root, path)})


def test_nothing_of_the_host_but_the_interpreter_is_visible(inside: Inside, request: pytest.FixtureRequest) -> None:
    found = json.loads(inside(LOOK))
    roots = interpreter().roots if request.node.callspec.params["inside"] == "root" else ()
    for path in ("/root", "/home", "/run", "/tmp", "/srv"):
        assert (path, found[path]) == (path, _expected(path, roots))
    assert found["/var"] == ["cache", "lib", "log", "run", "tmp"]
    assert found["/dev"] == sorted(
        ["null", "zero", "full", "random", "urandom", "tty", "fd", "stdin", "stdout", "stderr", "ptmx", "pts", "shm"]
    )


def test_python_and_its_modules_work_in_the_view(inside: Inside) -> None:
    code = (
        "import ssl, sqlite3, ctypes, subprocess\n"
        "print(subprocess.run(['/bin/sh', '-c', 'echo works'], capture_output=True, text=True).stdout, end='')"
    )
    assert inside(code) == "works\n"


def test_the_view_cannot_be_written(inside: Inside) -> None:
    code = (
        "import errno\n"
        "for path in ('/usr/x', '/etc/ssl/certs/x', '/usr/lib/x'):\n"
        "    try: open(path, 'w')\n"
        "    except OSError as error: print(errno.errorcode[error.errno])\n"
    )
    assert set(inside(code).split()) <= {"EROFS", "EACCES"}


def test_a_writable_mount_shows_its_files_and_covers_what_it_should(inside: Inside, project: Path) -> None:
    (project / "a.txt").write_text("shown")
    (project / ".env").write_text("TOKEN=canary")
    (project / "link").symlink_to(".env")
    code = (
        "import os\nprint(open('/data/a.txt').read(), repr(open('/data/.env').read()), repr(open('/data/link').read()))"
    )
    mount = {"source": str(project), "target": "/data", "mode": "rw", "hide": [".env"]}
    assert inside(code, mounts=[mount]) == "shown '' ''\n"


ATTACK = read_program("plan/host_view_attack.py")


def test_protected_names_of_a_writable_mount_hold_and_the_rest_is_writable(inside: Inside, project: Path) -> None:
    """A12, A13, A14, L01: by name, by rename of the file, by rename of an ancestor, and where nothing exists yet."""
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".git" / "config").write_text("[core]\n")
    for path in (project / ".git", project / ".git" / "hooks", project / ".git" / "config"):
        os.chown(path, project.stat().st_uid, project.stat().st_gid)
    before = {str(path.relative_to(project)) for path in project.rglob("*")}
    output = inside(ATTACK, mounts=[{"source": str(project), "target": "/data", "mode": "rw"}])
    printed = dict(line.split() for line in output.splitlines())
    assert printed == {
        "work": "done",
        "hook": "EROFS",
        "config": "EROFS",
        "commondir": "EROFS",
        "replace": "EBUSY",
        "ancestor": "EBUSY",
        "new": "EROFS",
        "folder": "EROFS",
        "unlink": "EBUSY",
        "rmdir": "EBUSY",
        "shell": "EROFS",
        "index": "done",
        "hardlink": "EXDEV",
    }
    after = {str(path.relative_to(project)) for path in project.rglob("*")}
    assert after - before == {"result.txt", ".git/n", ".git/index"}
    assert (project / ".git" / "config").read_text() == "[core]\n"
    assert (project / "result.txt").stat().st_uid == project.stat().st_uid


def test_the_guests_git_leaves_placeholders_out_of_its_commits(inside: Inside, project: Path) -> None:
    if not os.path.exists("/usr/bin/git"):
        pytest.skip("git is missing")
    subprocess.run(["git", "init", "-q", project], check=True)
    subprocess.run(["chown", "-R", f"--reference={project}", project], check=True)
    code = (
        "import os, subprocess\n"
        "os.chdir('/data')\n"
        "open('work.txt', 'w').write('x')\n"
        "who = ['-c', 'user.name=a', '-c', 'user.email=a@example.org']\n"
        "subprocess.run(['git', 'add', '--all'], check=True)\n"
        "subprocess.run(['git', *who, 'commit', '-qm', 'x'], check=True)\n"
        "subprocess.run(['git', 'ls-files'], check=True)\n"
    )
    assert inside(code, mounts=[{"source": str(project), "target": "/data", "mode": "rw"}]) == "work.txt\n"
    status = ["git", "-c", f"safe.directory={project}", "-C", str(project), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""


def test_only_named_commands_and_what_they_start_exist(inside: Inside) -> None:
    code = (
        "import os, shutil, subprocess\n"
        "print(sorted(os.listdir('/usr/sbin')), shutil.which('id'), shutil.which('perl'))\n"
        "print(subprocess.run(['git', '--version'], capture_output=True).returncode)\n"
    )
    assert inside(code, commands=["python3", "git"]) == "[] None None\n0\n"
