"""The container backend: Docker or Podman runs an image with the plan's skeleton, hardened, with guestd as PID 1."""

from __future__ import annotations

import contextlib
import os
import time

from ringfence.backends.container import api, channel, config, sweep
from ringfence.backends.container.container import ContainerWall, give_address
from ringfence.backends.engine import guestd_bundle, mount_identity
from ringfence.backends.engine.backend import (
    engine_plan,
    guarded,
    network_control,
    own_kernel_fence,
    shared_kernel_fence,
    with_enforcement,
)
from ringfence.backends.engine.box import EngineBox
from ringfence.backends.engine.rootfs import BoxBind, skeleton
from ringfence.backends.linux import linux_facts
from ringfence.errors import Missing, PolicyError, SandboxLostError, UnsupportedError
from ringfence.host import process_id, state
from ringfence.plan.controls import ALL_ON
from ringfence.results import Control
from ringfence.shared.paths import is_within
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Literal

    from ringfence.backends.container.api import Engine
    from ringfence.backends.container.channel import Door
    from ringfence.backends.contract import BackendReport
    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import Fence, FoundImage, HostFacts, LinuxPlan
    from ringfence.policy.model import Policy
    from ringfence.results import Enforcement
    from ringfence.values import Isolation

_START_S = 60.0
_END_S = 20.0
_LONGEST_ERROR = 400  # characters of an engine's own words


@final
class ContainerFacts(Struct):
    """The facts of this host that the container backend plans with."""

    host: HostFacts
    engine: Engine | None  # None: no engine listens, and a launch can start Podman's service


@final
class Container(Struct):
    """Docker or Podman through the Engine API."""

    engine: Literal["docker", "podman"] | None = None
    socket: str | None = None
    runtime: str | None = None  # "runsc"

    @property
    def name(self) -> str:
        return "container"

    @property
    def isolation(self) -> Isolation:
        return "own-kernel" if channel.has_own_kernel(self.runtime or "") else "shared-kernel"

    def facts(self) -> ContainerFacts:
        """Return what this host can do. Raises UnsupportedError, with what is missing, where no engine can be used."""
        return ContainerFacts(linux_facts(), api.look(self.engine, self.socket))

    def plan(self, policy: Policy, image: FoundImage, facts: ContainerFacts) -> LinuxPlan:
        """Return what a launch would do. Raises PolicyError or UnsupportedError for what cannot be kept here.

        What Podman can enforce is not known before its service was started: the launch checks that, and the box's
        `enforcement` says so.
        """
        plan = engine_plan(self.name, policy, image, facts.host)
        if facts.engine is None:
            return replace(plan, enforcement=_enforced_by_engine("podman, not started yet", None, plan))
        return with_enforcement(self.name, plan, self._enforcement(plan, facts.engine))

    def launch(self, plan: LinuxPlan, *, controls: Controls = ALL_ON) -> EngineBox:
        """Start a sandbox that has run nothing. Raises UnsupportedError, StartTimeoutError or SandboxLostError."""
        made = controls.plan(plan)
        anew = made.foreign or made.policy.commands == "any"
        return guarded(made, lambda: self._launch(made, controls), starts_python_anew=anew)

    def doctor(self) -> BackendReport:
        """Look for an engine and for known escapes from its programs, and run a sandbox. Takes about a second."""
        from ringfence.doctor.engines import examine_container

        return examine_container()

    def _launch(self, plan: LinuxPlan, controls: Controls) -> EngineBox:
        for last in (False, True):
            found = api.find(self.engine, self.socket)
            made = with_enforcement(self.name, plan, self._enforcement(plan, found))
            try:
                return _launch(found, self.runtime, made, controls)
            except SandboxLostError:
                if last or not api.was_killed(found):
                    raise
        raise AssertionError("unreachable")

    def _enforcement(self, plan: LinuxPlan, found: Engine) -> Enforcement:
        api.check_runtime(found, self.runtime)
        _check_socket(plan.policy, found.socket)
        _check_writable(plan, found)
        by = f"{found.name} {found.version}" + (f" with {self.runtime}" if self.runtime else "")
        enforcement = _enforced_by_engine(by, found, plan)
        runtime = self.runtime or found.runtime
        if channel.leads_into(runtime):
            return enforcement
        return _enforced_with_own_kernel(enforcement, by, is_own=channel.has_own_kernel(runtime))


def _check_socket(policy: Policy, socket: str) -> None:
    """Refuse to show the engine's own socket, even as `credentials`: a process that uses it is root here (M09)."""
    path = os.path.realpath(socket)
    for index, mount in enumerate(policy.mounts):
        source = os.path.realpath(mount.source)
        if is_within(path, source):
            raise PolicyError(
                f"mounts[{index}] shows the container engine's socket {path}: a process that uses it is root here",
                key=f"mounts[{index}]",
                fix="mount a folder that does not hold the socket",
            )


def _check_writable(plan: LinuxPlan, found: Engine) -> None:
    """Refuse writable mounts that mapped users cannot write to: for them every host file is another user's."""
    closed = [path for path in plan.writable if not os.stat(path).st_mode & 0o002] if found.mapped else []
    if closed:
        raise UnsupportedError(
            f"users in containers of this {found.name} have no rights on the host, and cannot write to {closed[0]}",
            code="mounts",
            missing=[Missing("container", "users that are not mapped, for a writable mount", 'backend="process"')],
        )


def _enforced_by_engine(by: str, found: Engine | None, plan: LinuxPlan) -> Enforcement:
    """Return what an engine enforces. Where the engine is not known yet, claim what every engine enforces."""
    limits = () if found is None else found.limits
    no_swap = found is not None and found.counts_swap
    return replace(
        plan.enforcement,
        files=Control(f"{by}: read-only root, binds read-only", "full"),
        network=network_control(f"{by}: network none", plan),
        processes=Control(f"{by}: {'pids limit, ' if 'pids' in limits else ''}RLIMIT_NPROC", "full"),
        syscalls=Control(f"{by}: its seccomp profile, and our allow-list inside", "full"),
        privileges=Control(f"{by}: a uid of its own, all capabilities dropped, no-new-privileges", "full"),
        time=Control("clock of guestd inside, and of the host behind it", "full"),
        cpu=Control(f"{by}: CPU quota, and the count of its cgroup", "full")
        if "cpu" in limits
        else Control("RLIMIT_CPU", "weaker", "time alone: this engine has no cgroup for shares"),
        memory=Control(f"{by}: memory limit{', no swap' if no_swap else ' (swap is not counted)'}", "full")
        if "memory" in limits
        else Control("RLIMIT_DATA", "weaker", "for each process: this engine has no cgroup for it"),
        disk=Control(f"{by}: tmpfs size and inodes", "full")
        if found is not None and config.counts_files(found)
        else Control(f"{by}: tmpfs size", "weaker", "bytes; files are not counted everywhere"),
    )


def _enforced_with_own_kernel(enforcement: Enforcement, by: str, *, is_own: bool) -> Enforcement:
    """Return what a runtime enforces that may have a kernel of its own: only what both kinds of runtime enforce.

    A kernel of its own counts no files and has no RLIMIT_NPROC; the engine's limits are around that kernel.
    """
    return replace(
        enforcement,
        syscalls=Control(f"{by}: a kernel of its own", "full") if is_own else enforcement.syscalls,
        processes=Control(f"{by}: pids limit", "weaker", "of the whole sandbox, on the host"),
        cpu=Control(enforcement.cpu.mechanism, "weaker", "CPU time for each process, not for the tree"),
        disk=Control(f"{by}: tmpfs size", "weaker", "bytes; files are not counted"),
    )


@final
class _Order(Struct):
    """A container that is to be started."""

    engine: Engine
    runtime: str | None  # chosen by the caller; None: the engine's default
    plan: LinuxPlan
    made: Skeleton
    shown: list[Any]  # mounts, in the Engine SDK's words
    controls: Controls
    deadline: float

    @property
    def runs_with(self) -> str:
        """The OCI runtime that will start the container."""
        return self.runtime or self.engine.runtime


def _launch(engine: Engine, runtime: str | None, plan: LinuxPlan, controls: Controls) -> EngineBox:
    """Start a box that has run nothing.

    Raises SandboxLostError when the engine fails, UnsupportedError or StartTimeoutError.
    """
    import docker.errors
    import requests.exceptions

    made = skeleton(plan, "container")
    guestd = guestd_bundle.folder(state.disk_directory("runtime"))
    shown = config.mounts(made, guestd) + config.resolver_mounts(plan, made)
    order = _Order(engine, runtime, plan, made, shown, controls, time.monotonic() + _START_S)
    # Where the runtime has a kernel of its own, that kernel enforces the mount flags.
    flags = controls.mount_flags and channel.leads_into(order.runs_with)
    with contextlib.closing(mount_identity.Meaning(_binds(order), flags=flags)) as meaning:
        try:
            sweep.sweep(engine)
            try:
                wall = _start(order)
            except docker.errors.ImageNotFound:  # removed by another process since we looked: `docker image prune`
                sweep.forget(engine)
                wall = _start(order)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            api.forget(engine)
            sweep.forget(engine)
            raise _failed(engine, error) from None
        box = EngineBox("container", wall, wall.channel, enforcement=plan.enforcement, env=plan.env)
        try:
            if flags:
                meaning.expect(wall.targets)
            looks = wall.takes_descriptors and not _may_look(wall)  # guestd itself
            meant = meaning.meant if looks else None
            with _cpu_counter(wall if plan.cgroup else None, box) as cpu:
                hands = wall.takes_descriptors
                box.begin(_fence(order), order.deadline, outlets=plan.outlets, hands=hands, cpu=cpu, meant=meant)
            if meaning.meant is not None and not looks:
                meaning.check(wall.shows_files)
            if plan.outlets is not None:
                give_address(wall.pid, guestd)
        except BaseException:
            box.close()
            box.wait_destroyed(_END_S)
            raise
        return box


def _binds(order: _Order) -> list[BoxBind]:
    """Return the host paths that the container shows, with the inodes that the plan looked at."""
    inodes = {(bind.source, bind.target): bind.inode for bind in order.made.binds}
    places = [(mount["Source"], mount["Target"], not mount["ReadOnly"]) for mount in order.shown]
    return [BoxBind(source, target, writable, inodes.get((source, target))) for source, target, writable in places]


def _may_look(wall: ContainerWall) -> bool:
    """Return whether this process can look at the container's mounts. guestd has no rights in some of the folders."""
    return os.geteuid() == 0 and wall.shows_files != 0


@contextlib.contextmanager
def _cpu_counter(wall: ContainerWall | None, box: EngineBox) -> Iterator[int]:
    """Yield a descriptor for guestd to read the container's CPU time from; -1 where there is none.

    Without a descriptor the box's `enforcement` says that CPU time is counted for each process.
    """
    cpu = wall.cpu_counter() if wall is not None and wall.takes_descriptors else -1
    if cpu < 0 and box.enforcement.cpu.level == "full":
        weaker = Control(box.enforcement.cpu.mechanism, "weaker", "CPU time for each process, not for the tree")
        box.enforcement = replace(box.enforcement, cpu=weaker)
    try:
        yield cpu
    finally:
        if cpu >= 0:
            os.close(cpu)


def _failed(engine: Engine, error: Exception) -> SandboxLostError:
    """Return the error for a failed call of the engine, in the engine's own words where it answered."""
    said = getattr(error, "explanation", None)
    if said:
        return SandboxLostError(
            f"{engine.name} made no container: {str(said)[:_LONGEST_ERROR]}",
            code="engine",
            fix="ringfence doctor container",
        )
    text = f"{engine.name} at {engine.socket} does not answer any more: {str(error)[:_LONGEST_ERROR]}"
    return SandboxLostError(text, code="engine", fix=f"is {engine.name} running?")


def _start(order: _Order) -> ContainerWall:
    """Create and start the container, and wait for guestd inside."""
    engine, plan = order.engine, order.plan
    with contextlib.ExitStack() as undo:
        image = sweep.of(engine, order.made)
        user = config.Account(engine, order.made, plan.writable)
        undo.callback(user.remove)
        room = config.Disks(engine, plan.policy.limits, user.uid)
        undo.callback(room.remove)
        door = channel.Door() if channel.leads_into(order.runs_with) else None
        shown = [*order.shown, *user.mounts()]
        if door is not None:
            undo.callback(door.close)
            shown += door.mounts()
        own_kernel = channel.has_own_kernel(order.runs_with)
        around = config.own_kernel(plan) if own_kernel else config.shared_kernel(plan)
        wanted = config.host_config(engine, shown, room, plan, order.runtime, around)
        settings = order.controls.container(_settings(wanted, user.uid, door))
        wanted = settings["host_config"]
        identity = str(engine.api.create_container(image, **settings)["Id"])
        undo.callback(sweep.remove, engine, identity)
        if order.controls.engine_settings:
            config.check(engine, identity, wanted)
        wall = ContainerWall(engine, identity, door, targets=config.targets(wanted))
        undo.callback(wall.hang_up)
        engine.api.start(identity)
        by_uid = order.controls.guestd_user and not engine.mapped
        wall.wait_for_guestd(order.deadline, user.uid if by_uid else None)
        wall.keep(undo.pop_all())
        return wall


def _settings(wanted: Any, uid: int, door: Door | None) -> dict[str, Any]:
    """Return the arguments that a container is created with, without its image."""
    return {
        "command": None,
        "entrypoint": guestd_bundle.command(),
        "user": f"{uid}:{uid}",
        "working_dir": "/",
        # LC_ALL: without it guestd's Python would look for a locale and find the image's.
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": "/workspace",
            "LC_ALL": "C",
            **({} if door is None else door.env),
        },
        "stdin_open": door is None,
        "tty": False,
        "hostname": "ringfence",
        "network_disabled": True,
        "labels": {config.LABEL: process_id.name()},
        "host_config": wanted,
        "name": sweep.name(),
    }


def _fence(order: _Order) -> Fence:
    if channel.has_own_kernel(order.runs_with):
        return own_kernel_fence(order.plan)
    by_process = None if "memory" in order.engine.limits else order.plan.policy.limits.memory
    return shared_kernel_fence(order.plan, memory=by_process)
