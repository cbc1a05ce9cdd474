"""The sync half is the async half, generated; and using it costs no asyncio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from programs import read_program

ROOT = Path(__file__).resolve().parents[1]


def test_the_sync_half_is_what_the_async_half_gives() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/unasync", "--check"], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_a_changed_sync_half_would_be_noticed(tmp_path: Path) -> None:
    import shutil

    for name in ("src/ringfence", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src/ringfence/_sync/files.py").open("a") as file:
        file.write("# by hand\n")
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts/unasync", "--check"], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.returncode) == ("not generated from _async: files.py; run scripts/unasync\n", 1)


def test_neither_the_package_nor_a_run_nor_a_sandbox_imports_asyncio() -> None:
    code = read_program("unasync/loads_no_asyncio.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "ignore", "-c", code, str(ROOT / "src")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_both_halves_have_the_same_names() -> None:
    from ringfence._async.files import AsyncFiles
    from ringfence._async.process import AsyncProcess
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence._sync.files import Files
    from ringfence._sync.process import Process
    from ringfence._sync.sandbox import Sandbox

    for one, other in ((Sandbox, AsyncSandbox), (Files, AsyncFiles), (Process, AsyncProcess)):
        public = [sorted(name for name in vars(kind) if not name.startswith("_")) for kind in (one, other)]
        assert public[0] == public[1]
