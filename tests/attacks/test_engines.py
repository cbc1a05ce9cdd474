"""The attacks on containers and gVisor, every arm, where there is an engine; and whether each control is noticed.

`make test` plays a few on each engine, `make proof` all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

import engines
from backends_declared import missing
from ringfence.backends.container import api as clients
from ringfence_attacks.case import Attack
from ringfence_attacks.engine_harness import catalogue, in_every_run, run_one, score, unnoticed
from ringfence_attacks.report import Row

# Why a control of an engine cannot be seen to work in some place. Anything else that no attack notices fails.
UNSEEN = {
    "podman": {
        "own-cgroups": "Podman gives no cgroup namespace on cgroup v1",
    },
    "docker": {},
    "gvisor": {},
}
# One for each kind of fence: the view, namespaces, the filter, capabilities, limits, what an engine is asked for.
FEW = {
    "container": ("A01", "A31", "B03", "D12-reaped", "E05-engine", "E25-filter", "F06-engine", "J02", "M09"),
    "gvisor": ("A01", "A31", "D02", "F01-sentry", "F06-sentry", "J02"),
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
    """Docker 20.10 can lose a container's end; removing that container then hangs: Docker is started again."""
    yield
    if "docker" not in engines.started():
        return
    docker = engines.running("docker")
    assert not isinstance(docker, str)
    api = clients.find("docker", docker.socket).api
    if left := [one["Id"] for one in api.containers(all=True)]:
        print(f"Docker did not remove {left}: it is started again", file=sys.stderr)
        docker.kill(hard=True)
        assert docker.start() is None
        for identity in left:
            api.remove_container(identity, force=True, v=True)


@pytest.fixture
def chosen(engine: engines.Started, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make `engine` the engine that is found when none is named."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    yield engine.name
    clients.forget(clients.find())


def _attacks(backend: str) -> list[ParameterSet]:
    return [
        pytest.param(each, id=each.id, marks=() if each.id in FEW[backend] else pytest.mark.proof)
        for each in catalogue(backend)
    ]


def _played(attack: Attack, backend: str) -> Row:
    """Play an attack; again when nothing was proven, as some measure CPU time that a busy host does not give."""
    row = run_one(attack, backend)
    return run_one(attack, backend) if row.verdict == "inconclusive" else row


def test_the_few_are_there() -> None:
    assert {name: set(ids) - {each.id for each in in_every_run(name)} for name, ids in FEW.items()} == {
        "container": set(),
        "gvisor": set(),
    }


@pytest.mark.parametrize("attack", _attacks("container"))
def test_a_container_holds(chosen: str, attack: Attack) -> None:
    row = _rows[chosen][attack.id] = _played(attack, "container")
    if row.verdict == "not applicable" and set(attack.off) & set(UNSEEN[chosen]):
        return
    if row.verdict == "not applicable" and attack not in in_every_run("container"):
        pytest.skip(row.detail)
    assert (row.verdict, row.succeeded) == ("held", ("off",)), row


@pytest.mark.parametrize("engine", ["gvisor"])  # which tells tests/suite.py the part that it belongs to
@pytest.mark.parametrize("attack", _attacks("gvisor"))
def test_gvisor_holds(attack: Attack, engine: str) -> None:
    reason = missing("gvisor")
    if reason is not None:
        pytest.skip(reason)
    row = _rows["gvisor"][attack.id] = _played(attack, "gvisor")
    if row.verdict == "not applicable" and (os.geteuid() != 0 or attack not in in_every_run("gvisor")):
        pytest.skip(row.detail)  # what takes root or a cgroup
    assert (row.verdict, row.succeeded) == ("held", ("off",)), row


@pytest.mark.proof
@pytest.mark.parametrize("name", _rows)
def test_every_control_of_an_engine_is_noticed(name: str) -> None:
    """Runs after the other tests of this module; alone, this test checks nothing."""
    backend = "gvisor" if name == "gvisor" else "container"
    rows = list(_rows[name].values())
    if len(rows) != len(catalogue(backend)):
        pytest.skip(f"{name}: only {len(rows)} of {len(catalogue(backend))} attacks were played before")
    print(f"{name}: {len(rows)} attacks, {score(backend, rows)}", file=sys.stderr)
    lacking = {row.control for row in rows if row.verdict == "not applicable" and os.geteuid() != 0}
    assert [one for one in unnoticed(backend, rows)[1] if one not in UNSEEN[name] and one not in lacking] == []
