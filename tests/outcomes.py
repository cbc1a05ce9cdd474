"""Which tests a run chooses, and what became of each: what tests/suite.py needs of the pytest processes it starts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ENGINES = {"container": "docker", "docker": "docker", "podman": "podman", "gvisor": "gvisor"}
_NAMES_AN_ENGINE = re.compile(r"\bengines\b|\bbackends_declared\b|mark\.everywhere")
WALLS = ("none", "docker", "podman", "gvisor")


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """The report of a pytest process, as plain JSON on disk."""

    passed: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # by reason
    failed: tuple[str, ...] = ()  # names of tests, of files that cannot be collected
    only_in_proof: int = 0
    not_available: tuple[str, ...] = ()  # backends
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by file and, unless that is none, wall


def wall_of(item: pytest.Item) -> str:
    """Return the wall that a test needs: an engine among the test's parameters, else the engine of the folder."""
    parameters = getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters is not None else ():
        if isinstance(value, str) and value in ENGINES:
            return ENGINES[value]
    folder = item.path.parent
    return ENGINES.get(folder.name, "none") if folder.parent.name == "backends" else "none"


def needs_an_engine(path: Path) -> bool:
    """Return whether a file may have tests of several walls, judged by the file's text and folder."""
    return "backends" in path.parts or _NAMES_AN_ENGINE.search(path.read_text()) is not None


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep in `items` only the tests of --wall and --share, and tests of `make proof` only where -m names them."""
    wall, share = config.getoption("--wall"), config.getoption("--share")
    lost = {item.path for item in items if wall == "none" and wall_of(item) != "none"}
    if lost := {path for path in lost if not needs_an_engine(path)}:
        raise pytest.UsageError(f"no part of tests/suite.py runs what needs an engine in {sorted(map(str, lost))}")
    chosen = [item for item in items if wall in (None, wall_of(item))]
    if "proof" not in config.getoption("-m"):
        late = [item for item in chosen if item.get_closest_marker("proof") is not None]
        chosen = [item for item in chosen if item not in set(late)]
        config.stash[ONLY_IN_PROOF] = len(late)
    if share:
        number, of = map(int, share.split("/"))
        size = -(-len(chosen) // of)
        chosen = chosen[(number - 1) * size : number * size]
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


ONLY_IN_PROOF = pytest.StashKey[int]()
NOT_AVAILABLE = pytest.StashKey[list[str]]()


class Recorder:
    """A pytest plugin that writes the outcomes to a file when the run ends."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path, self._pid = config, path, os.getpid()
        self._outcome: dict[str, str] = {}  # by test: the worst of its phases
        self._skipped: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._walls: dict[str, str] = {}
        self._left: dict[str, None] = {}  # tests that have not ended, in order

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._walls = {item.nodeid: wall_of(item) for item in session.items}
        self._left = dict.fromkeys(self._walls)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcome[report.nodeid] = "failed"
        elif report.skipped:  # a whole file
            self._skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        wall = self._walls.get(report.nodeid, "none")
        key = report.nodeid.partition("::")[0] + (f" {wall}" if wall != "none" else "")
        self._seconds[key] = self._seconds.get(key, 0.0) + report.duration
        before = self._outcome.get(report.nodeid)
        if report.failed or before == "failed":
            self._outcome[report.nodeid] = "failed"
        elif report.skipped:
            self._outcome[report.nodeid] = "skipped"
            self._skip(report)
        elif before is None:
            self._outcome[report.nodeid] = "passed"
        if report.when == "teardown":
            self._left.pop(report.nodeid, None)

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = _reason(report)
        self._skipped[reason] = self._skipped.get(reason, 0) + 1

    # Last of all: the summary is written meanwhile, and says which backends there are not.
    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if os.getpid() != self._pid:  # a child that a test forked: its parent knows the outcomes
            return
        failed = sorted(name for name, one in self._outcome.items() if one == "failed")
        # A run that ends before its last test, by whatever exit code, has not passed.
        failed += [f"{each} and {len(self._left) - 1} after it: not run to the end" for each in [*self._left][:1]]
        none: list[str] = []
        not_available = self._config.stash.get(NOT_AVAILABLE, none)
        found = Outcomes(
            passed=sum(one == "passed" for name, one in self._outcome.items() if name not in self._left),
            skipped=self._skipped,
            failed=tuple(failed),
            only_in_proof=self._config.stash.get(ONLY_IN_PROOF, 0),
            not_available=tuple(not_available),
            seconds={key: round(each, 2) for key, each in sorted(self._seconds.items())},
        )
        self._path.write_text(json.dumps(dataclasses.asdict(found)))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"fails, as is known: {report.wasxfail}"
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")


def read(path: Path) -> Outcomes | None:
    """Return what a pytest process wrote, or None when it died before."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return parsed(told)


def parsed(told: dict[str, Any]) -> Outcomes:
    """Return the outcomes that `dataclasses.asdict` and JSON have turned into `data`."""
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in told.items()}
    return Outcomes(**values)
