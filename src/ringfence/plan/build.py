"""policy + host facts → what the process backend will do. Pure: the same input gives the same plan."""

from __future__ import annotations

from ringfence.errors import UnsupportedError
from ringfence.plan.model import HostFacts, ProcessPlan
from ringfence.plan.seccomp import compiled
from ringfence.results import Control, Enforcement
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.plan.model import Op
    from ringfence.plan.rootfs.host_view import View
    from ringfence.plan.rootfs.image_view import Root
    from ringfence.policy.model import Limits, Policy


NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_SHM_BYTES = 64 << 20
_PAGE = 4096
# Counted by the kernel for each user of a user namespace, so small numbers do not disturb other sandboxes (F33).
# A core of one byte is none, and 1 alone keeps the kernel from handing it to a program of the host, which runs as root.
_FIXED_RLIMITS = {"CORE": 1, "SIGPENDING": 1024, "MSGQUEUE": 819_200, "MEMLOCK": 8 << 20, "RTPRIO": 0, "NICE": 0}
HOME = "/workspace"


def plan_process(
    policy: Policy, facts: HostFacts, view: View, *, image_env: Mapping[str, str], fresh: bool, root: Root | None = None
) -> ProcessPlan:
    """`view`: through its sources. `root`: of a stored image, None for the host's."""
    _check_machine(facts)
    limits = policy.limits
    shm = min(_SHM_BYTES, limits.memory // 2)
    return ProcessPlan(
        template=view.template,
        box={
            "as_root": facts.as_root,
            "owner": 0,
            "user_namespace": True,
            "namespaces": _namespaces(facts),
            "proc_subset": policy.strict,
            "proc_masks": True,
            "sizes": _sizes(limits, shm, _made_in_tmp(view.box)),
            "ops": list(view.box),
            "outlets": _outlets(policy),
            "fence": _fence(policy, facts),
        },
        memory_bytes=limits.memory + 2 * _whole_pages(limits.disk) + _whole_pages(shm),
        processes=limits.processes,
        cpus=limits.cpus,
        env={**_environment(view), **_proxies(policy), **image_env, **policy.env},
        enforcement=_enforcement(facts, policy),
        shown=view.shown,
        protected=view.protected,
        shared=not policy.mounts and policy.commands == "any",
        fresh=fresh or root is not None,
        foreign=root is not None,
        python=root.python if root is not None else None,
    )


def _check_machine(facts: HostFacts) -> None:
    if facts.machine != "x86_64":
        raise UnsupportedError(
            f"this version has no system call table for {facts.machine}",
            code="machine",
            fix="use a machine with x86-64: the other backends need the table too",
        )


def _namespaces(facts: HostFacts) -> int:
    """As root the user namespace comes later, made by PID 1: what is made before it belongs to the initial one."""
    own = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    return own if facts.as_root else own | NEWUSER


def through_sources(view: View) -> View:
    """The monitor makes box operations when the host's tree is gone: the template keeps their sources for it.

    Done once for a view: plans that share it share its template, by identity.
    """
    sources: list[Op] = []
    changed: list[Op] = []
    for op in view.box:
        if op[0] in ("bind", "overlay"):
            kept = f".sources/{len(sources)}"
            assert isinstance(op[3], dict)
            options = {name: value for name, value in op[3].items() if name != "inode"}
            shown = {"rw": bool(options.get("rw")), "idmap": False, "exec": True}
            sources.append(["bind", op[1], kept, shown | ({"inode": op[3]["inode"]} if "inode" in op[3] else {})])
            changed.append([op[0], f"/{kept}", op[2], options])
        else:
            changed.append(op)
    return replace(view, template=(*view.template, *sources), box=tuple(changed))


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _made_in_tmp(ops: tuple[Op, ...]) -> int:
    """Inodes that mount points below /tmp take: a caller whose Python lies there."""
    return sum(
        str(op[2]).count("/") + 1 for op in ops if op[0] in ("bind", "overlay") and str(op[2]).startswith("tmp/")
    )


def _sizes(limits: Limits, shm: int, made_in_tmp: int) -> dict[str, str]:
    """tmpfs options. The root of a tmpfs is an inode of its own, hence the one more."""
    size = f"size={_whole_pages(limits.disk)}"
    disk = f"{size},nr_inodes={limits.disk_files + 1}"
    return {
        "disk": disk,
        "tmp": f"{size},nr_inodes={limits.disk_files + 1 + made_in_tmp}",
        "shm": f"size={_whole_pages(shm)},nr_inodes=1001",
    }


def _fence(policy: Policy, facts: HostFacts) -> dict[str, object]:
    limits = policy.limits
    rlimits = {**_FIXED_RLIMITS, "NOFILE": limits.open_files, "CPU": int(limits.cpu_time_s) + 1}
    if facts.memory_by is None:
        rlimits["DATA"] = limits.memory
    return {
        "processes": limits.processes,
        "rlimits": rlimits,
        "affinity": [],
        "no_new_privileges": True,
        "capabilities": True,
        "landlock_abi": facts.landlock_abi,
        "landlock_files": True,
        "landlock_scopes": True,
        "seccomp": compiled.GUEST,
        "last_layer": compiled.LAST,
        "not_dumpable": True,
        "namespace_limits": True,
        "cgroup_namespace": True,
    }


def _environment(view: View) -> dict[str, str]:
    """All of a guest's variables besides the image's and the policy's. None comes from the host's environment (H01)."""
    return {"PATH": view.path, "HOME": HOME, "TMPDIR": "/tmp", "USER": "user", "LANG": "C.UTF-8"}  # inside


def has_network(policy: Policy) -> bool:
    """Whether anything can be reached at all. An empty list allows nothing."""
    return bool(policy.network.allow or policy.network.rules)


def _outlets(policy: Policy) -> dict[str, object] | None:
    if not has_network(policy):
        return None
    from ringfence.policy.reach import listening_ports, proxy_port, relayed_streams

    ports = list(listening_ports(policy.network))
    return {"ports": ports, "proxy": proxy_port(policy.network), "streams": relayed_streams(policy.network)}


def _proxies(policy: Policy) -> dict[str, str]:
    """For programs that know proxies. An HTTP proxy for all of them: SOCKS would need a library of its own."""
    if not has_network(policy):
        return {}
    from ringfence.policy.reach import proxy_port

    proxy = f"http://127.0.0.1:{proxy_port(policy.network)}"
    own = "localhost,127.0.0.1,::1"
    upper = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy, "NO_PROXY": own}
    return {**upper, **{name.lower(): value for name, value in upper.items()}}


def _full(mechanism: str, note: str = "") -> Control:
    return Control(mechanism, "full", note)


def _enforcement(facts: HostFacts, policy: Policy) -> Enforcement:
    landlock = f" + Landlock ABI {facts.landlock_abi}" if facts.landlock_abi else ""
    pids = f" + {facts.pids_by}" if facts.pids_by else ""
    return Enforcement(
        files=_full(f"mount namespace + read-only root{landlock}"),
        network=_network(policy),
        processes=_full(f"pid namespace + RLIMIT_NPROC in a user namespace{pids}"),
        syscalls=_full("seccomp allow-list"),
        privileges=_full("user namespace, no capabilities, no_new_privs"),
        time=_full("clock of the monitor, outside the sandbox"),
        cpu=_cpu(facts),
        memory=_memory(facts),
        disk=_full("tmpfs size and inodes"),
        output=_full("host keeps the first and last half"),
    )


def _network(policy: Policy) -> Control:
    if not has_network(policy):
        return _full("empty network namespace")
    return Control("network namespace without a card + gateway by name", "full", reports=True)


def _cpu(facts: HostFacts) -> Control:
    """Two promises in one: the share, `cpus`, and the time, `cpu_time_s`."""
    if facts.cpu_by is not None and facts.cpu_time_by is not None:
        return _full(f"{facts.cpu_by} + CPU affinity")
    by, notes = ["CPU affinity", facts.cpu_time_by or "RLIMIT_CPU"], []
    if facts.cpu_by is not None:
        by.insert(0, facts.cpu_by)
    else:
        notes.append("whole CPUs by affinity, which a guest can widen to all of the host's")
    if facts.cpu_time_by is None:
        notes.append("CPU time for each process and not for the tree; in a session for its interpreter")
    return Control(" + ".join(by), "weaker", ", ".join(notes))


def _memory(facts: HostFacts) -> Control:
    if facts.memory_by is not None:
        return _full(facts.memory_by, "the limit is memory plus the sizes of the file systems in memory")
    return Control("RLIMIT_DATA", "weaker", "for each process, not for the tree; shared memory is not counted")


IMPORTABLE = (
    "writable, and a folder of sys.path: what your own Python imports from there later may be the guest's; "
    "Ringfence's own imports leave it out"
)


def importable(plan: ProcessPlan) -> list[str]:
    """Folders of this process's `sys.path` that the guest could write to (L12)."""
    if not plan.writable:
        return []
    from ringfence.host import import_path

    return import_path.importable(plan.writable, [one.path for one in plan.protected if not one.missing])


def explain_lines(plan: ProcessPlan, policy: Policy) -> tuple[str, ...]:
    """What is shown, what can be reached and which calls pass, for --explain."""
    from ringfence.plan.seccomp import compiler
    from ringfence.policy.explain import network_lines

    lines = ["shown inside:", *(f"  {line}" for line in plan.shown)] if plan.shown else []
    lines += [f"  {folder}: {IMPORTABLE}" for folder in importable(plan)]
    if has_network(policy):
        lines += ["network:", *(f"  {line}" for line in network_lines(policy.network))]
    return (*lines, "system calls:", *(f"  {line}" for line in compiler.describe()))


# MERGED: Turns a plan with its workspace in memory into one with its workspace on disk. Pure.


_PAGE_DISK = 4096
_SOURCE = ".sources/workspace"
_NOTE = "each file is held to limits.disk by RLIMIT_FSIZE, their sum and their number by nothing"


def on_disk(plan: ProcessPlan, limits: Limits) -> ProcessPlan:
    """As root an image of exactly that size; for others a folder, which has no quota and says so.

    `limits.memory` is then not shared with the workspace, whose pages are the host's cache.
    """
    size = -(-limits.disk // _PAGE_DISK) * _PAGE_DISK
    if plan.box["as_root"]:
        held = Control("ext4 in an image file: its blocks and inodes", "full")
        less = plan.memory_bytes - size
        return replace(
            plan, disk=(size, limits.disk_files), memory_bytes=less, enforcement=replace(plan.enforcement, disk=held)
        )
    fence = dict(plan.fence)
    fence["rlimits"] = {**plan.fence["rlimits"], "FSIZE": size}  # type: ignore[dict-item]  # a dict: see plan.process
    in_memory = any(op[0] == "overlay" for op in plan.box_ops)  # what copies of mounts change stays there
    held = Control("a folder on the host's disk + RLIMIT_FSIZE", "weaker", _NOTE)
    return replace(
        plan,
        disk="folder",
        box={**plan.box, "fence": fence},
        memory_bytes=plan.memory_bytes - (0 if in_memory else size),
        enforcement=replace(plan.enforcement, disk=held),
    )


def with_folder(plan: ProcessPlan, path: str) -> ProcessPlan:
    """The plan of one sandbox: `path` on the host is its workspace. Mounts below /workspace come after it."""
    shown = {"rw": True, "idmap": False, "exec": True}
    template = (*plan.template, ["bind", path, _SOURCE, shown])
    ops = [["bind", f"/{_SOURCE}", "workspace", shown], *plan.box_ops]
    return replace(plan, template=template, box={**plan.box, "ops": ops}, shared=False)
