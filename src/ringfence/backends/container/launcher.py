"""Starts sandboxes in a container engine: an image with the plan's skeleton, hardened, guestd as PID 1."""

from __future__ import annotations

import contextlib
import os
import time

from ringfence.backends.container import api as engines
from ringfence.backends.container import channel, sweep, tmpfs
from ringfence.backends.container import config as checking
from ringfence.backends.container import config as hardening
from ringfence.backends.container.container import ContainerWall
from ringfence.backends.container.network import RESOLVER, Egress
from ringfence.backends.engine import guestd_bundle, mount_identity
from ringfence.backends.engine.box import WalledBox
from ringfence.backends.engine.rootfs import Bind, skeleton
from ringfence.errors import SandboxLostError
from ringfence.host import process_id, state
from ringfence.plan.controls import ALL_ON
from ringfence.results import Control
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.container.channel import Door
    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.model import Limits
    from ringfence.results import Enforcement

_START_S = 60.0
_END_S = 20.0
_SAID = 400  # of what an engine says


def launch(
    engine: Engine,
    plan: ProcessPlan,
    limits: Limits,
    enforcement: Enforcement,
    *,
    oci_runtime: str | None,
    writable: tuple[str, ...] = (),
    controls: Controls = ALL_ON,
) -> WalledBox:
    """A sandbox that has run nothing. `writable`: host paths that the guest may write to.

    Raises SandboxLostError when the engine fails, UnsupportedError, …
    """
    import docker.errors
    import requests.exceptions

    made = skeleton(plan, "container")
    egress = Egress(plan, made.files.get(RESOLVER))
    deadline = time.monotonic() + _START_S
    guestd = guestd_bundle.folder(state.disk_directory("runtime"))
    shown = hardening.mounts(made, guestd) + egress.mounts()
    inodes = {(bind.source, bind.target): bind.inode for bind in made.binds}
    asked = [
        Bind(where, target, not mount["ReadOnly"], inodes.get((where, target)))
        for mount in shown
        for where, target in [(mount["Source"], mount["Target"])]
    ]
    # Where the runtime has a kernel of its own, that kernel holds the flags.
    flags = controls.mount_flags and channel.leads_into(oci_runtime or engine.runtime)
    with contextlib.closing(mount_identity.Meaning(asked, flags=flags)) as meaning:
        try:
            sweep.sweep(engine)
            asked_for = (made, plan, limits, shown, oci_runtime, writable, controls, deadline)
            try:
                wall = _start(engine, sweep.of(engine, made), *asked_for)
            except docker.errors.ImageNotFound:  # removed by somebody since we looked, as `docker image prune` does
                sweep.forget(engine)
                wall = _start(engine, sweep.of(engine, made), *asked_for)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            engines.forget(engine)
            sweep.forget(engine)
            raise _failed(engine, error) from None
        box = WalledBox("container", wall, wall.channel, enforcement=enforcement, env=plan.env)
        try:
            own_kernel = channel.has_own_kernel(oci_runtime or engine.runtime)
            told = fence(plan, limits.memory, engine, shares_kernel=not own_kernel)
            if flags:
                meaning.expect(wall.targets)
            looks = wall.takes_descriptors and not _may_look(wall)  # guestd itself
            meant = meaning.meant if looks else None
            with _cpu_counter(wall if plan.cgroup else None, box) as cpu:
                hands = wall.takes_descriptors
                box.begin(told, deadline, outlets=egress.outlets, hands=hands, cpu=cpu, meant=meant)
            if meaning.meant is not None and not looks:
                meaning.check(wall.shows_files)
            egress.give_address(lambda: wall.pid, guestd)
        except BaseException:
            box.close()
            box.wait_destroyed(_END_S)
            raise
        return box


def _may_look(wall: ContainerWall) -> bool:
    """Whether the container's mounts can be looked at from here. guestd may not look into every folder it shows."""
    return os.geteuid() == 0 and wall.shows_files != 0


@contextlib.contextmanager
def _cpu_counter(wall: ContainerWall | None, box: WalledBox) -> Iterator[int]:
    """For guestd. Where there is none, the box says what holds instead."""
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
    """In the engine's own words, where it answered."""
    said = getattr(error, "explanation", None)
    if said:
        return SandboxLostError(
            f"{engine.name} made no container: {str(said)[:_SAID]}", code="engine", fix="ringfence doctor container"
        )
    text = f"{engine.name} at {engine.socket} does not answer any more: {str(error)[:_SAID]}"
    return SandboxLostError(text, code="engine", fix=f"is {engine.name} running?")


def _start(
    engine: Engine,
    image: str,
    made: Skeleton,
    plan: ProcessPlan,
    limits: Limits,
    shown: list[Any],
    oci_runtime: str | None,
    writable: tuple[str, ...],
    controls: Controls,
    deadline: float,
) -> ContainerWall:
    with contextlib.ExitStack() as undo:
        user = tmpfs.Account(engine, made, writable)
        undo.callback(user.remove)
        room = tmpfs.Disks(engine, limits, user.uid)
        undo.callback(room.remove)
        way = channel.Door() if channel.leads_into(oci_runtime or engine.runtime) else None
        if way is not None:
            undo.callback(way.close)
            shown = [*shown, *way.mounts()]
        own_kernel = channel.has_own_kernel(oci_runtime or engine.runtime)
        around = hardening.own_kernel(plan) if own_kernel else hardening.shared_kernel(plan)
        config = hardening.host_config(engine, [*shown, *user.mounts()], room, plan, limits, oci_runtime, around)
        settings = controls.container(_settings(config, user.uid, way))
        config = settings["host_config"]
        identity = str(engine.api.create_container(image, **settings)["Id"])
        undo.callback(sweep.remove, engine, identity)
        if controls.engine_settings:
            checking.check(engine, identity, config)
        wall = ContainerWall(engine, identity, way, targets=checking.targets(config))
        undo.callback(wall.hang_up)
        engine.api.start(identity)
        by_uid = controls.guestd_user and not engine.mapped
        wall.wait_for_guestd(deadline, user.uid if by_uid else None)
        wall.keep(undo.pop_all())
        return wall


def _settings(config: Any, uid: int, way: Door | None) -> dict[str, Any]:
    """Return what a container is created with, beside its image."""
    return {
        "command": None,
        "entrypoint": guestd_bundle.command(),
        "user": f"{uid}:{uid}",
        "working_dir": "/",
        # LC_ALL: guestd's Python would look for a locale, and find the image's.
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": "/workspace",
            "LC_ALL": "C",
            **({} if way is None else way.env),
        },
        "stdin_open": way is None,
        "tty": False,
        "hostname": "ringfence",
        "network_disabled": True,
        "labels": {tmpfs.LABEL: process_id.name()},
        "host_config": config,
        "name": sweep.name(),
    }


def fence(plan: ProcessPlan, memory: int, engine: Engine, *, shares_kernel: bool) -> Mapping[str, object]:
    """What is left for guests to give up inside: the engine has dropped capabilities and made the namespaces."""
    if not shares_kernel:
        from ringfence.backends.gvisor.launcher import fence as under_gvisor

        return under_gvisor(plan)
    own = {"capabilities": False, "namespace_limits": False, "cgroup_namespace": False, "affinity": []}
    limits = plan.fence["rlimits"]
    assert isinstance(limits, dict)
    kept = {name: value for name, value in limits.items() if name != "DATA"}  # stands in for a cgroup
    rlimits = kept if "memory" in engine.limits else {**kept, "DATA": memory}
    return {**plan.fence, **own, "rlimits": rlimits}
