"""One fixture for every backend there is: the same tests hold for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from backends_declared import DECLARED, missing
from ringfence import Sandbox
from ringfence.backends import Process
from ringfence.testing.conformance import CHECKS

if TYPE_CHECKING:
    from ringfence.backends import Backend

BACKENDS: dict[str, Backend] = {"process": Process(), "fresh": Process(fresh=True)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check on each backend that can run here. One that was asked for by --backend must be able to."""
    if "backend_name" not in metafunc.fixturenames:
        return
    asked: list[str] = metafunc.config.getoption("--backend")
    for name in asked:
        reason = "it is not declared" if name not in DECLARED else missing(name)
        if reason is not None:
            raise pytest.UsageError(f"--backend {name}: {reason}")
    names = asked or [name for name in DECLARED if missing(name) is None]
    pairs = [(name, one) for name in names for one in CHECKS if one.name.startswith(DECLARED[name].only)]
    metafunc.parametrize(("backend_name", "one"), pairs, ids=[f"{name}-{one}" for name, one in pairs])


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    """For what depends on how an interpreter is started."""
    found: Backend = BACKENDS[request.param]
    return found


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A running sandbox with the default policy."""
    with Sandbox() as sandbox:
        yield sandbox
