"""Thousands of runs and hundreds of violent deaths: every count comes back to where it was.

`make proof` runs it; RINGFENCE_SOAK=0.1 makes a tenth of it, for a quick look.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ringfence
import weaker
from programs import read_program
from ringfence import Limits, Policy, Sandbox
from ringfence.backends.process import pool
from ringfence.host import state
from soak.census import Census, census, settles

SHARE = float(os.environ.get("RINGFENCE_SOAK", "1"))
SOURCE = str(Path(__file__).resolve().parents[2] / "src")

pytestmark = [pytest.mark.proof, pytest.mark.timeout(200)]


def at_rest() -> Census:
    pool.close_all()
    state.sweep()
    return settles(census(), within_s=0)


def not_above(before: Census, after: Census) -> dict[str, tuple[int, int]]:
    """Return the counts that grew. Other programs come and go, therefore smaller counts are fine."""
    rows = zip(Census._fields, before, after, strict=True)
    return {name: (had, has) for name, had, has in rows if has > had}


def test_two_thousand_runs_in_a_row_leave_nothing_and_cost_no_memory() -> None:
    before = at_rest()
    runs = int(2000 * SHARE)
    for number in range(runs // 10):
        assert ringfence.run(f"print({number})").stdout == f"{number}\n"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(runs - runs // 10):
        assert ringfence.run(f"print({number})").stdout == f"{number}\n"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 8_000, f"{grown} KiB more after {runs} runs"
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 20  # a few spares more or less
    pool.close_all()
    assert not_above(before, settles(before)) == {}


def test_runs_of_every_end_from_four_threads_leave_nothing() -> None:
    before = at_rest()
    codes = {
        "print(1)": "ok",
        "1/0": "error",
        "import os; os._exit(3)": "error",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "error",
        "import time\ntime.sleep(60)": "timeout",
        "import os\nfor _ in range(5): os.fork()\nos.setsid\n": "ok",
        "x = []\nwhile True: x.append(bytearray(1 << 20))": "oom" if weaker.HAS_CGROUP else "error",
    }
    policy = Policy(limits=Limits(timeout_s=0.4, memory="48M", disk="1M", processes=40))

    def one(number: int) -> tuple[str, str]:
        code, expected = list(codes.items())[number % len(codes)]
        return ringfence.run(code, policy=policy).status, expected

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(one, range(int(140 * SHARE))))
    assert [pair for pair in found if pair[0] != pair[1] and pair[0] != "timeout"] == []
    pool.close_all()
    assert not_above(before, settles(before)) == {}


def test_sandboxes_with_files_and_processes_leave_nothing() -> None:
    before = at_rest()
    for number in range(int(60 * SHARE)):
        with Sandbox() as box:
            box.files.write("a/b", "x" * 10_000)
            box.spawn(["sh", "-c", "setsid sleep 600 & sleep 600"])
            assert box.exec(["cat", "a/b"]).usage.output_bytes == 10_000
            if number % 3 == 0:
                continue
            assert [info.path for info in box.files.list()] == ["a"]
    pool.close_all()
    assert not_above(before, settles(before)) == {}


VICTIM = read_program("soak/soak_victim.py")


def kill_at_random(number: int) -> float:
    """Start a library process and kill the process some milliseconds after its work began."""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(number)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"go\n"
    delay = random.Random(number).uniform(0.0, 0.5)
    time.sleep(delay)
    victim.kill()
    victim.communicate()
    return delay


def test_two_hundred_library_processes_killed_at_random_moments_leave_nothing() -> None:
    before = at_rest()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(kill_at_random, range(int(200 * SHARE))))
    ours_gone = settles(before._replace(groups=10_000, uids=10_000, records=10_000, files=10_000), within_s=5)
    assert ours_gone.processes <= before.processes
    assert ours_gone.namespaces <= before.namespaces
    assert ringfence.run("1").value == "1"  # as the next program does, this sweeps
    pool.close_all()
    assert not_above(before, settles(before)) == {}
