"""Plans and starts for the backends in which an engine isolates: the process backend's plan, enforced by the engine."""

from __future__ import annotations

from ringfence.backends.engine.rootfs import skeleton
from ringfence.backends.linux import interpreter, linux_plan
from ringfence.errors import UnsupportedError
from ringfence.host import state
from ringfence.host.cgroups.base import GroupLimits
from ringfence.results import Control
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.engine.box import EngineBox
    from ringfence.plan.model import Fence, FoundImage, HostFacts, LinuxPlan
    from ringfence.policy.model import Policy
    from ringfence.results import Enforcement


_KERNEL_BYTES = 160 << 20  # for the sentry and its gofer, beside the guest
# gVisor's own threads, and its stand-ins on the host: a process for each address space inside, with a thread for each
# thread of the sentry that ran it. One too few makes the whole sandbox panic. The guest's own are counted inside.
_KERNEL_PROCESSES = 512
_STAND_INS = 16
_KERNEL_RLIMITS = ("CORE", "MEMLOCK", "NOFILE", "CPU", "DATA")  # that gVisor accepts; its other limits are 0 or its own


def engine_plan(name: str, policy: Policy, image: FoundImage, facts: HostFacts) -> LinuxPlan:
    """Return the process backend's plan, which the backend `name` then adapts to its engine.

    Raises UnsupportedError for a plan that no engine can keep.
    """
    if image.on_disk:
        raise UnsupportedError(f"{name} has no workspace on disk", code="workspace", fix='workspace="memory"')
    plan = linux_plan(policy, image, facts, fresh=True)
    skeleton(plan, name)
    return plan


def with_enforcement(name: str, plan: LinuxPlan, enforcement: Enforcement) -> LinuxPlan:
    """Return the plan with this enforcement.

    Raises UnsupportedError where the policy is strict and a weaker mechanism would enforce a part of it.
    """
    if plan.policy.strict and enforcement.weaker:
        parts = "; ".join(f"{each}: {getattr(enforcement, each).note}" for each in enforcement.weaker)
        raise UnsupportedError(
            f"the policy is strict, and under {name} a weaker mechanism would enforce {parts}",
            code="strict",
            fix="strict = false",
        )
    return replace(plan, enforcement=enforcement)


def network_control(mechanism: str, plan: LinuxPlan) -> Control:
    """Return the control of the network: nothing but loopback, and the gateway where the policy has a network."""
    if plan.outlets is None:
        return Control(mechanism, "full")
    return Control(f"{mechanism} + gateway by name", "full", reports=True)


def guarded(plan: LinuxPlan, start: Callable[[], EngineBox], *, starts_python_anew: bool) -> EngineBox:
    """Start a box and guard the protected paths of its mounts.

    Placeholders take the place of missing protected paths, from before the start until after the end.
    `starts_python_anew`: Python code runs in a new interpreter. Otherwise it runs in a fork of guestd, which also works
    where the policy does not list that program.
    """
    state.sweep_once()
    if plan.policy.mounts:
        from ringfence.host.mount_guard import Guard
        from ringfence.host.programs import note_writable

        note_writable(plan.writable)
        guard = Guard(plan, outlives=True)
        try:
            box = start()
        except BaseException:
            guard.end()
            raise
        guard.begin(box)
    else:
        box = start()
    box.python = {**_python_of(plan), "fresh": starts_python_anew}
    return box


def _python_of(plan: LinuxPlan) -> dict[str, object]:
    """Return how Python code is run inside: by the image's own interpreter, or by the caller's where that is shown."""
    if plan.foreign:
        return {"executable": plan.python, "sys_path": None}
    caller = interpreter()
    return {"executable": caller.command, "sys_path": list(caller.sys_path)}


def shared_kernel_fence(plan: LinuxPlan, *, memory: int | None) -> Fence:
    """Return the fence of guests inside: the engine has already dropped capabilities and made the namespaces.

    `memory`: the limit of each process, where no cgroup limits the whole.
    """
    rlimits = {name: value for name, value in plan.fence.rlimits.items() if name != "DATA"}  # a substitute for a cgroup
    return _inside(plan, rlimits if memory is None else {**rlimits, "DATA": memory})


def own_kernel_fence(plan: LinuxPlan) -> Fence:
    """Return the fence of guests inside a kernel of their own, which knows fewer limits."""
    return _inside(plan, {name: value for name, value in plan.fence.rlimits.items() if name in _KERNEL_RLIMITS})


def _inside(plan: LinuxPlan, rlimits: dict[str, int]) -> Fence:
    return replace(plan.fence, capabilities=False, namespace_limits=False, cgroup_namespace=False, rlimits=rlimits)


def own_kernel_room(plan: LinuxPlan) -> GroupLimits:
    """Return the limits on the host of a guest and its own kernel together."""
    return GroupLimits(plan.memory_bytes + _KERNEL_BYTES, plan.processes * _STAND_INS + _KERNEL_PROCESSES, plan.cpus)
