"""Real programs with a known verdict: the 164 problems of HumanEval, each in a fresh sandbox, right and wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
