"""Callers that fork: a child holds nothing of its parent's sandboxes, and can make its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends_declared import DECLARED, missing
from ringfence import Sandbox

LIBRARY = """
import os, sys, time
import ringfence
from ringfence.backends import Container, Gvisor
box = ringfence.Sandbox(backend={backend}).start()
kept = box.spawn(["sleep", "600"])
if os.fork() == 0:
    try:
        box.exec(["true"])
    except ringfence.SandboxClosedError:
        print("not mine", flush=True)
    with ringfence.Sandbox(backend={backend}) as own:
        print(own.exec(["echo", "own"]).stdout.strip(), flush=True)
    print("child", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


@pytest.fixture(scope="module", params=["container", "podman", "gvisor"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    with Sandbox(backend=DECLARED[request.param].backend()):
        return repr(DECLARED[request.param].backend())


def guestds() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"/ringfence/guest/within.py" in words or b"runsc-sandbox" in words:
                found.add(entry.name)
    return found


def test_a_sandbox_ends_with_its_library_though_a_fork_of_it_lives_on(backend: str) -> None:
    before = guestds()
    with subprocess.Popen(
        [sys.executable, "-c", LIBRARY.format(backend=backend)], stdout=subprocess.PIPE, text=True
    ) as library:
        assert library.stdout is not None
        assert [library.stdout.readline() for _ in range(2)] == ["not mine\n", "own\n"]
        child = int(library.stdout.readline().split()[1])
        try:
            assert guestds() - before
            library.kill()
            library.wait()
            deadline = time.monotonic() + 30
            while guestds() - before and time.monotonic() < deadline:
                time.sleep(0.05)
            assert (guestds() - before, Path(f"/proc/{child}").exists()) == (set(), True)
        finally:
            os.kill(child, 9)
