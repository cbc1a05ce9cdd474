"""Many sandboxes of a program, and their policies. The conformance table has what every backend must do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ringfence
import weaker
from ringfence import AsyncSandbox, Limits, Mount, Policy, PolicyError, Sandbox
from ringfence.backends.auto import Launcher

pytestmark = pytest.mark.everywhere


def test_nothing_happens_in_the_constructor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    box = Sandbox()
    assert (box.state, len(os.listdir("/proc/self/fd"))) == ("new", before)
    assert box.id.startswith("s-")
    assert box.id != Sandbox().id


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
    """The test uses more views than templates are kept for."""
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


def test_protected_files_are_watched_from_such_a_program_too(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("the hard limit of open files is below 3000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    (tmp_path / ".envrc").write_text("")
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with Sandbox(policy=Policy(mounts=[Mount(tmp_path, "/m", "rw")])) as box:
            (tmp_path / "new").write_text("new")
            (tmp_path / "new").rename(tmp_path / ".envrc")
            deadline = time.monotonic() + 10
            while box.state == "running" and time.monotonic() < deadline:
                time.sleep(0.02)
            assert box.state == "lost"
    finally:
        for fd in held:
            os.close(fd)


def test_a_sandbox_that_is_closed_while_it_starts_does_not_start() -> None:
    async def work() -> list[str]:
        box = AsyncSandbox()
        starting = [asyncio.create_task(box.start()) for _ in range(3)]
        await asyncio.sleep(0)
        await box.close()
        ended = await asyncio.gather(*starting, return_exceptions=True)
        assert box._box is None
        return [type(one).__name__ for one in ended]

    assert asyncio.run(work()) == ["SandboxClosedError"] * 3


def test_an_interrupt_right_after_the_start_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupt_at("ringfence._sync.link.Link.__init__", monkeypatch)


@pytest.mark.everywhere(gvisor="its box is ended without a pidfd", container="its box is ended without a pidfd")
def test_an_interrupt_right_before_the_end_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupt_at("ringfence.shared.fast_stdlib.signal_pidfd", monkeypatch)


def _interrupt_at(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes: list[Any] = []
    real = Launcher.launch

    def launch(self: Launcher) -> object:
        boxes.append(real(self))
        return boxes[-1]

    monkeypatch.setattr(Launcher, "launch", launch)
    Sandbox().start().close()  # and all is loaded
    with monkeypatch.context() as patched:
        patched.setattr(moment, lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), Sandbox():
            pass
    assert [box.wait_destroyed(10.0) for box in boxes] == [True, True]


def test_an_interrupted_close_ends_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox().start()
    address, inside = box.expose(8000), box._box
    assert inside is not None
    with monkeypatch.context() as patched:
        patched.setattr(address, "close", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            box.close()
    assert inside.wait_destroyed(5.0)
    box.close()


@pytest.mark.parametrize("moment", ["start", "tell"])
def test_an_interrupt_while_a_cell_begins_ends_it_and_leaves_the_next_one_alone(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox() as box:
        box.exec(["true"])
        assert box._place is not None
        link = box._place.link
        real = getattr(link, moment)

        def interrupted(*args: object, **named: object) -> None:
            if moment == "tell":
                real(*args, **named)  # it is on its way
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(link, moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                box.run("import time; time.sleep(20)")
        begun = time.monotonic()
        assert box.run("6 * 7", timeout_s=5).value == "42"
        assert time.monotonic() - begun < 10


def test_started_by_several_it_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    async def work() -> None:
        box = AsyncSandbox()
        launch = box._launcher.launch

        def counted() -> Any:
            made.append(launch())
            return made[-1]

        monkeypatch.setattr(box._launcher, "launch", counted)
        await asyncio.gather(*[box.start() for _ in range(3)])
        await box.close()

    asyncio.run(work())
    assert len(made) == 1


@pytest.mark.everywhere(gvisor="its /proc is its own", container="the rest of /proc is covered, not absent")
@weaker.needs_cgroup
def test_strict_shows_only_processes_in_proc() -> None:
    policy = Policy(strict=True)
    code = "import os\n(sorted(n for n in os.listdir('/proc') if not n.isdigit()), os.path.exists('/proc/self/status'))"
    assert ringfence.run(code, policy=policy).value == "(['self', 'thread-self'], True)"
    assert ringfence.run("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1]))", policy=policy).ok


def test_a_backend_that_nobody_brought_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(PolicyError, match="unknown backend 'vm'"):
        ringfence.run("1", backend="vm")  # type: ignore[arg-type]  # no such backend here


def test_the_presets_that_this_backend_keeps_run() -> None:
    assert ringfence.run("1", policy=Policy.preset("offline")).value == "1"
    assert ringfence.run("1", policy=Policy.preset("dev")).value == "1"


def test_a_policy_from_a_file_is_the_policy_that_holds(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('version = 1\n[limits]\nprocesses = 5\n[env]\nWHO = "file"\n')
    assert tomllib.loads(file.read_text())["limits"] == {"processes": 5}
    result = ringfence.run("import os\nos.environ['WHO']", policy=Policy.load(file))
    assert result.value == "'file'"
