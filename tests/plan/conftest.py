"""Fixtures of the planner's tests: a view applied for real, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accounts import OrdinaryUser

APPLYING = Path(__file__).with_name("applying.py").read_text()
SOURCE = Path(__file__).resolve().parents[2] / "src"

Inside = Callable[..., str]


@pytest.fixture(params=["root", "user"])
def inside(request: pytest.FixtureRequest) -> Inside:
    """`inside(code, mounts=[…], commands=…)`: what Python prints in the view, through an applier of the tests' own."""

    def as_root(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", APPLYING],
            input=text,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(SOURCE), "HOME": "/root", "PATH": "/usr/bin:/bin"},
            timeout=50,
            check=False,
        )

    def as_user(text: str) -> subprocess.CompletedProcess[str]:
        user: OrdinaryUser = request.getfixturevalue("ordinary_user")
        return user.run(APPLYING, stdin=text)

    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("root is missing")
    start = as_root if request.param == "root" else as_user

    def run(code: str, *, mounts: list[dict[str, Any]] | None = None, commands: list[str] | str = "any") -> str:
        done = start(json.dumps({"mounts": mounts or [], "commands": commands, "argv": ["-c", code]}))
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    return run


@pytest.fixture
def project(inside: Inside, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Make a folder of the user that applies the view, outside every home and every sandbox's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="rf-project-", dir="/var/tmp"))
    if request.node.callspec.params["inside"] == "user" and os.geteuid() == 0:
        user: OrdinaryUser = request.getfixturevalue("ordinary_user")
        os.chown(folder, user.uid, user.gid)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
