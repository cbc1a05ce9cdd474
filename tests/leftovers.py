"""What a sandbox could leave on the host, counted from /proc and /sys: what descends from us or carries our name."""

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
_CGROUPS = Path("/sys/fs/cgroup")
_PLACES = [Path("/run/ringfence"), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]


class Process(NamedTuple):
    pid: int
    started: int
    name: str


class Leftovers(NamedTuple):
    """Equal before and after a test when it left nothing, but for the library's standing stock."""

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
    """Every process below this one, zombies too: a zombie is a wait that somebody forgot."""
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
    """Processes with our names that were given to PID 1 and whose library is gone.

    A template outlives its zygote as long as the library lives: that one is another program's standing stock.
    """
    found = [row for pid in os.listdir("/proc") if pid.isdigit() and (row := _stat(pid))]
    mine = [process for process, parent in found if parent == 1 and process.name.startswith("rf-")]
    return frozenset(process for process in mine if not _library_lives(process.pid) and not _is_zombie(process.pid))


def _is_zombie(pid: int) -> bool:
    """PID 1 of this machine reaps what is given to it when it gets round to it."""
    try:
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _library_lives(pid: int) -> bool:
    """Zygotes, templates and monitors hold a pidfd of their library as descriptor 4."""
    try:
        text = Path("/proc", str(pid), "fdinfo", "4").read_text()
    except OSError:
        return False
    numbers = [line.split()[1] for line in text.splitlines() if line.startswith("Pid:")]
    return bool(numbers) and int(numbers[0]) > 0


def _owner_is_dead(name: str) -> bool:
    """A cgroup of ours is called <pid>-<start time>-<pid namespace> of the library process that made it."""
    pid, _, rest = name.partition("-")
    row = _stat(pid) if pid.isdigit() else None
    return row is None or str(row[0].started) != rest.partition("-")[0]


def cgroups_of_the_dead() -> frozenset[str]:
    """Ours are at the top of a hierarchy as root, and below the user's slice otherwise."""
    return frozenset(str(d) for d in owner_groups() if _owner_is_dead(d.name))


def owner_groups() -> list[Path]:
    """The cgroup directories of library processes. Other programs make and remove theirs meanwhile."""
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
    """What the pools of this process keep between sandboxes, as they say themselves."""

    zygotes: int
    templates: int
    spares: int
    descriptors: frozenset[int]


def stock() -> Stock:
    pool = sys.modules.get("ringfence.backends.process.pool")
    if pool is None:
        return Stock(0, 0, 0, frozenset())
    held = [fd for fd, _ in sys.modules["ringfence.backends.process.pool"]._opened]
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
    """Its event loop, which stays as long as the process."""
    gateway = sys.modules.get("ringfence.gateway.service")
    loops = [one._loop for one in gateway._services.values()] if gateway is not None else []
    return [part.fileno() for loop in loops if loop is not None for part in (loop._selector, loop._ssock, loop._csock)]


def _of_the_engines() -> list[int]:
    """Connections that a client of an engine keeps for its next requests."""
    module = sys.modules.get("ringfence.backends.container.api")
    clients = [found.api for found in module._found.values()] if module is not None else []
    adapters = [adapter for api in clients for adapter in api.adapters.values() if hasattr(adapter, "pools")]
    pools = [adapter.pools[key] for adapter in adapters for key in adapter.pools.keys()]  # noqa: SIM118  # no mapping
    kept = [connection for pool in pools for connection in list(pool.pool.queue) if connection is not None]
    return [one.sock.fileno() for one in kept if getattr(one, "sock", None) is not None]


_ENGINES = ("/rf-tests-docker-", "/rf-tests-podman-", "/var/lib/containers/", "/var/lib/docker/", "/run/docker/")


def _is_of_an_engine(row: str) -> bool:
    """An engine mounts and unmounts when it likes; what it has of ours is counted by asking it."""
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


def count() -> Leftovers:
    kept = stock()
    below = descendants()
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
    """What is there now and was not before, in words."""
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
