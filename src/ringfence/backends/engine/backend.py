"""What backends share whose wall is an engine's: the process backend's plan, held otherwise, and guarded mounts."""

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


_KERNEL_BYTES = 160 << 20  # what the sentry and its gofer take themselves, beside the guest
# gVisor's own threads, and its stand-ins on the host: a process for each address space inside and a thread of it for
# each thread of the sentry that ran it. One too few is a panic of the whole sandbox; the guest's are counted inside.
_KERNEL_PROCESSES = 512
_STAND_INS = 16
_KERNEL_RLIMITS = ("CORE", "MEMLOCK", "NOFILE", "CPU", "DATA")  # that gVisor takes; its others are 0 or its own


def engine_plan(name: str, policy: Policy, image: FoundImage, facts: HostFacts) -> LinuxPlan:
    """Return the plan that this engine's backend changes. Raises UnsupportedError for what no engine can show."""
    if image.on_disk:
        raise UnsupportedError(f"{name} has no workspace on disk", code="workspace", fix='workspace="memory"')
    plan = linux_plan(policy, image, facts, fresh=True)
    skeleton(plan, name)
    return plan


def held(name: str, plan: LinuxPlan, enforcement: Enforcement) -> LinuxPlan:
    """Return the plan with what holds its promises. Raises UnsupportedError where a strict policy is held less well."""
    if plan.policy.strict and enforcement.weaker:
        parts = "; ".join(f"{each}: {getattr(enforcement, each).note}" for each in enforcement.weaker)
        raise UnsupportedError(
            f"the policy is strict, and under {name} a weaker mechanism would hold {parts}",
            code="strict",
            fix="strict = false",
        )
    return replace(plan, enforcement=enforcement)


def network_control(mechanism: str, plan: LinuxPlan) -> Control:
    """Return what holds the network: nothing but loopback, and the gateway where the policy has a network."""
    if plan.outlets is None:
        return Control(mechanism, "full")
    return Control(f"{mechanism} + gateway by name", "full", reports=True)


def guarded(plan: LinuxPlan, start: Callable[[], EngineBox], *, starts_python_anew: bool) -> EngineBox:
    """Start a box, and hold the protected paths of its mounts.

    Placeholders stand for protected paths that are not there, from before the start until after the end.
    `starts_python_anew`: else it is a fork of guestd, which runs where the policy lists no such program too.
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
    """Return how Python code is run inside: by the image's own interpreter."""
    if plan.foreign:
        return {"executable": plan.python, "sys_path": None}
    caller = interpreter()
    return {"executable": caller.command, "sys_path": list(caller.sys_path)}


def shared_kernel_fence(plan: LinuxPlan, *, memory: int | None) -> Fence:
    """Return what is left for guests to give up inside: the engine has dropped capabilities and made the namespaces.

    `memory`: for each process, where no cgroup holds it.
    """
    rlimits = {name: value for name, value in plan.fence.rlimits.items() if name != "DATA"}  # stands in for a cgroup
    return _inside(plan, rlimits if memory is None else {**rlimits, "DATA": memory})


def own_kernel_fence(plan: LinuxPlan) -> Fence:
    """Return what is left for guests to give up inside a kernel of their own, which knows fewer limits."""
    return _inside(plan, {name: value for name, value in plan.fence.rlimits.items() if name in _KERNEL_RLIMITS})


def _inside(plan: LinuxPlan, rlimits: dict[str, int]) -> Fence:
    return replace(plan.fence, capabilities=False, namespace_limits=False, cgroup_namespace=False, rlimits=rlimits)


def own_kernel_room(plan: LinuxPlan) -> GroupLimits:
    """Return what the guest and its kernel may use on the host, together."""
    return GroupLimits(plan.memory_bytes + _KERNEL_BYTES, plan.processes * _STAND_INS + _KERNEL_PROCESSES, plan.cpus)
