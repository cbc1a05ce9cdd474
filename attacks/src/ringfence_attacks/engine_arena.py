"""An arm of an attack on a container or on gVisor: the arena, with sandboxes that an engine makes.

An arm leaves out a control of the plan, which guestd applies inside, or a control of the engine, which is a setting of
the request to the engine.
"""

from __future__ import annotations

import os
import subprocess
import warnings

from ringfence import Sandbox, UnsupportedError
from ringfence.backends.auto import Launcher
from ringfence.host import programs
from ringfence.plan.model import FoundImage
from ringfence.policy.image import Image
from ringfence.values import replace
from ringfence_attacks import controls
from ringfence_attacks.arena import POLICY, Arm
from ringfence_attacks.case import NotApplicable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence import Policy
    from ringfence.images.store import Used
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import LinuxPlan
    from ringfence.values import Workspace
    from ringfence_attacks.case import ArmName, Attack
    from ringfence_attacks.controls import Change


class EngineArm(Arm):
    """An Arm whose sandboxes an engine makes. `also`: a further change of the request to the engine, set by a case."""

    def __init__(self, attack: Attack, name: ArmName, backend: str) -> None:
        super().__init__(attack, name)
        self.backend = backend
        self.also: Change | None = None

    @property
    def has_other_uid(self) -> bool:
        return True

    @property
    def contained(self) -> bool:
        """Whether the sandbox is a container, and not gVisor's."""
        return self.backend == "container"

    def sandbox(
        self,
        policy: Policy = POLICY,
        *,
        whole: bool = False,
        workspace: Workspace = "auto",
        used: Used | None = None,
    ) -> Sandbox:
        if self.bare:
            raise AssertionError(f"{self.attack.id}: the off arm is a plain process, and has no sandbox")
        if workspace != "auto":
            raise NotApplicable("only the process backend has workspaces on disk")
        made = Sandbox(policy=policy, backend=self.backend)  # type: ignore[arg-type]  # of harness.ENGINES
        if used is not None:
            made._launcher = Launcher((self.backend,), policy, FoundImage(Image("attack"), used.root))  # noqa: SLF001  # no public way leads there
        launcher = made._launcher  # noqa: SLF001  # as above
        try:
            launcher.sandbox_plan()
        except UnsupportedError as error:
            if error.code != "mounts":  # a mount that the engine cannot make cannot be attacked
                raise
            raise NotApplicable(str(error)) from None
        launcher.controls = self._controls(whole=whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weaker limits are shown with the matrix, not with each of its rows
            box = self.enter(made)
        if not whole:
            self._weaken_volume(box)
        return box

    def _controls(self, *, whole: bool) -> Controls:
        changes = [self.also] if self.also else []
        if not whole:
            names = controls.left_out_of_engine(self.backend, self.missing, self.attack.off)
            changes += [controls.of_engine(self.backend)[name] for name in names]
        checked = not changes
        return controls.Lacking(
            engine_settings=checked,
            mount_flags=checked,
            guestd_user=checked,
            weaken=controls.unchanged if whole else self.weaken,
            changes=tuple(changes),
        )

    def weaken(self, plan: LinuxPlan) -> LinuxPlan:
        inside = tuple(name for name in self.missing if name in controls.PLAN)
        if inside:
            left = controls.without(plan, *inside)
            # The container's own limit of processes stays: that limit is a control of the engine.
            plan = replace(left, processes=plan.processes) if self.contained else left
        if self.off and self.attack.change is not None:
            plan = self.attack.change(plan, self)
        return plan

    def _weaken_volume(self, box: Sandbox) -> None:
        """Mount Podman's volume anew without the limits that this arm leaves out."""
        names = controls.left_out_of_engine(self.backend, self.missing, self.attack.off)
        for name, options in controls.REMOUNTED_AFTER_START.items():
            if name in names and self.contained and wall_of(box)._engine.name == "podman":  # noqa: SLF001  # as above
                into = [programs.find("nsenter", path="") or "/usr/bin/nsenter", f"--target={wall_of(box).pid}"]
                subprocess.run(
                    [*into, "--mount", "/bin/mount", "-o", f"remount,{options}", "/workspace"], check=True, timeout=20
                )

    def workspace_bytes(self, box: Sandbox) -> int:
        if not self.contained:
            return super().workspace_bytes(box)
        found = os.statvfs(f"/proc/{wall_of(box).pid}/root/workspace")
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def inspect(self, box: Sandbox) -> dict[str, Any]:
        """Return the engine's own description of the container of `box`."""
        wall = wall_of(box)
        found: dict[str, Any] = wall._engine.api.inspect_container(wall._id)  # noqa: SLF001  # as above
        return found


def engine_arm(arm: Arm) -> EngineArm:
    """Return `arm` as an EngineArm, for a case that is played on engines alone."""
    assert isinstance(arm, EngineArm)
    return arm


def wall_of(box: Sandbox) -> Any:
    """Return the object that holds the container, or gVisor's process, of a started sandbox."""
    return box._box._wall  # type: ignore[union-attr]  # noqa: SLF001  # started; no public name leads there
