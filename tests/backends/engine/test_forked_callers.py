"""Callers that fork: a child process keeps no part of the parent's sandboxes open, and can make new sandboxes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends_declared import DECLARED, missing
from programs import read_program
from ringfence import Sandbox
from ringfence.host import state

LIBRARY = read_program("backends/forked_callers_library.py")
NEXT = """
import ringfence
from ringfence.backends import Container, Gvisor
ringfence.Sandbox(backend={backend}).start().close()  # it sweeps what the killed one left in the engine
"""


@pytest.fixture(scope="module", params=["container", "podman", "gvisor"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    with Sandbox(backend=DECLARED[request.param].backend()):
        return repr(DECLARED[request.param].backend())


def test_a_sandbox_ends_with_its_library_though_a_fork_of_it_lives_on(backend: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIBRARY.format(backend=backend)], stdout=subprocess.PIPE, text=True
    ) as library:
        assert library.stdout is not None
        child = 0
        try:
            guest = Path("/proc", library.stdout.readline().strip())
            assert [library.stdout.readline() for _ in range(2)] == ["not mine\n", "own\n"]
            child = int(library.stdout.readline().split()[1])
            assert guest.exists()
            library.kill()
            library.wait()
            _wait_gone(guest)
            assert (guest.exists(), Path(f"/proc/{child}").exists()) == (False, True)
        finally:
            library.kill()
            if child:
                os.kill(child, 9)
                _wait_gone(Path(f"/proc/{child}"))
            _sweep_until_its_groups_are_gone(library.pid)
            subprocess.run([sys.executable, "-c", NEXT.format(backend=backend)], check=True)


def _sweep_until_its_groups_are_gone(pid: int) -> None:
    """Sweep as the next start does. A process that is still ending keeps its cgroup for the sweep after that."""
    deadline = time.monotonic() + 10
    state.sweep()
    while list(Path("/sys/fs/cgroup").glob(f"*/ringfence/{pid}-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
        state.sweep()


def _wait_gone(process: Path) -> None:
    deadline = time.monotonic() + 30
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
