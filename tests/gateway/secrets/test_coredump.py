"""A process with a secret is killed by a signal that leaves a core file, which is searched byte by byte.

Control arm: the same process without a sandbox leaves a core file that holds the value.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from programs import read_program

PATTERN = Path("/proc/sys/kernel/core_pattern")
CODE = read_program("gateway/coredump_code.py")


def _cores(folder: Path, arm: str) -> list[bytes]:
    """Run the process in a new folder and return the core files that it left."""
    inside = folder / arm
    inside.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CODE, arm], cwd=inside, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -6, done.stderr
    return [path.read_bytes() for path in inside.iterdir() if path.name.startswith("core")]


def test_a_core_file_of_the_process_that_holds_a_secret_does_not_hold_it(tmp_path: Path) -> None:
    if PATTERN.read_text().strip() not in ("core", "core.%p"):
        pytest.skip("core files of this host do not come to the folder of their process")
    control = _cores(tmp_path, "control")
    if not control:
        pytest.skip("this host's hard limit lets no process write a core file")
    assert b"core-canary-" in b"".join(control)
    assert _cores(tmp_path, "kept") == []
    (dumped,) = _cores(tmp_path, "dumped")
    assert dumped.startswith(b"\x7fELF")
    assert b"core-canary-" not in dumped


def test_a_policy_that_is_only_checked_changes_no_limit_of_its_caller(tmp_path: Path) -> None:
    """Nothing happens in a constructor: the protection from core files begins when the gateway takes the secrets."""
    command = [sys.executable, "-c", CODE, "unstarted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True True\n", done.stderr
