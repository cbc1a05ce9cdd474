"""The registry of what a process keeps: every function is called, at exit and in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from programs import read_program


@pytest.mark.parametrize("when", ["exit", "fork"])
def test_what_one_function_raises_keeps_no_other_from_its_turn(when: str) -> None:
    argv = [sys.executable, "-c", read_program("host/lifecycle_failure.py"), when]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, check=False
    )
    assert done.stdout == b"called"
    assert b"Bad file descriptor" in done.stderr  # and it is reported
