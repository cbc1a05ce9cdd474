"""Takes one control out of a plan, so that an attack can be seen to succeed without it. For attacks and tests alone.

No policy key, argument or variable leads here: `ringfence attack` and the tests call it with a plan in their hands.
"""

from __future__ import annotations

from ringfence.plan import seccomp
from ringfence.plan.process import NEWIPC, NEWNET, NEWPID, NEWUTS
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
    *(f"seccomp:{name}" for name in seccomp.CONTROLS),
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
    fence = box["fence"] = dict(box["fence"])  # type: ignore[call-overload]
    if control in _NAMESPACES:
        box["namespaces"] = int(box["namespaces"]) & ~_NAMESPACES[control]  # type: ignore[call-overload]
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


def _open_filter(plan: ProcessPlan, left_out: frozenset[str]) -> ProcessPlan:
    """Both layers without these controls, together: each call compiles anew. ValueError for an unknown one."""
    fence = dict(plan.box["fence"])  # type: ignore[call-overload]
    if fence["seccomp"] is not None:
        fence["seccomp"] = base64_of(seccomp.guest_filter(without=left_out))
    if fence["last_layer"] is not None:
        fence["last_layer"] = base64_of(seccomp.last_layer(without=left_out))
    return replace(plan, box={**plan.box, "fence": fence})


def _without_group(plan: ProcessPlan, control: str) -> ProcessPlan:
    if control == "cgroup":
        return replace(plan, cgroup=False)
    fence = {**plan.box["fence"], "processes": _MANY}  # type: ignore[dict-item]
    return replace(plan, processes=_MANY, box={**plan.box, "fence": fence})


def _without_view(plan: ProcessPlan, control: str) -> ProcessPlan:
    if control == "view":
        return replace(plan, template=(*plan.template, ["bind", "/", "mnt", {"rw": False, "idmap": False}]))
    if control == "watch":  # what has a placeholder is still made: the operations name it
        return replace(plan, protected=tuple(path for path in plan.protected if path.missing))
    change = _writable if control == "read-only" else _left_out(control)
    return replace(plan, template=change(plan.template), box={**plan.box, "ops": list(change(plan.box["ops"]))})


def _left_out(name: str) -> Callable[[object], tuple[Op, ...]]:
    def change(ops: object) -> tuple[Op, ...]:
        return tuple(op for op in ops if op[0] != name)  # type: ignore[attr-defined]

    return change


def _writable(ops: object) -> tuple[Op, ...]:
    """Every bind of a host path without its read-only flag."""
    return tuple([*op[:3], {**op[3], "rw": True}] if op[0] == "bind" else op for op in ops)  # type: ignore[attr-defined]


def base64_of(program: bytes) -> str:
    from binascii import b2a_base64

    return b2a_base64(program, newline=False).decode()
