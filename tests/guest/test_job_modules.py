"""The modules that jobs need are computed from the packages, and loaded while the files are visible or sent as text."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.guest import job_modules

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "load_job_modules.py"


def _file(module: str) -> Path:
    return SOURCE / f"{module.replace('.', '/')}.py"


def _modules(*packages: str) -> list[str]:
    paths = (path for package in packages for path in (SOURCE / "ringfence" / package).glob("[!_]*.py"))
    return sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths)


def _imports(module: str, *, in_functions: bool) -> Iterator[str]:
    """Yield what a module imports as Python's own parser sees it, without what is for type checkers."""
    tree = ast.parse(_file(module).read_text())
    places = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] if in_functions else [tree]
    for place in places:
        for node in ast.walk(place) if in_functions else place.body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
                yield node.module


@pytest.mark.parametrize("how", ["load", "load_late"])
def test_no_file_is_opened_for_what_a_job_imports_late(how: str) -> None:
    """With `load_late` no file of the standard library is opened either."""
    names = [
        name for name in _modules("guest/files", "guest/interpreter") if name != "ringfence.guest.files.zip_stream"
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", PROGRAM, str(SOURCE), how, *names, "ringfence.guest.guestd.connector"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{len(names) + 1} modules\n", "")


def test_what_jobs_import_inside_functions_is_loaded_late() -> None:
    """Imports for type checkers only are left out: `typing` and similar modules cost more than a sandbox."""
    for module in _modules("guest/files"):
        wanted = {name for name in _imports(module, in_functions=True) if not name.startswith("ringfence.")}
        found = set(job_modules.imports_in_functions(_file(module).read_text()))
        assert found - {"ringfence.guest.files"} == wanted, module


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import re\nif TYPE_CHECKING:\n    import typing\n\ndef f():\n    import zlib\n", ["zlib"]),
        ("def f():\n    from io import BytesIO\n    import os.path\n", ["io", "os.path"]),
        ("def f():\n    imported = 1\n    frm = 2\n", []),
        ('def f():\n    """Take bytes\n    from here on."""\n', []),
    ],
)
def test_imports_in_functions_are_read_from_the_text(text: str, found: list[str]) -> None:
    assert list(job_modules.imports_in_functions(text)) == found


@pytest.mark.parametrize("begin", ["bash", "runner", "session"])
def test_the_text_of_all_that_an_own_interpreter_imports_is_sent_and_no_more(begin: str) -> None:
    wanted: set[str] = set()
    waiting = [f"ringfence.guest.interpreter.{begin}"]
    while waiting:
        name = waiting.pop()
        if name not in wanted and _file(name).exists():
            wanted.add(name)
            waiting += _imports(name, in_functions=False)

    sent = job_modules.texts(begin)

    assert sent == {name: _file(name).read_text() for name in wanted}
    late = {name for module in sent for name in _imports(module, in_functions=True) if name.startswith("ringfence")}
    assert late == set()


def test_a_job_imports_late_only_what_is_loaded() -> None:
    """The spawner decides what a job runs: its late imports are among what `load` loads."""
    late = {name for name in _imports("ringfence.guest.launch.spawner", in_functions=True) if _file(name).exists()}
    loaded = {*_modules("guest/files", "guest/interpreter"), "ringfence.guest.guestd.connector"}
    assert {"ringfence.guest.files.worker", "ringfence.guest.interpreter.session"} <= late
    assert late <= loaded
