"""Count what a sandbox could leave on the host, from /proc and /sys: descendants, and files by Ringfence's names."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

# A library process keeps a zygote, a template for each view and a few spares that never ran guest code. They stay
# between tests, and the pool knows how many they are; everything else must be gone.
STANDING = frozenset(["rf-zygote", "rf-forker", "rf-monitor", "rf-init", "rf-spawner"])
GUARDED = (
    "attacks",
    "backends",
    "behaviour",
    "conformance",
    "integrations",
    "interpreters",
    "gateway",
    "guest",
    "host",
    "manager",
    "sandbox",
    "snapshots",
    "transfer",
    "soak",
    "test_async.py",
)
_OF_ENGINES = ("conmon", "containerd", "docker", "podman", "runsc", "catatonit", "exe", "crun", "runc")
_CGROUPS = Path("/sys/fs/cgroup")
_PLACES = [Path("/run/ringfence"), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]


class Process(NamedTuple):
    pid: int
    started: int
    name: str


class Leftovers(NamedTuple):
    """The counts at a moment, without the library's standing stock: equal before and after a test that left nothing."""

    processes: frozenset[Process]
    over_stock: tuple[tuple[str, int], ...]  # processes with our names beyond those that the pools say they keep
    cgroups_of_the_dead: frozenset[str]
    mounts: int
    files: frozenset[str]
    descriptors: frozenset[str]  # number and what it is, beyond those of what the pools keep


def _stat(pid: str) -> tuple[Process, int] | None:
    try:
        text = Path("/proc", pid, "stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(int(pid), int(fields[19]), head.partition("(")[2]), int(fields[1])


def descendants(of: int | None = None) -> frozenset[Process]:
    """Return every process below this process, zombies too: a zombie is a forgotten wait."""
    root = os.getpid() if of is None else of
    found = [row for pid in os.listdir("/proc") if pid.isdigit() and (row := _stat(pid))]
    children: dict[int, list[Process]] = {}
    for process, parent in found:
        children.setdefault(parent, []).append(process)
    below: list[Process] = []
    queue = [root]
    while queue:
        mine = children.get(queue.pop(), [])
        below.extend(mine)
        queue.extend(process.pid for process in mine)
    return frozenset(below)


def orphans() -> frozenset[Process]:
    """Return processes with Ringfence's names that PID 1 has inherited and whose library is gone.

    A template outlives its zygote as long as the library lives: then it is another program's standing stock. Apart
    from other runs, PID 1 inherits from this run alone, and then names of others count too.
    """
    found = [row for pid in os.listdir("/proc") if pid.isdigit() and (row := _stat(pid))]
    is_apart = os.getppid() == 1
    mine = [
        process
        for process, parent in found
        if parent == 1 and (process.name.startswith("rf-") or (is_apart and _is_nobodys(process)))
    ]
    return frozenset(process for process in mine if not _library_lives(process.pid) and not _is_zombie(process.pid))


def _is_nobodys(process: Process) -> bool:
    """Return whether a process that PID 1 has inherited is neither this one nor an engine's, which mind themselves."""
    return process.pid != os.getpid() and not process.name.startswith(_OF_ENGINES)


def _is_zombie(pid: int) -> bool:
    """Return whether a process is a zombie or gone: PID 1 of this machine may reap it late."""
    try:
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _library_lives(pid: int) -> bool:
    """Return whether the library of a process lives: zygotes, templates and monitors have its pidfd as descriptor 4."""
    try:
        text = Path("/proc", str(pid), "fdinfo", "4").read_text()
    except OSError:
        return False
    numbers = [line.split()[1] for line in text.splitlines() if line.startswith("Pid:")]
    return bool(numbers) and int(numbers[0]) > 0


def _owner_is_dead(name: str) -> bool:
    """Return whether the library process of a cgroup is dead; the name is <pid>-<start time>-<pid namespace> of it."""
    pid, _, rest = name.partition("-")
    row = _stat(pid) if pid.isdigit() else None
    return row is None or str(row[0].started) != rest.partition("-")[0]


def cgroups_of_the_dead() -> frozenset[str]:
    """Return cgroups of dead libraries: as root at the top of a hierarchy, else in the user's slice."""
    return frozenset(str(d) for d in owner_groups() if _owner_is_dead(d.name))


def owner_groups() -> list[Path]:
    """Return the cgroup directories of library processes. Other programs may make and remove cgroups meanwhile."""
    found = []
    for base in [*_CGROUPS.glob("ringfence"), *_CGROUPS.glob("*/ringfence")]:
        try:
            found += [directory for directory in base.iterdir() if directory.is_dir()]
        except FileNotFoundError:
            continue
    return found


def _files() -> frozenset[str]:
    found: set[str] = set()
    for place in _PLACES:
        pattern = "*" if place.name == "ringfence" else "ringfence-*"
        # uid: a fixed, reused set of empty files, whose number is bounded. gvisor: what runsc can do in this boot.
        found.update(str(p) for p in place.glob(pattern) if p.name not in ("uid", "gvisor"))
    # Podman's monitors write one where they run when a container meets its memory limit
    found.update(str(p) for p in (Path("/oom"), Path("oom").absolute()) if p.exists())
    return frozenset(found)


class Stock(NamedTuple):
    """The stock that the pools of this process keep between sandboxes, by the pools' own account."""

    zygotes: int
    templates: int
    spares: int
    descriptors: frozenset[int]


def stock() -> Stock:
    pool = sys.modules.get("ringfence.backends.process.pool")
    if pool is None:
        return Stock(0, 0, 0, frozenset())
    held = [pool._sentinel._fd]
    record = sys.modules.get("ringfence.host.state")
    held += [owner._fd for owner in record._owners.values()] if record is not None else []
    zygotes = templates = spares = 0
    for one in list(pool._pools.values()):
        with one._lock:
            kept = [spare for shelf in one._shelves.values() for spare in shelf.spares]
            roots = list(one._templates._of_view.values())
            outgrown = list(one._templates._outgrown)  # each until its last sandbox has ended
            zygote = one._templates._zygote
        zygotes += zygote is not None
        templates += len(roots)
        spares += len(kept)
        held += [root._control.fileno() for root in (*roots, *outgrown)]
        held += [zygote._control.fileno(), zygote._errors] if zygote is not None else []
        for spare in kept:
            held += [spare.channel.fileno(), spare._init_pidfd, spare._uid.fileno() if spare._uid is not None else -1]
            held += [spare.outlet_channel.fileno()] if spare.outlet_channel is not None else []
    held += _of_the_gateway() + _of_the_engines()
    return Stock(zygotes, templates, spares, frozenset(fd for fd in held if fd >= 0))


def _of_the_gateway() -> list[int]:
    """Return the descriptors of the gateway's event loop, which stays as long as the process."""
    gateway = sys.modules.get("ringfence.gateway.service")
    loops = [one._loop for one in gateway._services.values()] if gateway is not None else []
    return [part.fileno() for loop in loops if loop is not None for part in (loop._selector, loop._ssock, loop._csock)]


def _of_the_engines() -> list[int]:
    """Return the sockets that a client of an engine keeps for later requests."""
    module = sys.modules.get("ringfence.backends.container.api")
    clients = [found.api for found in module._found.values()] if module is not None else []
    adapters = [adapter for api in clients for adapter in api.adapters.values() if hasattr(adapter, "pools")]
    pools = [adapter.pools[key] for adapter in adapters for key in adapter.pools.keys()]  # noqa: SIM118  # no mapping
    kept = [connection for pool in pools for connection in list(pool.pool.queue) if connection is not None]
    return [one.sock.fileno() for one in kept if getattr(one, "sock", None) is not None]


_ENGINES = ("/rf-tests-docker-", "/rf-tests-podman-", "/var/lib/containers/", "/var/lib/docker/", "/run/docker/")


def _is_of_an_engine(row: str) -> bool:
    """Return whether a mount is an engine's. Engines mount at any time; their containers are counted elsewhere."""
    point = row.split()[4]
    return any(part in f"{point}/" for part in _ENGINES) or "/docker/" in point


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # what listed them
            continue
    return found


def _stock_and_descendants() -> tuple[Stock, frozenset[Process]]:
    """Return both for the same moment: the pools' threads end spares and build others meanwhile."""
    before = stock()
    while True:
        below = descendants()
        now = stock()
        if now == before:
            return now, below
        before = now


def count() -> Leftovers:
    kept, below = _stock_and_descendants()
    names = [process.name for process in below]
    serving = {row[1] for process in below if process.name == "rf-init" and (row := _stat(str(process.pid)))}
    idle = [process for process in below if process.name == "rf-monitor" and process.pid not in serving]
    over = {
        "rf-zygote": names.count("rf-zygote") - kept.zygotes,
        "rf-monitor": len(idle) - kept.templates,
        "rf-forker": names.count("rf-forker") - names.count("rf-monitor"),
        "rf-init": names.count("rf-init") - kept.spares,
        "rf-spawner": names.count("rf-spawner") - kept.spares,
    }
    return Leftovers(
        processes=frozenset(p for p in below if p.name not in STANDING) | orphans(),
        over_stock=tuple((name, max(0, number)) for name, number in over.items()),
        cgroups_of_the_dead=cgroups_of_the_dead(),
        mounts=sum(not _is_of_an_engine(row) for row in Path("/proc/self/mountinfo").read_text().splitlines()),
        files=_files(),
        descriptors=frozenset(f"{fd} ({link})" for fd, link in _descriptors().items() if fd not in kept.descriptors),
    )


def difference(before: Leftovers, after: Leftovers) -> list[str]:
    """Return what is on the host now and was not before, in words."""
    found = [f"process {p.pid} {p.name!r}" for p in sorted(after.processes - before.processes)]
    found += [f"cgroup {path}" for path in sorted(after.cgroups_of_the_dead - before.cgroups_of_the_dead)]
    found += [f"file {path}" for path in sorted(after.files - before.files)]
    for (name, then), (_, now) in zip(before.over_stock, after.over_stock, strict=True):
        if now > then:
            found.append(f"{now - then} {name} more than the pools keep")
    if after.mounts > before.mounts:
        found.append(f"{after.mounts - before.mounts} mounts")
    if len(after.descriptors) > len(before.descriptors):
        found += [f"descriptor {each}" for each in sorted(after.descriptors - before.descriptors)]
    return found


def wait_for_nothing(before: Leftovers, *, within_s: float = 10.0) -> list[str]:
    """Return what is still left when everything has had `within_s` to go: at once when that is nothing.

    Beside other load the kernel takes seconds to end the processes of a full sandbox.
    """
    deadline = time.monotonic() + within_s
    while (left := difference(before, count())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
