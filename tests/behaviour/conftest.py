"""One fixture for every backend there is: the same tests hold for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ringfence import Sandbox
from ringfence.backends import Process

if TYPE_CHECKING:
    from ringfence.backends import Backend

BACKENDS: dict[str, Backend] = {"process": Process(), "fresh": Process(fresh=True)}


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
