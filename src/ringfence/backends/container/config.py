"""Owns what a container is created with: all that an engine can close is closed, always. No option opens any of it."""

from __future__ import annotations

import os

from ringfence.backends.container.tmpfs import SECRETS
from ringfence.backends.engine import guestd_bundle
from ringfence.backends.engine.backend import own_kernel_room
from ringfence.backends.engine.rootfs import BoxBind
from ringfence.errors import UnsupportedError
from ringfence.host import state
from ringfence.plan.rootfs.mounts import mounts_of_host
from ringfence.policy.host_paths import within
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.container.tmpfs import Disks
    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.plan.model import LinuxPlan


# MERGED: What of /proc and /sys a container does not show: all but what the process backend shows too.
#
# An engine's own list names what its authors thought of; a new kernel's new file is not on it (B15).


def apply(config: dict[str, Any], engine: Engine) -> None:
    """Adds to the host configuration. Each engine has its own words for it."""
    if engine.name == "docker":
        config["MaskedPaths"] = paths()
    else:
        config["SecurityOpt"] = [*config["SecurityOpt"], f"mask={':'.join(paths())}"]
    config["CgroupnsMode"] = "private"  # where it is not, /proc/self/cgroup tells its id and place (B13)


def paths() -> list[str]:
    from ringfence.guest.launch.mounts import PROC_SHOWN

    names = sorted(name for name in os.listdir("/proc") if not name.isdigit() and name not in PROC_SHOWN)
    links = ("mounts", "net")  # to files of the process itself
    return [*(f"/proc/{name}" for name in names if name not in links), "/proc/sys/kernel/random/boot_id", "/sys"]


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


def shared_kernel(plan: LinuxPlan) -> Around:
    return Around(plan.memory_bytes + _GUESTD_BYTES, plan.processes + _OURS)


def own_kernel(plan: LinuxPlan) -> Around:
    """That kernel and its stand-ins are inside these limits too; one process too few ends the whole of it."""
    room = own_kernel_room(plan)
    return Around(room.memory_bytes + _GUESTD_BYTES, room.processes)


def host_config(
    engine: Engine,
    shown: list[Any],
    disks: Disks,
    plan: LinuxPlan,
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
    shm = min(64 << 20, plan.policy.limits.memory // 2)
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
        **({"sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"}} if plan.outlets is not None else {}),
        **({"runtime": oci_runtime} if oci_runtime else {}),
    )
    apply(config, engine)
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
    return [*shown, *hidden, Mount(guestd_bundle.INSIDE, guestd, type="bind", read_only=True)]


def _read_only_below(made: Skeleton) -> list[BoxBind]:
    """Engines make only the top of a bind read-only: what the host has mounted below it gets a bind of its own.

    Newer ones can do it by an option, which older ones take and do not heed. Engines mount by depth, so these come
    after what they lie in.
    """
    targets = {bind.target for bind in made.binds}
    found: dict[str, BoxBind] = {}
    for where, _ in mounts_of_host():
        for bind in made.binds:
            target = bind.target + where[len(bind.source.rstrip("/")) :]
            if where == bind.source or not within(where, bind.source) or target in targets:
                continue
            nearest = max((one for one in made.binds if within(target, one.target)), key=lambda one: len(one.target))
            if nearest == bind and not bind.writable and os.path.lexists(where):  # else another mount covers it
                found[target] = BoxBind(where, target, writable=False)
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


# MERGED: Compares a container, as its engine tells it, with what it was asked for. Before it is started: nothing
# ran in it.
#
# An engine has settings of its own, which open what a request leaves unsaid: Podman's containers.conf can name devices
# and folders of the host for every container, and an engine drops a limit that its host cannot hold.


_SAME = ("NetworkMode", "ReadonlyRootfs", "Privileged")
_LIMITS = {"memory": "Memory", "pids": "PidsLimit"}  # by controller
_NOTHING = ("CapAdd", "Devices", "DeviceRequests", "DeviceCgroupRules", "GroupAdd", "PortBindings", "VolumesFrom")
_OWN_NAMESPACE = ("PidMode", "UTSMode", "IpcMode")


def targets(asked: Any) -> list[str]:
    """Where that configuration mounts something."""
    return [*(str(mount["Target"]) for mount in asked["Mounts"]), *asked["Tmpfs"]]


def check(engine: Engine, identity: str, asked: Any) -> None:
    """`asked`: its host configuration. Raises UnsupportedError."""
    found = engine.api.inspect_container(identity)
    wrong = _wrong(engine, found, asked)
    if wrong is not None:
        raise UnsupportedError(
            f"{engine.name} made the container otherwise than it was asked to: {wrong}",
            code="engine-settings",
            fix=f'take it out of {engine.name}\'s own settings, such as containers.conf, or backend="process"',
        )


def _wrong(engine: Engine, found: Any, asked: Any) -> str | None:
    """What is not as it was asked for; None when all is."""
    host = found.get("HostConfig") or {}
    for word in (*_SAME, *(_LIMITS[name] for name in _LIMITS if name in engine.limits)):
        if host.get(word) != asked.get(word, False):
            return f"{word} is {host.get(word)!r:.60}, not {asked.get(word, False)!r:.60}"
    for word in _NOTHING:
        if host.get(word):
            return f"it has {word} {host[word]!r:.200}"
    for word in _OWN_NAMESPACE:
        if str(host.get(word) or "").startswith(("host", "container:", "ns:")):
            return f"{word} is {host[word]!r:.60}"
    meant = targets(asked)
    shown = [mount for mount in found.get("Mounts") or () if mount.get("Destination") not in meant]
    if shown:
        return f"it shows {shown[0].get('Source')!r:.200} at {shown[0].get('Destination')!r:.200}"
    return None
