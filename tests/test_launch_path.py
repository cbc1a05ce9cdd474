"""The launch path imports nothing heavy: seen in a fresh interpreter, module by module and after real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"

# Added to the start of `python -I -S`, each alone, Python 3.11, p50 of 20 interleaved starts, ms: asyncio 50,
# dataclasses 19, inspect 16, logging 16, subprocess 13, tempfile 13, pathlib 12, typing 12, argparse 10.
HEAVY = frozenset(
    """
    argparse ast asyncio attr concurrent.futures contextlib dataclasses datetime decimal email enum functools http
    importlib.metadata inspect logging msgspec multiprocessing pathlib pickle platform pydantic random re rich selectors
    shutil socket ssl subprocess tempfile threading tomllib traceback typing unittest urllib uuid zipfile
    """.split()  # noqa: SIM905  # a column of words reads better than a column of quotes
)

# Heavy modules that are permitted, with the feature that needs each.
ALLOWED = {
    "threading": "5 ms: the thread that makes spares, a guard's watch",
    "functools": "threading imports it",
}


# What chooses a backend; those of an engine load more, because an engine is not started in milliseconds.
BACKENDS = tuple(f"backends/{name}" for name in ("__init__", "auto", "contract", "linux", "registry"))


def heavy_after(code: str) -> set[str]:
    """Heavy modules in a fresh interpreter after `code`. -I: no user site, no variables, no working directory."""
    program = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, {str(SOURCE)!r})
{code}
loaded = sorted(set(sys.modules) - before)
import json
print()
print(json.dumps(loaded))
"""
    # A warning that is shown loads `re`: a user without a cgroup gets one from the library, and no command shows it.
    argv = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return (set(json.loads(done.stdout.splitlines()[-1])) & HEAVY) - ALLOWED.keys()


def launch_modules() -> list[str]:
    """Every module of the layers a launch goes through. Loading TOML is not launching."""
    rooms = ("shared", "policy", "plan", "wire", "host", "core", "backends/process")
    single = ("values", "errors", "results", "events", "records", "rendering", "text", *BACKENDS)
    files = [f for room in rooms for f in (SOURCE / "ringfence" / room).rglob("*.py")]
    files += [SOURCE / "ringfence" / f"{name}.py" for name in single]
    names = (f.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".") for f in files)
    return sorted(name.removesuffix(".__init__") for name in names)


def test_a_heavy_module_would_be_seen() -> None:
    assert "dataclasses" in heavy_after("import dataclasses")


@pytest.mark.parametrize("module", launch_modules())
def test_a_module_of_the_launch_path_imports_nothing_heavy(module: str) -> None:
    assert heavy_after(f"import {module}") == set()


def test_the_package_and_its_names_import_nothing_heavy() -> None:
    assert heavy_after("import ringfence; ringfence.run, ringfence.Policy, ringfence.Limits, ringfence.Result") == set()


def test_a_whole_run_imports_nothing_heavy() -> None:
    assert heavy_after("import ringfence; assert ringfence.run('print(1)').stdout == '1\\n'") == set()


def test_a_whole_command_imports_nothing_heavy() -> None:
    assert heavy_after("from ringfence.cli import main; assert main(['exec', '--', '/bin/true']) == 0") == set()
