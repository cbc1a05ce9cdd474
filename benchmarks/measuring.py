"""Measure two things alternately, in one run, as p50 and p99. Knows nothing about sandboxes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TIMES = "×"  # noqa: RUF001  # the sign for a ratio


@dataclass(frozen=True)
class Series:
    """The sorted samples of one measurement."""

    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Series:
        return cls(tuple(sorted(samples)))

    def at(self, share: float) -> float:
        """Return the smallest sample that `share` of all samples do not exceed."""
        index = max(0, -int(-share * len(self.samples) // 1) - 1)
        return self.samples[index]

    @property
    def p50(self) -> float:
        return self.at(0.50)

    @property
    def p99(self) -> float:
        return self.at(0.99)


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` is a ratio, or a size where `unit` says so; the bar is for p50."""

    name: str
    bar: float
    value: float | None = None
    value_p99: float | None = None
    at_least: bool = False
    unit: str = TIMES
    ours: str = ""
    against: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        kept = self.value >= self.bar if self.at_least else self.value <= self.bar
        return "pass" if kept else "FAIL"

    def to_dict(self) -> dict[str, object]:
        names = ("name", "value", "value_p99", "bar", "at_least", "unit", "ours", "against", "notes", "verdict")
        return {name: getattr(self, name) for name in names}


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def alternate(count: int, *measures: Callable[[], float], warm_up: int = 2) -> list[Series]:
    """Return `count` samples of each function, taken in turns; which of them is first changes every turn."""
    found: list[list[float]] = [[] for _ in measures]
    for turn in range(warm_up + count):
        for step in range(len(measures)):
            index = (turn + step) % len(measures)
            sample = measures[index]()
            if turn >= warm_up:
                found[index].append(sample)
    return [Series.of(samples) for samples in found]


def compared(name: str, bar: float, ours: Series, bare: Series, against: str, *notes: str) -> Row:
    """Return the row of a comparison of times in seconds: our p50 by the peer's p50, our p99 by its p99."""
    return Row(
        name,
        bar,
        ours.p50 / bare.p50,
        ours.p99 / bare.p99,
        ours=milliseconds(ours),
        against=f"{against}: {milliseconds(bare)}",
        notes=notes,
    )


def milliseconds(series: Series) -> str:
    return f"{series.p50 * 1000:.2f} / {series.p99 * 1000:.2f} ms"


def output_of(argv: list[str], env: dict[str, str] | None = None) -> bytes:
    """Start a command, read its output, wait for its end. posix_spawn adds the least of our own time to the peer's."""
    read_end, write_end = os.pipe()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        actions = [
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, write_end, 1),
            (os.POSIX_SPAWN_DUP2, null, 2),
        ]
        pid = os.posix_spawn(argv[0], argv, {} if env is None else env, file_actions=actions)
    finally:
        os.close(write_end)
        os.close(null)
    with open(read_end, "rb", buffering=0) as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(argv[:2])} … ended with {os.waitstatus_to_exitcode(status)}")
    return data
