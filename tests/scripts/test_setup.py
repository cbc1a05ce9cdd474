"""The output of `scripts/setup` and the files left, in a project made by the test, with nothing to download."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import read_program

ROOT = Path(__file__).resolve().parents[2]

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "NAME"
version = "1"
"""

# The least that pip takes for an editable install: a wheel with one line of path.
BACKEND = read_program("scripts/setup_backend.py")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project") / "with a space"
    for name in ("scripts", "requirements", "bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup", folder / "scripts")
    (folder / "requirements/build.txt").write_text("")
    (folder / "bin/ringfence").write_text("")
    for place, name in ((folder, "ringfence"), (folder / "attacks", "extra")):
        (place / "src" / name / "inner").mkdir(parents=True)
        (place / "pyproject.toml").write_text(PROJECT.replace("NAME", name))
        (place / "backend.py").write_text(BACKEND.replace("NAME", name))
        for module in ("__init__", "inner/__init__", "inner/module"):
            (place / "src" / name / f"{module}.py").write_text("VALUE = 1\n")
    return folder


def set_up(project: Path) -> list[str]:
    """Run the script as a container's shell would, with a pip that is configured for folders that are not there."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(project),
        "PYTHON": os.path.realpath(sys.executable),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_FIND_LINKS": "/nowhere/simple/a /nowhere/simple/b",
    }
    done = subprocess.run(
        ["scripts/setup", "build"], cwd=project, env=environment, capture_output=True, text=True, timeout=55
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()


def without_bytecode(project: Path) -> list[str]:
    """Return the sources for which no bytecode, or bytecode of an older text, was written."""
    cached = f"{sys.implementation.cache_tag}.pyc"
    found = []
    for source in (*(project / "src").rglob("*.py"), *(project / "attacks/src").rglob("*.py")):
        compiled = source.parent / "__pycache__" / f"{source.stem}.{cached}"
        stamp = int(source.stat().st_mtime).to_bytes(4, "little")
        if not compiled.exists() or compiled.read_bytes()[8:12] != stamp:
            found.append(source.name)
    return found


def test_set_up_says_one_line_and_nothing_of_pips_configuration(project: Path) -> None:
    lines = set_up(project)
    assert len(lines) == 1
    assert lines[0].startswith("setup: making .venv with ")
    assert set_up(project) == []


def test_the_command_runs_in_a_folder_with_a_space(project: Path) -> None:
    set_up(project)
    done = subprocess.run([project / ".venv/bin/ringfence"], capture_output=True, text=True, timeout=20, check=True)
    assert (done.stdout, done.stderr) == ("the command runs\n", "")


def test_the_package_is_compiled_where_python_writes_no_bytecode_by_itself(project: Path) -> None:
    set_up(project)
    assert without_bytecode(project) == []


def test_a_source_that_changed_since_is_compiled_again(project: Path) -> None:
    set_up(project)
    changed = project / "src/ringfence/inner/module.py"
    changed.write_text("VALUE = 2\n")
    os.utime(changed, (1_700_000_000, 1_700_000_000))
    assert without_bytecode(project) == ["module.py"]
    set_up(project)
    assert without_bytecode(project) == []
