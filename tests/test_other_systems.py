"""On another system every module can be imported, and a start reports what is missing and starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"

# What only Linux has, of what we use; a Python for macOS has none of it.
PRETENDED = f"""
import os, sys
sys.path.insert(0, {str(SOURCE)!r})
sys.platform = "darwin"
for name in ("memfd_create", "pidfd_open", "sched_getaffinity", "O_PATH", "eventfd", "splice", "getxattr", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
"""
WORDS = "Ringfence runs on Linux, and this is darwin"
FIX = "use a Linux machine, a virtual one too"


def pretended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", "-c", PRETENDED + code], capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize(
    "start",
    [
        "ringfence.run('1')",
        "ringfence.Sandbox().start()",
        "ringfence.Sandbox(backend='container').start()",
        "__import__('asyncio').run(ringfence.run_async('1'))",
    ],
)
def test_a_start_on_another_system_says_what_is_missing(start: str) -> None:
    done = pretended(f"""
import ringfence
for name in ringfence.__all__:
    getattr(ringfence, name)
ringfence.Policy().explain()
try:
    {start}
except ringfence.UnsupportedError as error:
    print(error, error.code, error.fix, sep="|")
""")
    assert (done.stdout, done.stderr) == (f"{WORDS}|system|{FIX}\n", "")


@pytest.mark.parametrize(
    "line", [["run", "-c", "1"], ["exec", "--", "true"], ["doctor"], ["attack"], ["image", "list"]]
)
def test_a_command_on_another_system_says_what_is_missing(line: list[str]) -> None:
    done = pretended(f"sys.argv[1:] = {line}\nfrom ringfence.__main__ import main\nsys.exit(main())\n")
    assert (done.returncode, done.stdout, done.stderr) == (125, "", f"ringfence: {WORDS}\nringfence: {FIX}\n")


@pytest.mark.parametrize("line", [["policy", "list"], ["doctor", "--help"], ["--version"]])
def test_what_starts_nothing_works_on_another_system(line: list[str]) -> None:
    done = pretended(f"sys.argv[1:] = {line}\nfrom ringfence.__main__ import main\nsys.exit(main())\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_on_another_machine_no_backend_is_named_as_the_way_out() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-c"),
            f"""
import os, sys
sys.path.insert(0, {str(SOURCE)!r})
os.uname = lambda: os.uname_result(("Linux", "host", "6.12", "1", "aarch64"))
import ringfence
for backend in ("auto", "process"):
    try:
        ringfence.run("1", backend=backend)
    except ringfence.UnsupportedError as error:
        print(str(error).partition(" — ")[0], error.code, error.fix, sep="|")
""",
        ],
        capture_output=True,
        text=True,
        timeout=50,
    )
    fix = "use a machine with x86-64: the other backends need the table too"
    line = f"this version has no system call table for aarch64|machine|{fix}\n"
    assert (done.stdout, done.stderr) == (line * 2, "")
