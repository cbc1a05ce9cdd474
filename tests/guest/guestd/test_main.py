"""guestd of a walled box ends with everything it may kill, so it starts as PID 1 of a box and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import ringfence.guest


def test_guestd_does_not_start_where_it_is_not_pid_1() -> None:
    """Its input is at its end: a guestd that did start would end at once, and kill nothing."""
    program = f"{ringfence.guest.__path__[0]}/guestd/__main__.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    said = (done.returncode, done.stdout, done.stderr)
    assert said == (1, b"", b"guestd is PID 1 of a box, and runs nowhere else\n")
