"""Makes the plan of a sandbox on this machine from a policy, an image and facts. Pure: same input, same plan."""

from __future__ import annotations

from ringfence.errors import UnsupportedError
from ringfence.plan.model import Bind, Fence, LinuxPlan, Outlets, Overlay, TmpfsOptions
from ringfence.plan.seccomp import compiled
from ringfence.results import Control, Enforcement
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import FoundImage, HostFacts, Op
    from ringfence.plan.rootfs.host_view import View
    from ringfence.policy.model import Limits, Policy


NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_SHM_BYTES = 64 << 20
_PAGE = 4096
# The kernel counts these for each user of a user namespace, so small numbers do not disturb other sandboxes (F33).
# CORE: a core of one byte is no core, and no other number keeps the kernel from handing the core to a program of the
# host, which runs as root.
_FIXED_RLIMITS = {"CORE": 1, "SIGPENDING": 1024, "MSGQUEUE": 819_200, "MEMLOCK": 8 << 20, "RTPRIO": 0, "NICE": 0}
HOME = "/workspace"


def plan_linux(policy: Policy, image: FoundImage, facts: HostFacts, view: View, *, fresh: bool) -> LinuxPlan:
    """Return the plan of a root that `view` shows, made by `through_sources`.

    Raises UnsupportedError for a machine that this version has no system call table for.
    """
    _check_machine(facts)
    limits = policy.limits
    root = image.root
    shm = min(_SHM_BYTES, limits.memory // 2)
    plan = LinuxPlan(
        policy=policy,
        image=image,
        template=view.template,
        ops=view.box,
        as_root=facts.as_root,
        namespaces=_namespaces(facts),
        proc_subset=policy.strict,
        sizes=_sizes(limits, shm, _made_in_tmp(view.box)),
        outlets=_outlets(policy),
        fence=_fence(policy, facts),
        memory_bytes=limits.memory + 2 * _whole_pages(limits.disk) + _whole_pages(shm),
        processes=limits.processes,
        cpus=limits.cpus,
        counts_on_cgroup=any((facts.memory_by, facts.cpu_by, facts.cpu_time_by, facts.pids_by)),
        env={**_environment(view), **_proxies(policy), **image.env, **policy.env},
        enforcement=_enforcement(facts, policy),
        shown=view.shown,
        protected=view.protected,
        shared=not policy.mounts and policy.commands == "any",
        fresh=fresh or root is not None,
        foreign=root is not None,
        python=root.python if root is not None else None,
    )
    return _on_disk(plan) if image.on_disk else plan


def _check_machine(facts: HostFacts) -> None:
    if facts.machine != "x86_64":
        raise UnsupportedError(
            f"this version has no system call table for {facts.machine}",
            code="machine",
            fix="use a machine with x86-64: the other backends need the table too",
        )


def _namespaces(facts: HostFacts) -> int:
    """Return the flags of clone.

    As root, PID 1 makes the user namespace later: namespaces made before belong to the initial user namespace.
    """
    own = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    return own if facts.as_root else own | NEWUSER


def through_sources(view: View) -> View:
    """Return `view` with its template keeping the sources of the box operations.

    The monitor makes box operations when the host's tree is gone. Done once for a view: all plans of a view share its
    template, by identity.
    """
    sources: list[Op] = []
    changed: list[Op] = []
    for op in view.box:
        if isinstance(op, Bind | Overlay):
            kept = f".sources/{len(sources)}"
            writable = isinstance(op, Bind) and op.writable
            sources.append(Bind(op.source, kept, writable, inode=op.inode))
            changed.append(replace(op, source=f"/{kept}", inode=None))
        else:
            changed.append(op)
    return replace(view, template=(*view.template, *sources), box=tuple(changed))


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _made_in_tmp(ops: tuple[Op, ...]) -> int:
    """Return how many inodes the mount points below /tmp take, as for a caller whose Python is in /tmp."""
    targets = [op.target for op in ops if isinstance(op, Bind | Overlay)]
    return sum(target.count("/") + 1 for target in targets if target.startswith("tmp/"))


def _sizes(limits: Limits, shm: int, made_in_tmp: int) -> TmpfsOptions:
    """Return tmpfs options. Each counts one inode more than asked for: the root of the tmpfs."""
    size = f"size={_whole_pages(limits.disk)}"
    return TmpfsOptions(
        disk=f"{size},nr_inodes={limits.disk_files + 1}",
        tmp=f"{size},nr_inodes={limits.disk_files + 1 + made_in_tmp}",
        shm=f"size={_whole_pages(shm)},nr_inodes=1001",
    )


def _fence(policy: Policy, facts: HostFacts) -> Fence:
    limits = policy.limits
    rlimits = {**_FIXED_RLIMITS, "NOFILE": limits.open_files, "CPU": int(limits.cpu_time_s) + 1}
    if facts.memory_by is None:
        rlimits["DATA"] = limits.memory
    return Fence(limits.processes, rlimits, facts.landlock_abi, seccomp=compiled.GUEST, last_layer=compiled.LAST)


def _environment(view: View) -> dict[str, str]:
    """Return all variables of a guest besides the image's and the policy's.

    None comes from the host's environment (H01).
    """
    return {"PATH": view.path, "HOME": HOME, "TMPDIR": "/tmp", "USER": "user", "LANG": "C.UTF-8"}  # inside


def has_network(policy: Policy) -> bool:
    """Return whether anything can be reached at all. An empty list allows nothing."""
    return bool(policy.network.allow or policy.network.rules)


def _outlets(policy: Policy) -> Outlets | None:
    if not has_network(policy):
        return None
    from ringfence.policy.reach import listening_ports, proxy_port, relayed_streams

    network = policy.network
    return Outlets(tuple(listening_ports(network)), proxy_port(network), relayed_streams(network))


def _proxies(policy: Policy) -> dict[str, str]:
    """Return the variables by which programs find the proxy.

    All name the HTTP proxy: SOCKS would need a library in the guest.
    """
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
    """Return what enforces the share `cpus` and the time `cpu_time_s`, which are two promises."""
    if facts.cpu_by is not None and facts.cpu_time_by is not None:
        return _full(f"{facts.cpu_by} + CPU affinity")
    by = ["CPU affinity", facts.cpu_time_by or "RLIMIT_CPU"]
    notes = []
    if facts.cpu_by is not None:
        by.insert(0, facts.cpu_by)
    else:
        notes.append("whole CPUs by affinity, which a guest can widen to all CPUs of the host")
    if facts.cpu_time_by is None:
        notes.append("CPU time is limited for each process, not for the tree; in a session, for its interpreter alone")
    return Control(" + ".join(by), "weaker", "; ".join(notes))


def _memory(facts: HostFacts) -> Control:
    if facts.memory_by is not None:
        return _full(facts.memory_by, "the limit is memory plus the sizes of the file systems in memory")
    return Control("RLIMIT_DATA", "weaker", "for each process, not for the tree; shared memory is not counted")


def explain_lines(plan: LinuxPlan) -> tuple[str, ...]:
    """Return what is shown, what can be reached and which calls pass, for --explain."""
    from ringfence.plan.seccomp import compiler
    from ringfence.policy.explain import network_lines

    lines = ["shown inside:", *(f"  {line}" for line in plan.shown)] if plan.shown else []
    if plan.outlets is not None:
        lines += ["network:", *(f"  {line}" for line in network_lines(plan.policy.network))]
    return (*lines, "system calls:", *(f"  {line}" for line in compiler.describe()))


# ── a workspace on disk in place of the one in memory ─────────────────────────────────────────────

_SOURCE = ".sources/workspace"
_NOTE = "RLIMIT_FSIZE limits each file to limits.disk; the sum of all files and their number are not limited"


def _on_disk(plan: LinuxPlan) -> LinuxPlan:
    """Return the plan with its workspace on disk: as root in an image of exact size, else in a folder without a quota.

    The workspace then takes no part of `limits.memory`: its pages are the host's cache.
    """
    limits = plan.policy.limits
    size = _whole_pages(limits.disk)
    if plan.as_root:
        held = Control("ext4 in an image file: its blocks and inodes", "full")
        less = plan.memory_bytes - size
        return replace(
            plan, disk=(size, limits.disk_files), memory_bytes=less, enforcement=replace(plan.enforcement, disk=held)
        )
    in_memory = any(isinstance(op, Overlay) for op in plan.ops)  # what copies of mounts change stays there
    held = Control("a folder on the host's disk + RLIMIT_FSIZE", "weaker", _NOTE)
    return replace(
        plan,
        disk="folder",
        fence=replace(plan.fence, rlimits={**plan.fence.rlimits, "FSIZE": size}),
        memory_bytes=plan.memory_bytes - (0 if in_memory else size),
        enforcement=replace(plan.enforcement, disk=held),
    )


def with_folder(plan: LinuxPlan, path: str) -> LinuxPlan:
    """Return the plan of a sandbox with the host's folder `path` as workspace.

    The workspace is mounted before what the policy mounts below it.
    """
    template = (*plan.template, Bind(path, _SOURCE, writable=True))
    ops = (Bind(f"/{_SOURCE}", "workspace", writable=True), *plan.ops)
    return replace(plan, template=template, ops=ops, shared=False)
