"""The attacks on containers and gVisor, both arms, where there is an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import engines
from backends_declared import missing
from ringfence.attacks.walled import CASES, Case, run_one
from ringfence.backends.container import engine as clients


@pytest.fixture(scope="session", params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> engines.Started:
    found = engines.running(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def chosen(engine: engines.Started, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one that is found when none is named."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    yield
    clients.forget(clients.find())


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_container_holds(case: Case) -> None:
    row = run_one(case, "container")
    assert (row.verdict, row.succeeded) == ("held", ("off",)), row


@pytest.mark.parametrize("case", [case for case in CASES if "gvisor" in case.backends], ids=lambda case: case.id)
def test_gvisor_holds(case: Case) -> None:
    reason = missing("gvisor")
    if reason is not None:
        pytest.skip(reason)
    row = run_one(case, "gvisor")
    assert (row.verdict, row.succeeded) == ("held", ("off",)), row
