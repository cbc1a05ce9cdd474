"""Fixtures for all tests: nothing is left behind, and the same code as a user without rights."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import backends_declared
import leftovers
from accounts import OrdinaryUser, account

pytest.register_assert_rewrite("ringfence.testing.checks")
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
# Not the interpreter of the virtual environment: that may live below /root, where an ordinary user cannot go.
SYSTEM_PYTHON = "/usr/bin/python3"


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run the behaviour tests of this backend only; again for another; one that cannot run here is an error"
    parser.addoption("--backend", action="append", default=[], metavar="NAME", help=help_text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A backend that could not be tested is said and counted, never left out in silence."""
    ran = {key.partition("[")[2].partition("-")[0] for key in _conformance_ids(terminalreporter)}
    if not ran:
        return
    from ringfence.testing.conformance import CHECKS

    for name in backends_declared.DECLARED:
        reason = backends_declared.missing(name)
        if name not in ran and reason is not None:
            terminalreporter.write_line(f"NOT AVAILABLE {name}: {len(CHECKS)} checks not run: {reason}")


def _conformance_ids(terminalreporter: pytest.TerminalReporter) -> list[str]:
    reports = [r for rows in terminalreporter.stats.values() for r in rows if hasattr(r, "nodeid")]
    return [r.nodeid for r in reports if "test_a_backend_conforms[" in r.nodeid]


def pytest_configure() -> None:
    """Started in the background, by a shell or nohup, we would ignore what tests send to their own children."""
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
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", str(source)], check=True)
        yield OrdinaryUser(user.pw_name, user.pw_uid, user.pw_gid, Path(user.pw_dir), source, python)


def _guarded(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in leftovers.GUARDED


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of sandboxes nothing is left: processes, cgroups, mounts, files, descriptors."""
    if not _guarded(request.path):
        yield
        return
    before = leftovers.count()
    yield
    left = leftovers.wait_for_nothing(before)
    assert left == [], "left behind: " + ", ".join(left)
