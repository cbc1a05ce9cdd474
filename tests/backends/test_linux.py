"""Plans that are kept for later sandboxes, used by several threads at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringfence import Limits, Policy
from ringfence.backends import linux
from ringfence.backends.auto import find_image
from ringfence.plan.model import LinuxPlan

FACTS, IMAGE = linux.linux_facts(), find_image("host")


def plan_of(policy: Policy) -> LinuxPlan:
    return linux.linux_plan(policy, IMAGE, FACTS)


def of_memory(mib: int) -> Policy:
    return Policy(limits=Limits(memory=f"{mib}M"))


def test_a_plan_is_never_another_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread compared its policy with the plan used last, and returned the plan that another thread used since."""
    mine, others = of_memory(101), of_memory(202)
    plan_of(others), plan_of(mine)
    is_same = linux._is_same

    def slow(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
        found = is_same(one, other)
        monkeypatch.setattr(linux, "_is_same", is_same)
        plan_of(others)  # what the other thread does between the look and its use
        return found

    monkeypatch.setattr(linux, "_is_same", slow)
    assert plan_of(mine).policy is mine


@pytest.fixture
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
def test_more_policies_than_are_kept_in_several_threads() -> None:
    """Two threads that both removed the oldest plan ended with a KeyError."""

    def use(start: int) -> None:
        for number in range(100):
            policy = of_memory(64 + start + number)
            assert plan_of(policy).policy == policy
            linux.plans_of_image("none")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, (0, 25, 50, 75)))
    assert len(linux._kept.plans) <= linux._MOST_PLANS + 3  # each thread may add one at the same moment
