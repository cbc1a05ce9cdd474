"""Measure the memory of one more idle sandbox, with the pages that it shares counted once. Root only."""

from __future__ import annotations

import os
import time

from benchmarks import spares
from benchmarks.measuring import Row
from ringfence import Sandbox

NAME = "memory of an idle sandbox (PSS)"
BAR = 4.5
_PER_SANDBOX = "rf-init"  # each sandbox has one process of this name
_OF_A_SANDBOX = (_PER_SANDBOX, "rf-spawner")


def idle(count: int) -> Row:
    """Return by how much each of `count` idle sandboxes increases the PSS of all processes of Ringfence together.

    Summed over the family, PSS counts every page once: what a sandbox shares with the zygote is in both sums.
    """
    if os.geteuid() != 0:
        return Row(NAME, BAR, unit="MiB", notes=("only root may read it: the processes are not dumpable",))
    with Sandbox() as box:  # makes the zygote and the policy's template
        box.start()
    _wait_for_sandboxes(0)
    before = _family_pss()
    boxes = [Sandbox() for _ in range(count)]
    try:
        for box in boxes:
            box.start()
        _wait_for_sandboxes(count)
        after = _family_pss()
        own = sum(_pss(pid) for pid, name in _family().items() if name in _OF_A_SANDBOX) / count
    finally:
        for box in boxes:
            box.close()
    ours = f"{before / 1024:.1f} MiB before, {after / 1024:.1f} with {count}; each one's two processes {own / 1024:.1f}"
    return Row(NAME, BAR, (after - before) / count / 1024, unit="MiB", ours=ours)


def _wait_for_sandboxes(wanted: int, within_s: float = 10.0) -> None:
    """Wait until exactly `wanted` sandboxes exist; spares are removed as soon as they are made."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        spares.take_all_away_everywhere()
        time.sleep(0.3)  # the last spare that was asked for may not be made yet
        if list(_family().values()).count(_PER_SANDBOX) == wanted:
            return
    raise RuntimeError(f"not {wanted} sandboxes after {within_s:g} s: {sorted(_family().values())}")


def _family() -> dict[int, str]:
    """Return the names of Ringfence's processes below this one, by pid."""
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            continue
        names[int(name)], parents[int(name)] = head.partition("(")[2], int(tail.split()[1])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {pid: names[pid] for pid in mine if names.get(pid, "").startswith("rf-")}


def _family_pss() -> float:
    """Return the PSS of all of them together in KiB."""
    return sum(_pss(pid) for pid in _family())


def _pss(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next(float(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError as error:
        raise RuntimeError(f"cannot read the memory of process {pid}: {error.strerror}") from None
