"""Crash-only: whenever the library process dies, no guest lives on and the next start sweeps the rest (D15, D17)."""

from __future__ import annotations

import time

import pytest

import leftovers
from behaviour import host
from behaviour.host import Host
from programs import read_program

STARTING = "import ringfence\nprint('go')\nringfence.run('import time; time.sleep(60)')"
RUNNING = """
import ringfence
box = ringfence.Sandbox().start()
p = box.spawn(["sh", "-c", "setsid sleep 600 & setsid sleep 600 & echo up; sleep 600"])
next(iter(p))
print("go")
p.wait()
"""
IDLE = "import ringfence, time\nringfence.run('1')\ntime.sleep(0.3)\nprint('go')\ntime.sleep(60)"
THREAD = read_program("behaviour/death_of_the_library_thread.py")
FORKED = """
import os, ringfence, time
box = ringfence.Sandbox().start()
p = box.spawn(["sh", "-c", "echo up; sleep 600"])
next(iter(p))
if os.fork() == 0:
    os.setsid()
    time.sleep(5)
    os._exit(0)
print("go")
time.sleep(60)
"""


def die(code: str, delay_s: float = 0.0) -> None:
    with Host(code) as process:
        assert process.line() == "go" or process.line() == "go"
        time.sleep(delay_s)
        mine = host.belongings(process.pid)
        process.kill()
    guests = host.Belongings(mine.processes, frozenset(), frozenset())
    assert host.wait_until_gone(guests) == []
    host.sweep()
    assert host.wait_until_gone(host.Belongings(frozenset(), mine.groups, mine.uids), within_s=1) == []


@pytest.mark.parametrize("delay_ms", [0, 10, 30, 60, 90, 120, 150, 250])
def test_killed_while_it_starts_a_sandbox(delay_ms: int) -> None:
    die(STARTING, delay_ms / 1000)


def test_killed_while_a_guest_with_daemons_runs() -> None:
    die(RUNNING)


def test_killed_while_spares_wait() -> None:
    die(IDLE)


def test_killed_after_the_thread_that_started_the_zygote_ended() -> None:
    """D17: a parent's death signal would come when that thread ends, and kill everything too early."""
    with Host(THREAD) as process:
        assert (process.line(), process.line()) == ("1 True", "go")
        mine = host.belongings(process.pid)
        process.kill()
    assert host.wait_until_gone(host.Belongings(mine.processes, frozenset(), frozenset())) == []
    host.sweep()
    assert mine.left() == []


def test_killed_after_it_forked_a_child_that_holds_all_descriptors() -> None:
    """D17: no end of file comes, because the child has the other ends open; the pidfd reports the death anyway."""
    with Host(FORKED) as process:
        assert process.line() == "go"
        mine = host.belongings(process.pid)
        ours = frozenset(p for p in mine.processes if p.name.startswith("rf-") or p.name in ("sh", "sleep"))
        process.kill()
        assert len(ours) > 5
        assert host.wait_until_gone(host.Belongings(ours, frozenset(), frozenset())) == []
        host.sweep()
        assert host.Belongings(frozenset(), mine.groups, mine.uids).left() == []


@pytest.mark.parametrize(
    "end",
    [
        "",
        "import sys; sys.exit(3)",
        "raise ZeroDivisionError",
        "import threading; threading.Thread(target=lambda: ringfence.run('1')).start()",
    ],
)
def test_an_interpreter_that_ends_without_close_leaves_nothing(end: str) -> None:
    code = f"""
import ringfence, os
box = ringfence.Sandbox().start()
p = box.spawn(["sh", "-c", "setsid sleep 600 & echo up; sleep 600"])
next(iter(p))
ringfence.run("1")
print("go")
input()
{end}
"""
    with Host(code) as process:
        assert process.line() == "go"
        mine = host.belongings(process.pid)
        assert process.process.stdin is not None
        process.process.stdin.write("\n")
        process.process.stdin.flush()
        started = time.monotonic()
        process.rest()
        assert time.monotonic() - started < 5
    assert host.wait_until_gone(mine, within_s=1) == []


@pytest.mark.parametrize("delay_ms", [0, 5, 20, 50])
def test_an_interpreter_that_ends_while_spares_are_built_leaves_nothing(delay_ms: int) -> None:
    code = f"""
import ringfence, time
from ringfence.host import process_id as owners
for n in range(3): ringfence.run("1", policy=ringfence.Policy(limits=ringfence.Limits(processes=20 + n)))
time.sleep({delay_ms / 1000})
print(owners.name())
"""
    with Host(code) as process:
        owner = process.rest().strip()
    assert owner.count("-") == 2, owner
    assert [path for path in leftovers.cgroups_of_the_dead() if owner in path] == []
