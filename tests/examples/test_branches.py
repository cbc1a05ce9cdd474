"""The example of a tree search finds a way, and leaves the first sandbox as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import weaker

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "branches.py"


def test_the_search_finds_a_branch_and_the_original_is_as_before() -> None:
    argv = [sys.executable, "-W", weaker.SILENT, str(EXAMPLE)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("5 * 5 = 25\n25 - 1 = 24\n\nthe original still holds [5, 5, 1]; ")
