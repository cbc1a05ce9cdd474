"""The process backend: namespaces, seccomp and Landlock around processes forked from a warm interpreter."""

from __future__ import annotations

import time

from ringfence.backends.linux import check_pause, facts_with, forget_image, interpreter, linux_plan, plans_of_image
from ringfence.errors import Missing, RingfenceError, SandboxError, UnsupportedError
from ringfence.host import zygote_start
from ringfence.plan.controls import ALL_ON
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.contract import BackendReport
    from ringfence.backends.process.box import ProcessBox
    from ringfence.backends.process.pool import Pool
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import FoundImage, HostFacts, LinuxPlan
    from ringfence.policy.model import Policy
    from ringfence.values import Isolation

_ATTEMPTS = 3
_AGAIN_S = 0.02


@final
class Process(Struct):
    """Linux namespaces, seccomp and Landlock around a process. Needs nothing but Linux and Python."""

    fresh: bool = False  # a new address space for each run: slower, no shared layout

    @property
    def name(self) -> str:
        return "process"

    @property
    def isolation(self) -> Isolation:
        return "shared-kernel"

    def facts(self) -> HostFacts:
        """Return what this host can do, with the cgroups of this process's sandboxes once there are any."""
        from ringfence.backends.process.pool import tree_of_sandboxes

        return facts_with(tree_of_sandboxes())

    def plan(self, policy: Policy, image: FoundImage, facts: HostFacts) -> LinuxPlan:
        """Return what a launch would do. Raises PolicyError or UnsupportedError for what cannot be kept here."""
        plan = linux_plan(policy, image, facts, fresh=self.fresh)
        if policy.strict and plan.enforcement.weaker:
            raise _too_weak(plan)
        check_pause(policy, facts)
        return plan

    def launch(self, plan: LinuxPlan, *, controls: Controls = ALL_ON) -> ProcessBox:
        """Start a sandbox that has run nothing.

        Raises UnsupportedError, or a SandboxError for a failure that may pass.
        """
        _warn_if_weaker(plan)
        return start(self, plan, controls)

    def doctor(self) -> BackendReport:
        """Try every step of a start, each in a process of its own. Takes about half a second."""
        from ringfence.doctor.process import examine_process

        return examine_process()


def start(backend: Process, plan: LinuxPlan, controls: Controls = ALL_ON) -> ProcessBox:
    """Start a sandbox as `launch` does, without a warning of weaker limits."""
    made = controls.plan(plan)
    if not plan.policy.mounts:
        return _launch_once(made)
    from ringfence.host.programs import note_writable

    note_writable(made.writable)
    for attempt in range(_ATTEMPTS):  # what the host's folders hold may change between a plan and its start
        try:
            return _launch_once(made)
        except SandboxError as error:
            if attempt == _ATTEMPTS - 1 or error.code != "start" or made.disk == "folder":
                raise
        time.sleep(_AGAIN_S * (attempt + 1))
        made = controls.plan(backend.plan(plan.policy, plan.image, backend.facts()))
    raise AssertionError("unreachable")


def _launch_once(plan: LinuxPlan) -> ProcessBox:
    if plan.disk != "folder":
        return _launch_guarded(plan)
    from ringfence.host import loop_disk
    from ringfence.plan.build import with_folder

    path = loop_disk.make_folder()
    try:
        box = _launch_guarded(with_folder(plan, path))
    except BaseException:
        loop_disk.remove_folder(path)
        raise
    box.on_destroyed.append(lambda: loop_disk.remove_folder(path))
    return box


def _launch_guarded(plan: LinuxPlan) -> ProcessBox:
    """Start a sandbox, with a guard on the protected paths of its mounts from before the start until after the end.

    Raises as `Pool.take` does, SandboxLostError for a mounted folder that is no folder any more, and OSError when a
    placeholder cannot be made; nothing is left then.
    """
    if not plan.policy.mounts:
        return _pool(plan).take(plan)
    from ringfence.host.mount_guard import Guard

    guard = Guard(plan)
    try:
        box = _pool(plan).take(plan, stake=guard.stake)
    except BaseException:
        guard.end()
        raise
    guard.begin(box)
    return box


def _pool(plan: LinuxPlan) -> Pool:
    from ringfence.backends.process.pool import pool

    return pool(interpreter(), tuple(plan.image.image.preload))


def begin_ahead(plan: LinuxPlan) -> None:
    """Begin the only sandbox of a command ahead of time; `launch` of the same plan then returns it.

    A failure here is ignored: the launch tries again and reports it.
    """
    if not plan.shared:
        return
    try:
        _pool(plan).ask(plan)
    except (RingfenceError, OSError):
        return


def release_image(digest: str) -> bool:
    """Drop everything kept ready for sandboxes of a stored image. Returns False while such a sandbox exists."""
    from ringfence.backends.process import pool
    from ringfence.images.store import release

    if not all(pool.release(plan.template) for plan in plans_of_image(digest)):
        return False
    forget_image(digest)
    release(digest)
    return True


def _too_weak(plan: LinuxPlan) -> UnsupportedError:
    parts = []
    for name in plan.enforcement.weaker:
        control = getattr(plan.enforcement, name)
        parts.append(f"{name}: only {control.mechanism} ({control.note})")
    missing = [Missing("process", "a writable cgroup", "ringfence doctor --fix")]
    if plan.enforcement.weaker == ("disk",):
        missing = [Missing("process", "a quota on the workspace, which on disk takes root", 'workspace="memory"')]
    return UnsupportedError(
        f"the policy is strict, and a weaker mechanism would enforce {'; '.join(parts)}",
        code="strict",
        missing=missing,
    )


_warned: set[tuple[str, ...]] = set()


def _warn_if_weaker(plan: LinuxPlan) -> None:
    """Warn the caller of weaker limits, once for each set of limits. A command reports them after the run."""
    weaker = plan.enforcement.weaker
    if not weaker or weaker in _warned or zygote_start.is_command():
        return
    _warned.add(weaker)
    from ringfence.errors import WeakerLimitWarning, warn

    names = ", ".join(f"{name} ({getattr(plan.enforcement, name).note})" for name in weaker)
    warn(f"enforced by a weaker mechanism on this host: {names}", WeakerLimitWarning)
