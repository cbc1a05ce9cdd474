"""The attacks on containers and gVisor, every arm, where there is an engine; and whether each control is noticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

import engines
from backends_declared import missing
from ringfence.attacks.case import Attack
from ringfence.attacks.report import Row
from ringfence.attacks.walled import in_every_run, run_one, score, unnoticed
from ringfence.backends.container import api as clients

# Why a control of a wall cannot be seen to work in some place. Anything else that no attack notices fails.
UNSEEN = {
    "podman": {
        "own-cgroups": "Podman gives no cgroup namespace on cgroup v1",
    },
    "docker": {},
    "gvisor": {},
}
_rows: dict[str, dict[str, Row]] = {"docker": {}, "podman": {}, "gvisor": {}}


@pytest.fixture(scope="session", params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> engines.Started:
    found = engines.running(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="module", autouse=True)
def no_engine_that_hangs() -> Iterator[None]:
    """Docker 20.10 can lose a container's end, and then never answers who removes it: later tests get it anew."""
    yield
    docker = engines.running("docker")
    if isinstance(docker, str):
        return
    api = clients.find("docker", docker.socket).api
    if left := [one["Id"] for one in api.containers(all=True)]:
        print(f"Docker did not remove {left}: it is started again", file=sys.stderr)
        docker.kill(hard=True)
        assert docker.start() is None
        for identity in left:
            api.remove_container(identity, force=True, v=True)


@pytest.fixture
def chosen(engine: engines.Started, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The one that is found when none is named."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    yield engine.name
    clients.forget(clients.find())


@pytest.mark.parametrize("attack", in_every_run("container"), ids=lambda attack: attack.id)
def test_a_container_holds(chosen: str, attack: Attack) -> None:
    row = _rows[chosen][attack.id] = run_one(attack, "container")
    if row.verdict == "not applicable" and set(attack.off) & set(UNSEEN[chosen]):
        return
    assert (row.verdict, row.succeeded) == ("held", ("off",)), row


@pytest.mark.parametrize("attack", in_every_run("gvisor"), ids=lambda attack: attack.id)
def test_gvisor_holds(attack: Attack) -> None:
    reason = missing("gvisor")
    if reason is not None:
        pytest.skip(reason)
    row = _rows["gvisor"][attack.id] = run_one(attack, "gvisor")
    if row.verdict == "not applicable" and os.geteuid() != 0:
        pytest.skip(row.detail)  # what takes root or a cgroup
    assert (row.verdict, row.succeeded) == ("held", ("off",)), row


@pytest.mark.parametrize("name", _rows)
def test_every_control_of_a_wall_is_noticed(name: str) -> None:
    """Runs after the others of this module, and on its own says nothing."""
    backend = "gvisor" if name == "gvisor" else "container"
    rows = list(_rows[name].values())
    if len(rows) == len(in_every_run(backend)):
        print(f"{name}: {len(rows)} attacks, {score(backend, rows)}", file=sys.stderr)
        lacking = {row.control for row in rows if row.verdict == "not applicable" and os.geteuid() != 0}
        assert [one for one in unnoticed(backend, rows)[1] if one not in UNSEEN[name] and one not in lacking] == []
