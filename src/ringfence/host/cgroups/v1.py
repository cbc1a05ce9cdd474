"""cgroup v1 as root: one directory per controller below each hierarchy's own root.

Measured on a quiet machine: the first join of a process waits 5 to 15 ms for an RCU grace period, every further one
right after it takes 0.02 ms, and making a directory 0.03 ms. Therefore all five controllers are joined at once. A
freezer that is joined later would have to chase a forking guest.
"""

from __future__ import annotations

import errno
import os
import time

from ringfence.host import process_id
from ringfence.host.cgroups import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.host.cgroups.base import DeadTest, GroupLimits

CONTROLLERS = ("memory", "cpu", "cpuacct", "pids", "freezer")
_ROUNDS_BEFORE_FREEZE = 5
_FREEZE_AGAIN_S = 0.15


def find() -> Tree | None:
    """Return the tree of this host, or None when no hierarchy can be written (not root, or mounted read-only)."""
    roots = {}
    for controller in CONTROLLERS:
        root = f"{base.MOUNT}/{controller}"
        if os.access(root, os.W_OK) and os.access(f"{root}/cgroup.procs", os.W_OK):
            linked = os.path.islink(root)  # cpu and cpuacct are often links to one hierarchy
            roots[controller] = os.path.realpath(root) if linked else root
    return Tree(roots) if roots else None


def remove_dead_owners(is_dead: DeadTest) -> list[str]:
    """Do what `cgroups.remove_dead_owners` says. Thaws before it kills (D18)."""
    tree = find()
    if tree is None:
        return []
    found: set[str] = set()
    for root in tree.unique_roots:
        found.update(name for name in base.names(f"{root}/{base.BASE}") if is_dead(name))
    return [path for owner in sorted(found) for path in tree.remove_owner(owner, timeout_s=2.0)]


class Tree(base.Tree):
    """The v1 hierarchies this process can write."""

    kind = "cgroup v1"

    def __init__(self, roots: dict[str, str]) -> None:
        self.roots = roots
        self.unique_roots = list(dict.fromkeys(roots.values()))
        self.has_memory = "memory" in roots
        self.has_cpu = "cpu" in roots
        self.has_pids = "pids" in roots
        self.has_freezer = "freezer" in roots
        memory = roots.get("memory", "")
        self._boxes: set[str] = set()
        self.counts_swap = os.path.exists(f"{memory}/memory.memsw.limit_in_bytes")
        self.counts_tcp = os.path.exists(f"{memory}/memory.kmem.tcp.limit_in_bytes")

    @property
    def mechanisms(self) -> base.Mechanisms:
        swap = "" if self.counts_swap else " (swap is not counted: memory.memsw is missing)"
        return base.Mechanisms(
            memory=f"cgroup v1 memory.limit_in_bytes{swap}" if self.has_memory else None,
            cpu="cgroup v1 cpu.cfs_quota_us" if self.has_cpu else None,
            cpu_time="cgroup v1 cpuacct.usage" if "cpuacct" in self.roots else None,
            processes="cgroup v1 pids.max" if self.has_pids else None,
        )

    def create(self, box_id: str, limits: GroupLimits) -> Group:
        base.check_box_id(box_id)
        owner = process_id.name()
        group = Group(self, box_id, owner)
        _make(self.unique_roots[0], owner, box_id)  # refuses an id in use before any of its groups is touched
        try:
            for root in self.unique_roots[1:]:
                _make(root, owner, box_id)
            self._boxes.add(box_id)
            group.prepare()
            group.set(limits)
        except OSError:
            group.remove()
            raise
        return group

    def owner_directories(self) -> list[str]:
        return [f"{root}/{base.BASE}/{process_id.name()}" for root in self.unique_roots]

    def close(self, timeout_s: float = 2.0) -> bool:
        owner = process_id.name()
        gone = [Group(self, box_id, owner).remove(timeout_s) for box_id in sorted(self._boxes)]
        self._boxes.clear()
        for root in self.unique_roots:
            base.remove_if_empty(f"{root}/{base.BASE}/{owner}")
            base.remove_if_empty(f"{root}/{base.BASE}")
        return all(gone)

    def forget(self, box_id: str) -> None:
        """Drop a group that is gone."""
        self._boxes.discard(box_id)

    def remove_owner(self, owner: str, timeout_s: float) -> list[str]:
        """Kill and remove every group of an owner. Return the directories that are gone."""
        tops = [f"{root}/{base.BASE}/{owner}" for root in self.unique_roots]
        boxes = {name for top in tops for name in base.names(top)}
        for box_id in sorted(boxes):
            Group(self, box_id, owner).remove(timeout_s)
        removed = []
        for top in tops:
            if os.path.isdir(top) and base.rmdir_until([top], time.monotonic()):
                removed.append(top)
            base.remove_if_empty(os.path.dirname(top))
        return removed


class Group(base.Group):
    """The cgroup of a sandbox: a directory in each hierarchy."""

    def __init__(self, tree: Tree, box_id: str, owner: str) -> None:
        self.box_id = box_id
        self._tree = tree
        below = f"{base.BASE}/{owner}/{box_id}"
        self._at = {controller: f"{root}/{below}" for controller, root in tree.roots.items()}
        self._directories = [f"{root}/{below}" for root in tree.unique_roots]
        self._memory_bytes: int | None = None

    def prepare(self) -> None:
        """Set what stays the same. Without swap accounting, at least prefer not to swap the guest out (F05)."""
        if self._tree.has_memory and not self._tree.counts_swap:
            base.write(f"{self._at['memory']}/memory.swappiness", "0")

    def join_fds(self) -> list[int]:
        fds: list[int] = []
        try:
            # A thread that moves itself by `tasks` takes no lock of the whole kernel; by cgroup.procs it would, and
            # wait 5 to 20 ms. The process that writes there has a single thread (kernel fact 8).
            flags = os.O_WRONLY | os.O_CLOEXEC
            fds.extend(os.open(f"{directory}/tasks", flags) for directory in self._directories)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def set(self, limits: GroupLimits) -> None:
        if self._tree.has_memory:
            self._set_memory(limits.memory_bytes)
        if self._tree.has_cpu:
            self._set_cpu(limits.cpus)
        if self._tree.has_pids:
            base.write(f"{self._at['pids']}/pids.max", str(limits.processes))

    def _set_memory(self, memory_bytes: int) -> None:
        files = ["memory.limit_in_bytes"]
        if self._tree.counts_swap:
            files.append("memory.memsw.limit_in_bytes")
        if self._memory_bytes is not None and memory_bytes > self._memory_bytes:
            files.reverse()  # the kernel keeps limit <= memsw.limit at every step
        if self._tree.counts_tcp:
            files.append("memory.kmem.tcp.limit_in_bytes")  # v1 counts socket buffers only once this is set (F04)
        for file in files:
            base.write(f"{self._at['memory']}/{file}", str(memory_bytes))
        self._memory_bytes = memory_bytes

    def _set_cpu(self, cpus: float) -> None:
        file = f"{self._at['cpu']}/cpu.cfs_quota_us"
        try:
            base.write(file, str(base.quota_us(cpus)))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            base.write(file, "-1")  # more than a group above us has: its tighter limit is enforced

    def cpu_fd(self) -> int | None:
        if "cpuacct" not in self._at:
            return None
        return os.open(f"{self._at['cpuacct']}/cpuacct.usage", os.O_RDONLY | os.O_CLOEXEC)

    def usage(self) -> base.GroupUsage:
        at = self._at
        nanoseconds = base.number(f"{at.get('cpuacct')}/cpuacct.usage")
        return base.GroupUsage(
            cpu_s=None if nanoseconds is None else nanoseconds / 1e9,
            memory_peak_bytes=base.number(f"{at.get('memory')}/memory.max_usage_in_bytes"),
            processes_peak=base.number(f"{at.get('pids')}/pids.peak"),
            oom_kills=base.counter(f"{at.get('memory')}/memory.oom_control", "oom_kill"),
        )

    def freeze(self, timeout_s: float = 2.0) -> bool:
        state = f"{self._at['freezer']}/freezer.state"
        base.write(state, "FROZEN")
        now = time.monotonic()
        deadline = now + timeout_s
        again = now + _FREEZE_AGAIN_S
        while (base.read(state) or "").strip() != "FROZEN":
            now = time.monotonic()
            if now >= deadline:
                return False
            # A process that waits for a frozen process, as a tracer does, may keep the freeze from ending.
            if now >= again:
                base.write(state, "THAWED")
                time.sleep(0.01)
                base.write(state, "FROZEN")
                again = now + _FREEZE_AGAIN_S
            time.sleep(0.001)
        return True

    def is_frozen(self) -> bool:
        state = f"{self._at['freezer']}/freezer.state" if self._tree.has_freezer else ""
        return bool(state) and (base.read(state) or "").strip() == "FROZEN"

    @property
    def can_freeze(self) -> bool:
        return self._tree.has_freezer

    def thaw(self) -> None:
        if self._tree.has_freezer:
            base.write_if_there(f"{self._at['freezer']}/freezer.state", "THAWED")

    def freezer_fd(self) -> int | None:
        if not self._tree.has_freezer:
            return None
        return os.open(f"{self._at['freezer']}/freezer.state", os.O_RDWR | os.O_CLOEXEC)

    def kill(self, timeout_s: float = 2.0) -> bool:
        deadline = time.monotonic() + timeout_s
        self.thaw()
        rounds = 0
        while self._signal_all():
            if time.monotonic() >= deadline:
                return False
            rounds += 1
            if rounds % _ROUNDS_BEFORE_FREEZE == 0 and self._tree.has_freezer:
                self._kill_frozen()
            time.sleep(min(0.0005 * rounds, 0.02))
        return True

    def _kill_frozen(self) -> None:
        """Freeze processes that fork faster than we kill, signal all, then thaw the group so that all die."""
        try:
            self.freeze(timeout_s=0.2)
            self._signal_all()
        except FileNotFoundError:
            return  # another process, which removes the group too, was faster
        finally:
            self.thaw()

    def _signal_all(self) -> int:
        return sum(base.signal_all(directory) for directory in self._directories)

    def remove(self, timeout_s: float = 2.0) -> bool:
        deadline = time.monotonic() + timeout_s
        gone = base.rmdir_until(self._directories, 0)  # mostly all processes have ended already
        if not gone:
            self.kill(timeout_s)
            gone = base.rmdir_until(self._directories, deadline)
        if gone:
            self._tree.forget(self.box_id)
        return gone


def _make(root: str, owner: str, box_id: str) -> None:
    for _ in range(10):
        try:
            base.make(f"{root}/{base.BASE}/{owner}/{box_id}")
            return
        except FileNotFoundError:  # our first group, or another process removed the empty base between our two steps
            base.make_dirs(root, base.BASE, owner)
    raise OSError(errno.EBUSY, "the cgroup base directory vanishes as fast as it is made", f"{root}/{base.BASE}")
