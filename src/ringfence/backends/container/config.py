"""The configuration of a new container: limits, mounts, and everything an engine can close, closed.

No option opens any of it. `check` compares the container with this configuration before it is started: an engine has
settings of its own, which open what a request leaves unsaid. Podman's containers.conf can name devices and folders of
the host for every container, and an engine drops a limit that its host cannot enforce.
"""

from __future__ import annotations

import hashlib
import os

from ringfence.backends.container.tmpfs import SECRETS
from ringfence.backends.engine import guestd_bundle
from ringfence.backends.engine.backend import own_kernel_room
from ringfence.backends.engine.rootfs import BoxBind
from ringfence.errors import UnsupportedError
from ringfence.host import state
from ringfence.plan.rootfs.mounts import mounts_of_host
from ringfence.policy.host_paths import within
from ringfence.shared.proc import PROC_SHOWN
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.container.tmpfs import Disks
    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.plan.model import LinuxPlan

_RESOLVER = "etc/resolv.conf"
_FILES = 4096
_MOST_BELOW = 256  # mounts; a container is slow to start with more
_OURS = 12  # our processes inside, beside the guest's
_GUESTD_BYTES = 48 << 20  # what guestd itself takes
_SPLITTING = frozenset(',"\r\n')


@final
class Around(Struct):
    """The limits that the engine enforces around a whole container: the guest's, and room for our own processes."""

    memory: int
    processes: int


def shared_kernel(plan: LinuxPlan) -> Around:
    """Return the limits around a container that shares the host's kernel."""
    return Around(plan.memory_bytes + _GUESTD_BYTES, plan.processes + _OURS)


def own_kernel(plan: LinuxPlan) -> Around:
    """Return the limits around a container with a kernel of its own.

    They count that kernel and its processes on the host too. One process too few ends the whole container.
    """
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
    """Return the host configuration of a container, as the Engine API takes it.

    Raises UnsupportedError for a path that this engine would misread.
    """
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
            {"Name": "nofile", "Soft": _FILES, "Hard": _FILES},  # for guestd; guests have limits.open_files
            {"Name": "nproc", "Soft": around.processes, "Hard": around.processes},
        ],
        log_config={"Type": "none", "Config": {}},
        ipc_mode="private",
        privileged=False,
        init=False,
        auto_remove=False,
        oom_kill_disable=False,
        # guestd listens for the gateway on ports of hosts, below 1024 too. The namespace has no network card.
        **({"sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"}} if plan.outlets is not None else {}),
        **({"runtime": oci_runtime} if oci_runtime else {}),
    )
    if engine.name == "docker":
        config["MaskedPaths"] = _masked_paths()
    else:
        config["SecurityOpt"] = [*config["SecurityOpt"], f"mask={':'.join(_masked_paths())}"]
    config["CgroupnsMode"] = "private"  # else /proc/self/cgroup shows the container's id and its place (B13)
    return config


def _masked_paths() -> list[str]:
    """Return what of /proc and /sys a container does not show: all that the process backend does not show either.

    An engine's own list names what its authors thought of; a new kernel's new file is not on it (B15).
    """
    names = sorted(name for name in os.listdir("/proc") if not name.isdigit() and name not in PROC_SHOWN)
    links = ("mounts", "net")  # to files of the process itself
    return [*(f"/proc/{name}" for name in names if name not in links), "/proc/sys/kernel/random/boot_id", "/sys"]


def _check_spelling(engine: Engine, mount: Any) -> None:
    """Raise UnsupportedError for a path with a character that Podman takes for a separator.

    Podman writes a mount as one line of comma-separated values and reads that line again, without quotes. A folder
    "x,source=etc" of an image would therefore be the host's /etc (M11).
    """
    for path in (mount["Source"], mount["Target"]):
        if engine.name == "podman" and not _SPLITTING.isdisjoint(path):
            raise UnsupportedError(
                f"Podman cannot be told to show {path!r:.200}: it would take a part of the name for an option",
                code="mounts",
                fix='rename it (no comma, quote or line break), or engine="docker", or backend="process"',
            )


def mounts(made: Skeleton, guestd: str) -> list[Any]:
    """Return the mounts of a container, in the Engine SDK's words. `guestd`: the folder of guestd's own interpreter."""
    from docker.types import Mount

    hidden = [Mount(target, _empty(made, target), type="bind", read_only=True) for target in made.hidden]
    binds = [*made.binds, *_read_only_below(made)]
    shown = [Mount(bind.target, bind.source, type="bind", read_only=not bind.writable) for bind in binds]
    return [*shown, *hidden, Mount(guestd_bundle.INSIDE, guestd, type="bind", read_only=True)]


def resolver_mounts(plan: LinuxPlan, made: Skeleton) -> list[Any]:
    """Return the mount that shows the plan's resolver; none where the plan has no network.

    Engines put a file of their own over the image's, and theirs names no resolver.
    """
    text = made.files.get(_RESOLVER)
    if plan.outlets is None or text is None:
        return []
    from docker.types import Mount

    return [Mount(f"/{_RESOLVER}", _file_with(text), type="bind", read_only=True)]


def _file_with(text: str) -> str:
    """Return the path of our file on the host that holds this text. Writes the file where there is none yet."""
    path = f"{state.disk_directory('resolver')}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not os.path.exists(path):
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.rename(file.name, path)
    return path


def _read_only_below(made: Skeleton) -> list[BoxBind]:
    """Return a read-only bind for each file system that the host has mounted below a read-only bind.

    Engines make only the top of a bind read-only. Newer engines can do more by an option, which older engines accept
    and ignore. Engines mount by depth, so these binds come after the binds they lie in.
    Raises UnsupportedError for too many.
    """
    targets = {bind.target for bind in made.binds}
    found: dict[str, BoxBind] = {}
    for where, _ in mounts_of_host():
        for bind in made.binds:
            target = bind.target + where[len(bind.source.rstrip("/")) :]
            if where == bind.source or not within(where, bind.source) or target in targets:
                continue
            around = (each for each in made.binds if within(target, each.target))
            nearest = max(around, key=lambda each: len(each.target))
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
    """Return the path of our own empty folder or file that hides `target`."""
    folder = state.disk_directory("empty")
    for bind in reversed(made.binds):
        if target.startswith(f"{bind.target}/") and not os.path.isdir(bind.source + target[len(bind.target) :]):
            path = f"{folder}/file"
            with open(path, "ab"):
                return path
    os.makedirs(f"{folder}/folder", 0o555, exist_ok=True)
    return f"{folder}/folder"


_SAME = ("NetworkMode", "ReadonlyRootfs", "Privileged")
_LIMITS = {"memory": "Memory", "pids": "PidsLimit"}  # by controller
_NOTHING = ("CapAdd", "Devices", "DeviceRequests", "DeviceCgroupRules", "GroupAdd", "PortBindings", "VolumesFrom")
_OWN_NAMESPACE = ("PidMode", "UTSMode", "IpcMode")


def targets(asked: Any) -> list[str]:
    """Return every path inside at which a host configuration mounts something."""
    return [*(str(mount["Target"]) for mount in asked["Mounts"]), *asked["Tmpfs"]]


def check(engine: Engine, identity: str, asked: Any) -> None:
    """Raise UnsupportedError where a container that was not started yet is not what was asked for.

    `asked`: the host configuration it was created with.
    """
    found = engine.api.inspect_container(identity)
    wrong = _wrong(engine, found, asked)
    if wrong is not None:
        raise UnsupportedError(
            f"{engine.name} did not make the container as it was asked to: {wrong}",
            code="engine-settings",
            fix=f'take it out of {engine.name}\'s own settings, such as containers.conf, or backend="process"',
        )


def _wrong(engine: Engine, found: Any, asked: Any) -> str | None:
    """Return the first difference from what was asked for; None when there is none."""
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
