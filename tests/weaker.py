"""Hosts that lack something: a cgroup, which commands report as weaker limits; or node."""

from __future__ import annotations

import re
import shutil

import pytest

from ringfence_attacks import harness

HAS_CGROUP = harness.has_cgroup()
needs_cgroup = pytest.mark.skipif(not HAS_CGROUP, reason="this user has no cgroup")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: make system")
LACKING: dict[str, str] = {}  # what the process backend does not have here, of ringfence.testing's capabilities
if not HAS_CGROUP:
    LACKING |= dict.fromkeys(("cpu-share", "cpu-time", "memory-limit", "pause", "usage"), "this user has no cgroup")
if shutil.which("node") is None:
    LACKING["node"] = "node is not installed: make system"
SILENT = "ignore:enforced by a weaker mechanism:UserWarning"  # for -W of a program that uses the library
_SAID = re.compile(r"ringfence: (weaker than the policy's default here|what would make it full): .*?\n")


def without(said: str) -> str:
    """Return what a command printed, without the warnings that every run prints on a host without a cgroup."""
    return _SAID.sub("", said)
