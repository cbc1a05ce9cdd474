"""gVisor holds a strict policy: processes, bytes and files are counted exactly, and what cannot be is refused."""

from __future__ import annotations

import json
import os
import time

import pytest

from accounts import OrdinaryUser
from backends_declared import missing
from programs import read_program
from ringfence import Limits, Policy, Sandbox
from ringfence.backends.auto import find_image
from ringfence.backends.engine.backend import own_kernel_fence
from ringfence.backends.gvisor import backend
from ringfence.host import cgroups

HOSTILE = Policy.preset("hostile").replace(limits=Limits(timeout_s=60, disk="2M", disk_files=50, processes=20))
COUNT = read_program("backends/limits_count.py")


@pytest.fixture(autouse=True)
def installed() -> None:
    reason = missing("gvisor")
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.skipif(os.geteuid() != 0, reason="files are counted by a tmpfs of the host's, which takes root")
def test_a_hostile_policy_is_held_exactly() -> None:
    with Sandbox(policy=HOSTILE, backend="gvisor") as box:
        result = box.exec(["python3", "-c", COUNT])
    assert result.ok, result.render()
    full = "No space left on device"
    assert (json.loads(result.stdout), result.enforcement.weaker) == (
        {
            "names": [50, full],
            "bytes": [2 << 20, full],
            "processes": [20, "Resource temporarily unavailable"],
        },
        (),
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="the other test is for an ordinary user")
def test_a_guest_at_its_limit_of_processes_is_still_served() -> None:
    code = "import os, time\ntry:\n  while True: os.fork() or time.sleep(60)\nexcept OSError: time.sleep(60)"
    limits = Limits(timeout_s=60, processes=8)
    with Sandbox(policy=Policy(limits=limits), backend="gvisor") as box:
        with box.spawn(["python3", "-c", code]):
            box.files.write("here", "1")
            assert box.files.read_text("here") == "1"
        assert box.exec(["echo", "again"]).stdout == "again\n"


def test_a_guest_cannot_fill_the_file_that_takes_errors_of_guestd() -> None:
    """gVisor of 2022 lets a guest open the files that PID 1 has open."""
    code = "for n in range(32):\n  try: open(f'/proc/1/fd/{n}', 'wb', 0).write(b'x' * 9999)\n  except OSError: pass"
    with Sandbox(backend="gvisor") as box:
        assert box.exec(["timeout", "10", "python3", "-c", code]).exit_code is not None
        written = os.fstat(box._box._wall._errors.fileno()).st_size  # type: ignore[union-attr]  # the host's file
    assert written == 0


AS_USER = read_program("backends/limits_as_user.py")


def test_an_ordinary_user_has_gvisor_without_root(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(AS_USER)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "stdout": "user\n1\n",
        "value": "42",
        "file": "1\n",
        "refused": ["strict", "mounts"],
    }


_BUSY = "import os\nos.fork(); os.fork()\nwhile True: open('/proc/self/stat').read()"


@pytest.mark.skipif(os.geteuid() != 0, reason="a freezer takes a cgroup of ours")
def test_a_sandbox_that_traces_itself_all_the_time_is_paused_each_time() -> None:
    """gVisor's sentry waits for threads that it traces: frozen in the wrong order, neither would ever end."""
    room = Policy(limits=Limits(cpu_time_s=120, timeout_s=120))
    with Sandbox(backend="gvisor", policy=room) as box, box.spawn(["python3", "-c", _BUSY]):
        time.sleep(0.5)
        for _ in range(150):
            box.pause()
            box.resume()


def test_cgroups_that_only_the_process_backend_could_use_are_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemd user scope is for our zygote; runsc, started by this process, would run outside, without a limit."""
    scope = cgroups.find()
    if scope is None:
        pytest.skip("no cgroup this user may write")
    monkeypatch.setattr(backend, "_trees", {})
    monkeypatch.setattr(cgroups, "find", lambda: None)
    monkeypatch.setattr(cgroups, "delegable", lambda: scope)
    gvisor = backend.Gvisor()
    plan = gvisor.plan(Policy(), find_image("host"), gvisor.facts())
    assert backend._tree() is None  # which is what a launch uses
    assert plan.enforcement.memory.level == "weaker"
    assert "DATA" in own_kernel_fence(plan).rlimits
