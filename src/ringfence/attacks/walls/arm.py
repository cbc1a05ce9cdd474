"""One arm of an attack on a container or under gVisor: the arena, with sandboxes of that wall.

What an arm leaves out is either a control of the plan (`plan.mutate`), which guestd applies inside, or one of the wall
(`controls`), which is in what the engine is asked for. No public name of Ringfence leads to either.
"""

from __future__ import annotations

import os
import subprocess
import warnings

from ringfence import Sandbox, UnsupportedError
from ringfence.attacks.arena import POLICY, Arm, Lacking, unchanged
from ringfence.attacks.case import NotApplicable
from ringfence.attacks.walls import controls
from ringfence.host import programs
from ringfence.plan.mutate import CONTROLS, without
from ringfence.policy.image import Image
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence import Policy
    from ringfence.attacks.case import ArmName, Attack
    from ringfence.attacks.walls.controls import Change
    from ringfence.images.store import Used
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import ProcessPlan
    from ringfence.values import Workspace
    from ringfence.walls import WalledLauncher

BACKENDS = ("container", "gvisor")


class WalledArm(Arm):
    """As Arm. `also`: what a case changes in this arm beside the controls it names."""

    def __init__(self, attack: Attack, name: ArmName, backend: str) -> None:
        super().__init__(attack, name)
        self.backend = backend
        self.also: Change | None = None

    @property
    def has_other_uid(self) -> bool:
        return True

    @property
    def contained(self) -> bool:
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
            raise NotApplicable("of the process backend alone")
        made = Sandbox(policy=policy, backend=self.backend)  # type: ignore[arg-type]  # one of BACKENDS
        launcher: WalledLauncher = made._launcher  # type: ignore[assignment]  # noqa: SLF001  # no public way leads there
        if used is not None:
            launcher.used, launcher.image = used, Image("attack")
        try:
            launcher._plan()  # noqa: SLF001  # as above
        except UnsupportedError as error:
            if error.code != "mounts":  # what it does not show, nobody attacks there
                raise
            raise NotApplicable(str(error)) from None
        launcher.controls = self._controls(whole=whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in the arena
            box = self.enter(made)
        if not whole:
            self._weaken_volume(box)
        return box

    def _controls(self, *, whole: bool) -> Controls:
        steps = [self.also] if self.also else []
        if not whole:
            names = controls.at_the_wall(self.backend, self.missing, self.attack.off)
            steps += [controls.of(self.backend)[name] for name in names]
        checked = not steps
        return Lacking(
            engine_settings=checked,
            mount_flags=checked,
            guestd_user=checked,
            weaken=unchanged if whole else self.weaken,
            steps=tuple(steps),
        )

    def weaken(self, plan: ProcessPlan) -> ProcessPlan:
        inside = tuple(name for name in self.missing if name in CONTROLS)
        if inside:
            left = without(plan, *inside)
            # What the engine is asked for is a control of its own.
            plan = replace(left, processes=plan.processes) if self.contained else left
        if self.off and self.attack.change is not None:
            plan = self.attack.change(plan, self)
        return plan

    def _weaken_volume(self, box: Sandbox) -> None:
        names = controls.at_the_wall(self.backend, self.missing, self.attack.off)
        for name, options in controls.AFTERWARDS.items():
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
        """What the engine says of its container."""
        wall = wall_of(box)
        found: dict[str, Any] = wall._engine.api.inspect_container(wall._id)  # noqa: SLF001  # as above
        return found


def wall_of(box: Sandbox) -> Any:
    return box._box._wall  # type: ignore[union-attr]  # noqa: SLF001  # started; no public name leads there
