"""Many containers and gVisor sandboxes, one after the other: nothing stays in the engine, on disk or in cgroups.

`make proof` makes 300 containers and 100 under gVisor, RINGFENCE_SOAK_WALLS=5; by itself this makes a fifth of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import leftovers
from backends_declared import DECLARED, missing
from ringfence import Policy, Sandbox
from ringfence.backends import Container
from ringfence.backends.container import api as engines
from ringfence.host import process_id, state

SHARE = float(os.environ.get("RINGFENCE_SOAK_WALLS", "1"))

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]


@pytest.fixture(scope="session", params=["container", "podman", "gvisor"])
def name(request: pytest.FixtureRequest) -> str:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


def on_disk() -> list[str]:
    """Return the folders of this process's sandboxes below the state directory."""
    mine = f"{process_id.name()}_"
    places = [Path(state.disk_directory(place)) for place in ("accounts", "doors", "gvisor")]
    return [str(path) for place in places for path in place.iterdir() if path.name.startswith(mine)]


def in_cgroups() -> list[str]:
    """Return the cgroups of this process's sandboxes."""
    found = Path("/sys/fs/cgroup").glob(f"**/{process_id.name()}-*")
    return [str(path) for path in found if path.is_dir()]


def in_engine(backend: object) -> list[object]:
    if not isinstance(backend, Container):
        return []
    api = engines.find(backend.engine, backend.socket).api
    return [*api.containers(all=True), *(api.volumes().get("Volumes") or ())]


def open_here() -> int:
    """Return the number of open descriptors, without those that the engine's client keeps for later requests."""
    return len(set(map(int, os.listdir("/proc/self/fd"))) - leftovers.stock().descriptors)


def test_many_runs_leave_nothing(name: str) -> None:
    backend = DECLARED[name].backend()
    runs = int({"container": 60, "podman": 20, "gvisor": 20}[name] * SHARE)
    descriptors = 0
    for number in range(runs):
        with Sandbox(backend=backend, policy=Policy()) as box:
            if number % 3 == 0:
                box.spawn(["sh", "-c", "setsid sleep 60 & sleep 60"])
            assert box.exec(["echo", str(number)]).stdout == f"{number}\n"
        descriptors = descriptors or open_here()
    assert (in_engine(backend), on_disk(), in_cgroups()) == ([], [], [])
    assert open_here() <= descriptors + 2
