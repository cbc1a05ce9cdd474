"""guestd in an engine's sandbox kills every process it can when it ends, therefore guestd starts only as PID 1."""

from __future__ import annotations

import subprocess
import sys

import ringfence.guest


def test_guestd_does_not_start_where_it_is_not_pid_1() -> None:
    """The input is empty: a guestd that started by mistake would end at once and kill nothing."""
    program = f"{ringfence.guest.__path__[0]}/guestd/__main__.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    said = (done.returncode, done.stdout, done.stderr)
    assert said == (1, b"", b"guestd is PID 1 of a box, and runs nowhere else\n")
