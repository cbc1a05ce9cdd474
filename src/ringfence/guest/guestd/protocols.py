"""The shapes of the JSON that the library sends to the guest's side, and what guestd needs of the process it is in.

For type checkers alone: never imported when running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable


Op = list[Any]


class Fence(TypedDict):
    """What a process gives up, step by step; each is on unless a test took it out."""

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


class Outlets(TypedDict):
    """What a sandbox with a network listens on for the gateway."""

    ports: list[int]
    proxy: int
    streams: int  # connections at once where guestd relays them; more wait


class Meant(TypedDict):
    """What is to stand at and below the writable mounts of a box, and where else anything is mounted."""

    places: list[tuple[str, int, int, bool]]  # target, device and inode of what is shown there, writable
    below: list[tuple[str, str]]  # what the host has mounted there, which comes along: device, root in it
    flags: bool  # read-only is the mount's; else it is held elsewhere
    targets: list[str] | None  # of all that was asked for; None: other mounts are not looked for
    brought: list[tuple[str, str]]  # what the host has mounted below the sources of those: device, root in it


class Told(TypedDict):
    """The first frame to a guestd that is alone in its box."""

    fence: Fence
    outlets: Outlets | None
    hands: bool  # the channel takes descriptors, the listeners' too; else guestd relays
    meant: Meant | None  # for guestd to look at, where the host cannot
    gvisor: bool  # the kernel here is gVisor's: it makes no siblings, and its pids controller counts the guest


class Plan(TypedDict):
    """One sandbox. `owner` and the fence's `affinity` come with each."""

    as_root: bool
    owner: int
    user_namespace: bool
    namespaces: int
    proc_subset: bool
    proc_masks: bool
    sizes: dict[str, str]
    ops: list[Op]
    outlets: Outlets | None
    fence: Fence


class Hello(TypedDict):
    sys_path: list[str]
    preload: list[str]
    cgroups: list[str]  # directories to remove when the library is gone
    record: str  # of what the library noted; there when something is, and then there is more to remove
    uids: str | None  # directory of lock files, those that nobody holds then too
    stakes: str  # directory with a file for each sandbox that needs placeholders
    home: str  # of the caller, for the sweep


class Kept(TypedDict):
    """What PID 1 spares when it kills a tree."""

    alone: list[int]
    trees: list[int]  # with their descendants
    since: int  # clock ticks since boot: what is older


class Template(TypedDict):
    """A view: how its root is built."""

    ops: list[Op]
    as_root: bool
    foreign: bool  # not the host's: its files are nobody's that we know


class Launch(TypedDict):
    """A sandbox, as the library orders it from the monitor."""

    box: int
    owner: int
    affinity: list[int]
    waits: bool  # nobody wants it yet: it has time to rehearse
    plan_id: int
    plan: Plan | None  # None: sent before under the same number
    fds: list[str]  # what each descriptor that comes along is: channel, cpu, freezer, join, uid, listeners, disk, into


class Given(TypedDict):
    """A descriptor for a sandbox that exists: a memory image, or where to write what became of `protect`."""

    box: int
    protect: list[tuple[str, int, int]] | None  # paths inside that are to be read-only again, their devices and inodes


class Order(TypedDict):
    """What the monitor asks the forker for."""

    op: str
    box: int
    owner: int
    affinity: list[int]
    waits: bool
    plan_id: int
    plan: Plan | None
    # Descriptors of cgroups to join come along, then as many of these as there are:
    disk: bool  # a mount, the sandbox's disk
    listeners: bool  # the channel that the sandbox's listeners go by
    into: bool  # the directory of a cgroup v2, to be born in
    protect: list[tuple[str, int, int]]  # of op "protect", as in Given


class Work(TypedDict, total=False):
    """What one process inside does. Which fields there are follows from `kind`."""

    kind: str
    env: dict[str, str]
    cwd: str
    argv: list[str]
    code: str
    args: Any
    sys_path: list[str] | None  # None: the interpreter's own
    executable: str
    call: str
    image: list[int]  # a session that gets a memory image along, as descriptor 5: numbers it must not have; else none
    fresh: bool  # a session in an interpreter of its own
    port: int
    language: str
    tools: list[str]


class Size(TypedDict):
    """Of a terminal."""

    cols: int
    rows: int


class Handed(TypedDict):
    """A packet from monitor to spawner. `body`: the work as JSON text, None when it comes as a file in memory."""

    become: bool
    pty: Size | None
    body: str | None


class Request(TypedDict):
    """What the library asks the monitor for. Which fields there are follows from `op`; `start` has the first ones."""

    op: str
    id: int
    one_shot: bool
    job: Work
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


class Bundle(Protocol):
    """The loader of guestd where guestd is one compiled file."""

    def members(self, package: str) -> list[str]: ...

    def get_data(self, path: str) -> bytes: ...


class Channel(Protocol):
    """What a socket is to guestd."""

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
