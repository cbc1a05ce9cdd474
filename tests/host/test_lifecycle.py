"""The registry of what a process keeps: every function is called, at exit and in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os
from ringfence.host import lifecycle

def fail():
    raise OSError(9, "Bad file descriptor")

def say(word):
    os.write(1, word)

lifecycle.{register}fail)
lifecycle.{register}lambda: say(b"called"))
{end}
"""


@pytest.mark.parametrize(
    ("register", "end"),
    [
        ("at_exit(lifecycle.SANDBOXES, ", ""),
        ("after_fork(", "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)"),
    ],
    ids=["exit", "fork"],
)
def test_what_one_function_raises_keeps_no_other_from_its_turn(register: str, end: str) -> None:
    program = _PROGRAM.format(register=register, end=end)
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    assert done.stdout == b"called"
    assert b"Bad file descriptor" in done.stderr  # and it is reported
