"""Modules that a command's zygote reads but does not run: they come from memory when they are used."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.guest.launch import held

SOURCE = Path(__file__).resolve().parents[3] / "src" / "ringfence"
# Loads a module of ours that was held while no file can be opened below the package, as in a sandbox.
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from ringfence.guest.launch import held, zygote
held.Held().hold()
late = sorted(name for name in sys.modules if name.endswith((".shell", ".connector")))
def refuse(event, args):
    if event == "open" and str(args[0]).startswith({root!r}):
        raise AssertionError(f"{{args[0]}} was opened")
sys.addaudithook(refuse)
for name in held._HELD:
    __import__("ringfence.guest." + name)
from ringfence.guest.guestd import connector; from ringfence.guest.interpreter import bash as shell
print(late, shell.__file__ == {root!r} + "/ringfence/guest/shell.py", shell.serve.__module__, connector.answer)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as installed, with up-to-date bytecode; one module of it says which version it is."""
    root = tmp_path / "root"
    (root / "ringfence").mkdir(parents=True)
    shutil.copy(SOURCE / "__init__.py", root / "ringfence")
    shutil.copytree(SOURCE / "guest", root / "ringfence" / "guest", ignore=shutil.ignore_patterns("__pycache__"))
    _write(root, "answer = 'first'\n")
    subprocess.run([sys.executable, "-I", "-m", "compileall", "-q", str(root)], check=True)
    return root


def _write(root: Path, text: str) -> None:
    (root / "ringfence" / "guest" / "connector.py").write_text(text)


def _said(root: Path) -> str:
    program = PROGRAM.format(root=str(root))
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_held_module_is_loaded_when_it_is_used_and_no_file_is_opened_for_it(copy: Path) -> None:
    assert _said(copy) == "[] True ringfence.guest.interpreter.bash first"


def test_what_is_held_is_the_text_there_is_and_not_bytecode_of_an_older_one(copy: Path) -> None:
    _write(copy, "answer = 'second'\n")

    assert _said(copy) == "[] True ringfence.guest.interpreter.bash second"


def test_every_module_that_is_imported_late_is_held() -> None:
    late = {
        alias.name
        for path in (SOURCE / "guest").glob("*.py")
        if path.stem in held._HELD or path.stem in ("spawner", "kernel")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in ([ast.alias(node.module)] if node.module else node.names)
    }

    assert {"fileworker", "pycode", "session", "shell", "stepwise"} <= late
    assert late - set(held._HELD) == set()
