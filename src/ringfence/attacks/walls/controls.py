"""Every control of a wall, by name, with what leaves it out. For attacks and tests alone, as `plan.mutate` is.

A container's are changes to what it is created with; gVisor's are changes to its OCI configuration.
"""

from __future__ import annotations

from ringfence.backends.engine import guestd_bundle
from ringfence.guest.guestd.engine_pid1 import NOT_FIRST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    Change: TypeAlias = Callable[[dict[str, Any]], None]

_MORE = 1 << 30
_IDLE_PID_1 = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"  # reaps nobody but its child


def _host(name: str, value: object) -> Change:
    """Another value of the host configuration."""

    def change(settings: dict[str, Any]) -> None:
        settings["host_config"][name] = value

    return change


def _network(settings: dict[str, Any]) -> None:
    settings["network_disabled"] = False
    settings["host_config"]["NetworkMode"] = "host"


def _capabilities(settings: dict[str, Any]) -> None:
    settings["host_config"].update(CapDrop=[], CapAdd=["ALL"])


def _security(prefix: str, *instead: str) -> Change:
    def change(settings: dict[str, Any]) -> None:
        config = settings["host_config"]
        config["SecurityOpt"] = [*(opt for opt in config.get("SecurityOpt") or () if not opt.startswith(prefix))]
        config["SecurityOpt"] += instead

    return change


def _user(settings: dict[str, Any]) -> None:
    settings["user"] = "0:0"


def _memory(settings: dict[str, Any]) -> None:
    settings["host_config"].update(Memory=_MORE, MemorySwap=_MORE)


def _processes(settings: dict[str, Any]) -> None:
    settings["host_config"]["PidsLimit"] = 400


def _ulimit(name: str, value: int) -> Change:
    def change(settings: dict[str, Any]) -> None:
        for limit in settings["host_config"]["Ulimits"]:
            if limit["Name"] == name:
                limit["Soft"] = limit["Hard"] = value

    return change


def _tmpfs(option: str, value: str) -> Change:
    """Another value of an option for every memory file system that has it. Podman's volume: see `AFTERWARDS`."""

    def change(settings: dict[str, Any]) -> None:
        config = settings["host_config"]
        for path, options in config["Tmpfs"].items():
            words = [f"{option}={value}" if word.startswith(f"{option}=") else word for word in options.split(",")]
            config["Tmpfs"][path] = ",".join(words)

    return change


def _is_guestds(target: str) -> bool:
    """A copy that an attack shows below guestd's place: the one that is used is never shown writable."""
    return target.startswith(f"{guestd_bundle.INSIDE}/")


def _guestd_writable(settings: dict[str, Any]) -> None:
    for mount in settings["host_config"]["Mounts"]:
        if _is_guestds(mount["Target"]):
            mount["ReadOnly"] = False


def _binds_writable(settings: dict[str, Any]) -> None:
    for mount in settings["host_config"]["Mounts"]:
        if not mount["Target"].startswith(guestd_bundle.INSIDE) and mount.get("Type") == "bind":
            mount["ReadOnly"] = False


def _device(settings: dict[str, Any]) -> None:
    given = {"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse", "CgroupPermissions": "rwm"}
    settings["host_config"]["Devices"] = [given]


def _masks(settings: dict[str, Any]) -> None:
    """Podman takes its words as options."""
    if "MaskedPaths" in settings["host_config"]:
        settings["host_config"]["MaskedPaths"] = []
    else:
        _security("mask=", "unmask=ALL")(settings)


def _read_only_paths(settings: dict[str, Any]) -> None:
    if "MaskedPaths" in settings["host_config"]:
        settings["host_config"]["ReadonlyPaths"] = []
    else:
        _security("mask=", "unmask=/proc/sys")(settings)


def _not_first(settings: dict[str, Any]) -> None:
    settings["entrypoint"] = ["/usr/bin/python3", "-c", _IDLE_PID_1, *settings["entrypoint"], NOT_FIRST]


def _host_processes(settings: dict[str, Any]) -> None:
    """guestd is then one of many; its user has no other process."""
    settings["host_config"]["PidMode"] = "host"
    settings["entrypoint"] = [*settings["entrypoint"], NOT_FIRST]


def _host_ipc(settings: dict[str, Any]) -> None:
    settings["host_config"]["IpcMode"] = "host"
    settings["host_config"].pop("ShmSize", None)  # the host's has its own


def _host_names(settings: dict[str, Any]) -> None:
    settings["host_config"]["UTSMode"] = "host"
    settings["hostname"] = None


def _privileged(settings: dict[str, Any]) -> None:
    settings["host_config"]["Privileged"] = True


def _shared_memory(settings: dict[str, Any]) -> None:
    """Where its files are counted it is one of our own file systems, else the engine's."""
    config = settings["host_config"]
    config["ShmSize"] = 256 << 20
    words = config["Tmpfs"].get("/dev/shm", "").split(",")
    if "/dev/shm" in config["Tmpfs"]:
        config["Tmpfs"]["/dev/shm"] = ",".join("size=256m" if word.startswith("size=") else word for word in words)


def _engine_socket(settings: dict[str, Any]) -> None:
    from docker.types import Mount

    from ringfence.backends.container import api

    shown = Mount("/run/engine.sock", api.find().socket, type="bind")
    settings["host_config"]["Mounts"].append(shown)


CONTAINER: dict[str, Change] = {
    "network-none": _network,
    "read-only-root": _host("ReadonlyRootfs", value=False),
    "binds-read-only": _binds_writable,
    "guestd-read-only": _guestd_writable,
    "tmpfs-bytes": _tmpfs("size", "64m"),
    "tmpfs-files": _tmpfs("nr_inodes", "20000"),
    "capabilities-dropped": _capabilities,
    "no-new-privileges-flag": _security("no-new-privileges"),
    "engine-seccomp": _security("seccomp", "seccomp=unconfined"),
    "own-user": _user,
    "memory-limit": _memory,
    "pids-limit": _processes,
    "cpu-quota": _host("NanoCpus", 0),
    "ulimit-nproc": _ulimit("nproc", 4000),
    "ulimit-core": _ulimit("core", 1 << 20),
    "own-pids": _host_processes,
    "own-ipc": _host_ipc,
    "own-uts": _host_names,
    "no-devices": _device,
    "not-privileged": _privileged,
    "no-engine-socket": _engine_socket,
    "own-cgroups": _host("CgroupnsMode", "host"),
    "masked-paths": _masks,
    "read-only-paths": _read_only_paths,
    "guestd-first": _not_first,
    "shm-size": _shared_memory,
}


# What is to be mounted anew in a started container of Podman's: its volume is made before it is asked for.
AFTERWARDS = {"tmpfs-bytes": "size=64m", "tmpfs-files": "nr_inodes=20000"}


def _process(name: str, value: object) -> Change:
    def change(config: dict[str, Any]) -> None:
        config["process"][name] = value

    return change


def _gvisor_writable(*, guestd: bool) -> Change:
    def change(config: dict[str, Any]) -> None:
        for mount in config["mounts"]:
            target = mount["destination"]
            if mount["type"] == "bind" and target != guestd_bundle.INSIDE and _is_guestds(target) is guestd:
                mount["options"] = ["rbind", "rw"]

    return change


def _gvisor_root(config: dict[str, Any]) -> None:
    config["root"]["readonly"] = False


def _gvisor_size(config: dict[str, Any]) -> None:
    for mount in config["mounts"]:
        if mount["type"] == "tmpfs" and mount["destination"] != "/dev":
            mount["options"] = [*(word for word in mount["options"] if not word.startswith("size=")), "size=67108864"]


def _gvisor_files(config: dict[str, Any]) -> None:
    for mount in config["mounts"]:
        if mount["type"] == "tmpfs" and mount["destination"] != "/dev":
            kept = [word for word in mount["options"] if not word.startswith("nr_inodes=")]
            mount["options"] = [*kept, "nr_inodes=20000"]


def _gvisor_network(config: dict[str, Any]) -> None:
    config["network"] = "host"
    spaces = config["linux"]["namespaces"]
    config["linux"]["namespaces"] = [each for each in spaces if each["type"] != "network"]


GVISOR: dict[str, Change] = {
    "network-none": _gvisor_network,
    "read-only-root": _gvisor_root,
    "binds-read-only": _gvisor_writable(guestd=False),
    "guestd-read-only": _gvisor_writable(guestd=True),
    "tmpfs-bytes": _gvisor_size,
    "tmpfs-files": _gvisor_files,
    "own-user": _process("user", {"uid": 0, "gid": 0}),
}


def of(backend: str) -> dict[str, Change]:
    return CONTAINER if backend == "container" else GVISOR


# Controls of the process backend's plan, in a wall's words.
_SAME = {
    "container": {
        "net-namespace": "network-none",
        "pid-namespace": "own-pids",
        "ipc-namespace": "own-ipc",
        "uts-namespace": "own-uts",
        "read-only": "binds-read-only",
        "capabilities": "capabilities-dropped",
        "no-new-privileges": "no-new-privileges-flag",
        "proc-masks": "masked-paths",
        "cgroup-namespace": "own-cgroups",
        "tmpfs-size": "tmpfs-bytes",
        "cgroup": "memory-limit",
        "process-limit": "pids-limit",
    },
    "gvisor": {"net-namespace": "network-none", "read-only": "binds-read-only", "tmpfs-size": "tmpfs-bytes"},
}


def same(backend: str) -> dict[str, str]:
    """Controls of the plan that a control of this wall stands for."""
    return _SAME[backend]


_PROCESSES = {"pids-limit", "ulimit-nproc"}  # behind the one that guestd sets


def at_the_wall(backend: str, missing: tuple[str, ...], judged: tuple[str, ...]) -> list[str]:
    """What of the wall is left out for these: those it names, and what stands for a control of the plan.

    A second fence that the attack is not about (`judged`) goes with the first.
    """
    known, same = of(backend), _SAME[backend]
    found = [same.get(name, name) for name in missing if not (name == "process-limit" and _PROCESSES & {*judged})]
    if any(name.startswith("seccomp") or name == "last-layer" for name in missing) and "engine-seccomp" not in judged:
        found.append("engine-seccomp")
    if "pids-limit" in found and "ulimit-nproc" not in judged:
        found.append("ulimit-nproc")
    return [name for name in dict.fromkeys(found) if name in known]
