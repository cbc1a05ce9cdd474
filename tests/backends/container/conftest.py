"""Fixtures: the engines for these tests, Docker and Podman, where they can be started."""

from __future__ import annotations

import pytest

from backends_declared import DECLARED, missing
from ringfence.backends import Container


@pytest.fixture(scope="session", params=["container", "podman"])
def contained(request: pytest.FixtureRequest) -> Container:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    backend = DECLARED[request.param].backend()
    assert isinstance(backend, Container)
    return backend
