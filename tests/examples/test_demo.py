"""The demo, which newcomers run first, works as root and as a user, and prints plain text without a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from accounts import OrdinaryUser

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
END = "4 of 4 contained"


def test_the_demo_contains_all_four() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert END in done.stdout
    assert done.stdout.count("enforced by:") == 4
    assert "\x1b" not in done.stdout


def test_the_demo_contains_all_four_as_an_ordinary_user(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(DEMO.read_text())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert END in done.stdout


def test_the_demo_notices_a_snippet_that_was_not_stopped() -> None:
    """The other arm: a snippet that ends well was not stopped by anything, and the demo ends with 1."""
    code = DEMO.read_text().replace('READ_SECRET = "print(open({path!r}).read())"', "READ_SECRET = 'print(1)'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55)
    assert (done.returncode, "3 of 4 contained" in done.stdout) == (1, True), done.stdout
