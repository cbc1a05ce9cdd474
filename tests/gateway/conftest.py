"""Fixtures: an event loop and an authority for the tests of the gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends_declared import DECLARED
from gateway.servers import Loop, Roots
from gateway.world import World, world
from ringfence import Sandbox


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    return Roots(tmp_path_factory.mktemp("roots"))


@pytest.fixture(scope="session", autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    """Engines of --backend NAME are started, and used once, before a test counts what is there."""
    for name in request.config.getoption("--backend"):
        with Sandbox(backend=DECLARED[name].backend()):
            pass


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def internet(loop: Loop, roots: Roots, request: pytest.FixtureRequest) -> Iterator[World]:
    """Return a small internet. With --backend NAME its sandboxes are of that backend."""
    with world(loop, roots) as made:
        for name in request.config.getoption("--backend"):
            made.backend = DECLARED[name].backend()
        yield made
