"""Tests for every backend: tests marked `everywhere`, and the conformance table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from backends_declared import DECLARED, missing
from outcomes import ENGINES, NOT_AVAILABLE
from ringfence import AsyncSandbox, AsyncSandboxManager, Sandbox, SandboxManager, run, run_async
from ringfence.backends import Process
from ringfence.testing.conformance import CHECKS

if TYPE_CHECKING:
    from ringfence.backends import Backend

BACKENDS: dict[str, Backend] = {"process": Process(), "fresh": Process(fresh=True)}
TAKES_A_BACKEND = (
    *(kind.__init__ for kind in (Sandbox, AsyncSandbox, SandboxManager, AsyncSandboxManager)),
    *(run, run_async),
)


def names_here(config: pytest.Config) -> list[str]:
    """Return the backends that can run here. A backend named by --backend must be able to run."""
    asked: list[str] = config.getoption("--backend")
    for name in asked:
        reason = "it is not declared" if name not in DECLARED else missing(name)
        if reason is not None:
            raise pytest.UsageError(f"--backend {name}: {reason}")
    if asked:
        return asked
    wall = config.getoption("--wall")
    reasons = {name: missing(name) for name in DECLARED if wall in (None, ENGINES.get(name, "none"))}
    config.stash[NOT_AVAILABLE] = [
        f"NOT AVAILABLE {name}: {len(CHECKS)} checks not run: {reason}" for name, reason in reasons.items() if reason
    ]
    return [name for name, reason in reasons.items() if reason is None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check of the conformance table on each backend; a test marked `everywhere` on each that was asked for."""
    if metafunc.definition.get_closest_marker("everywhere") is not None:
        metafunc.parametrize("everywhere", _of_everywhere(metafunc), indirect=True)
    if "backend_name" not in metafunc.fixturenames:
        return
    names = names_here(metafunc.config)
    pairs = [(name, one) for name in names for one in CHECKS if one.name.startswith(DECLARED[name].only)]
    metafunc.parametrize(("backend_name", "one"), pairs, ids=[f"{name}-{one}" for name, one in pairs])


def _of_everywhere(metafunc: pytest.Metafunc) -> list[object]:
    """Return the backends of a test marked `everywhere`; the mark names the backends left out, with reasons. Podman's
    reasons are Docker's."""
    but: dict[str, str] = {}
    for mark in metafunc.definition.iter_markers("everywhere"):
        but |= mark.kwargs
    if "container" in but:
        but["podman"] = but["container"]
    asked = names_here(metafunc.config) if metafunc.config.getoption("--backend") else ["process"]
    return [
        pytest.param(name, marks=pytest.mark.skip(f"not for {name}: {but[name]}")) if name in but else name
        for name in asked
        if name != "fresh"
    ]


@pytest.fixture(autouse=True)
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test marked `everywhere` once for each backend, as the default; other tests use the usual default."""
    name = getattr(request, "param", "process")
    if hasattr(request, "param") and name != "process":
        chosen = DECLARED[name].backend()
        for call in TAKES_A_BACKEND:
            assert call.__kwdefaults__ is not None
            monkeypatch.setitem(call.__kwdefaults__, "backend", chosen)
    return str(name)


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Run a test with each way to start an interpreter."""
    found: Backend = BACKENDS[request.param]
    return found


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A running sandbox with the default policy."""
    with Sandbox() as sandbox:
        yield sandbox
