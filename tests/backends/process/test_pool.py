"""Policies that differ only in limits share a template and rows of system calls; the numbers stay each policy's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ringfence
import weaker
from ringfence import Limits, Policy, SandboxError, UnsupportedError
from ringfence.backends.auto import find_image
from ringfence.backends.linux import interpreter, linux_facts
from ringfence.backends.process import pool
from ringfence.backends.process.backend import Process, start
from ringfence.plan.rootfs.interpreter import Interpreter

_LOOK = """
import json, os, resource
files = os.statvfs("/workspace")
asked = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("NPROC", "NOFILE", "CPU")}
print(json.dumps([asked, files.f_blocks * files.f_frsize, len(os.sched_getaffinity(0))]))
"""
_NARROW = Policy(limits=Limits(processes=20, open_files=100, cpu_time_s=3, disk=16 << 20))
_WIDE = Policy(limits=Limits(processes=50, open_files=200, cpu_time_s=7, disk=48 << 20))


def seen(policy: Policy) -> list[Any]:
    result = ringfence.run(_LOOK, policy=policy)
    assert result.ok, result.stderr
    found: list[Any] = json.loads(result.stdout)
    return found


def test_each_keeps_its_own_limits_whichever_came_before() -> None:
    narrow, wide = seen(_NARROW), seen(_WIDE)
    assert narrow[0]["NOFILE"] == [100, 100]
    assert wide[0]["NOFILE"] == [200, 200]
    assert wide[0]["CPU"][0] - narrow[0]["CPU"][0] == 4
    assert wide[0]["NPROC"][0] - narrow[0]["NPROC"][0] == 30
    assert (narrow[1], wide[1]) == (16 << 20, 48 << 20)
    for _ in range(2):
        assert (seen(_NARROW), seen(_WIDE)) == (narrow, wide)


@pytest.fixture
def no_pool() -> Iterator[None]:
    pool.close_all()
    yield
    pool.close_all()


@pytest.mark.usefixtures("no_pool")
def test_runs_that_begin_together_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread opened the sentinel, another took it for closed and dropped the pool, zygote and all."""
    opening, look, made, make = threading.Event(), os.fstat, [], pool.Pool

    def late(fd: int) -> os.stat_result:
        if not opening.is_set() and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:ringfence"):
            opening.set()
            time.sleep(0.3)
        return look(fd)

    def noted(interpreter: Interpreter, preload: tuple[str, ...]) -> pool.Pool:
        made.append(make(interpreter, preload))
        return made[-1]

    monkeypatch.setattr(os, "fstat", late)
    monkeypatch.setattr(pool, "Pool", noted)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(ringfence.run, "6 * 7")
        assert opening.wait(10)
        assert (ringfence.run("2 * 3").value, first.result().value) == ("6", "42")
    assert list(pool._pools.values()) == made
    assert len(made) == 1


@pytest.fixture
def pool_without_cgroups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first sandbox of the process came when no cgroup could be used; now one can."""
    pool.close_all()
    with monkeypatch.context() as patched:
        patched.setattr(pool, "find_or_delegable", lambda: None)
        pool.pool(interpreter(), ())
    yield
    pool.close_all()


@weaker.needs_cgroup
@pytest.mark.usefixtures("pool_without_cgroups")
def test_a_pool_without_cgroups_promises_none_that_appear_later() -> None:
    assert Process().facts().memory_by is None
    with pytest.raises(UnsupportedError, match="strict"):
        ringfence.run("1", policy=Policy(strict=True), backend="process")


@weaker.needs_cgroup
@pytest.mark.usefixtures("pool_without_cgroups")
def test_a_plan_that_counts_on_a_cgroup_starts_nothing_without_one() -> None:
    made = Process().plan(Policy(), find_image("host"), linux_facts())
    assert made.enforcement.memory.level == "full"
    with pytest.raises(SandboxError, match="counts on a cgroup"):
        start(Process(), made)


def test_a_shelf_that_was_dropped_before_its_refill_gets_no_spares() -> None:
    ringfence.run("1")
    one = next(iter(pool._pools.values()))
    made = Process().plan(Policy(limits=Limits(processes=77)), find_image("host"), Process().facts())
    with one._lock:
        shelf, _ = one._shelf(made)
        shelf.wanted = 1
        del one._shelves[id(made)]
    one._refill(shelf)
    kept, boxes = list(shelf.spares), [box for box in one._boxes if box.plan is made]
    for box in boxes:
        box.close()
        box.wait_destroyed(5)
    assert (kept, boxes) == ([], [])
