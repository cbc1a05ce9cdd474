"""A sandbox starts once, ends once, and says what it is at any moment."""

from __future__ import annotations

import os
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ringfence
from ringfence import Limits, Policy, Sandbox, SandboxClosedError, UnsupportedError


def test_nothing_happens_in_the_constructor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    box = Sandbox()
    assert (box.state, len(os.listdir("/proc/self/fd"))) == ("new", before)
    assert box.id.startswith("s-")
    assert box.id != Sandbox().id


def test_a_sandbox_goes_from_new_over_running_to_closed() -> None:
    box = Sandbox()
    states = [box.state]
    with box:
        states.append(box.state)
    states.append(box.state)
    assert states == ["new", "running", "closed"]


def test_using_it_before_its_start_says_how_to_start_it() -> None:
    box = Sandbox()
    for use in (lambda: box.run("1"), lambda: box.exec(["ls"]), lambda: box.files.read("x"), box.usage):
        with pytest.raises(SandboxClosedError, match="has not been started") as caught:
            use()
        assert caught.value.fix == "use `with`, or call start()"
    with pytest.raises(SandboxClosedError, match="not been started"):
        _ = box.backend


def test_using_it_after_its_end_says_so() -> None:
    with Sandbox() as box:
        pass
    for use in (lambda: box.run("1"), lambda: box.spawn(["ls"]), lambda: list(box.files.list())):
        with pytest.raises(SandboxClosedError, match="was closed"):
            use()
    with pytest.raises(SandboxClosedError, match="a sandbox starts once"):
        box.start()


def test_start_and_close_may_be_called_again() -> None:
    box = Sandbox()
    assert box.start() is box
    assert box.start() is box
    assert box.run("1").value == "1"
    box.close()
    box.close()
    assert box.state == "closed"
    never = Sandbox()
    never.close()
    assert never.state == "closed"


def test_closing_while_another_thread_waits_ends_its_call() -> None:
    box = Sandbox().start()
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(box.exec(["sleep", "60"]).status))
    thread.start()
    time.sleep(0.3)
    started = time.monotonic()
    box.close()
    thread.join(5)
    assert (results, time.monotonic() - started < 3) == (["killed"], True)


def test_the_plan_is_known_before_the_start_and_the_backend_after() -> None:
    box = Sandbox()
    plan = box.plan()
    assert plan.backend == "process"
    assert box.enforcement == plan.enforcement
    with box:
        assert (box.backend, box.enforcement) == ("process", plan.enforcement)


def test_thirty_sandboxes_at_once_do_not_meet() -> None:
    def work(number: int) -> tuple[str | None, list[str]]:
        with Sandbox() as box:
            box.files.write("mine", str(number))
            value = box.run("import os, time\ntime.sleep(0.05)\n(open('mine').read(), os.listdir('/workspace'))").value
            return value, [info.path for info in box.files.list()]

    with ThreadPoolExecutor(30) as pool:
        found = list(pool.map(work, range(30)))
    assert found == [(f"('{n}', ['mine'])", ["mine"]) for n in range(30)]


def test_runs_from_many_threads_are_each_their_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda n: ringfence.run(f"{n} * 2").value, range(40)))
    assert values == [str(n * 2) for n in range(40)]


def test_many_policies_in_turn_do_not_pile_up() -> None:
    """More views than templates are kept."""
    for number in range(12):
        policy = Policy(limits=Limits(processes=20 + number))
        assert ringfence.run("1", policy=policy).value == "1"


def test_a_program_with_more_than_1024_descriptors_can_run_sandboxes() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("the hard limit of open files is below 3000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with Sandbox() as box:
            assert box.exec(["echo", "x"]).stdout == "x\n"
        assert ringfence.run("1").value == "1"
    finally:
        for fd in held:
            os.close(fd)


def test_usage_grows_with_what_is_used() -> None:
    with Sandbox() as box:
        before = box.usage()
        box.run(
            "import time\nx = bytearray(50 << 20)\nend = time.process_time() + 0.2\n"
            "while time.process_time() < end: pass"
        )
        after = box.usage()
    assert before.cpu_s is not None
    assert after.cpu_s is not None
    assert after.memory_peak_bytes is not None
    assert after.cpu_s - before.cpu_s >= 0.19
    assert after.memory_peak_bytes > 50 << 20


def test_strict_shows_only_processes_in_proc() -> None:
    policy = Policy(strict=True)
    code = "import os\n(sorted(n for n in os.listdir('/proc') if not n.isdigit()), os.path.exists('/proc/self/status'))"
    assert ringfence.run(code, policy=policy).value == "(['self', 'thread-self'], True)"
    assert ringfence.run("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1]))", policy=policy).ok


def test_what_comes_later_is_unsupported_and_starts_nothing() -> None:
    later: list[Callable[[], object]] = [
        lambda: ringfence.run("1", backend="vm"),
        lambda: ringfence.run("1", policy=Policy.preset("hostile")),
    ]
    for use in later:
        with pytest.raises(UnsupportedError):
            use()


def test_the_presets_that_this_backend_keeps_run() -> None:
    assert ringfence.run("1", policy=Policy.preset("offline")).value == "1"
    assert ringfence.run("1", policy=Policy.preset("dev")).value == "1"


def test_a_policy_from_a_file_is_the_policy_that_holds(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('version = 1\n[limits]\nprocesses = 5\n[env]\nWHO = "file"\n')
    assert tomllib.loads(file.read_text())["limits"] == {"processes": 5}
    result = ringfence.run("import os\nos.environ['WHO']", policy=Policy.load(file))
    assert result.value == "'file'"
