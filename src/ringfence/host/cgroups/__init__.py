"""Control groups of sandboxes: the mechanism that this host offers, behind one interface over v1 and v2.

A group holds only what belongs to one sandbox's guest. The caller's own process is never moved, and nothing is made,
changed or killed outside directories named `ringfence/<owner>` (or a systemd scope that we started).
"""

from __future__ import annotations

import os

from ringfence.host.cgroups.base import MOUNT, Group, GroupLimits, GroupUsage, Mechanisms, Tree
from ringfence.shared.paths import is_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.host.cgroups.base import DeadTest

__all__ = [
    "Group",
    "GroupLimits",
    "GroupUsage",
    "Mechanisms",
    "Tree",
    "delegable",
    "find",
    "find_or_delegable",
    "remove_dead_owners",
    "remove_noted",
]


def find() -> Tree | None:
    """Return the cgroups that this process can use right now, or None. Changes nothing; costs well below 1 ms."""
    if os.path.exists(f"{MOUNT}/cgroup.controllers"):
        from ringfence.host.cgroups import v2

        return v2.find()
    from ringfence.host.cgroups import v1

    return v1.find()


def delegable() -> Tree | None:
    """Return a tree whose zygote will be in a systemd user scope, for an ordinary user on v2 where `find` is None.

    Returns None when there is no systemd user manager to ask. Starts nothing.
    """
    if os.geteuid() == 0 or not os.path.exists(f"{MOUNT}/cgroup.controllers"):
        return None
    from ringfence.host.cgroups import v2

    return v2.delegable()


def find_or_delegable() -> Tree | None:
    """Return the cgroups that this process could use now, or None when there are none. Changes nothing."""
    return find() or delegable()


def remove_dead_owners(is_dead: DeadTest) -> list[str]:
    """Kill and remove the groups of every owner that `is_dead`. Return the directories that were removed."""
    if os.path.exists(f"{MOUNT}/cgroup.controllers"):
        from ringfence.host.cgroups import v2

        return v2.remove_dead_owners(is_dead)
    from ringfence.host.cgroups import v1

    return v1.remove_dead_owners(is_dead)


def remove_noted(path: str, owner: str) -> bool:
    """Kill and remove a v2 group that a dead owner's record names. Return False when the group is not that owner's."""
    name = os.path.basename(path)
    theirs = path.endswith(f"/ringfence/{owner}") or (
        name.startswith(f"ringfence-{owner}-") and name.endswith(".scope")
    )
    if not theirs or not is_below(path, MOUNT) or ".." in path.split("/"):
        return False
    from ringfence.host.cgroups import v2

    return os.path.isdir(path) and v2.remove_tree(path, timeout_s=2.0)
