"""A run on the container backend loads few modules of ours, and none of the guest's: seen in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from programs import read_program
from ringfence.backends import Container

SOURCE = Path(__file__).resolve().parents[3] / "src"
MOST_MODULES = 60  # without packages that are a docstring alone


def test_a_run_loads_few_modules_and_none_of_the_guest(contained: Container) -> None:
    program = read_program("backends/loaded_modules.py")
    argv = [sys.executable, "-W", "ignore", "-c", program, str(SOURCE), str(contained.engine), str(contained.socket)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert [name for name in loaded if name.startswith("ringfence.guest")] == []
    modules = [name for name in loaded if not _is_docstring_alone(name)]
    assert len(modules) <= MOST_MODULES, modules


def _is_docstring_alone(name: str) -> bool:
    package = SOURCE / name.replace(".", "/") / "__init__.py"
    return package.exists() and len(ast.parse(package.read_text()).body) <= 1
