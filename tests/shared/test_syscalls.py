"""Limits by number, without the module `resource`: the numbers and what they say are that module's."""

from __future__ import annotations

import resource

import pytest

from ringfence.shared import syscalls


@pytest.mark.parametrize("name", syscalls.RLIMITS)
def test_a_limit_is_the_one_of_its_name(name: str) -> None:
    if name == "LOCKS":
        assert syscalls.RLIMITS[name] == 10  # resource has no name for it
        return
    number = getattr(resource, f"RLIMIT_{name}", syscalls.RLIMITS[name])
    assert syscalls.RLIMITS[name] == number
    unlimited = (1 << 64) - 1
    assert syscalls.limits(name) == tuple(limit & unlimited for limit in resource.getrlimit(number))


def test_a_limit_that_is_set_is_set() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        syscalls.set_limits("CORE", 0, max(0, hard) if hard >= 0 else (1 << 64) - 1)
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
