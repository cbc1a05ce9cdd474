"""Takes one control out of a plan, so that an attack can be seen to succeed without it. For attacks and tests alone.

No policy key, argument or variable leads here: `ringfence attack` and the tests call it with a plan in their hands.
"""

from __future__ import annotations

from ringfence.plan.build import NEWIPC, NEWNET, NEWPID, NEWUTS
from ringfence.plan.seccomp import compiler
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ringfence.plan.model import Op, ProcessPlan

_NAMESPACES = {"net-namespace": NEWNET, "pid-namespace": NEWPID, "ipc-namespace": NEWIPC, "uts-namespace": NEWUTS}
_FENCE = {
    "no-new-privileges": "no_new_privileges",
    "capabilities": "capabilities",
    "landlock-files": "landlock_files",
    "landlock-scopes": "landlock_scopes",
    "not-dumpable": "not_dumpable",
    "namespace-limits": "namespace_limits",
    "cgroup-namespace": "cgroup_namespace",
}
_SHOWN = ("view", "read-only", "protect", "pin", "watch")
_RLIMITS = {"rlimit-core": "CORE", "rlimit-nofile": "NOFILE", "rlimit-sigpending": "SIGPENDING", "rlimit-cpu": "CPU"}

_MANY = 10_000  # processes: more than any attack starts, fewer than the host's own limit

CONTROLS = (
    *_NAMESPACES,
    *_FENCE,
    *_RLIMITS,
    "seccomp",
    "last-layer",
    *(f"seccomp:{name}" for name in compiler.CONTROLS),
    "proc-masks",
    "process-limit",
    "cgroup",
    "tmpfs-size",
    "user-namespace",
    *_SHOWN,
)


def without(plan: ProcessPlan, *controls: str) -> ProcessPlan:
    """`plan` with these controls left out. ValueError for a name not in CONTROLS. Never shared with other sandboxes."""
    filters = frozenset(control[8:] for control in controls if control.startswith("seccomp:"))
    for control in controls:
        if not control.startswith("seccomp:"):
            plan = _without_one(plan, control)
    return replace(_open_filter(plan, filters) if filters else plan, shared=False)


def _without_one(plan: ProcessPlan, control: str) -> ProcessPlan:
    if control in _SHOWN:
        return _without_view(plan, control)
    if control in ("process-limit", "cgroup"):
        return _without_group(plan, control)
    box = dict(plan.box)
    fence = box["fence"] = _fence(plan)
    if control in _NAMESPACES:
        box["namespaces"] = _number(plan, "namespaces") & ~_NAMESPACES[control]
    elif control in _FENCE:
        fence[_FENCE[control]] = False
        if control == "no-new-privileges":
            fence["last_layer"] = None  # whoever may gain privileges may not install a filter
    elif control in _RLIMITS:
        fence["rlimits"] = {k: v for k, v in fence["rlimits"].items() if k != _RLIMITS[control]}
    elif control == "last-layer":
        fence["last_layer"] = None
    elif control == "seccomp":
        fence["seccomp"] = fence["last_layer"] = None
    elif control == "proc-masks":
        box["proc_masks"] = False
    elif control == "tmpfs-size":
        box["sizes"] = dict.fromkeys(("disk", "tmp", "shm"), "size=1g,nr_inodes=1000000")
    elif control == "user-namespace":
        box["user_namespace"] = fence["cgroup_namespace"] = False  # the second needs the capabilities of the first
    else:
        raise ValueError(f"no control is named {control!r}; the names are {', '.join(CONTROLS)}")
    return replace(plan, box=box)


def _fence(plan: ProcessPlan) -> dict[str, Any]:
    """A copy. The plan is plain data for the other side, hence the loose type."""
    return dict(plan.fence)


def _number(plan: ProcessPlan, name: str) -> int:
    value = plan.box[name]
    assert isinstance(value, int)
    return value


def _open_filter(plan: ProcessPlan, left_out: frozenset[str]) -> ProcessPlan:
    """Both layers without these controls, together: each call compiles anew. ValueError for an unknown one."""
    fence = _fence(plan)
    if fence["seccomp"] is not None:
        fence["seccomp"] = compiler.guest_filter(without=left_out).hex()
    if fence["last_layer"] is not None:
        fence["last_layer"] = compiler.last_layer(without=left_out).hex()
    return replace(plan, box={**plan.box, "fence": fence})


def _without_group(plan: ProcessPlan, control: str) -> ProcessPlan:
    if control == "cgroup":
        return replace(plan, cgroup=False)
    fence = {**_fence(plan), "processes": _MANY}
    return replace(plan, processes=_MANY, box={**plan.box, "fence": fence})


def _without_view(plan: ProcessPlan, control: str) -> ProcessPlan:
    if control == "view":
        return replace(plan, template=(*plan.template, ["bind", "/", "mnt", {"rw": False, "idmap": False}]))
    if control == "watch":  # what has a placeholder is still made: the operations name it
        return replace(plan, protected=tuple(path for path in plan.protected if path.missing))
    change = _writable if control == "read-only" else _left_out(control)
    return replace(plan, template=change(plan.template), box={**plan.box, "ops": list(change(plan.box_ops))})


def _left_out(name: str) -> Callable[[Iterable[Op]], tuple[Op, ...]]:
    def change(ops: Iterable[Op]) -> tuple[Op, ...]:
        return tuple(op for op in ops if op[0] != name)

    return change


def _writable(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Every bind of a host path without its read-only flag."""
    return tuple([*op[:3], {**op[3], "rw": True}] if op[0] == "bind" and isinstance(op[3], dict) else op for op in ops)
