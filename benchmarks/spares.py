"""Look into the library's pool: how often a run found a spare sandbox, and when a spare is ready."""

from __future__ import annotations

import time

from ringfence.backends.process import pool
from ringfence.backends.process.pool import Pool
from ringfence.plan.rootfs.interpreter import interpreter


def of(preload: tuple[str, ...] = ()) -> Pool:
    return pool.pool(interpreter(), preload)


def wait_for_one(where: Pool, within_s: float = 2.0) -> None:
    """Wait until every policy that is to have a spare has one, or time is up."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        shelves = [shelf for shelf in where._shelves.values() if shelf.wanted]  # noqa: SLF001  # the pool has no public view, and needs none
        if shelves and all(any(spare.ready_now for spare in shelf.spares) for shelf in shelves):
            return
        time.sleep(0.002)


def take_all_away(where: Pool) -> None:
    """Remove all spares, as after a burst of runs."""
    for shelf in list(where._shelves.values()):  # noqa: SLF001  # a benchmark looks behind the surface
        spares, shelf.spares = shelf.spares, []
        for spare in spares:
            spare.close()
            spare.wait_destroyed(2.0)


def take_all_away_everywhere() -> None:
    for where in list(pool._pools.values()):  # noqa: SLF001  # a benchmark looks behind the surface
        take_all_away(where)


class Hits:
    """The share of runs that found a spare, since this object was made."""

    def __init__(self, where: Pool) -> None:
        self._where = where
        self._before = (where.hits, where.misses)

    def __str__(self) -> str:
        hits, misses = self._where.hits - self._before[0], self._where.misses - self._before[1]
        total = hits + misses
        return f"hit rate {hits / total:.0%} of {total}" if total else "no run asked for a spare"
