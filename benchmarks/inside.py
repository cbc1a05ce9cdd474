"""Measure how much slower the same machine code is inside: arithmetic, system calls without a path, opening files."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.measuring import Row, Series, output_of
from ringfence import Sandbox

NAMES = ("CPU-bound", "system calls without a path", "open and close")
BARS = (1.05, 1.3, 1.7)


def slowdown(count: int, turns: int) -> list[Row]:
    compiler = shutil.which("gcc")
    if compiler is None:
        return [Row(name, bar, notes=("gcc is not installed",)) for name, bar in zip(NAMES, BARS, strict=True)]
    with tempfile.TemporaryDirectory(prefix="rf-bench-") as folder:
        program = Path(folder, "loops")
        source = Path(__file__).with_name("loops.c")
        subprocess.run([compiler, "-O1", "-static", "-o", str(program), str(source)], check=True)
        inside, outside = _measured(program, count, turns)
    return [_row(number, inside[number], outside[number]) for number in range(len(NAMES))]


def _measured(program: Path, count: int, turns: int) -> tuple[list[Series], list[Series]]:
    """Run the loops outside and inside in turns. Each run gives one sample of each loop."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    with Sandbox() as box:
        box.files.write("loops", program.read_bytes())
        box.files.chmod("loops", 0o755)
        for turn in range(count + 1):
            inside = box.exec(["/workspace/loops", str(turns)]).check().stdout
            outside = output_of([str(program), str(turns)]).decode()
            if turn:  # the first is for the caches
                ours.append([float(word) for word in inside.split()])
                bare.append([float(word) for word in outside.split()])
    return _columns(ours), _columns(bare)


def _columns(rows: list[list[float]]) -> list[Series]:
    return [Series.of(list(column)) for column in zip(*rows, strict=True)]


def _row(number: int, inside: Series, outside: Series) -> Row:
    return Row(
        NAMES[number],
        BARS[number],
        inside.p50 / outside.p50,
        inside.p99 / outside.p99,
        ours=f"{inside.p50:.2f} / {inside.p99:.2f} ns",
        against=f"bare: {outside.p50:.2f} / {outside.p99:.2f} ns",
    )
