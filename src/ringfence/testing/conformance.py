"""The table of checks that any backend must pass, ours or another project's, and the function that runs the checks.

    report = check(lambda **kwargs: Sandbox(backend=Mine(), **kwargs))
    print(report.explain())

`python -m ringfence.testing.conformance --backend process` runs the checks on a backend by name.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Literal

from ringfence.testing.checks import (
    code,
    commands,
    copies,
    disk,
    files,
    isolation,
    languages,
    lifecycle,
    limits,
    looking,
    reaching,
    refusals,
    sessions,
    spawning,
    tools,
    transfers,
)
from ringfence.testing.model import CAPABILITIES, Capability, Check, MakeSandbox
from ringfence.values import Struct, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ringfence.values import Strings

__all__ = ["CAPABILITIES", "CHECKS", "Capability", "Check", "MakeSandbox", "Outcome", "Report", "check", "outcomes"]

CHECKS: tuple[Check, ...] = (
    *lifecycle.CHECKS,
    *code.CHECKS,
    *sessions.CHECKS,
    *languages.CHECKS,
    *commands.CHECKS,
    *spawning.CHECKS,
    *reaching.CHECKS,
    *tools.CHECKS,
    *files.CHECKS,
    *transfers.CHECKS,
    *looking.CHECKS,
    *disk.CHECKS,
    *copies.CHECKS,
    *limits.CHECKS,
    *isolation.CHECKS,
    *refusals.CHECKS,
)


@final
class Outcome(Struct):
    """The outcome of a check. `reason` is empty for a check that passed."""

    check: str
    status: Literal["passed", "failed", "not-applicable"]
    reason: str
    duration_s: float


@final
class Report(Struct):
    """The outcomes of all chosen checks, in order."""

    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed and at least one passed."""
        return not self.of("failed") and bool(self.of("passed"))

    def of(self, status: Literal["passed", "failed", "not-applicable"]) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status == status)

    def explain(self) -> str:
        """Return a line for each check that failed or was not applicable, with the reason, and the three numbers."""
        rows = [o for o in self.outcomes if o.status != "passed"]
        lines = [f"{o.status}: {o.check}: {o.reason}" for o in rows]
        numbers = [f"{len(self.of(s))} {s}" for s in ("passed", "failed", "not-applicable")]
        return "\n".join([*lines, ", ".join(numbers)])


def check(make_sandbox: MakeSandbox, *, without: Mapping[str, str] | None = None, only: Strings = ()) -> Report:
    """Run the checks in order. All checks take about a minute.

    `make_sandbox` takes the keywords of Sandbox except `backend` and returns a sandbox that is not started.
    `without` names the capabilities that do not apply to this backend, each with the reason; their checks are counted.
    `only` keeps the checks whose names start with one of the given texts ("files.").
    """
    return Report(tuple(outcomes(make_sandbox, without=without, only=only)))


def outcomes(
    make_sandbox: MakeSandbox, *, without: Mapping[str, str] | None = None, only: Strings = ()
) -> Iterator[Outcome]:
    """Do the same as `check`, but yield each outcome when its check ends."""
    if not __debug__:
        raise RuntimeError("checks are assertions, and python -O leaves them out: run without -O")
    missing = dict(without or {})
    unknown = [name for name in missing if name not in CAPABILITIES]
    if unknown:
        raise ValueError(f"no capability is named {unknown[0]!r}; known: {', '.join(CAPABILITIES)}")
    chosen = [c for c in CHECKS if not only or c.name.startswith(tuple(only))]
    if not chosen:
        raise ValueError(f"no check starts with {' or '.join(map(repr, only))}")
    return (_outcome(c, make_sandbox, missing) for c in chosen)


def _outcome(one: Check, make: MakeSandbox, missing: Mapping[str, str]) -> Outcome:
    lacking = [f"{name}: {missing[name]}" for name in one.needs if name in missing]
    if lacking:
        return Outcome(one.name, "not-applicable", "; ".join(lacking), 0.0)
    started = time.monotonic()
    try:
        one.act(make)
    except Exception as error:  # noqa: BLE001  # any error of a backend fails the check
        return Outcome(one.name, "failed", _described(error), time.monotonic() - started)
    return Outcome(one.name, "passed", "", time.monotonic() - started)


def _described(error: Exception) -> str:
    """Return an error's type and text, and the line of the check that failed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/testing/checks/" in f.filename]
    place = f" at `{frames[-1].line}` (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def main(arguments: list[str] | None = None) -> int:
    import argparse

    from ringfence import Sandbox

    parser = argparse.ArgumentParser(description="Run the checks that any backend must pass.")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--without", action="append", default=[], metavar="CAPABILITY=REASON")
    parser.add_argument("only", nargs="*", metavar="CHECK", help="run only checks whose names start with this")
    given = parser.parse_args(arguments)
    without = dict(item.partition("=")[::2] for item in given.without)
    report = check(lambda **kwargs: Sandbox(backend=given.backend, **kwargs), without=without, only=given.only)
    print(report.explain())
    return 0 if report.ok else 1


if __name__ == "__main__":
    import sys

    sys.exit(main())
