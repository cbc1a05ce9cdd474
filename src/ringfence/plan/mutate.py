"""Takes one control out of a plan, so that an attack can be seen to succeed without it. For attacks and tests alone.

No policy key, argument or variable leads here: `ringfence attack` and the tests call it with a plan in their hands.
"""

from __future__ import annotations

from ringfence.plan import seccomp
from ringfence.plan.process import NEWIPC, NEWNET, NEWPID, NEWUTS, base64_of
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import ProcessPlan

_NAMESPACES = {"net-namespace": NEWNET, "pid-namespace": NEWPID, "ipc-namespace": NEWIPC, "uts-namespace": NEWUTS}
_FENCE = {
    "no-new-privileges": "no_new_privileges",
    "capabilities": "capabilities",
    "landlock-files": "landlock_files",
    "landlock-scopes": "landlock_scopes",
    "not-dumpable": "not_dumpable",
    "namespace-limits": "namespace_limits",
}
_RLIMITS = {"rlimit-core": "CORE", "rlimit-nofile": "NOFILE", "rlimit-sigpending": "SIGPENDING", "rlimit-cpu": "CPU"}

_MANY = 10_000  # processes: more than any attack starts, fewer than the host's own limit

CONTROLS = (
    *_NAMESPACES,
    *_FENCE,
    *_RLIMITS,
    "seccomp",
    "last-layer",
    *(f"seccomp:{name}" for name in seccomp.CONTROLS),
    "proc-masks",
    "process-limit",
    "cgroup",
    "tmpfs-size",
    "user-namespace",
)


def without(plan: ProcessPlan, *controls: str) -> ProcessPlan:
    """`plan` with these controls left out. ValueError for a name not in CONTROLS. Never shared with other sandboxes."""
    for control in controls:
        plan = _without_one(plan, control)
    return replace(plan, shared=False)


def _without_one(plan: ProcessPlan, control: str) -> ProcessPlan:
    box = dict(plan.box)
    fence = dict(box["fence"])  # type: ignore[call-overload]
    if control in _NAMESPACES:
        box["namespaces"] = int(box["namespaces"]) & ~_NAMESPACES[control]  # type: ignore[call-overload]
    elif control in _FENCE:
        fence[_FENCE[control]] = False
    elif control in _RLIMITS:
        fence["rlimits"] = {k: v for k, v in fence["rlimits"].items() if k != _RLIMITS[control]}
    elif control == "seccomp":
        fence["seccomp"] = fence["last_layer"] = None
    elif control == "last-layer":
        fence["last_layer"] = None
    elif control.startswith("seccomp:") and control[8:] in seccomp.CONTROLS:
        left_out = frozenset((control[8:],))
        fence["seccomp"] = base64_of(seccomp.guest_filter(without=left_out))
        fence["last_layer"] = base64_of(seccomp.last_layer(without=left_out))
    elif control == "proc-masks":
        box["proc_masks"] = False
    elif control == "process-limit":
        fence["processes"] = _MANY
        plan = replace(plan, processes=_MANY)
    elif control == "cgroup":
        plan = replace(plan, cgroup=False)
    elif control == "tmpfs-size":
        box["sizes"] = dict.fromkeys(("disk", "tmp", "shm"), "size=1g,nr_inodes=1000000")
    elif control == "user-namespace":
        box["user_namespace"] = fence["cgroup_namespace"] = False  # the second needs the capabilities of the first
    else:
        raise ValueError(f"no control is named {control!r}; the names are {', '.join(CONTROLS)}")
    box["fence"] = fence
    return replace(plan, box=box)
