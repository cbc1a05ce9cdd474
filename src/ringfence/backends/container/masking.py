"""What of /proc and /sys a container does not show: all but what the process backend shows too.

An engine's own list names what its authors thought of; a new kernel's new file is not on it (B15).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.engine import Engine


def apply(config: dict[str, Any], engine: Engine) -> None:
    """Adds to the host configuration. Each engine has its own words for it."""
    if engine.name == "docker":
        config["MaskedPaths"] = paths()
    else:
        config["SecurityOpt"] = [*config["SecurityOpt"], f"mask={':'.join(paths())}"]
    config["CgroupnsMode"] = "private"  # where it is not, /proc/self/cgroup tells its id and place (B13)


def paths() -> list[str]:
    from ringfence.guest.box import PROC_SHOWN

    names = sorted(name for name in os.listdir("/proc") if not name.isdigit() and name not in PROC_SHOWN)
    links = ("mounts", "net")  # to files of the process itself
    return [*(f"/proc/{name}" for name in names if name not in links), "/proc/sys/kernel/random/boot_id", "/sys"]
