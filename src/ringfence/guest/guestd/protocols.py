"""The shapes of the JSON that the library sends to the guest's side, and what guestd needs of its own process.

This module is for type checkers alone and never imported at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.shared.mount_check import Meant


Op = list[Any]


class FenceForm(TypedDict):
    """The rights that a process gives up, step by step. Each step is on unless the attack suite left it out."""

    processes: int
    rlimits: dict[str, int]
    affinity: list[int]
    no_new_privileges: bool
    capabilities: bool
    landlock_abi: int
    landlock_files: bool
    landlock_scopes: bool
    seccomp: str | None
    last_layer: str | None
    not_dumpable: bool
    namespace_limits: bool
    cgroup_namespace: bool


class OutletsForm(TypedDict):
    """The listeners of a sandbox with a network, for the gateway."""

    ports: list[int]
    proxy: int
    streams: int  # the most connections at once where guestd relays; further ones wait


class FirstFrame(TypedDict):
    """The first frame to a guestd that is alone in its box."""

    fence: FenceForm
    outlets: OutletsForm | None
    hands: bool  # whether the channel takes descriptors, also of listeners; else guestd relays
    meant: Meant | None  # for guestd to check, where the host cannot
    gvisor: bool  # whether the kernel is gVisor's, which makes no siblings and has a pids controller to count the guest


class PlanForm(TypedDict):
    """The plan of a sandbox. `owner` and the fence's `affinity` come with each sandbox."""

    as_root: bool
    owner: int
    user_namespace: bool
    namespaces: int
    proc_subset: bool
    proc_masks: bool
    sizes: dict[str, str]
    ops: list[Op]
    outlets: OutletsForm | None
    fence: FenceForm


class Hello(TypedDict):
    sys_path: list[str]
    preload: list[str]
    cgroups: list[str]  # directories to remove when the library is gone
    record: str  # the library's record, which exists if there is more to remove
    uids: str | None  # directory of lock files; unheld files are removed too
    stakes: str  # directory with a file for each sandbox that needs placeholders
    home: str  # the caller's home, for the sweep


class SparedProcesses(TypedDict):
    """The processes that PID 1 spares when it kills a tree."""

    alone: list[int]
    trees: list[int]  # with their descendants
    since: int  # clock ticks since boot: older processes are spared
    sessions: list[int]  # of jobs that ended just before: their processes that started in that very tick are spared


class TemplateForm(TypedDict):
    """A view: how its root is built."""

    ops: list[Op]
    as_root: bool
    foreign: bool  # whether the files are not the host's, with unknown owners


class Launch(TypedDict):
    """A sandbox, as the library orders it from the monitor."""

    box: int
    owner: int
    affinity: list[int]
    waits: bool  # whether no caller waits for it, so that it has time to rehearse
    plan_id: int
    plan: PlanForm | None  # None: the plan was sent before under the same number
    fds: list[str]  # what each descriptor is: channel, cpu, freezer, join, uid, listeners, disk, into


class GivenDescriptor(TypedDict):
    """A descriptor for a running sandbox: a memory image, or where to write the outcome of `protect`."""

    box: int
    protect: list[tuple[str, int, int]] | None  # paths inside that are to be read-only again, their devices and inodes


class Order(TypedDict):
    """The order of a monitor to its forker."""

    op: str
    box: int
    owner: int
    affinity: list[int]
    waits: bool
    plan_id: int
    plan: PlanForm | None
    # Descriptors of cgroups to join come along, then those of the following that are true:
    disk: bool  # a mount, the sandbox's disk
    listeners: bool  # the channel that the sandbox's listeners go by
    into: bool  # the directory of a cgroup v2, to be born in
    protect: list[tuple[str, int, int]]  # for op "protect", as in GivenDescriptor


class ProcessWork(TypedDict, total=False):
    """The work of a process inside. `kind` decides which fields there are."""

    kind: str
    env: dict[str, str]
    cwd: str
    argv: list[str]
    code: str
    args: Any
    sys_path: list[str] | None  # None: the interpreter's own
    executable: str
    call: str
    image: list[int]  # process numbers that a session with a memory image (descriptor 5) must not have
    fresh: bool  # a session in an interpreter of its own
    port: int
    language: str
    tools: list[str]


class Size(TypedDict):
    """The size of a terminal."""

    cols: int
    rows: int


class SpawnPacket(TypedDict):
    """A packet from monitor to spawner. `body`: the work as JSON text, None when the JSON comes as a file in memory."""

    become: bool
    pty: Size | None
    body: str | None


class GuestdRequest(TypedDict):
    """A request of the library to the monitor. `op` decides which fields there are; `start` has the first fields."""

    op: str
    id: int
    one_shot: bool
    job: ProcessWork
    stdin: bool
    pty: Size | None
    credit: int
    timeout_s: float | None
    cpu_s: float | None
    n: int
    bytes: int
    signal: int
    cols: int
    rows: int
    why: str
    lifetime_s: float
    idle_s: float
    on_idle: str


# ── what the guest's side needs of the process it is in ──────────────────────────────────────────


class BundleLoader(Protocol):
    """The loader of guestd where guestd is a single compiled file."""

    def members(self, package: str) -> list[str]: ...

    def get_data(self, path: str) -> bytes: ...


class GuestdSocket(Protocol):
    """The methods of a socket that guestd uses."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def settimeout(self, value: float, /) -> None: ...

    def recv(self, size: int, /) -> bytes | memoryview: ...

    def send(self, data: bytes | bytearray | memoryview, /) -> int: ...

    def sendmsg(self, parts: list[bytes | memoryview], /) -> int: ...

    def sendall(self, data: bytes | bytearray, /) -> None: ...

    def close(self) -> None: ...


class Keeper(Protocol):
    """An event loop that also orders processes from the forker and is notified when a sandbox is gone."""

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None: ...

    def change(self, fd: int, events: int) -> None: ...

    def unwatch(self, fd: int) -> None: ...

    def order(self, op: str, number: int, /) -> bool: ...

    def reap_strays(self) -> None: ...

    def gone(self, number: int, /) -> None: ...
