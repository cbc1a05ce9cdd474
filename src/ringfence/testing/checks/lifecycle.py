"""Checks of a sandbox's life: it starts once, ends once, and reports its state at any moment."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ringfence import SandboxClosedError
from ringfence.testing.model import MakeSandbox, raises, with_maker


def it_goes_from_new_over_running_to_closed(make: MakeSandbox) -> None:
    box = make()
    states = [box.state]
    with box:
        states.append(box.state)
    states.append(box.state)
    assert states == ["new", "running", "closed"]
    assert box.id != make().id


def using_it_before_its_start_says_how_to_start_it(make: MakeSandbox) -> None:
    box = make()
    for use in (lambda: box.run("1"), lambda: box.exec(["ls"]), lambda: box.files.read("x"), box.usage):
        with raises(SandboxClosedError, match="has not been started") as caught:
            use()
        assert caught.value.fix
    with raises(SandboxClosedError, match="not been started"):
        _ = box.backend


def using_it_after_its_end_says_so(make: MakeSandbox) -> None:
    with make() as box:
        pass
    for use in (lambda: box.run("1"), lambda: box.spawn(["ls"]), lambda: list(box.files.list())):
        with raises(SandboxClosedError, match="was closed"):
            use()
    with raises(SandboxClosedError, match="a sandbox starts once"):
        box.start()


def start_and_close_may_be_called_again(make: MakeSandbox) -> None:
    box = make()
    assert box.start() is box
    assert box.start() is box
    assert box.exec(["true"]).ok
    box.close()
    box.close()
    assert box.state == "closed"
    never = make()
    never.close()
    assert never.state == "closed"


def closing_while_another_thread_waits_ends_its_call(make: MakeSandbox) -> None:
    box = make().start()
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(box.exec(["sleep", "60"]).status))
    thread.start()
    time.sleep(0.5)
    box.close()
    thread.join(15)
    assert results == ["killed"]


def the_plan_is_known_before_the_start_and_the_backend_after(make: MakeSandbox) -> None:
    box = make()
    plan = box.plan()
    assert (box.enforcement, bool(plan.explain())) == (plan.enforcement, True)
    with box:
        assert (box.backend, box.enforcement) == (plan.backend, plan.enforcement)


def several_at_once_do_not_meet(make: MakeSandbox) -> None:
    def work(number: int) -> tuple[str, list[str]]:
        with make() as box:
            box.files.write("mine", str(number))
            seen = box.exec(["sh", "-c", "sleep 0.05; cat mine; cd /workspace; echo *"]).stdout
            return seen, [info.path for info in box.files.list()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(8)))
    assert found == [(f"{n}mine\n", ["mine"]) for n in range(8)]


CHECKS = (
    with_maker(it_goes_from_new_over_running_to_closed),
    with_maker(using_it_before_its_start_says_how_to_start_it),
    with_maker(using_it_after_its_end_says_so),
    with_maker(start_and_close_may_be_called_again),
    with_maker(closing_while_another_thread_waits_ends_its_call),
    with_maker(the_plan_is_known_before_the_start_and_the_backend_after),
    with_maker(several_at_once_do_not_meet),
)
