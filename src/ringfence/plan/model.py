"""What a plan is made of: facts about the host, and everything a backend needs to know to keep a policy. Plain data."""

from __future__ import annotations

from ringfence.values import Struct, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from ringfence.plan.rootfs.protected import Protected
    from ringfence.results import Enforcement

    Op = list[object]


@final
class HostFacts(Struct):
    """What was found out about this host, cheaply and without side effects. None: no cgroup controller for it."""

    as_root: bool
    machine: str
    kernel: str
    landlock_abi: int  # 0: none
    cpus: tuple[int, ...]  # this process may run on
    memory_by: str | None
    cpu_by: str | None
    cpu_time_by: str | None
    pids_by: str | None


@final
class ProcessPlan(Struct):
    """What the process backend will do. `box` goes to the monitor as it is, with the sandbox's uid and CPUs added."""

    template: tuple[Op, ...]
    box: Mapping[str, object]
    memory_bytes: int  # of the cgroup: the policy's memory and every tmpfs, so that a full disk is ENOSPC (F34)
    processes: int
    cpus: float
    env: Mapping[str, str]
    enforcement: Enforcement
    shown: tuple[str, ...]  # for --explain
    protected: tuple[Protected, ...]
    shared: bool  # nothing of the policy names host files: templates and spares may be kept
    fresh: bool = False  # Python code gets a new interpreter by exec instead of the zygote's address space
    cgroup: bool = True
    foreign: bool = False  # the root is a stored image: nothing of ours may be imported once it stands (J19)
    disk: tuple[int, int] | Literal["folder"] | None = None  # the workspace's bytes and files in an image; None: memory
    python: str | None = None  # of a foreign root: its own Python, started anew for each run

    def __post_init__(self) -> None:
        put(self, "env", frozen_map(self.env))

    @property
    def fence(self) -> Mapping[str, object]:
        """What guest processes give up, step by step."""
        fence = self.box["fence"]
        assert isinstance(fence, dict)
        return fence

    @property
    def writable(self) -> tuple[str, ...]:
        """Sources of mounts that the guest may write to, without links, as they were looked at."""
        binds = [(str(op[1]), op[3]) for op in self.template if op[0] == "bind"]
        return tuple(where for where, how in binds if isinstance(how, dict) and how.get("rw") and "inode" in how)

    @property
    def box_ops(self) -> list[Op]:
        """Operations that need the sandbox's own uid or disk."""
        ops = self.box["ops"]
        assert isinstance(ops, list)
        return ops


@final
class Plan(Struct):
    """What a backend will do to keep a policy. Pure; nothing has started."""

    backend: str
    enforcement: Enforcement
    rejected: Mapping[str, str]  # backend → why "auto" did not take it
    _lines: tuple[str, ...] = ()

    def explain(self) -> str:
        """The plan for people: the backend, why not another, and what holds each promise."""
        lines = [f"backend: {self.backend}"]
        lines += [f"  not {name}: {why}" for name, why in self.rejected.items()]
        lines.append("held by:")
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
