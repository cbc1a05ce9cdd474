"""Launchers of the backends whose wall is an engine's: the same policy and plan, another box."""

from __future__ import annotations

from ringfence.errors import Missing, UnsupportedError
from ringfence.plan.model import Plan, make_plan
from ringfence.results import Control, Enforcement
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.base import Box, Outlet
    from ringfence.files.usedimages import Used
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy


class GvisorLauncher:
    """The gvisor backend for one policy and image."""

    name = "gvisor"

    def __init__(
        self, policy: Policy, image: Image, *, used: Used | None, platform: str | None, rejected: dict[str, str]
    ) -> None:
        self.policy = policy
        self.image = image
        self.used = used
        self._platform = platform
        self._rejected = rejected
        self._made: ProcessPlan | None = None
        self.twin_of: Outlet | None = None

    def _plan(self) -> ProcessPlan:
        from ringfence.launching import process_plan

        if self._made is None:
            self._made = process_plan(self.policy, self.image, fresh=True, used=self.used)
        return self._made

    def plan(self) -> Plan:
        from ringfence.backends.gvisor import runsc
        from ringfence.plan.process import explain_lines

        runsc.find(self._platform)
        made = self._plan()
        return make_plan(self.name, self._enforcement(made), self._rejected, explain_lines(made, self.policy))

    def launch(self) -> Box:
        """A sandbox that has run nothing. Raises UnsupportedError, StartTimeoutError or SandboxLostError."""
        from ringfence.backends.gvisor.launcher import launch

        if self.policy.network.allow or self.policy.network.rules:
            raise UnsupportedError(
                "the gvisor backend has no way out to a network yet",
                code="network",
                missing=[Missing("gvisor", "egress through the gateway", 'backend="process"')],
            )
        made = self._plan()
        enforcement = self._enforcement(made)
        if self.policy.strict and enforcement.weaker:
            raise UnsupportedError(
                f"the policy is strict, and under gvisor a weaker mechanism would hold {', '.join(enforcement.weaker)}",
                code="strict",
                fix="strict = false",
            )
        box = launch(made, self.policy.limits, enforcement, platform=self._platform, env=made.env)
        box.python = python_of(made)
        return box

    def _enforcement(self, made: ProcessPlan) -> Enforcement:
        from ringfence.backends.gvisor import runsc

        kernel = f"gVisor {runsc.find(self._platform).version}"
        by = made.enforcement
        return replace(
            by,
            files=Control(f"{kernel}: gofer limited to the image, read-only root", "full"),
            network=Control(f"{kernel}: no network stack but loopback", "full"),
            processes=Control(f"{kernel}: RLIMIT_NPROC, pids of the whole sandbox outside", "full"),
            syscalls=Control(f"{kernel}: a kernel of its own in user space", "full"),
            privileges=Control(f"{kernel}: uid 1000, no capabilities, no_new_privs", "full"),
            time=Control("clock of guestd inside, and of the host behind it", "full"),
            disk=Control(f"{kernel}: size of the memory file systems", "weaker", "bytes; files are not counted"),
        )


def python_of(made: ProcessPlan) -> dict[str, object]:
    """How Python code is run inside: by the image's own interpreter, started anew."""
    from ringfence.launching import interpreter

    if made.foreign:
        return {"fresh": True, "executable": made.python, "sys_path": None}
    caller = interpreter()
    return {"fresh": True, "executable": caller.command, "sys_path": list(caller.sys_path)}
