"""Hosts where this user has no cgroup: limits are held by weaker means, commands say so, and some things cannot be."""

from __future__ import annotations

import re

import pytest

from ringfence import Sandbox

HAS_CGROUP = "memory" not in Sandbox(backend="process").plan().enforcement.weaker
needs_cgroup = pytest.mark.skipif(not HAS_CGROUP, reason="this user has no cgroup")
# What the process backend then does not have, of ringfence.testing's capabilities.
LACKING: dict[str, str] = (
    {}
    if HAS_CGROUP
    else dict.fromkeys(("cpu-share", "cpu-time", "memory-limit", "pause", "usage"), "this user has no cgroup")
)
_SAID = re.compile(r"ringfence: (weaker than the policy's default here|what would make it full): .*?\n")


def without(said: str) -> str:
    """What a command said, less what it says of every run on such a host."""
    return _SAID.sub("", said)
