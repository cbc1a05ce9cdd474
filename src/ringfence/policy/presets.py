"""The presets. They differ in limits and isolation only, never in network or mounts."""

from __future__ import annotations

from ringfence.policy.checks import choice
from ringfence.policy.model import Limits, Policy

NAMES = ("offline", "dev", "hostile")


def preset(name: object) -> Policy:
    """The policy of that name. PolicyError with the near one when there is none."""
    match choice(*NAMES)(name, "preset"):
        case "dev":
            return Policy(limits=_DEV)
        case "hostile":
            return Policy(isolation="own-kernel", strict=True)
        case _:
            return Policy()


# Room for a build: an hour of wall clock on four CPUs, all of it usable.
_DEV = Limits(
    timeout_s=3600,
    cpu_time_s=4 * 3600,
    cpus=4,
    memory="4G",
    processes=2048,
    open_files=65_536,
    disk="2G",
    disk_files=500_000,
    output="16M",
    lifetime_s=8 * 3600,
)
