"""cgroup v2: as root below the hierarchy's root, as an ordinary user in a subtree that was delegated.

The kernel lets no group hold both processes and children with controllers. Therefore processes are in leaves only, and
the caller's own group cannot be used, as we never move the caller: a group above it has to be writable.
"""

from __future__ import annotations

import errno
import os
import time

from ringfence.errors import UnsupportedError
from ringfence.host import process_id
from ringfence.host.cgroups import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.host.cgroups.base import DeadTest, GroupLimits

WANTED = ("memory", "pids", "cpu")
ZYGOTE = "zygote.leaf"  # no box id holds a dot
_ADOPT_S = 2.0


def find() -> Tree | None:
    """Return the tree that this process can use now, or None when no group it may write can have controllers."""
    parent = _parent()
    return None if parent is None else Tree(parent, f"{parent}/{base.BASE}", _controllers(parent))


def delegable() -> ScopeTree | None:
    """Do what `cgroups.delegable` says."""
    runtime = f"/run/user/{os.geteuid()}"
    manager = _manager()
    if not os.path.exists(f"{runtime}/systemd/private") or not os.path.isdir(manager):
        return None
    from ringfence.host import programs

    program = programs.find("systemd-run", path="")
    if program is None:
        return None
    return ScopeTree(program, runtime, _read_set(f"{manager}/cgroup.controllers"))


def remove_dead_owners(is_dead: DeadTest) -> list[str]:
    """Do what `cgroups.remove_dead_owners` says, for scopes too, though systemd removes an empty scope itself."""
    removed: list[str] = []
    parent = _parent()
    if parent is not None:
        top = f"{parent}/{base.BASE}"
        dead = [f"{top}/{owner}" for owner in base.names(top) if is_dead(owner)]
        removed += [directory for directory in dead if remove_tree(directory, 2.0)]
        base.remove_if_empty(top)
    if os.geteuid() != 0:
        removed += _remove_dead_scopes(is_dead)
    return removed


def _remove_dead_scopes(is_dead: DeadTest) -> list[str]:
    slice_ = f"{_manager()}/app.slice"
    removed = []
    for name in base.names(slice_):
        owner = name.removeprefix(f"{base.BASE}-").removesuffix(".scope").rpartition("-")[0]
        if name.startswith(f"{base.BASE}-") and is_dead(owner) and remove_tree(f"{slice_}/{name}", 2.0):
            removed.append(f"{slice_}/{name}")
    return removed


class Tree(base.Tree):
    """Groups at `<parent>/ringfence/<owner>/<box>`; `parent` belongs to the host, everything below to us."""

    kind = "cgroup v2"

    def __init__(self, parent: str, top: str, controllers: set[str]) -> None:
        self._parent = parent
        self._base = top
        self._pid = os.getpid()
        self._boxes: set[str] = set()  # directories
        self._take(controllers)

    def _take(self, controllers: set[str]) -> None:
        self.controllers = [controller for controller in WANTED if controller in controllers]
        self.has_memory = "memory" in controllers
        self.has_cpu = "cpu" in controllers
        self.has_pids = "pids" in controllers
        self.has_freezer = True  # part of the core of v2 since 5.2

    @property
    def mechanisms(self) -> base.Mechanisms:
        return base.Mechanisms(
            memory="cgroup v2 memory.max" if self.has_memory else None,
            cpu="cgroup v2 cpu.max" if self.has_cpu else None,
            cpu_time="cgroup v2 cpu.stat",  # of the core, as the freezer is
            processes="cgroup v2 pids.max" if self.has_pids else None,
        )

    def create(self, box_id: str, limits: GroupLimits) -> Group:
        base.check_box_id(box_id)
        group = Group(self, self._make(box_id), box_id)
        self._boxes.add(group.directory)
        try:
            group.prepare()
            group.set(limits)
        except OSError:
            group.remove()
            raise
        return group

    @property
    def path(self) -> str | None:
        return self._owner_base()

    def owner_directories(self) -> list[str]:
        return [self._owner_base()]

    def close(self, timeout_s: float = 2.0) -> bool:
        if os.getpid() != self._pid:
            return True  # a fork of the process that made the groups does not own them
        gone = [remove_tree(directory, timeout_s) for directory in sorted(self._boxes)]
        self._boxes.clear()
        for directory in (self._owner_base(), self._base):
            base.remove_if_empty(directory)
        return all(gone)

    def forget(self, directory: str) -> None:
        """Drop a group that is gone."""
        self._boxes.discard(directory)

    def _owner_base(self) -> str:
        return f"{self._base}/{process_id.name()}"

    def _make(self, leaf: str) -> str:
        """Make a leaf, and the groups above when missing: another tree or process removes empty groups."""
        directory = self._owner_base()
        for _ in range(10):
            try:
                base.make(f"{directory}/{leaf}")
            except FileNotFoundError:
                self._make_base(directory)
            else:
                return f"{directory}/{leaf}"
        raise OSError(errno.EBUSY, "the cgroup base directory vanishes as fast as it is made", self._base)

    def _make_base(self, directory: str) -> None:
        """Make ringfence/<owner> with controllers enabled all the way."""
        try:
            base.make_dirs(self._parent, base.BASE, os.path.basename(directory))
            for above in (self._parent, self._base, directory):
                _enable(above, self.controllers)
        except FileNotFoundError:
            return  # a group was removed again in between; the caller tries once more


class ScopeTree(Tree):
    """Groups in a systemd user scope that the zygote is moved to or started in. Usable after `attach`."""

    moves_zygotes = True

    def __init__(self, program: str, runtime: str, controllers: set[str]) -> None:
        super().__init__("", "", controllers)
        self._program = program
        self._runtime = runtime

    def owner_directories(self) -> list[str]:
        return []  # systemd removes a scope when its last process is gone

    def adopt(self, zygote_pid: int) -> bool:
        from ringfence.host.cgroups import systemd

        unit = _unit()
        if not systemd.ask(self._runtime, unit, zygote_pid):
            return False
        deadline = time.monotonic() + _ADOPT_S
        while not (_own_path(zygote_pid) or "").endswith(f"/{unit}"):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
        return True

    def launch_prefix(self) -> list[str]:
        """Return the systemd-run command. It gets the user manager's address; the zygote still gets no variables."""
        env = ["/usr/bin/env", "-i"]
        run = [self._program, "--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes", f"--unit={_unit()}"]
        return [*env, f"XDG_RUNTIME_DIR={self._runtime}", *run, "--", *env]

    def attach(self, zygote_pid: int) -> None:
        """Find the zygote's scope, move the scope's processes to a leaf, and enable controllers.

        Raises OSError when the zygote is in no scope of this process, UnsupportedError when systemd gave the scope
        fewer controllers than plans were made with.
        """
        path = _own_path(zygote_pid)
        scope = f"{base.MOUNT}{path}"
        if not os.path.basename(scope).startswith(f"{base.BASE}-{process_id.name()}-"):
            raise OSError(errno.ENOENT, "the zygote is not in the systemd scope it was started with", scope)
        leaf = base.make_dirs(scope, ZYGOTE)
        for _ in range(100):
            for pid in (found := base.pids(scope)):
                _move(pid, leaf)
            if not found:
                break
        self._check_given(_read_set(f"{scope}/cgroup.controllers"))
        self._base = scope
        _enable(scope, self.controllers)

    def _check_given(self, given: set[str]) -> None:
        """Raise UnsupportedError if the scope lacks a controller that the user manager has and that plans rely on.

        A slice may keep controllers from its scopes, and only a scope shows that. Limits would then be claimed, and
        enforced by nothing.
        """
        lacks = [name for name in self.controllers if name not in given]
        if lacks:
            raise UnsupportedError(
                f"systemd gave the scope of the sandboxes no {' and no '.join(lacks)} controller; its manager has it",
                code="cgroup",
                fix="take DisableControllers= away: systemctl --user cat app.slice",
            )

    def close(self, timeout_s: float = 2.0) -> bool:
        """Kill and remove the scope's groups and the zygote too: systemd removes the scope once it is empty."""
        return not self._base or os.getpid() != self._pid or remove_tree(self._base, timeout_s)

    def _owner_base(self) -> str:
        if not self._base:
            raise OSError(errno.ENOENT, "no zygote has been attached to this tree yet")
        return self._base

    def _make_base(self, directory: str) -> None:
        raise OSError(errno.ENOENT, "the systemd scope of the zygote is gone; start another zygote", directory)


class Group(base.Group):
    """The cgroup of a sandbox: a leaf of the tree.

    memory.oom.group stays 0, as on v1: the kernel kills the largest process, the counter in memory.events says so,
    and the spawner, which is small, survives for the next run of the sandbox.
    """

    def __init__(self, tree: Tree, directory: str, box_id: str) -> None:
        self.box_id = box_id
        self.directory = directory
        self._tree = tree
        self._controllers = tree.controllers

    def prepare(self) -> None:
        """Set what stays the same: no swap (F05). A kernel without swap accounting has no file for that."""
        swap = f"{self.directory}/memory.swap.max"
        if "memory" in self._controllers and os.path.exists(swap):
            base.write(swap, "0")

    def join_fds(self) -> list[int]:
        return [base.open_procs(self.directory)]

    def into_fd(self) -> int | None:
        return os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def set(self, limits: GroupLimits) -> None:
        if "memory" in self._controllers:
            base.write(f"{self.directory}/memory.max", str(limits.memory_bytes))
        if "cpu" in self._controllers:
            base.write(f"{self.directory}/cpu.max", f"{base.quota_us(limits.cpus)} {base.CPU_PERIOD_US}")
        if "pids" in self._controllers:
            base.write(f"{self.directory}/pids.max", str(limits.processes))

    def cpu_fd(self) -> int | None:
        return os.open(f"{self.directory}/cpu.stat", os.O_RDONLY | os.O_CLOEXEC)

    def usage(self) -> base.GroupUsage:
        microseconds = base.counter(f"{self.directory}/cpu.stat", "usage_usec")
        return base.GroupUsage(
            cpu_s=None if microseconds is None else microseconds / 1e6,
            memory_peak_bytes=base.number(f"{self.directory}/memory.peak"),
            processes_peak=base.number(f"{self.directory}/pids.peak"),
            oom_kills=base.counter(f"{self.directory}/memory.events", "oom_kill"),
        )

    def freeze(self, timeout_s: float = 2.0) -> bool:
        base.write(f"{self.directory}/cgroup.freeze", "1")
        return _wait(self.directory, "frozen", 1, time.monotonic() + timeout_s)

    def is_frozen(self) -> bool:
        return base.counter(f"{self.directory}/cgroup.events", "frozen") == 1

    @property
    def can_freeze(self) -> bool:
        return True

    def thaw(self) -> None:
        base.write_if_there(f"{self.directory}/cgroup.freeze", "0")

    def freezer_fd(self) -> int | None:
        return os.open(f"{self.directory}/cgroup.freeze", os.O_RDWR | os.O_CLOEXEC)

    def kill(self, timeout_s: float = 2.0) -> bool:
        return _kill(self.directory, time.monotonic() + timeout_s)

    def remove(self, timeout_s: float = 2.0) -> bool:
        deadline = time.monotonic() + timeout_s
        gone = base.rmdir_until([self.directory], 0)  # mostly all processes have ended already
        if not gone:
            _kill(self.directory, deadline)
            gone = base.rmdir_until([self.directory], deadline)
        if gone:
            self._tree.forget(self.directory)
        return gone


def _kill(directory: str, deadline: float) -> bool:
    """Kill a whole subtree. Return whether the subtree is empty before the deadline.

    Before Linux 5.14 there is no cgroup.kill. There the subtree is frozen first, so that no process forks away, and a
    frozen process still dies of SIGKILL.
    """
    try:
        if os.path.exists(f"{directory}/cgroup.kill"):
            base.write(f"{directory}/cgroup.kill", "1")
        else:
            _kill_frozen(directory, deadline)
    except FileNotFoundError:
        return True
    return _wait(directory, "populated", 0, deadline)


def _kill_frozen(directory: str, deadline: float) -> None:
    base.write(f"{directory}/cgroup.freeze", "1")
    _wait(directory, "frozen", 1, min(deadline, time.monotonic() + 0.2))
    for below in [directory, *_descendants(directory)]:
        base.signal_all(below)
    base.write(f"{directory}/cgroup.freeze", "0")


def _wait(directory: str, key: str, value: int, deadline: float) -> bool:
    pause = 0.0002
    while (now := base.counter(f"{directory}/cgroup.events", key)) != value:
        if now is None:
            return not os.path.isdir(directory)
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True


def remove_tree(directory: str, timeout_s: float) -> bool:
    """Kill and remove a group with everything below. Return True when the group is gone."""
    deadline = time.monotonic() + timeout_s
    if not os.path.isdir(directory):
        return True
    _kill(directory, deadline)
    return base.rmdir_until([*_descendants(directory), directory], deadline)


def _descendants(directory: str) -> list[str]:
    """Return every group below, deepest first."""
    found = []
    for name in base.names(directory):
        found += [*_descendants(f"{directory}/{name}"), f"{directory}/{name}"]
    return found


def _parent() -> str | None:
    """Return the directory below which `ringfence` can be made, or None."""
    if os.geteuid() == 0:
        return base.MOUNT if _usable(base.MOUNT) else None
    path = os.path.dirname(_own_path(os.getpid()) or "/")
    while path != "/":
        directory = f"{base.MOUNT}{path}"
        if _usable(directory) and os.stat(directory).st_uid == os.geteuid():
            return directory
        path = os.path.dirname(path)
    return None


def _usable(directory: str) -> bool:
    files = ("", "/cgroup.procs", "/cgroup.subtree_control")
    return all(os.access(directory + file, os.W_OK) for file in files) and "memory" in _controllers(directory)


def _controllers(directory: str) -> set[str]:
    """Return the controllers that groups below `directory` have, or could have if we enabled them."""
    enabled = _read_set(f"{directory}/cgroup.subtree_control")
    real_root = not os.path.exists(f"{directory}/cgroup.type")
    if real_root or not base.read(f"{directory}/cgroup.procs"):
        enabled |= _read_set(f"{directory}/cgroup.controllers")
    return enabled & set(WANTED)


def _enable(directory: str, controllers: list[str]) -> None:
    missing = [name for name in controllers if name not in _read_set(f"{directory}/cgroup.subtree_control")]
    if missing:
        base.write(f"{directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in missing))


def _read_set(path: str) -> set[str]:
    return set((base.read(path) or "").split())


def _own_path(pid: int) -> str | None:
    for line in (base.read(f"/proc/{pid}/cgroup") or "").splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


def _move(pid: int, directory: str) -> None:
    try:
        base.write(f"{directory}/cgroup.procs", str(pid))
    except ProcessLookupError:
        return  # it ended


def _unit() -> str:
    return f"{base.BASE}-{process_id.name()}-{os.urandom(4).hex()}.scope"  # a process may have many zygotes


def _manager() -> str:
    uid = os.geteuid()
    return f"{base.MOUNT}/user.slice/user-{uid}.slice/user@{uid}.service"
