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
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from accounts import OrdinaryUser, let_others_through
from behaviour import every_method
from ringfence import import_path
from test_imports import ROOT, all_imports

SCRIPT = Path(every_method.__file__)
PLANTED = """
import os, sys
with open({witness!r}, "a") as file:
    file.write(f"{{__name__}} {{os.getpid()}}\\n")
here = os.path.dirname(__file__)
place = sys.path.index(here)
del sys.path[place], sys.modules[__name__]
import importlib
try:
    sys.modules[__name__] = importlib.import_module(__name__)
finally:
    sys.path.insert(place, here)
"""


def imported_names(folder: Path) -> set[str]:
    """The first part of all that files below it import, in code or in the text of code."""
    files = (path for path in folder.rglob("*.py") if not {"test", "tests", "idlelib"} & set(path.parts))
    texts = (path.read_text(errors="replace") for path in files)
    return {name for text in texts for name in re.findall(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", text, re.MULTILINE)}


@pytest.fixture(scope="session")
def names() -> str:
    """Of everything that our source imports, that the standard library does, and that packages which work for us do."""
    found = {one.imported.split(".")[0] for one in all_imports()} | set(sys.stdlib_module_names) | import_path.HELPERS
    found |= imported_names(Path(sysconfig.get_path("stdlib")))
    for package in import_path.HELPERS:
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
    (project / "planted.txt").write_text(PLANTED.format(witness=str(tmp_path / "witness")))
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
    """A new method stands in the surface first, and is called there from then on."""
    tree = ast.parse((ROOT / "tests/surface/ringfence.pyi").read_text())
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
        *("run_async", "connect_async"),
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
    """h11, h2 and their like are not there: the gateway looks for them when the guest makes a request."""
    agent = shutil.copy(SCRIPT, top / "project/agent.py")
    for path in (top, *top.rglob("*")):
        os.chown(path, ordinary_user.uid, ordinary_user.gid)
    done = ordinary_user.run(Path(agent), str(top), half, timeout_s=150)
    assert unexpected(done.stdout) == []
    assert planted(top) > 500
    assert ran(top) == []
