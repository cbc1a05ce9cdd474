"""A temporary failure does not lead to another backend (O27): the start is tried again, then the error is raised."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringfence
from backends.container import equipped
from behaviour import host
from programs import read_program
from ringfence import Mount, Policy, Sandbox, SandboxError, StartTimeoutError, UnsupportedError
from ringfence.backends import auto, registry
from ringfence.backends.container import api
from ringfence.backends.contract import BackendReport
from ringfence.backends.process import pool
from ringfence.backends.process.backend import Process
from ringfence.backends.process.zygote import Template, explain_refusal
from ringfence.errors import SandboxLostError
from ringfence.host import programs
from ringfence.plan.model import FoundImage, SandboxPlan
from ringfence.policy.image import Image

PASSING = [
    pytest.param("PID 1 could not be set up: it ended", None, id="a helper was killed"),
    pytest.param("the forker ended", None, id="the forker was killed"),
    pytest.param("[Errno 2] No such file or directory [mount bind /x on x]", errno.ENOENT, id="a placeholder went"),
    pytest.param("[Errno 5] Input/output error", errno.EIO, id="EIO"),
    pytest.param("[Errno 24] Too many open files", errno.EMFILE, id="EMFILE"),
    pytest.param("[Errno 11] Resource temporarily unavailable", errno.EAGAIN, id="EAGAIN"),
    pytest.param("[Errno 12] Cannot allocate memory", errno.ENOMEM, id="ENOMEM"),
    pytest.param("[Errno 28] No space left on device [unshare 0x10020000]", errno.ENOSPC, id="namespaces used up"),
]
FACTS = [
    pytest.param("[Errno 1] Operation not permitted [unshare 0x10020000]", errno.EPERM, id="EPERM"),
    pytest.param("[Errno 38] Function not implemented [mount_setattr x]", errno.ENOSYS, id="ENOSYS"),
    pytest.param("[Errno 95] Operation not supported [mount overlay]", errno.EOPNOTSUPP, id="EOPNOTSUPP"),
    pytest.param("PID 1 could not be set up: [Errno 1] Operation not permitted [mount proc]", None, id="in words"),
]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pool.close_all()  # no spare that is there already
    monkeypatch.setattr(auto._known, "refusal", None)
    yield
    pool.close_all()


class Faults:
    """Refuse the first `times` sandboxes of the process backend, with the error that its monitor would report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, number: int | None, times: int) -> None:
        self.left, self.met = times, 0
        built = Template.wait_built

        def wait_built(template: Template) -> None:
            if self.left:
                self.left -= 1
                self.met += 1
                raise explain_refusal(text, number)
            built(template)

        monkeypatch.setattr(Template, "wait_built", wait_built)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every engine unavailable, and return a list of the attempts to find one."""
    asked: list[str] = []

    def find(*_: object, **__: object) -> None:
        asked.append("an engine")
        raise UnsupportedError("no engine here")

    monkeypatch.setattr(api, "find", find)
    return asked


@pytest.mark.parametrize(("text", "number"), PASSING)
def test_one_passing_failure_is_tried_again_behind_the_same_wall(
    monkeypatch: pytest.MonkeyPatch, no_engine: list[str], text: str, number: int | None
) -> None:
    faults = Faults(monkeypatch, text, number, 1)
    result = ringfence.run("6 * 7")
    assert (result.backend, result.value, faults.met, no_engine) == ("process", "42", 1, [])


@pytest.mark.parametrize(("text", "number"), PASSING)
def test_one_that_stays_is_raised_as_what_it_is_and_asks_for_no_other_wall(
    monkeypatch: pytest.MonkeyPatch, no_engine: list[str], text: str, number: int | None
) -> None:
    faults = Faults(monkeypatch, text, number, 100)
    with pytest.raises(SandboxError, match=re.escape(text)) as raised:
        ringfence.run("1")
    assert raised.value.fix
    assert (raised.value.code in ("start", "namespaces-used-up"), raised.value.retryable) == (True, True)
    assert (1 < faults.met <= 9, no_engine, auto.known_refusal()) == (True, [], None)
    faults.left = 0
    assert ringfence.run("6 * 7").value == "42"


@pytest.mark.parametrize(("text", "number"), FACTS)
def test_a_fact_of_the_host_is_met_once_and_another_wall_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, no_engine: list[str], text: str, number: int | None
) -> None:
    faults = Faults(monkeypatch, text, number, 100)
    made: list[str] = []
    found = registry.get

    def only_process(name: str) -> object:
        if name == "process":
            return found(name)
        made.append(name)
        raise UnsupportedError(f"no {name} here")

    monkeypatch.setattr(registry, "get", only_process)
    with pytest.raises(UnsupportedError, match="nor can another backend"):
        ringfence.run("1")
    assert (faults.met, made) == (1, ["container", "gvisor"])


def test_with_a_writable_mount_the_plan_is_made_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_engine: list[str]
) -> None:
    """A file in the mount may be gone since the plan was made."""
    faults = Faults(monkeypatch, "[Errno 2] No such file or directory [mount bind]", errno.ENOENT, 4)
    plans: list[object] = []
    plan = Process.plan

    def counted(*args: Any) -> object:
        plans.append(plan(*args))
        return plans[-1]

    monkeypatch.setattr(Process, "plan", counted)
    with Sandbox(policy=Policy(mounts=[Mount(str(tmp_path), mode="rw")])) as box:
        assert box.exec(["true"]).backend == "process"
    assert (faults.met, len(plans), no_engine) == (4, 2, [])


def test_a_start_that_took_its_whole_time_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, no_engine: list[str]
) -> None:
    tries: list[int] = []

    def late(*_: object) -> None:
        tries.append(1)
        raise StartTimeoutError("the sandbox did not start in time")

    monkeypatch.setattr(Template, "wait_built", late)
    with pytest.raises(StartTimeoutError):
        ringfence.run("1")
    assert (len(tries), no_engine) == (1, [])


class NamedBox:
    """A box that has every part of the contract and a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channel, other = socket.socketpair()
        other.close()

    def __getattr__(self, part: str) -> object:
        return None


class Failing:
    """A backend that raises the given errors in its first launches, in order, and then succeeds."""

    isolation = "shared-kernel"

    def __init__(self, name: str, errors: list[Exception]) -> None:
        self.name, self.errors = name, errors

    def facts(self) -> None: ...

    def plan(self, *_: object) -> SandboxPlan:
        return SandboxPlan(Policy(), FoundImage(Image()), None)  # type: ignore[arg-type]  # nothing looks at it

    def launch(self, _: object, *, controls: object) -> NamedBox:
        del controls
        if self.errors:
            raise self.errors.pop(0)
        return NamedBox(f"a box of {self.name}'s")

    def doctor(self) -> BackendReport:
        raise AssertionError


def test_an_engine_that_fails_twice_is_the_answer_and_one_that_is_gone_by_then_is_a_fact() -> None:
    lost = [SandboxLostError("made no container", code="engine") for _ in range(4)]
    gone = UnsupportedError("no engine", code="engine-missing")
    outcomes = []
    for errors in ([lost[0]], [lost[1], gone], lost[2:]):
        first = Failing("first", [UnsupportedError("no namespaces")])
        backends = (first, Failing("second", [*errors]), Failing("third", []))
        launcher = auto.Launcher(backends, Policy(), FoundImage(Image()), chooses=True)  # type: ignore[arg-type]  # stand-ins
        try:
            box = launcher.launch()
            box.channel.close()
            outcomes.append(box.name)  # type: ignore[attr-defined]  # a NamedBox
        except SandboxLostError as error:
            outcomes.append(str(error))
    assert outcomes == ["a box of second's", "a box of third's", "made no container"]


# ── an engine's service that we start ───────────────────────────────────────────────────────────────

_FAILING = """#!/bin/sh
echo started >> {folder}/starts
exit 3
"""


@pytest.fixture
def own_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(api, "_found", {})
    monkeypatch.setattr(api, "_podman", api._Podman())
    monkeypatch.setattr(api, "_candidates", lambda *_: [])
    monkeypatch.delenv("DOCKER_HOST", raising=False)


@pytest.mark.usefixtures("own_engines")
def test_a_service_that_does_not_start_is_not_started_by_each_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = tmp_path / "podman"
    podman.write_text(_FAILING.format(folder=tmp_path))
    podman.chmod(0o755)
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path), *programs.SYSTEM_FOLDERS))
    for name in (None, "podman", None):
        with pytest.raises(UnsupportedError, match="a service of Podman's: it ended with status 3"):
            api.find(name)
    assert (tmp_path / "starts").read_text() == "started\n"


@pytest.mark.usefixtures("own_engines")
def test_without_the_package_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service was started first, though no client could use or end it: forty services in ten seconds."""
    podman = tmp_path / "podman"
    podman.write_text(_FAILING.format(folder=tmp_path))
    podman.chmod(0o755)
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path), *programs.SYSTEM_FOLDERS))
    monkeypatch.setitem(sys.modules, "docker", None)  # as where it is not installed
    with pytest.raises(UnsupportedError) as raised:
        api.find()
    assert (raised.value.code, (tmp_path / "starts").exists()) == ("extra-missing", False)


_SERVICE = read_program("behaviour/temporary_failures_service.py")


@pytest.mark.skipif(os.geteuid() != 0, reason="without root it takes a range of uids; tests of rootless Podman do")
def test_one_service_serves_the_process_and_ends_with_it_however_that_ended() -> None:
    """The thread that started the service is gone, and a fork of the service's owner lives on."""
    equipped.skip_unless_root()
    if programs.find("podman") is None:
        pytest.skip("podman is not installed")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVICE],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": host.SOURCE},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as library:
        assert library.stdout is not None
        asked, sockets, pid = map(int, library.stdout.readline().split())
        time.sleep(0.2)
        lives = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:3] == ["system", "service"]
        library.kill()
        library.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = not Path(f"/proc/{pid}").exists()
        os.killpg(library.pid, 9)  # the fork
    assert (asked, sockets, lives, ended) == (4, 1, True, True)


_KILLED = read_program("behaviour/temporary_failures_killed.py")


@pytest.mark.skipif(os.geteuid() != 0, reason="without root it takes a range of uids; tests of rootless Podman do")
def test_a_service_of_ours_that_was_killed_is_replaced_without_a_word(tmp_path: Path) -> None:
    equipped.skip_unless_root()
    if programs.find("podman") is None:
        pytest.skip("podman is not installed")
    runtime = "crun" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "runc"
    (tmp_path / "c.conf").write_text(f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "cgroupfs"\n')
    storage = f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}/data"\nrunroot = "{tmp_path}/run"\n'
    (tmp_path / "s.conf").write_text(storage)
    done = subprocess.run(
        # What a killed Podman leaves mounted goes with this namespace.
        ["/usr/bin/unshare", "--mount", "--propagation=private", sys.executable, "-P", "-c", _KILLED],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": host.SOURCE,
            "CONTAINERS_CONF": f"{tmp_path}/c.conf",
            "CONTAINERS_STORAGE_CONF": f"{tmp_path}/s.conf",
        },
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    first, second, lost, third = json.loads(done.stdout)
    assert [one[0] for one in (first, second, third)] == ["1\n"] * 3
    assert len({one[1] for one in (first, second, third)}) == 3
    assert lost == ["lost", "guest-lost"]
