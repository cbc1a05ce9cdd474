"""A plan's statement about CPU limits follows the cgroup files at hand: the share, and the time of the whole tree."""

from __future__ import annotations

import pytest

from ringfence.plan.build import _cpu
from ringfence.plan.model import HostFacts
from ringfence.results import Control

SHARE, TIME = "cgroup v1 cpu.cfs_quota_us", "cgroup v1 cpuacct.usage"
WHOLE = "whole CPUs by affinity, which a guest can widen to all CPUs of the host"
FOR_EACH = "CPU time is limited for each process, not for the tree; in a session, for its interpreter alone"


@pytest.mark.parametrize(
    ("share", "time", "expected"),
    [
        (SHARE, TIME, Control(f"{SHARE} + CPU affinity", "full")),
        (SHARE, None, Control(f"{SHARE} + CPU affinity + RLIMIT_CPU", "weaker", FOR_EACH)),
        (None, TIME, Control(f"CPU affinity + {TIME}", "weaker", WHOLE)),
        (None, None, Control("CPU affinity + RLIMIT_CPU", "weaker", f"{WHOLE}; {FOR_EACH}")),
    ],
)
def test_cpu_is_full_where_share_and_time_are_both_held(share: str | None, time: str | None, expected: Control) -> None:
    """`strict` passes what is full: without cpuacct a guest of many processes had as much CPU time as it wanted."""
    assert (
        _cpu(HostFacts(as_root=False, machine="x86_64", kernel="6.1", landlock_abi=6, cpu_by=share, cpu_time_by=time))
        == expected
    )
