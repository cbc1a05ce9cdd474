"""The benchmarks run and judge. The numbers are not tested here: that needs a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measure(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--scale", "0.001", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55)


def test_a_row_has_its_ratio_its_bar_and_the_hit_rate() -> None:
    done = measure("--json", "--only", "spare")
    (row,) = json.loads(done.stdout)["rows"]
    assert row["value"] > 0
    assert (row["name"], row["bar"], row["at_least"]) == ("run, a spare ready", 0.25, False)
    assert row["notes"][0].startswith("hit rate ")
    assert (row["verdict"], done.returncode) in [("pass", 0), ("FAIL", 1)]


def test_a_row_over_its_bar_fails_and_one_that_was_not_measured_does_not() -> None:
    code = """
from benchmarks.measuring import Row, Series
print(Row("a", 1.0, 1.1).verdict, Row("b", 1.0, 0.9).verdict, Row("c", 1.8, 1.7, at_least=True).verdict,
      Row("d", 1.0).verdict)
series = Series.of([float(n) for n in range(100, 0, -1)])
print(series.p50, series.p99, Series.of([3.0]).p99)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.stdout == "FAIL pass FAIL not measured\n50.0 99.0 3.0\n"


def test_an_unknown_row_is_an_error_that_names_the_rows() -> None:
    done = measure("--only", "spares")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "no row named 'spares': spare, burst, policy, first, numpy, exec, throughput, memory,"
    )


def test_the_gateways_rows_are_measured_with_real_peers() -> None:
    done = measure("--json", "--only", "network", "--only", "latency")
    rows = json.loads(done.stdout)["rows"]
    assert [(row["name"], row["bar"], row["unit"]) for row in rows] == [
        ("start with a network / without", 1.5, "×"),  # noqa: RUF001  # the sign for a ratio
        ("added latency, permitted HTTPS request", 2, "ms"),
        ("added latency, a secret injected", 10, "ms"),
    ]
    assert all(row["value"] is not None for row in rows)
