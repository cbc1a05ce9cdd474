"""Warm sandboxes of engines: started ahead of need, used once, replaced, never too many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from backends_declared import DECLARED, missing
from ringfence import Limits, Policy, Sandbox, SandboxManager
from ringfence.backends import Backend

POLICY = Policy(limits=Limits(memory="128M", disk="1M"))
WARM = 2


@pytest.fixture(scope="module", params=["container", "podman", "gvisor"])
def backend(request: pytest.FixtureRequest) -> Backend:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    found = DECLARED[request.param].backend()
    with Sandbox(backend=found):
        return found


@pytest.fixture
def manager(backend: Backend) -> Iterator[SandboxManager]:
    with SandboxManager(backend=backend, policy=POLICY, warm=WARM) as made:
        yield made


def test_a_warm_sandbox_runs_when_it_is_handed_out_and_another_takes_its_place(manager: SandboxManager) -> None:
    taken = [manager.sandbox() for _ in range(WARM + 1)]
    assert [box.state for box in taken[:WARM]] == ["running"] * WARM
    for number, box in enumerate(taken[:WARM]):
        there = box.exec(["python3", "-c", "import os; print(*os.listdir('/proc'))"]).stdout.split()
        assert str(box.run("import os; os.getpid()").value) in there  # its interpreter was started ahead
        assert list(box.files.list()) == []
        box.files.write("mine", str(number))
    again: list[Sandbox] = []

    def has_come() -> bool:
        assert len(manager._waiting) <= WARM
        again.append(manager.sandbox())
        return again[-1].state == "running"

    _wait_until(has_come)
    assert list(again[-1].files.list()) == []
    assert again[-1].run("6 * 7").value == "42"
    assert [box.files.read_text("mine") for box in taken[:WARM]] == ["0", "1"]
    for box in (*taken, *again):
        box.close()


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 45
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
