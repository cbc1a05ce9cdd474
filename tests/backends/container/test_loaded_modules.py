"""A run on the container backend loads few modules of ours, and hardly any of guestd's: seen in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from programs import read_program
from ringfence.backends import Container

SOURCE = Path(__file__).resolve().parents[3] / "src"
MOST_MODULES = 77  # 104 before; 13 of them are packages without code
# What compares a box's mounts from the host's side too. The rest of guestd runs inside alone.
OF_THE_GUEST = {"ringfence.guest", "ringfence.guest.guestd", "ringfence.guest.guestd.mount_check"}


def test_a_run_loads_few_modules_and_hardly_any_of_the_guest(contained: Container) -> None:
    program = read_program("backends/loaded_modules.py")
    argv = [sys.executable, "-W", "ignore", "-c", program, str(SOURCE), str(contained.engine), str(contained.socket)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert {name for name in loaded if name.startswith("ringfence.guest")} <= OF_THE_GUEST
    assert len(loaded) <= MOST_MODULES, loaded
