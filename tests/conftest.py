"""Fixtures for all tests: nothing is left behind, and the same code as a user without rights."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

import backends_declared
import leftovers
import outcomes
from accounts import OrdinaryUser, account
from ringfence import Sandbox
from ringfence.host import state

pytest.register_assert_rewrite("ringfence.testing.checks")
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
ATTACKS = TESTS.parent / "attacks" / "src"
# Not the interpreter of the virtual environment: that may live below /root, where an ordinary user cannot go.
SYSTEM_PYTHON = "/usr/bin/python3"


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run the behaviour tests of this backend only; again for another; one that cannot run here is an error"
    parser.addoption("--backend", action="append", default=[], metavar="NAME", help=help_text)
    parser.addoption("--wall", choices=outcomes.WALLS, help="run the tests that need this engine only")
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of what is chosen only")
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write what became of each test, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make proof` runs, unless -m names it."""
    outcomes.choose(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name and count the backends that could not be tested: none is left out in silence."""
    late = terminalreporter.config.stash.get(outcomes.ONLY_IN_PROOF, 0)
    if late:
        terminalreporter.write_line(f"{late} tests not run: they are for make proof (-m proof)")
    for row in terminalreporter.config.stash.get(outcomes.NOT_AVAILABLE, []):
        terminalreporter.write_line(row)


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a shell or nohup does to a command in the background: tests signal their own children."""
    if (path := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(outcomes.Recorder(config, path))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[OrdinaryUser]:
    user = account()
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or SYSTEM_PYTHON
    # Not tmp_path: pytest keeps its folders to the user that runs it.
    with tempfile.TemporaryDirectory(prefix="rf-tests-") as folder:
        os.chmod(folder, 0o755)
        source = Path(folder, "src")
        for package in (SOURCE, ATTACKS):
            shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        subprocess.run(["chmod", "-R", "a+rX", str(source)], check=True)
        yield OrdinaryUser(user.pw_name, user.pw_uid, user.pw_gid, Path(user.pw_dir), source, python)


def _guarded(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in leftovers.GUARDED


@cache
def _settle(wall: str) -> None:
    """Use a backend once, so that what its first use makes and keeps is there before a test counts."""
    state.record()  # the folder that records of processes are in stays
    name = {"docker": "container"}.get(wall, wall)
    if name != "none" and backends_declared.missing(name) is None:
        with Sandbox(backend=backends_declared.DECLARED[name].backend()):
            pass


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, cgroups, mounts, files or descriptors."""
    if not _guarded(request.path):
        yield
        return
    _settle(outcomes.wall_of(request.node))
    before = leftovers.count()
    yield
    left = leftovers.wait_for_nothing(before)
    assert left == [], "left behind: " + ", ".join(left)
