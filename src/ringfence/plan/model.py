"""Defines plans as plain data: facts about the host, the image that was found, and what a backend will do.

`SandboxPlan` has what the plans of all backends have. `LinuxPlan` is the plan of the backends that show a guest files
of this host and start processes of this machine: process, container, gVisor.
"""

from __future__ import annotations

from ringfence.values import Struct, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

    from ringfence.plan.rootfs.image_view import Root
    from ringfence.plan.rootfs.protected import Protected
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.results import Enforcement


class HostFacts(Struct):
    """Facts about this host, found cheaply and without side effects. A backend may add more facts."""

    as_root: bool
    machine: str
    kernel: str
    landlock_abi: int  # 0: none
    # The cgroup file that enforces each limit; None: no controller for the limit.
    memory_by: str | None = None
    cpu_by: str | None = None
    cpu_time_by: str | None = None
    pids_by: str | None = None
    has_freezer: bool = False  # our cgroups can be frozen


@final
class FoundImage(Struct):
    """An image as it was found on this host."""

    image: Image  # as the caller named it
    root: Root | None = None  # the tree of a stored image; None: the host's own system
    env: Mapping[str, str] = frozen_map({})  # variables of the image and of the caller, whose win
    on_disk: bool = False  # the caller wants the workspace on disk, not in memory

    def __post_init__(self) -> None:
        put(self, "env", frozen_map(self.env))


# ── operations: the steps that build a guest's root ───────────────────────────────────────────────

# Targets are relative to the new root. `guest/launch/mounts.py` applies the operations in order and decides nothing.


@final
class Folder(Struct):
    """Make a folder with the given mode."""

    target: str
    mode: int = 0o755


@final
class File(Struct):
    """Write a file with the given text."""

    target: str
    text: str = ""
    mode: int = 0o644


@final
class SymbolicLink(Struct):
    """Make a symbolic link at `target` that leads to `text`."""

    text: str
    target: str


@final
class Bind(Struct):
    """Show a host path at `target`, with all mounts below the path."""

    source: str
    target: str
    writable: bool = False
    idmap: bool = False  # the owner of the files is mapped to the guest's user
    inode: tuple[int, int] | None = None  # device and number that `source` must still have; None: not compared


@final
class Overlay(Struct):
    """Show a host path at `target` under a layer of this sandbox alone: a copy, or a view that lacks some names."""

    source: str
    target: str
    idmap: bool = False
    read_only: bool = False
    absent: tuple[str, ...] = ()  # paths below the source that the layer takes away
    inode: tuple[int, int] | None = None  # as for Bind


@final
class Device(Struct):
    """Show a device of the host at the same name in /dev."""

    name: str

    @property
    def target(self) -> str:
        return f"dev/{self.name}"


@final
class Hide(Struct):
    """Cover what is at `target` with an empty, read-only folder or file."""

    target: str


@final
class Pin(Struct):
    """Make `target` a mount point, so that the guest cannot rename it away."""

    target: str


@final
class Protect(Struct):
    """Make `target`, which lies in a writable mount, read-only."""

    target: str


Op: TypeAlias = Folder | File | SymbolicLink | Bind | Overlay | Device | Hide | Pin | Protect


def rows(ops: tuple[Op, ...]) -> list[list[object]]:
    """Return operations as the lists that the zygote takes."""
    return [_row(op) for op in ops]


def _row(op: Op) -> list[object]:
    if isinstance(op, Bind):
        shown: dict[str, object] = {"rw": op.writable, "idmap": op.idmap, "exec": True}
        return ["bind", op.source, op.target, shown if op.inode is None else {**shown, "inode": list(op.inode)}]
    if isinstance(op, Folder):
        return ["dir", op.target, op.mode]
    if isinstance(op, File):
        return ["file", op.target, op.text, op.mode]
    if isinstance(op, SymbolicLink):
        return ["symlink", op.text, op.target]
    if isinstance(op, Overlay):
        layer: dict[str, object] = {"idmap": op.idmap}
        if op.read_only:
            layer["ro"] = True
        if op.absent:
            layer["absent"] = list(op.absent)
        if op.inode is not None:
            layer["inode"] = list(op.inode)
        return ["overlay", op.source, op.target, layer]
    if isinstance(op, Device):
        return ["dev", op.name]
    if isinstance(op, Hide):
        return ["hide", op.target]
    return ["pin" if isinstance(op, Pin) else "protect", op.target]


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────


@final
class Fence(Struct):
    """The rights that guest processes give up, step by step. Every step is on; only the attack suite leaves one out."""

    processes: int
    rlimits: Mapping[str, int]
    landlock_abi: int
    seccomp: str | None  # both layers as programs, in hexadecimal digits
    last_layer: str | None
    no_new_privileges: bool = True
    capabilities: bool = True
    landlock_files: bool = True
    landlock_scopes: bool = True
    not_dumpable: bool = True
    namespace_limits: bool = True
    cgroup_namespace: bool = True

    def __post_init__(self) -> None:
        put(self, "rlimits", frozen_map(self.rlimits))

    def encoded(self) -> dict[str, object]:
        """Return the JSON form that both kinds of guestd take. The CPUs to run on are added for each sandbox."""
        fields: dict[str, object] = {name: getattr(self, name) for name in type(self).__fields__}
        return {**fields, "affinity": []}


@final
class TmpfsOptions(Struct):
    """Mount options of the sandbox's file systems in memory."""

    disk: str
    tmp: str
    shm: str


@final
class Outlets(Struct):
    """The ports on which a sandbox with a network listens for the gateway."""

    ports: tuple[int, ...]
    proxy: int
    streams: int  # connections at once where guestd relays connections; further connections wait

    def encoded(self) -> dict[str, object]:
        """Return the JSON form that guestd takes."""
        return {"ports": list(self.ports), "proxy": self.proxy, "streams": self.streams}


class SandboxPlan(Struct):
    """The steps by which a backend will enforce one policy, made by `Backend.plan` and run by `Backend.launch`."""

    policy: Policy
    image: FoundImage
    enforcement: Enforcement  # what will enforce each promise

    def lines(self) -> tuple[str, ...]:
        """Return the lines that `--explain` shows besides what enforces each promise."""
        return ()


@final
class LinuxPlan(SandboxPlan):
    """The plan of a root made of this host's files, in which processes of this machine run."""

    template: tuple[Op, ...]  # the root that sandboxes share, made while the host's tree is still there
    ops: tuple[Op, ...]  # what needs the sandbox's own uid, disk or private file systems; made after these exist
    as_root: bool
    namespaces: int  # flags of clone
    sizes: TmpfsOptions
    outlets: Outlets | None  # None: no network
    fence: Fence
    memory_bytes: int  # of the cgroup: the policy's memory and every tmpfs, so that a full disk is ENOSPC (F34)
    processes: int
    cpus: float
    env: Mapping[str, str]
    shown: tuple[str, ...]  # for --explain
    protected: tuple[Protected, ...]
    shared: bool  # nothing of the policy names host files: templates and spares may be kept
    proc_subset: bool
    proc_masks: bool = True
    user_namespace: bool = True
    fresh: bool = False  # Python code gets a new interpreter by exec instead of the zygote's address space
    cgroup: bool = True
    counts_on_cgroup: bool = False  # `enforcement` says that a cgroup enforces a limit: without one nothing may start
    foreign: bool = False  # the root is a stored image: once it is mounted, none of our modules may be imported (J19)
    disk: tuple[int, int] | Literal["folder"] | None = None  # the workspace's bytes and files in an image; None: memory
    python: str | None = None  # the Python of a foreign root, started anew for each run

    def __post_init__(self) -> None:
        put(self, "env", frozen_map(self.env))

    @property
    def writable(self) -> tuple[str, ...]:
        """Return the sources of mounts that the guest may write to, without links, as found when the plan was made."""
        binds = [op for op in self.template if isinstance(op, Bind)]
        return tuple(op.source for op in binds if op.writable and op.inode is not None)

    def lines(self) -> tuple[str, ...]:
        from ringfence.plan.build import explain_lines

        return explain_lines(self)

    def encoded(self) -> dict[str, object]:
        """Return the JSON form that the monitor takes. The sandbox's uid and CPUs are added for each sandbox."""
        return {
            "as_root": self.as_root,
            "owner": 0,
            "user_namespace": self.user_namespace,
            "namespaces": self.namespaces,
            "proc_subset": self.proc_subset,
            "proc_masks": self.proc_masks,
            "sizes": {"disk": self.sizes.disk, "tmp": self.sizes.tmp, "shm": self.sizes.shm},
            "ops": rows(self.ops),
            "outlets": None if self.outlets is None else self.outlets.encoded(),
            "fence": self.fence.encoded(),
        }


@final
class Plan(Struct):
    """The steps by which a backend will enforce a policy. Pure data; nothing has started."""

    backend: str
    enforcement: Enforcement
    rejected: Mapping[str, str]  # backend → why "auto" did not take it
    _lines: tuple[str, ...] = ()

    def explain(self) -> str:
        """Return the plan for people: the backend, why not another, and what enforces each promise."""
        lines = [f"backend: {self.backend}"]
        lines += [f"  not {name}: {why}" for name, why in self.rejected.items()]
        lines.append("enforced by:")
        width = max(len(name) for name in type(self.enforcement).__fields__)
        for name in type(self.enforcement).__fields__:
            control = getattr(self.enforcement, name)
            weaker = f"  (weaker: {control.note})" if control.level == "weaker" else ""
            lines.append(f"  {name.ljust(width)}  {control.mechanism}{weaker}")
        lines += self._lines
        return "\n".join(lines) + "\n"


def make_plan(backend: str, enforcement: Enforcement, rejected: Mapping[str, str], lines: tuple[str, ...]) -> Plan:
    plan = Plan(backend, enforcement, frozen_map(rejected))
    put(plan, "_lines", lines)
    return plan
