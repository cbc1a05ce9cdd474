"""Counts of everything a sandbox is made of, on the whole machine, but for what other living programs own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import leftovers

_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_STATE = Path("/run/ringfence")


class Census(NamedTuple):
    processes: int  # with a name of ours, zombies too
    groups: int  # cgroup directories below a `ringfence`
    mounts: int  # in this process's view
    namespaces: int  # all kinds
    descriptors: int  # of this process
    files: int  # in temporary places, with our name
    uids: int  # lock files that no living process holds, and our own
    records: int  # of library processes that are dead, and our own


def census() -> Census:
    names = 0
    spaces: set[str] = set()
    foreign = _foreign()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) in foreign:
            continue
        try:
            names += Path("/proc", pid, "comm").read_text().startswith("rf-")
            spaces.update(os.readlink(f"/proc/{pid}/ns/{kind}") for kind in _KINDS)
        except OSError:
            continue
    owners = [directory for directory in leftovers.owner_groups() if _counts(directory.name)]
    return Census(
        processes=names,
        groups=sum(sum(1 for _ in os.walk(owner)) for owner in owners),
        mounts=len(Path("/proc/self/mountinfo").read_bytes().splitlines()),
        namespaces=len(spaces),
        descriptors=len(os.listdir("/proc/self/fd")),
        files=sum(len(list(Path(place).glob("ringfence-*"))) for place in ("/tmp", "/dev/shm", "/var/tmp")),
        uids=len(_inodes(_STATE / "uid") - _held_by_others()),
        records=sum(_counts(path.name) for path in _below(_STATE / "owners")),
    )


def _foreign() -> set[int]:
    """Return all processes below other programs that use the library and are not descendants of this process."""
    ours = {process.pid for process in leftovers.descendants()} | {os.getpid()}
    rows = {int(pid): row for pid in os.listdir("/proc") if pid.isdigit() and (row := leftovers._stat(pid))}
    roots = {
        parent
        for process, parent in rows.values()
        if process.name.startswith("rf-") and parent not in ours and parent > 1 and parent in rows
    }
    roots |= {pid for pid, (p, parent) in rows.items() if parent == 1 and leftovers._library_lives(pid)}
    below = {process.pid for root in roots - ours for process in leftovers.descendants(root)}
    return (below | roots) - ours


def _counts(owner: str) -> bool:
    return leftovers._owner_is_dead(owner) or owner.startswith(f"{os.getpid()}-")


def _below(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if os.access(directory, os.R_OK | os.X_OK) else []


def _inodes(directory: Path) -> set[int]:
    found = set()
    for path in _below(directory):
        try:
            found.add(path.stat().st_ino)
        except OSError:
            continue
    return found


def _held_by_others() -> set[int]:
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {
        int(fields[5].rpartition(":")[2])
        for fields in lines
        if fields[1] == "FLOCK" and fields[4] != str(os.getpid()) and os.path.exists(f"/proc/{fields[4]}")
    }


def settles(to: Census, within_s: float = 10.0) -> Census:
    """Return the census as soon as no count is above `to`, or the census when the time is over."""
    deadline = time.monotonic() + within_s
    while True:
        now = census()
        if all(have <= had for have, had in zip(now, to, strict=True)) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)
