"""The whole posture of a running sandbox against a golden file, from outside and inside, as root and as a user.

A change here is a change of what holds: read the difference, and only then write the golden file anew with
`python tests/attacks/posture.py > tests/attacks/posture.root.json`, as the user in question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accounts import OrdinaryUser

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"


def golden(name: str) -> object:
    return json.loads((HERE / f"posture.{name}.json").read_text())


def read(*args: str) -> object:
    done = subprocess.run(
        [sys.executable, str(HERE / "posture.py"), *args],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SOURCE), "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if os.geteuid() == 0 else _without_groups(json.loads(done.stdout))


def _without_groups(seen: Any) -> object:
    """Remove the groups: a user's guest keeps its caller's groups, which differ; the golden user has none."""
    for one in (seen["inside"], *seen["outside"].values()):
        one["status"]["Groups"] = " "
    seen["inside"]["ids"][2] = []
    return seen


def read_as(user: OrdinaryUser, *args: str) -> object:
    done = user.run((HERE / "posture.py").read_text(), *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_posture_is_the_golden_one() -> None:
    assert read() == golden("root" if os.geteuid() == 0 else "user")


def test_the_posture_of_a_copy_of_a_copy_is_the_golden_one() -> None:
    """All processes are compared, the copied session among them: no posture differs from an original's."""
    assert read("copy") == golden("root" if os.geteuid() == 0 else "user")


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_the_posture_as_an_ordinary_user_is_the_golden_one(ordinary_user: OrdinaryUser) -> None:
    assert read_as(ordinary_user) == golden("user")


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_the_posture_of_a_copy_as_an_ordinary_user_is_the_golden_one(ordinary_user: OrdinaryUser) -> None:
    assert read_as(ordinary_user, "copy") == golden("user")
