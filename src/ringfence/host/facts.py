"""Reads what this host can do, cheaply and without side effects. What must be tried to be known is doctor's."""

from __future__ import annotations

import os

from ringfence.errors import need_linux
from ringfence.plan.model import HostFacts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.host.cgroups.base import Tree


def host_facts(tree: Tree | None) -> HostFacts:
    """Return the facts of this Linux host. `tree`: the cgroups that limits would be set in; None: there are none.

    Raises UnsupportedError on another system.
    """
    need_linux()
    from ringfence.shared import syscalls

    uname = os.uname()
    facts = HostFacts(os.geteuid() == 0, uname.machine, uname.release, syscalls.landlock_abi())
    if tree is None:
        return facts
    by = tree.mechanisms
    return HostFacts(
        facts.as_root,
        facts.machine,
        facts.kernel,
        facts.landlock_abi,
        memory_by=by.memory,
        cpu_by=by.cpu,
        cpu_time_by=by.cpu_time,
        pids_by=by.processes,
        has_freezer=tree.has_freezer,
    )


def found_tree() -> Tree | None:
    """Return the cgroups that this process could use now. Changes nothing."""
    from ringfence.host.cgroups import find

    return find.find() or find.delegable()
