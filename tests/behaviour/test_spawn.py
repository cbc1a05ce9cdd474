"""spawn() where the process backend differs; what holds for every backend is in ringfence.testing.checks.spawning."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from backends_declared import OURS
from programs import read_program
from ringfence import Sandbox
from ringfence.events import Stdout
from ringfence.types import Process

pytestmark = pytest.mark.everywhere

HEADLESS = read_program("behaviour/spawn_headless.py")


def test_a_process_whose_first_thread_has_ended_is_killed_with_its_tree(box: Sandbox, everywhere: str) -> None:
    """The process is shown as a zombie in /proc while other threads of the process run on."""
    with box.spawn(["python3", "-c", HEADLESS]) as process:
        next(iter(process))
        time.sleep(0.4)
        assert process.running
    assert process.wait().status == "killed"
    code = "import os\nsum(p.isdigit() for p in os.listdir('/proc'))"
    assert box.run(code).value == str(OURS[everywhere] + 1)
    assert box.exec(["python3", "-c", HEADLESS], timeout_s=0.6).status == "timeout"
    assert box.state == "running"
    code = "import os\nsum(p.isdigit() for p in os.listdir('/proc'))"
    assert box.run(code).value == str(OURS[everywhere] + 1)


IN_FLIGHT = read_program("behaviour/spawn_in_flight.py")


@pytest.mark.everywhere(gvisor="it counts no descriptors in flight")
def test_a_command_that_is_refused_did_not_run() -> None:
    """The guest has sent as many descriptors as permitted: the descriptors of a new process cannot be passed."""
    with Sandbox() as box:
        with box.spawn(["python3", "-c", IN_FLIGHT]) as holder:
            next(event for event in holder if isinstance(event, Stdout))
            with pytest.raises(OSError, match="cannot start another process"):
                box.exec(["sh", "-c", "echo ran >> log"])
        assert box.exec(["sh", "-c", "cat log 2>/dev/null"]).stdout == ""


def test_asking_whether_a_cell_runs_holds_up_no_output() -> None:
    with Sandbox() as box, box.session().spawn("for _ in range(4000): print('x' * 999)", timeout_s=20) as cell:
        asked_until = time.monotonic() + 0.5
        while cell.running and time.monotonic() < asked_until:
            time.sleep(0.01)
        assert sum(len(event.data) for event in cell if isinstance(event, Stdout)) == 4_000_000


def until_it_ends(process: Process) -> None:
    while process.running:
        continue


@pytest.mark.parametrize("what", ["command", "cell"])
def test_threads_that_read_wait_and_ask_lose_nothing_of_each_other(what: str) -> None:
    switched, said = sys.getswitchinterval(), "".join(f"{number}\n" for number in range(60_000))
    sys.setswitchinterval(1e-6)
    try:
        with Sandbox() as box, ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                if what == "cell":
                    process = box.session().spawn("for number in range(60_000): print(number)", timeout_s=25)
                else:
                    process = box.spawn(["seq", "0", "59999"])
                waiting = [pool.submit(process.wait) for _ in range(2)]
                asking = pool.submit(until_it_ends, process)
                read = "".join(event.text for event in process if isinstance(event, Stdout))
                results = [one.result(timeout=30) for one in waiting]
                asking.result(timeout=30)
                assert (read == said, [(one.status, one.stdout == said) for one in results]) == (
                    True,
                    [("ok", True)] * 2,
                )
    finally:
        sys.setswitchinterval(switched)


@pytest.mark.parametrize("how", ["wait", "events", "running"])
def test_the_clock_of_a_spawned_cell_ends_with_it_and_its_session_lives_on(how: str) -> None:
    with Sandbox() as box:
        cell = box.session().spawn("x = 1", timeout_s=0.5)
        if how == "wait":
            cell.wait()
        elif how == "events":
            list(cell)
        while how == "running" and cell.running:
            time.sleep(0.01)
        time.sleep(1.5)  # longer than its time, and what an interrupt adds
        assert (box.run("x").value, cell.wait().state_kept) == ("1", True)


def test_a_cell_that_was_interrupted_at_its_deadline_keeps_its_session_or_says_that_it_did_not() -> None:
    with Sandbox() as box:
        box.run("x = 1; import time").check()
        heard = box.session().spawn("time.sleep(20)", timeout_s=0.5).wait()
        time.sleep(1)
        assert (heard.status, heard.state_kept, box.run("x").value) == ("timeout", True, "1")
        unheard = box.session().spawn("time.sleep(20)", timeout_s=0.5)
        time.sleep(2)
        result = unheard.wait()
        assert (result.status, result.state_kept, box.run("x").value) == ("timeout", False, None)
