"""Real programs with a known verdict: the 164 problems of HumanEval, right and wrong, on every backend.

On the process backend each has a fresh sandbox; behind walls, which take longer to build, they share sessions.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from backends_declared import DECLARED, missing
from ringfence import Sandbox

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "humaneval.py"
WORKERS = 2 * (os.cpu_count() or 1)


@pytest.fixture(scope="module")
def humaneval() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_humaneval", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_all_164_reference_solutions_pass_inside(humaneval: ModuleType) -> None:
    answers = humaneval.solve(humaneval.problems(), humaneval.reference, WORKERS)
    assert len(answers) == 164
    assert [f"{a.problem.id}: {a.result.render()}" for a in answers if not a.result.ok] == []


def test_all_164_functions_that_return_none_fail_inside(humaneval: ModuleType) -> None:
    answers = humaneval.solve(humaneval.problems(), humaneval.nothing, WORKERS)
    assert len(answers) == 164
    verdicts = {(a.result.status, a.result.reason, a.result.exit_code) for a in answers}
    assert verdicts == {("error", "exception", 1)}, [a.problem.id for a in answers if a.result.ok]


@pytest.fixture(scope="module", params=["container", "podman", "gvisor"])
def walled(request: pytest.FixtureRequest) -> str:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    with Sandbox(backend=DECLARED[request.param].backend()):
        pass  # what a first use makes is there before a test counts what is left
    return str(request.param)


def test_all_328_have_the_same_verdicts_on_every_engine(humaneval: ModuleType, walled: str) -> None:
    backend = DECLARED[walled].backend()
    right = humaneval.solve_in_sessions(humaneval.problems(), humaneval.reference, 2, backend)
    assert (len(right), {answer.result.backend for answer in right}) == (164, {backend.name})
    assert [f"{a.problem.id}: {a.result.render()}" for a in right if not a.result.ok] == []
    wrong = humaneval.solve_in_sessions(humaneval.problems(), humaneval.nothing, 2, backend)
    assert len(wrong) == 164
    verdicts = {(a.result.status, a.result.reason) for a in wrong}
    assert verdicts == {("error", "exception")}, [a.problem.id for a in wrong if a.result.ok]
