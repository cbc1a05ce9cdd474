"""A paused sandbox stands still, its clocks too, and nobody has to thaw it to end it."""

from __future__ import annotations

import time

import pytest

from ringfence import Limits, Policy, Sandbox, SandboxError

COUNTING = "import itertools, time\nfor i in itertools.count():\n    print(i, flush=True)\n    time.sleep(0.01)"


def test_a_paused_sandbox_does_nothing_and_uses_no_cpu(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", "while True: pass"]):
        time.sleep(0.3)
        box.pause()
        assert box.state == "paused"
        with pytest.raises(SandboxError, match="is paused"):
            box.run("1")
        box.pause()
        box.resume()
        box.pause()
        box._paused = False  # to ask for the usage of what stands still
        before = box.usage().cpu_s
        time.sleep(0.3)
        after = box.usage().cpu_s
        box._paused = True
        assert before is not None
        assert after is not None
        assert after - before < 0.02
        box.resume()
    assert box.run("1 + 1").value == "2"


def test_a_deadline_stands_still_while_it_is_paused(box: Sandbox) -> None:
    with box.spawn(["sleep", "60"], timeout_s=0.8) as process:
        box.pause()
        time.sleep(1.2)
        box.resume()
        time.sleep(0.3)
        assert process.running
        assert process.wait().status == "timeout"


def test_state_survives_a_pause(box: Sandbox) -> None:
    box.run("x = 1").check()
    box.pause()
    box.resume()
    assert box.run("x").value == "1"


def test_a_paused_sandbox_can_be_closed() -> None:
    box = Sandbox().start()
    box.spawn(["sleep", "60"])
    box.pause()
    started = time.monotonic()
    box.close()
    assert time.monotonic() - started < 3
    assert box.state == "closed"


def test_an_idle_sandbox_is_paused_by_its_policy_and_the_next_call_wakes_it() -> None:
    with Sandbox(policy=Policy(limits=Limits(idle_s=0.3, on_idle="pause"))) as box:
        box.run("x = 5").check()
        deadline = time.monotonic() + 5
        while box.state != "paused" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert box.state == "paused"
        assert box.run("x").value == "5"
        assert box.exec(["echo", "hi"]).stdout == "hi\n"
