"""What a sandbox could leave on the host, counted from /proc and /sys: what descends from us or carries our name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

# A library process keeps a zygote, a template for each view and a few spares that never ran guest code. They stay
# between tests; everything else must be gone, and the spares must not grow past their number.
STANDING = frozenset(["rf-zygote", "rf-template", "rf-forker", "rf-monitor", "rf-init", "rf-spawner"])
SPARES_PER_VIEW = 16  # four for each policy that was used twice lately, and policies share a view
GUARDED = ("attacks", "backends", "behaviour", "conformance", "integrations", "sandbox", "soak", "test_async.py")
_CGROUPS = Path("/sys/fs/cgroup")
_PLACES = [Path("/run/ringfence"), Path("/tmp"), Path("/dev/shm")]


class Process(NamedTuple):
    pid: int
    started: int
    name: str


class Leftovers(NamedTuple):
    """Equal before and after a test when it left nothing, but for the library's standing stock."""

    processes: frozenset[Process]
    standing: int
    sandboxes_over_stock: int
    cgroups_of_the_dead: frozenset[str]
    mounts: int
    files: frozenset[str]
    descriptors: int


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
        # uid locks are a fixed, reused set of empty files: their number is bounded by design
        found.update(str(p) for p in place.glob(pattern) if p.name != "uid")
    return frozenset(found)


def count() -> Leftovers:
    below = descendants()
    names = [process.name for process in below]
    stock = SPARES_PER_VIEW * max(1, names.count("rf-template") + names.count("rf-forker"))
    return Leftovers(
        processes=frozenset(p for p in below if p.name not in STANDING) | orphans(),
        standing=len(below),
        sandboxes_over_stock=max(0, names.count("rf-init") - stock),
        cgroups_of_the_dead=cgroups_of_the_dead(),
        mounts=len(Path("/proc/self/mountinfo").read_bytes().splitlines()),
        files=_files(),
        descriptors=len(os.listdir("/proc/self/fd")),
    )


def difference(before: Leftovers, after: Leftovers) -> list[str]:
    """What is there now and was not before, in words."""
    found = [f"process {p.pid} {p.name!r}" for p in sorted(after.processes - before.processes)]
    found += [f"cgroup {path}" for path in sorted(after.cgroups_of_the_dead - before.cgroups_of_the_dead)]
    found += [f"file {path}" for path in sorted(after.files - before.files)]
    if after.sandboxes_over_stock > before.sandboxes_over_stock:
        found.append(f"{after.sandboxes_over_stock} sandboxes more than spares explain")
    if after.mounts > before.mounts:
        found.append(f"{after.mounts - before.mounts} mounts")
    # a spare made during the test holds descriptors of its own; with the same stock the number is exact
    if after.standing <= before.standing and after.descriptors > before.descriptors:
        found.append(f"{after.descriptors - before.descriptors} descriptors")
    return found


def wait_for_nothing(before: Leftovers, *, within_s: float = 3.0) -> list[str]:
    """What is still left when everything has had `within_s` to go. Returns at once when nothing is."""
    deadline = time.monotonic() + within_s
    while (left := difference(before, count())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
