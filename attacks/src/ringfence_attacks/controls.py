"""The controls, by name, and how each is left out: an attack must succeed where its control is missing.

There are three tables: the controls of the plan, which the process backend applies, and guestd inside a sandbox of an
engine; the settings that a container is created with; and gVisor's OCI configuration. `Lacking` carries what an arm
leaves out into a launch. No policy key, argument, variable or option of the product leads here.
"""

from __future__ import annotations

from ringfence.backends.engine import guestd_bundle
from ringfence.plan.build import NEWIPC, NEWNET, NEWPID, NEWUTS
from ringfence.plan.controls import Controls
from ringfence.plan.model import Bind, Pin, Protect, TmpfsOptions
from ringfence.plan.seccomp import compiler, table
from ringfence.values import final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, TypeAlias

    from ringfence.plan.model import LinuxPlan, Op

    Change: TypeAlias = Callable[[dict[str, Any]], None]  # changes the request to an engine in place


def unchanged(plan: LinuxPlan) -> LinuxPlan:
    """Return the plan as it is."""
    return plan


@final
class Lacking(Controls):
    """The controls of an arm that leaves some out: `weaken` from the plan, `changes` from the request to an engine."""

    weaken: Callable[[LinuxPlan], LinuxPlan] = unchanged
    changes: tuple[Change, ...] = ()

    def plan(self, plan: LinuxPlan) -> LinuxPlan:
        return self.weaken(plan)

    def container(self, settings: dict[str, Any]) -> dict[str, Any]:
        for change in self.changes:
            change(settings)
        return settings

    def bundle(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.container(config)


# Controls of the plan.

_NAMESPACES = {"net-namespace": NEWNET, "pid-namespace": NEWPID, "ipc-namespace": NEWIPC, "uts-namespace": NEWUTS}
_FENCE = {
    "no-new-privileges": "no_new_privileges",
    "capabilities": "capabilities",
    "landlock-files": "landlock_files",
    "landlock-scopes": "landlock_scopes",
    "not-dumpable": "not_dumpable",
    "namespace-limits": "namespace_limits",
    "cgroup-namespace": "cgroup_namespace",
}
_SHOWN = ("view", "read-only", "protect", "pin", "watch")
_SHOWN_BY: dict[str, type[Op]] = {"protect": Protect, "pin": Pin}
_RLIMITS = {"rlimit-core": "CORE", "rlimit-nofile": "NOFILE", "rlimit-sigpending": "SIGPENDING", "rlimit-cpu": "CPU"}

_MANY = 10_000  # a limit of processes: more than any attack starts, fewer than the host's own limit

PLAN = (
    *_NAMESPACES,
    *_FENCE,
    *_RLIMITS,
    "seccomp",
    "last-layer",
    *(f"seccomp:{name}" for name in compiler.CONTROLS),
    "proc-masks",
    "process-limit",
    "cgroup",
    "tmpfs-size",
    "user-namespace",
    *_SHOWN,
)


def without(plan: LinuxPlan, *controls: str) -> LinuxPlan:
    """Return a plan that leaves out these controls and is not shared. Raises ValueError for a name not in PLAN."""
    filters = frozenset(control[8:] for control in controls if control.startswith("seccomp:"))
    for control in controls:
        if not control.startswith("seccomp:"):
            plan = _without_one(plan, control)
    return replace(_open_filter(plan, filters) if filters else plan, shared=False)


def _without_one(plan: LinuxPlan, control: str) -> LinuxPlan:
    fence = plan.fence
    if control in _SHOWN:
        return _without_view(plan, control)
    if control == "cgroup":
        return replace(plan, cgroup=False)
    if control == "process-limit":
        return replace(plan, processes=_MANY, fence=replace(fence, processes=_MANY))
    if control in _NAMESPACES:
        return replace(plan, namespaces=plan.namespaces & ~_NAMESPACES[control])
    if control == "no-new-privileges":  # a process that may gain privileges may not install a filter
        return replace(plan, fence=replace(fence, no_new_privileges=False, last_layer=None))
    if control in _FENCE:
        return replace(plan, fence=replace(fence, **{_FENCE[control]: False}))
    if control in _RLIMITS:
        kept = {name: value for name, value in fence.rlimits.items() if name != _RLIMITS[control]}
        return replace(plan, fence=replace(fence, rlimits=kept))
    if control in ("last-layer", "seccomp"):
        seccomp = None if control == "seccomp" else fence.seccomp
        return replace(plan, fence=replace(fence, seccomp=seccomp, last_layer=None))
    if control == "proc-masks":
        return replace(plan, proc_masks=False)
    if control == "tmpfs-size":
        return replace(plan, sizes=TmpfsOptions(*["size=1g,nr_inodes=1000000"] * 3))
    if control == "user-namespace":  # a cgroup namespace needs the capabilities of the user namespace
        return replace(plan, user_namespace=False, fence=replace(fence, cgroup_namespace=False))
    raise ValueError(f"no control is named {control!r}; the names are {', '.join(PLAN)}")


def _open_filter(plan: LinuxPlan, left_out: frozenset[str]) -> LinuxPlan:
    """Return `plan` with both filters compiled without these controls. Raises ValueError for an unknown name."""
    fence = plan.fence
    if fence.seccomp is not None:
        fence = replace(fence, seccomp=seccomp_program("guest", left_out).hex())
    if fence.last_layer is not None:
        fence = replace(fence, last_layer=seccomp_program("last", left_out).hex())
    return replace(plan, fence=fence)


def seccomp_program(layer: str, left_out: frozenset[str]) -> bytes:
    """Return a layer of the filter, "guest" or "last", without some controls. Raises ValueError for an unknown name."""
    strange = sorted(left_out.difference(compiler.CONTROLS))
    if strange:
        raise ValueError(f"no such seccomp control: {', '.join(strange)}")
    rules, rest = compiler.rules_of(layer)
    opened = {name: _opened(rule, left_out) for name, rule in rules.items()}
    return compiler.compile_rules(opened, _opened(rest, left_out), check_abi="abi" not in left_out)


def _opened(rule: table.Rule, left_out: frozenset[str]) -> table.Rule:
    """Return `rule` without the clauses of these controls. With its last clause left out, a rule allows the call."""
    kept = tuple(clause for clause in rule[:-1] if clause[1][1] not in left_out)
    checks, verdict = rule[-1]
    return (*kept, (checks, table.ALLOW if verdict[1] in left_out else verdict))


def _without_view(plan: LinuxPlan, control: str) -> LinuxPlan:
    if control == "view":
        return replace(plan, template=(*plan.template, Bind("/", "mnt")))
    if control == "watch":  # paths with a placeholder stay: the operations name them
        return replace(plan, protected=tuple(path for path in plan.protected if path.missing))
    change = _writable if control == "read-only" else _left_out(_SHOWN_BY[control])
    return replace(plan, template=change(plan.template), ops=change(plan.ops))


def _left_out(kind: type[Op]) -> Callable[[Iterable[Op]], tuple[Op, ...]]:
    """Return a function that leaves the operations of one kind out."""

    def change(ops: Iterable[Op]) -> tuple[Op, ...]:
        return tuple(op for op in ops if not isinstance(op, kind))

    return change


def _writable(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Return the operations with every bind of a host path writable."""
    return tuple(replace(op, writable=True) if isinstance(op, Bind) else op for op in ops)


# Controls of a container: changes of the settings that the container is created with.

_MORE = 1 << 30
_IDLE_PID_1 = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"  # reaps its own child and no orphan
# guestd refuses to run as another process than PID 1, because at its end it kills every process that it may. This
# program starts it as any process, and only where it is not root.
_GUESTD_ANYWHERE = f"""
import os, sys
assert os.geteuid() != 0
sys.path.insert(0, {guestd_bundle.INSIDE!r})
from ringfence.guest.guestd import engine_pid1
engine_pid1._check_place = lambda: None
engine_pid1.main()
"""


def _host(name: str, value: object) -> Change:
    """Return a change that sets a value of the host configuration."""

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
    """Return a change that sets an option of the memory file systems that have that option.

    Podman's volume is not among them: see `REMOUNTED_AFTER_START`.
    """

    def change(settings: dict[str, Any]) -> None:
        config = settings["host_config"]
        for path, options in config["Tmpfs"].items():
            words = [f"{option}={value}" if word.startswith(f"{option}=") else word for word in options.split(",")]
            config["Tmpfs"][path] = ",".join(words)

    return change


def _is_below_guestd(target: str) -> bool:
    """Return whether a mount is a copy that an attack mounts below guestd's folder.

    guestd's folder itself never becomes writable.
    """
    return target.startswith(f"{guestd_bundle.INSIDE}/")


def _guestd_writable(settings: dict[str, Any]) -> None:
    for mount in settings["host_config"]["Mounts"]:
        if _is_below_guestd(mount["Target"]):
            mount["ReadOnly"] = False


def _binds_writable(settings: dict[str, Any]) -> None:
    for mount in settings["host_config"]["Mounts"]:
        if not mount["Target"].startswith(guestd_bundle.INSIDE) and mount.get("Type") == "bind":
            mount["ReadOnly"] = False


def _device(settings: dict[str, Any]) -> None:
    given = {"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse", "CgroupPermissions": "rwm"}
    settings["host_config"]["Devices"] = [given]


def _masks(settings: dict[str, Any]) -> None:
    """Unmask all of /proc and /sys. Podman takes a security option for that."""
    if "MaskedPaths" in settings["host_config"]:
        settings["host_config"]["MaskedPaths"] = []
    else:
        _security("mask=", "unmask=ALL")(settings)


def _read_only_paths(settings: dict[str, Any]) -> None:
    if "MaskedPaths" in settings["host_config"]:
        settings["host_config"]["ReadonlyPaths"] = []
    else:
        _security("mask=", "unmask=/proc/sys")(settings)


def _guestd_anywhere(entrypoint: list[str]) -> list[str]:
    """Return a command that starts guestd as any process: the same Python, with `_GUESTD_ANYWHERE` as its program."""
    return [*entrypoint[:-1], "-c", _GUESTD_ANYWHERE]


def _not_first(settings: dict[str, Any]) -> None:
    settings["entrypoint"] = ["/usr/bin/python3", "-c", _IDLE_PID_1, *_guestd_anywhere(settings["entrypoint"])]


def _host_processes(settings: dict[str, Any]) -> None:
    """Share the host's pid namespace. guestd is then a process of the host, with a user that no other process has."""
    settings["host_config"]["PidMode"] = "host"
    settings["entrypoint"] = _guestd_anywhere(settings["entrypoint"])


def _host_ipc(settings: dict[str, Any]) -> None:
    settings["host_config"]["IpcMode"] = "host"
    settings["host_config"].pop("ShmSize", None)  # the host's /dev/shm has a size already


def _host_names(settings: dict[str, Any]) -> None:
    settings["host_config"]["UTSMode"] = "host"
    settings["hostname"] = None


def _privileged(settings: dict[str, Any]) -> None:
    settings["host_config"]["Privileged"] = True


def _shared_memory(settings: dict[str, Any]) -> None:
    """Enlarge /dev/shm: Ringfence's own file system where the policy counts files, else the engine's."""
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


# Controls that are left out by mounting Podman's volume anew in the started container: Podman makes the volume before
# the request for the container is changed.
REMOUNTED_AFTER_START = {"tmpfs-bytes": "size=64m", "tmpfs-files": "nr_inodes=20000"}


# Controls of gVisor: changes of its OCI configuration.


def _process(name: str, value: object) -> Change:
    def change(config: dict[str, Any]) -> None:
        config["process"][name] = value

    return change


def _gvisor_writable(*, guestd: bool) -> Change:
    def change(config: dict[str, Any]) -> None:
        for mount in config["mounts"]:
            target = mount["destination"]
            if mount["type"] == "bind" and target != guestd_bundle.INSIDE and _is_below_guestd(target) is guestd:
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


def of_engine(backend: str) -> dict[str, Change]:
    """Return the controls of an engine, each with the change that leaves the control out."""
    return CONTAINER if backend == "container" else GVISOR


_EQUIVALENTS = {
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


def equivalents(backend: str) -> dict[str, str]:
    """Return, by control of the plan, the control of an engine that does the same."""
    return _EQUIVALENTS[backend]


_PROCESSES = {"pids-limit", "ulimit-nproc"}  # the engine's limits of processes, beside the limit that guestd sets


def left_out_of_engine(backend: str, missing: tuple[str, ...], judged: tuple[str, ...]) -> list[str]:
    """Return the engine's controls to leave out: those named in `missing`, and the equivalents of the plan's controls.

    A second control that stops the same attack is left out with the first, unless the attack is about it (`judged`).
    """
    known = of_engine(backend)
    engines = _EQUIVALENTS[backend]
    found = [engines.get(name, name) for name in missing if not (name == "process-limit" and _PROCESSES & {*judged})]
    if any(name.startswith("seccomp") or name == "last-layer" for name in missing) and "engine-seccomp" not in judged:
        found.append("engine-seccomp")
    if "pids-limit" in found and "ulimit-nproc" not in judged:
        found.append("ulimit-nproc")
    return [name for name in dict.fromkeys(found) if name in known]
