"""Measure the table of docs/performance.md on this machine: python -m benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable

from benchmarks import engines, gateway, images, inside, llm_sandbox, memory, sessions, starting, throughput
from benchmarks.as_user import run_as_user
from benchmarks.measuring import Row
from ringfence import WeakerLimitWarning


def groups(scale: float) -> dict[str, Callable[[], list[Row]]]:
    """Return the groups of rows, by the names that --only takes. `scale` 1 is enough for a p99 of the fast rows."""

    def times(count: int, least: int = 3) -> int:
        return max(least, round(count * scale))

    return {
        "spare": lambda: [starting.with_a_spare(times(300))],
        "burst": lambda: [starting.after_a_burst(times(100))],
        "policy": lambda: [starting.with_a_new_policy(times(100))],
        "first": lambda: [starting.first_call(times(50))],
        "numpy": lambda: [starting.with_numpy(times(100))],
        "exec": lambda: [starting.from_the_shell(times(100))],
        "throughput": lambda: [throughput.at_once(times(8), times(200, 8))],
        "memory": lambda: [memory.idle(times(10))],
        "cells": lambda: sessions.cells(times(300)),
        "copies": lambda: sessions.copies(times(10)),
        "snapshots": lambda: sessions.snapshots(times(5)),
        "transfers": lambda: sessions.transfers(times(1000, 100)),
        "sessions": lambda: sessions.idle(times(200, 20)),
        "egress": lambda: gateway.many_bytes(times(1024, 64)),
        "requests": lambda: gateway.small_requests(times(2000, 200)),
        "latency": lambda: gateway.latency(times(100, 10)),
        "network": lambda: gateway.starting(times(100)),
        "inside": lambda: inside.slowdown(times(30), times(200_000, 1000)),
        "container": lambda: engines.containers(times(20)),
        "llm-sandbox": lambda: llm_sandbox.fresh(times(20)),
        "import": lambda: [images.importing(times(10), times(200, 20))],
        "gvisor": lambda: engines.under_gvisor(times(20)),
    }


def main() -> int:
    arguments = _arguments()
    if arguments.user:
        return run_as_user([word for word in sys.argv[1:] if word != "--user"])
    warnings.simplefilter("ignore", WeakerLimitWarning)
    table = groups(arguments.scale)
    unknown = [name for name in arguments.only if name not in table]
    if unknown:
        print(f"no row named {unknown[0]!r}: {', '.join(table)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    if not arguments.json:
        print(f"as {who}, {os.cpu_count()} CPUs, Linux {os.uname().release}, Python {sys.version.split()[0]}\n")
    for name in arguments.only or table:
        for row in table[name]():
            rows.append(row)
            if not arguments.json:
                print(line(row), flush=True)
    if arguments.json:
        print(json.dumps({"as_root": os.geteuid() == 0, "rows": [row.to_dict() for row in rows]}, indent=2))
    return 1 if any(row.verdict == "FAIL" for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="everything, for machines")
    parser.add_argument("--user", action="store_true", help="as root: measure as a user without rights")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer samples (default: 1)")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="one row; may be given again")
    return parser.parse_args()


def line(row: Row) -> str:
    """Return a row as text: the ratio, its bar, and the times behind it."""
    bar = f"{'at least' if row.at_least else 'at most'} {row.bar:g} {row.unit}"
    value = "–" if row.value is None else f"{row.value:.2f} {row.unit}"
    worst = f" (p99 {row.value_p99:.2f})" if row.value_p99 is not None else ""
    shown = f"{row.verdict:12} {row.name:42} {value + worst:24} {bar}"
    details = [text for text in (row.ours, row.against, *row.notes) if text]
    return f"{shown}\n{'':12} {'; '.join(details)}" if details else shown


if __name__ == "__main__":
    sys.exit(main())
