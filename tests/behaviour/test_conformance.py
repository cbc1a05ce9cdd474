"""Every check of ringfence.testing.conformance on every backend that this host has, through one fixture."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

import pytest

from backends_declared import DECLARED
from ringfence import Sandbox
from ringfence.testing import checks, conformance
from ringfence.testing.conformance import CHECKS, Check, Outcome, Report, check

MODULES = [
    importlib.import_module(f"{checks.__name__}.{found.name}") for found in pkgutil.iter_modules(checks.__path__)
]


def test_a_backend_conforms(backend_name: str, one: Check) -> None:
    declared = DECLARED[backend_name]
    lacking = [f"{need}: {declared.without[need]}" for need in one.needs if need in declared.without]
    if lacking:
        pytest.skip(f"declared not applicable: {'; '.join(lacking)}")
    one.act(declared.make())


# ── the suite itself ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])
def test_every_check_that_is_written_is_in_the_table(module: ModuleType) -> None:
    """A check is a public function whose first parameter is a sandbox or a maker of sandboxes."""
    written = {
        name
        for name, found in vars(module).items()
        if callable(found)
        and not name.startswith("_")
        and getattr(found, "__module__", "") == module.__name__
        and found.__code__.co_varnames[:1] in (("box",), ("make",))
        and found.__code__.co_argcount == 1
    }
    listed = [one.name.partition(".")[2] for one in module.CHECKS]
    assert (sorted(written), len(set(listed))) == (sorted(listed), len(listed))


def test_names_are_unique_and_every_module_is_in_the_whole_table() -> None:
    names = [one.name for one in CHECKS]
    assert len(set(names)) == len(names) == sum(len(module.CHECKS) for module in MODULES)


def make(**kwargs: object) -> Sandbox:
    return Sandbox(**kwargs)  # type: ignore[arg-type]  # passed on


def untimed(report: Report) -> list[tuple[str, str, str]]:
    return [(o.check, o.status, o.reason) for o in report.outcomes]


def test_a_report_counts_what_passed_failed_and_was_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Callable[..., Sandbox]) -> None:
        raise AssertionError("it does not hold")

    chosen = next(one for one in CHECKS if one.name == "lifecycle.it_goes_from_new_over_running_to_closed")
    limited = Check("limits.of_memory", broken, ("memory-limit",))
    monkeypatch.setattr(conformance, "CHECKS", (chosen, Check("limits.broken", broken), limited))
    report = check(make, without={"memory-limit": "no cgroup"})
    assert untimed(report) == [
        (chosen.name, "passed", ""),
        ("limits.broken", "failed", "AssertionError: it does not hold"),
        ("limits.of_memory", "not-applicable", "memory-limit: no cgroup"),
    ]
    assert (report.ok, report.explain().splitlines()[-1]) == (False, "1 passed, 1 failed, 1 not-applicable")
    assert check(make, only=["lifecycle."]).ok


def test_a_backend_that_leaks_between_sandboxes_fails_the_suite() -> None:
    """The other arm: one sandbox handed out again and again is no isolation, and the checks say so."""

    class Shared:
        def __init__(self, box: Sandbox) -> None:
            self.box = box

        def __enter__(self) -> Sandbox:
            return self.box

        def __exit__(self, *_: object) -> None:
            return

    with Sandbox() as box:
        report = check(lambda **_: Shared(box), only=["isolation.one_sandbox", "limits.threads", "disk.usage"])  # type: ignore[arg-type]  # it stands in
    assert [outcome.status for outcome in report.outcomes] == ["failed", "failed", "failed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"without": {"telepathy": "x"}}, "no capability is named 'telepathy'"), ({"only": ["nope"]}, "no check starts")],
)
def test_a_wrong_argument_is_refused_before_a_check_runs(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(make, **arguments)  # type: ignore[arg-type]  # passed on


def test_nothing_that_passed_is_no_success() -> None:
    assert not Report((Outcome("x", "not-applicable", "y", 0.0),)).ok


def test_the_module_runs_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--backend", "process", "lifecycle.it_goes", "refusals."]) == 0
    assert capsys.readouterr().out == "4 passed, 0 failed, 0 not-applicable\n"
