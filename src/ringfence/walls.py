"""Launchers of the backends whose wall is an engine's: the same policy and plan, another box."""

from __future__ import annotations

import os

from ringfence.errors import Missing, SandboxLostError, UnsupportedError
from ringfence.plan.controls import ALL_ON
from ringfence.plan.model import Plan, make_plan
from ringfence.results import Control, Enforcement
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.container.api import Engine
    from ringfence.backends.contract import Box, Outlet
    from ringfence.backends.engine.box import WalledBox
    from ringfence.images.store import Used
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy


class WalledLauncher:
    """One backend for one policy and image. What differs is in the two methods that raise here."""

    name = ""

    def __init__(self, policy: Policy, image: Image, *, used: Used | None, rejected: dict[str, str]) -> None:
        self.policy = policy
        self.image = image
        self.used = used
        self.twin_of: Outlet | None = None
        self._rejected = rejected
        self._made: ProcessPlan | None = None
        self.controls = ALL_ON

    def _plan(self) -> ProcessPlan:
        from ringfence.launching import process_plan

        if self._made is None:
            self._made = process_plan(self.policy, self.image, fresh=True, used=self.used)
        return self._made

    def plan(self) -> Plan:
        from ringfence.backends.engine.rootfs import skeleton
        from ringfence.plan.build import explain_lines

        made = self._plan()
        skeleton(made, self.name)
        return make_plan(self.name, self._checked(made), self._rejected, explain_lines(made, self.policy))

    def launch(self) -> Box:
        """A sandbox that has run nothing. Raises UnsupportedError, StartTimeoutError or SandboxLostError."""
        made = self.controls.plan(self._plan())
        if made.box["outlets"] is not None:
            from ringfence.gateway.service import service

            service().start()  # its thread imports what it needs while the sandbox is built
        box = self._guarded(made) if self.policy.mounts else self._launch(made, self._checked(made))
        box.python = {**python_of(made), "fresh": self._starts_python_anew(made)}
        if made.box["outlets"] is not None:
            self._let_out(box)
        return box

    def _guarded(self, made: ProcessPlan) -> WalledBox:
        """Placeholders stand for protected paths that are not there, from before the start until after the end."""
        from ringfence.host.mount_guard import Guard
        from ringfence.host.programs import note_writable

        note_writable(made.writable)
        enforcement = self._checked(made)
        guard = Guard(made, outlives=True)
        try:
            box = self._launch(made, enforcement)
        except BaseException:
            guard.end()
            raise
        guard.begin(box)
        return box

    def _let_out(self, box: WalledBox) -> None:
        """guestd listens inside already; no guest code exists."""
        from ringfence.gateway.service import service

        network, secrets = self.policy.network, self.policy.secrets
        try:
            if box.listeners:
                listeners, box.listeners = box.listeners, []
                outlet = service().register(network, secrets, listeners, self.twin_of)
            else:
                outlet, box.channel = service().register_relayed(network, secrets, box.channel, box.kill, self.twin_of)
            box.outlet = outlet
            box.env = {**outlet.defaults, **box.env, **outlet.env}
        except BaseException:
            box.close()
            raise

    def _checked(self, made: ProcessPlan) -> Enforcement:
        enforcement = self._enforcement(made)
        if self.policy.strict and enforcement.weaker:
            parts = "; ".join(f"{name}: {getattr(enforcement, name).note}" for name in enforcement.weaker)
            raise UnsupportedError(
                f"the policy is strict, and under {self.name} a weaker mechanism would hold {parts}",
                code="strict",
                fix="strict = false",
            )
        return enforcement

    def _network(self, mechanism: str, made: ProcessPlan) -> Control:
        if made.box["outlets"] is None:
            return Control(mechanism, "full")
        return Control(f"{mechanism} + gateway by name", "full", reports=True)

    def _enforcement(self, made: ProcessPlan) -> Enforcement:
        raise NotImplementedError

    def _launch(self, made: ProcessPlan, enforcement: Enforcement) -> WalledBox:
        raise NotImplementedError

    def _starts_python_anew(self, made: ProcessPlan) -> bool:
        """Else guests' Python is a fork of guestd: it runs where the policy lists no such program, too."""
        return made.foreign or self.policy.commands == "any"


class GvisorLauncher(WalledLauncher):
    name = "gvisor"
    platform: str | None = None

    def _plan(self) -> ProcessPlan:
        made = super()._plan()
        if os.geteuid() != 0 and any(mount.mode == "rw" for mount in self.policy.mounts):
            raise UnsupportedError(
                "without root the guest of gVisor is nobody's user on the host, and can write to no folder of it",
                code="mounts",
                missing=[Missing("gvisor", "root, for a writable mount", 'backend="process"')],
            )
        return made

    def _enforcement(self, made: ProcessPlan) -> Enforcement:
        from ringfence.backends.gvisor import runsc

        kernel = f"gVisor {runsc.find(self.platform).version}"
        if self.policy.strict and os.geteuid() == 0:
            disk = Control(f"{kernel}: tmpfs of the host, size and inodes", "full")
        else:
            how = "bytes; files are counted where the policy is strict, as root"
            disk = Control(f"{kernel}: size of its file systems", "weaker", how)
        return replace(
            made.enforcement,
            files=Control(f"{kernel}: gofer limited to the image, read-only root", "full"),
            network=self._network(f"{kernel}: no network stack but loopback", made),
            processes=Control(f"{kernel}: its pids controller", "full"),
            syscalls=Control(f"{kernel}: a kernel of its own in user space", "full"),
            privileges=Control(f"{kernel}: uid 1000, no capabilities, no_new_privs", "full"),
            time=Control("clock of guestd inside, and of the host behind it", "full"),
            disk=disk,
        )

    def _launch(self, made: ProcessPlan, enforcement: Enforcement) -> WalledBox:
        from ringfence.backends.gvisor.launcher import launch
        from ringfence.launching import check_pause, interpreter

        check_pause(self.policy, self.image)

        return launch(
            made,
            self.policy.limits,
            enforcement,
            platform=self.platform,
            python=interpreter().executable if self.policy.commands == "any" and not made.foreign else None,
            env=made.env,
            shares=bool(self.policy.mounts),
            exact=self.policy.strict,
            controls=self.controls,
        )

    def _starts_python_anew(self, made: ProcessPlan) -> bool:
        """The caller's Python runs guestd there: starting a second one takes as long as all else together."""
        return made.foreign


class ContainerLauncher(WalledLauncher):
    name = "container"
    engine: str | None = None
    socket: str | None = None
    runtime: str | None = None

    def _enforcement(self, made: ProcessPlan) -> Enforcement:
        from ringfence.backends.container.api import check_runtime, find
        from ringfence.backends.container.channel import has_own_kernel as is_kernel
        from ringfence.backends.container.channel import leads_into

        found = find(self.engine, self.socket)
        check_runtime(found, self.runtime)
        self._check_socket(found.socket)
        self._check_writable(found, made)
        by = f"{found.name} {found.version}" + (f" with {self.runtime}" if self.runtime else "")
        held = self._held_by_engine(by, found, made)
        runtime = self.runtime or found.runtime
        if leads_into(runtime):
            return held
        return _as_gvisor_holds(held, by, own_kernel=is_kernel(runtime))

    def _check_socket(self, socket: str) -> None:
        """The engine's own is never shown, not even as `credentials`: who speaks with it is root here (M09)."""
        from ringfence.errors import PolicyError
        from ringfence.policy.host_paths import within

        path = os.path.realpath(socket)
        for index, mount in enumerate(self.policy.mounts):
            source = os.path.realpath(mount.source)
            if within(path, source):
                raise PolicyError(
                    f"mounts[{index}] shows the container engine's socket {path}: who speaks with it is root here",
                    key=f"mounts[{index}]",
                    fix="mount a folder that does not hold it",
                )

    def _check_writable(self, found: Engine, made: ProcessPlan) -> None:
        """Users inside have other numbers here: what is not open to all would be mounted and could not be written."""
        closed = [path for path in made.writable if not os.stat(path).st_mode & 0o002] if found.mapped else []
        if closed:
            raise UnsupportedError(
                f"users in containers of this {found.name} are nobody's on the host, and cannot write to {closed[0]}",
                code="mounts",
                missing=[Missing("container", "users that are not mapped, for a writable mount", 'backend="process"')],
            )

    def _held_by_engine(self, by: str, found: Engine, made: ProcessPlan) -> Enforcement:
        from ringfence.backends.container.tmpfs import counts_files

        return replace(
            made.enforcement,
            files=Control(f"{by}: read-only root, binds read-only", "full"),
            network=self._network(f"{by}: network none", made),
            processes=Control(f"{by}: {'pids limit, ' if 'pids' in found.limits else ''}RLIMIT_NPROC", "full"),
            syscalls=Control(f"{by}: its seccomp profile, and our allow-list inside", "full"),
            privileges=Control(f"{by}: a uid of its own, all capabilities dropped, no-new-privileges", "full"),
            time=Control("clock of guestd inside, and of the host behind it", "full"),
            cpu=Control(f"{by}: CPU quota, and the count of its cgroup", "full")
            if "cpu" in found.limits
            else Control("RLIMIT_CPU", "weaker", "time alone: this engine has no cgroup for shares"),
            memory=Control(
                f"{by}: memory limit{', no swap' if found.counts_swap else ' (swap is not counted)'}", "full"
            )
            if "memory" in found.limits
            else Control("RLIMIT_DATA", "weaker", "for each process: this engine has no cgroup for it"),
            disk=Control(f"{by}: tmpfs size and inodes", "full")
            if counts_files(found)
            else Control(f"{by}: tmpfs size", "weaker", "bytes; files are not counted everywhere"),
        )

    def _launch(self, made: ProcessPlan, enforcement: Enforcement) -> WalledBox:
        from ringfence.backends.container.api import find, was_killed
        from ringfence.backends.container.launcher import launch

        for last in (False, True):
            found = find(self.engine, self.socket)
            try:
                return launch(
                    found,
                    made,
                    self.policy.limits,
                    enforcement,
                    oci_runtime=self.runtime,
                    writable=made.writable,
                    controls=self.controls,
                )
            except SandboxLostError:
                if last or not was_killed(found):
                    raise
        raise AssertionError("unreachable")


def has_own_kernel(backend: object) -> bool:
    """Whether containers of this backend have one, by the runtime that is named for them."""
    from ringfence.backends.container import channel

    return channel.has_own_kernel(getattr(backend, "runtime", None) or "")


def _as_gvisor_holds(held: Enforcement, by: str, *, own_kernel: bool) -> Enforcement:
    """A kernel of its own keeps no count of files and no RLIMIT_NPROC; the engine's limits are around it.

    A runtime that we do not know may have one or not: the least of both is claimed.
    """
    return replace(
        held,
        syscalls=Control(f"{by}: a kernel of its own", "full") if own_kernel else held.syscalls,
        processes=Control(f"{by}: pids limit", "weaker", "of the whole sandbox, on the host"),
        cpu=Control(held.cpu.mechanism, "weaker", "CPU time for each process, not for the tree"),
        disk=Control(f"{by}: tmpfs size", "weaker", "bytes; files are not counted"),
    )


def python_of(made: ProcessPlan) -> dict[str, object]:
    """How Python code is run inside: by the image's own interpreter."""
    from ringfence.launching import interpreter

    if made.foreign:
        return {"executable": made.python, "sys_path": None}
    caller = interpreter()
    return {"executable": caller.command, "sys_path": list(caller.sys_path)}
