"""Open what a library process opens once and keeps, before anything is counted."""

from __future__ import annotations

import tempfile
import warnings

import pytest

from ringfence import Mount, Policy, Sandbox
from ringfence.host import state


@pytest.fixture(scope="session", autouse=True)
def settled() -> None:
    """Start the zygote, and make the folders of the placeholders' ledgers, which the first writable mount makes, and of
    what was found out about gVisor."""
    state.directory("gvisor")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="rf-tests-", dir="/var/tmp") as folder:
        warnings.simplefilter("ignore")
        with Sandbox(policy=Policy(mounts=[Mount(folder, mode="rw")])):
            pass
