"""Ringfence's own imports take nothing from where a guest can write (L12), whatever is called, and however it is found.

The control is `import_path`: a finder before all others. It could be bypassed by an import that another finder, another
thread or another process of ours answers, or by one that nobody thought of; so every public method is called in a
program whose folder holds a module under every name that anything of ours, or what it stands on, could ask for. Each
tells its name, from outside of every mount, when it is run.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import pytest

from accounts import OrdinaryUser, let_others_through
from behaviour import every_method
from programs import read_program
from ringfence import Mount, Policy, PolicyError, Sandbox
from ringfence.plan.rootfs.interpreter import HELPERS
from test_imports import ROOT, all_imports

SCRIPT = Path(every_method.__file__)
PLANTED = read_program("behaviour/own_imports_planted.py")


def imported_names(folder: Path) -> set[str]:
    """Return the first part of every name that files below `folder` import, in code or in programs in strings."""
    files = (path for path in folder.rglob("*.py") if not {"test", "tests", "idlelib"} & set(path.parts))
    texts = (path.read_text(errors="replace") for path in files)
    return {name for text in texts for name in re.findall(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", text, re.MULTILINE)}


@pytest.fixture(scope="session")
def names() -> str:
    """Return all names that Ringfence's source, the standard library, and packages that Ringfence uses import."""
    found = {one.imported.split(".")[0] for one in all_imports()} | set(sys.stdlib_module_names) | HELPERS
    found |= imported_names(Path(sysconfig.get_path("stdlib")))
    for package in HELPERS:
        found |= imported_names(Path(sysconfig.get_path("purelib"), package))
    assert {"hashlib", "h11", "msvcrt", "stringprep", "simplejson", "encodings"} < found
    return "\n".join(sorted(found - {"sitecustomize", "usercustomize"}))  # are held where they exist


@pytest.fixture
def top(tmp_path: Path, names: str) -> Path:
    let_others_through(tmp_path)
    project = tmp_path / "project"
    for folder in (project, tmp_path / "folder"):
        folder.mkdir()
    (project / "names.txt").write_text(names)
    (project / "planted.txt").write_text(f"WITNESS = {str(tmp_path / 'witness')!r}\n{PLANTED}")
    for name in ("file", "folder/file"):
        (tmp_path / name).write_text("words")
    (tmp_path / "policy.toml").write_text("version = 1\n[limits]\ntimeout_s = 5\n")
    return tmp_path


def planted(top: Path) -> int:
    return len(list((top / "project").glob("*.py")))


def ran(top: Path) -> list[str]:
    return (top / "witness").read_text().splitlines() if (top / "witness").exists() else []


# Where something is missing for it: a cgroup, a server. "sync" or "async" made no difference.
MAY_FAIL = {"connect: UnsupportedError", "Sandbox.pause: UnsupportedError", "Sandbox.fork: UnsupportedError"}


def unexpected(output: str) -> list[str]:
    return [line for line in output.splitlines() if ": ".join(line.split(": ")[:2]) not in MAY_FAIL]


def test_every_public_method_is_called() -> None:
    """A new method is in the surface first, and must be called in `every_method` from then on."""
    stubs = [ROOT / f"tests/surface/{name}.pyi" for name in ("ringfence", "events", "types")]
    tree = ast.parse("\n".join(stub.read_text() for stub in stubs))
    methods = {
        f"{each.name}.{part.name}"
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name != "Opening"
        for part in each.body
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        and (not part.name.startswith("_") or part.name in ("__iter__", "__next__"))
    }
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert methods | functions == set(every_method.CALLS) | {
        *(f"Async{name}" for name in every_method.CALLS if f"Async{name}" in methods),
        "run_async",
    }


@pytest.mark.timeout(180)
@pytest.mark.parametrize("half", ["sync", "async"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_no_method_runs_what_a_guest_left_in_a_folder_of_the_path(top: Path, place: str, half: str) -> None:
    agent = shutil.copy(SCRIPT, top / "project/agent.py" if place == "first" else top / "agent.py")
    argv = [sys.executable, "-W", "ignore", agent, str(top), half]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, cwd="/")
    assert (unexpected(done.stdout), done.stderr) == ([], "")
    assert planted(top) > 500
    assert ran(top) == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("half", ["sync", "async"])
@pytest.mark.skipif(os.geteuid() != 0, reason="the test above already runs as an ordinary user")
def test_nor_does_one_of_an_ordinary_user_whose_python_lacks_packages(
    top: Path, half: str, ordinary_user: OrdinaryUser
) -> None:
    """h11, h2 and similar packages are missing: the gateway looks for them when the guest makes a request."""
    agent = shutil.copy(SCRIPT, top / "project/agent.py")
    for path in (top, *top.rglob("*")):
        os.chown(path, ordinary_user.uid, ordinary_user.gid)
    done = ordinary_user.run(Path(agent), str(top), half, timeout_s=150)
    assert unexpected(done.stdout) == []
    assert planted(top) > 500
    assert ran(top) == []


# The package lies in the folder itself, as in a checkout; each of our processes is started after the guest has worked.
LATER = read_program("behaviour/own_imports_later.py")


def _sweeps(top: Path, run: subprocess.CompletedProcess[str]) -> None:
    assert (run.returncode, run.stderr) == (-signal.SIGKILL, "")
    assert planted(top) > 500
    deadline = time.monotonic() + 20
    while (top / "project/.vscode").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (top / "project/.vscode").exists()  # the other library process removed the folder
    assert ran(top) == []


@pytest.mark.timeout(90)
def test_nor_do_processes_of_ours_that_start_later_where_the_package_itself_lies_there(top: Path) -> None:
    """A zygote, the doctor's programs, and what cleans up after a killed library."""
    shutil.copytree(ROOT / "src/ringfence", top / "project/ringfence", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"PLANT = {every_method.PLANT!r}\n{LATER}"
    argv = [sys.executable, "-I", "-W", "ignore", "-c", code, str(top), str(top / "project")]
    _sweeps(top, subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/"))


@pytest.mark.timeout(90)
@pytest.mark.skipif(os.geteuid() != 0, reason="the test above already runs as an ordinary user")
def test_nor_do_those_of_an_ordinary_user(top: Path, ordinary_user: OrdinaryUser) -> None:
    shutil.copytree(ROOT / "src/ringfence", top / "project/ringfence", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (top, *top.rglob("*")):
        os.chown(path, ordinary_user.uid, ordinary_user.gid)
    code = f"import warnings; warnings.simplefilter('ignore')\nPLANT = {every_method.PLANT!r}\n{LATER}"
    _sweeps(top, ordinary_user.run(code, str(top), str(top / "project"), timeout_s=60))


def command(*words: str, cwd: Path | str = "/", path: str = "") -> subprocess.CompletedProcess[str]:
    """The `ringfence` of this environment."""
    env = {"PATH": "/usr/bin:/bin", "HOME": os.path.expanduser("~"), **({"PYTHONPATH": path} if path else {})}
    argv = [str(Path(sys.prefix, "bin/ringfence")), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=50, cwd=cwd, env=env)


# What Python itself imports before the first line of the command; the last for setuptools.
PYTHONS_OWN = {"encodings", "site", "os", "codecs", "io", "abc", "stat", "posixpath", "zipimport", "_distutils_hack"}


@pytest.mark.parametrize("path", ["absolute", "relative", "none"])
def test_the_command_runs_nothing_that_an_earlier_guest_left(top: Path, path: str) -> None:
    """Modules, the package's too, are planted in the working directory and in a folder of PYTHONPATH."""
    project = top / "project"
    for name in (set((project / "names.txt").read_text().split()) | {"ringfence"}) - PYTHONS_OWN:
        shutil.copy(project / "planted.txt", project / f"{name}.py")
    setting = {"absolute": str(project), "relative": f".{os.pathsep}../project", "none": ""}[path]
    for words in (["exec", "--rw", ".", "--", "true"], ["run", "-c", "print(1)"], ["policy", "show"], ["--version"]):
        done = command(*words, cwd=project, path=setting)
        assert (words, done.returncode) == (words, 0), done.stderr
    assert ran(top) == []


def test_the_command_says_that_the_guest_could_write_to_a_folder_of_its_path(tmp_path: Path) -> None:
    """The command does not warn of the working directory, which is not in its path."""
    (tmp_path / "lib").mkdir()
    shown = command("exec", "--explain", "--rw", str(tmp_path), "--", "true", path=f"{tmp_path}/lib").stdout
    assert f"  {tmp_path}/lib: writable, and a folder of sys.path" in shown
    told = f"ringfence: {tmp_path}/lib: writable, and a folder of sys.path"
    assert told in command("exec", "--rw", f"{tmp_path}/lib", "--", "true", path=f"{tmp_path}/lib").stderr
    # Once a guest was given it, it is no folder of the command's path any more, and there is nothing to say.
    assert "sys.path" not in command("exec", "--rw", f"{tmp_path}/lib", "--", "true", path=f"{tmp_path}/lib").stderr
    assert "sys.path" not in command("exec", "--rw", ".", "--", "true", cwd=tmp_path).stderr


def test_the_library_says_so_when_it_plans_and_once_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    policy = Policy(mounts=[Mount(tmp_path, mode="rw")])
    box = Sandbox(policy=policy)
    assert f"  {tmp_path}: writable, and a folder of sys.path" in box.plan().explain()
    with pytest.warns(UserWarning, match=rf"{tmp_path}: writable, and a folder of sys\.path"):
        box.start()
    box.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sandbox(policy=policy).start().close()
    assert "sys.path" not in Sandbox(policy=policy.replace(mounts=[Mount(tmp_path)])).plan().explain()


@pytest.mark.parametrize("place", ["package", "below the package"])
def test_our_own_package_is_never_writable(place: str) -> None:
    source = ROOT / "src/ringfence" / ("guest" if place != "package" else "")
    with pytest.raises(PolicyError, match="is a part of Ringfence or of Python's own library, and is never writable"):
        Sandbox(policy=Policy(mounts=[Mount(source, mode="rw")])).plan()


@pytest.mark.parametrize("place", ["bin", "site-packages", "a helper"])
def test_no_folder_of_our_python_that_its_next_start_runs_is_writable(place: str) -> None:
    """`bin` has the command itself; Python runs every `.pth` in `site-packages`."""
    packages = Path(sysconfig.get_path("purelib"))
    source = {"bin": Path(sys.prefix, "bin"), "site-packages": packages, "a helper": packages / "h11"}[place]
    with pytest.raises(PolicyError, match="belongs to the Python that runs Ringfence"):
        Sandbox(policy=Policy(mounts=[Mount(source, mode="rw")])).plan()


def test_another_installed_package_may_be_worked_on() -> None:
    Sandbox(policy=Policy(mounts=[Mount(Path(sysconfig.get_path("purelib"), "pytest"), mode="rw")])).plan()


@pytest.mark.parametrize("mounted", [".", "./docker"])
def test_the_next_command_elsewhere_takes_nothing_of_a_folder_of_pythonpath_that_a_guest_wrote(
    tmp_path: Path, mounted: str
) -> None:
    """The container backend asks for `docker` there, and the doctor for `wasmtime`."""
    let_others_through(tmp_path)
    (tmp_path / "project/docker").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    path = str(tmp_path / "project")
    code = "import os, sys; sys.argv = ['ringfence', '--version']; sys.path.insert(0, os.environ['PYTHONPATH'])"
    code += "; from ringfence.__main__ import leave_out_working_folders as leave; leave(); print(sys.path)"

    def used() -> bool:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=20,
            cwd=tmp_path / "elsewhere",
            env={"PATH": "/usr/bin:/bin", "HOME": os.path.expanduser("~"), "PYTHONPATH": path},
            check=True,
        )
        return path in ast.literal_eval(done.stdout)

    assert used()
    assert command("exec", "--rw", mounted, "--", "true", cwd=tmp_path / "project").returncode == 0
    assert not used()


def test_a_startup_file_in_a_folder_of_pythonpath_below_the_working_folder_is_held(tmp_path: Path) -> None:
    """The command leaves that folder out of its own path, but the next Python would start with the folder."""
    (tmp_path / "src").mkdir()
    startup = tmp_path / "src/sitecustomize.py"
    startup.write_text("")
    write = "echo evil >> src/sitecustomize.py"
    command("exec", "--rw", ".", "--", "sh", "-c", write, cwd=tmp_path, path=f"{tmp_path}/src")
    assert startup.read_text() == ""
