"""Owns what a container is created with: all that an engine can close is closed, always. No option opens any of it."""

from __future__ import annotations

import os

from ringfence.backends.container import masking
from ringfence.backends.container.disks import SECRETS
from ringfence.backends.process import state
from ringfence.backends.walled import runtime
from ringfence.backends.walled.skeleton import Bind
from ringfence.errors import UnsupportedError
from ringfence.plan.interpreter import within
from ringfence.plan.mounts import mounts_of_host
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.disks import Disks
    from ringfence.backends.container.engine import Engine
    from ringfence.backends.walled.skeleton import Skeleton
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.model import Limits

_FILES = 4096
_MOST_BELOW = 256  # mounts; a container is slow to start with more
_OURS = 12  # processes of ours inside, beside the guest's
_GUESTD_BYTES = 48 << 20  # what guestd itself takes
_SPLITTING = frozenset(',"\r\n')


@final
class Around(Struct):
    """What the engine is to hold around the whole of a container: the guest's, and what we need ourselves."""

    memory: int
    processes: int


def shared_kernel(plan: ProcessPlan) -> Around:
    return Around(plan.memory_bytes + _GUESTD_BYTES, plan.processes + _OURS)


def own_kernel(plan: ProcessPlan) -> Around:
    """That kernel and its stand-ins are inside these limits too; one process too few ends the whole of it."""
    from ringfence.backends.gvisor.launcher import room_for

    room = room_for(plan)
    return Around(room.memory_bytes + _GUESTD_BYTES, room.processes)


def host_config(
    engine: Engine,
    shown: list[Any],
    disks: Disks,
    plan: ProcessPlan,
    limits: Limits,
    oci_runtime: str | None,
    around: Around,
) -> Any:
    for mount in shown:
        _check_spelling(engine, mount)
        mount["Target"] = disks.spelled(mount["Target"])
    taken = {mount["Target"] for mount in shown}
    if "/run" in taken:  # an image's, read-only
        taken.add(SECRETS)
    memory = around.memory
    shm = min(64 << 20, limits.memory // 2)
    config = engine.api.create_host_config(
        network_mode="none",
        read_only=True,
        tmpfs={path: options for path, options in disks.with_shared(shm).items() if path not in taken},
        mounts=[*shown, *disks.mounts],
        shm_size=shm,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=around.processes,
        nano_cpus=int(min(plan.cpus, engine.cpus) * 1_000_000_000),  # Docker refuses more than there are
        ulimits=[
            {"Name": "core", "Soft": 1, "Hard": 1},
            {"Name": "nofile", "Soft": _FILES, "Hard": _FILES},  # guestd's; guests have limits.open_files
            {"Name": "nproc", "Soft": around.processes, "Hard": around.processes},
        ],
        log_config={"Type": "none", "Config": {}},
        ipc_mode="private",
        privileged=False,
        init=False,
        auto_remove=False,
        oom_kill_disable=False,
        # guestd listens for the gateway on ports of hosts; in a namespace without a card, that is nobody else's right.
        **({"sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"}} if plan.box["outlets"] is not None else {}),
        **({"runtime": oci_runtime} if oci_runtime else {}),
    )
    masking.apply(config, engine)
    return config


def _check_spelling(engine: Engine, mount: Any) -> None:
    """Podman writes a mount as one line of comma-separated values and reads that again, without quotes.

    A folder "x,source=etc" of an image would so be the host's /etc (M11).
    """
    for path in (mount["Source"], mount["Target"]):
        if engine.name == "podman" and not _SPLITTING.isdisjoint(path):
            raise UnsupportedError(
                f"Podman cannot be told to show {path!r:.200}: it would take a part of the name for an option",
                code="mounts",
                fix='rename it (no comma, quote or line break), or engine="docker", or backend="process"',
            )


def mounts(made: Skeleton, guestd: str) -> list[Any]:
    from docker.types import Mount

    hidden = [Mount(target, _empty(made, target), type="bind", read_only=True) for target in made.hidden]
    binds = [*made.binds, *_read_only_below(made)]
    shown = [Mount(bind.target, bind.source, type="bind", read_only=not bind.writable) for bind in binds]
    return [*shown, *hidden, Mount(runtime.INSIDE, guestd, type="bind", read_only=True)]


def _read_only_below(made: Skeleton) -> list[Bind]:
    """Engines make only the top of a bind read-only: what the host has mounted below it gets a bind of its own.

    Newer ones can do it by an option, which older ones take and do not heed. Engines mount by depth, so these come
    after what they lie in.
    """
    targets = {bind.target for bind in made.binds}
    found: dict[str, Bind] = {}
    for where, _ in mounts_of_host():
        for bind in made.binds:
            target = bind.target + where[len(bind.source.rstrip("/")) :]
            if where == bind.source or not within(where, bind.source) or target in targets:
                continue
            nearest = max((one for one in made.binds if within(target, one.target)), key=lambda one: len(one.target))
            if nearest == bind and not bind.writable and os.path.lexists(where):  # else another mount covers it
                found[target] = Bind(where, target, writable=False)
    if len(found) > _MOST_BELOW:
        raise UnsupportedError(
            f"{len(found)} file systems are mounted below what is shown read-only, such as {next(iter(found))}",
            code="mounts",
            fix='mount folders that do not contain them, or backend="process"',
        )
    return list(found.values())


def _empty(made: Skeleton, target: str) -> str:
    """An empty folder or file of ours that hides it."""
    folder = state.disk_directory("empty")
    for bind in reversed(made.binds):
        if target.startswith(f"{bind.target}/") and not os.path.isdir(bind.source + target[len(bind.target) :]):
            path = f"{folder}/file"
            with open(path, "ab"):
                return path
    os.makedirs(f"{folder}/folder", 0o555, exist_ok=True)
    return f"{folder}/folder"
