"""Run the whole test suite in parts, several side by side, each apart from the others; print one report.

    python tests/suite.py              what `make test` runs
    python tests/suite.py --proof      what `make proof` runs: that, and what a change seldom breaks

Most tests wait more than they compute, so more parts run at once than there are processors. As root each part has
process ids, cgroups and folders of its own (scripts/apart), and its own container engine where its tests need one. As
another user nothing can be kept apart, and the parts run one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import accounts
from outcomes import WALLS, Outcomes, needs_an_engine, parsed, read

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
DURATIONS = TESTS / "durations.json"
WORK = ROOT / ".cache" / "tests"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")

SECONDS_OF_A_PART = 60.0
SECONDS_OF_AN_UNKNOWN_FILE = 1.0
LONGEST_S = 2400.0
SECONDS_TO_END = 60.0  # after a signal that a process can ignore
# A file whose last test judges what the others found has to stay in one piece.
IN_ONE_PIECE = ("tests/attacks/test_mutation.py", "tests/attacks/test_engines.py")
_CLOSING = re.compile(r"^=*\s*\d+ (passed|failed|skipped|error)")


@dataclasses.dataclass(frozen=True)
class Part:
    """A command of the run. A part without `tests` passes when the exit code is 0."""

    name: str
    command: tuple[str, ...]
    seconds: float  # expected, on an idle machine
    tests: bool = True
    load: int = 1  # of the parts that may run at once, as how many this one counts
    apart: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    may_be_empty: bool = False  # whether pytest may find no test


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of a part: exit code, time and outcomes."""

    name: str
    ok: bool
    outcomes: Outcomes
    seconds: float
    cpu_seconds: float
    why: str = ""  # it failed, beyond the tests that failed
    log: str = ""


# ── what there is to run ─────────────────────────────────────────────────────────────────────────


def files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py"))


def durations() -> dict[str, float]:
    told: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return told


def marked(mark: str) -> list[str]:
    """Return the files in which a test has this mark."""
    return [file for file in files() if f"pytest.mark.{mark}" in (ROOT / file).read_text()]


def test_parts() -> list[Part]:
    """Return what `make test` runs; every test is in exactly one part, or only in `make proof`."""
    known = durations()
    parts = [Part("types", (sys.executable, "-m", "mypy", "--no-error-summary"), 60.0, tests=False, apart=False)]
    for wall in WALLS:
        rows = [
            (file, known.get(file if wall == "none" else f"{file} {wall}", SECONDS_OF_AN_UNKNOWN_FILE))
            for file in files()
            if wall == "none" or needs_an_engine(ROOT / file)
        ]
        parts += _parts_of(wall, rows)
    if measuring := marked("measures"):
        parts.append(Part("measures", (*PYTEST, "-m", "measures", *measuring), 1000.0, load=3))
    return parts


def _parts_of(wall: str, rows: list[tuple[str, float]]) -> Iterator[Part]:
    """Cut the files, in order, into parts of about the same length; a long file is cut into shares."""
    options = ("-m", "not measures", "--wall", wall)
    number, kept, length = 1, [], 0.0
    # An engine takes seconds to start and to fill: its parts are longer.
    target = SECONDS_OF_A_PART * (1 if wall == "none" else 2)

    def part(chosen: list[str], seconds: float, *more: str) -> Part:
        nonlocal number
        name = f"{'tests' if wall == 'none' else wall} {number}"
        number += 1
        return Part(name, (*PYTEST, *options, *more, *chosen), seconds, may_be_empty=wall != "none")

    for file, seconds in rows:
        if seconds > 1.5 * target and file not in IN_ONE_PIECE:
            shares = round(seconds / target)
            for share in range(1, shares + 1):
                yield part([file], seconds / shares, "--share", f"{share}/{shares}")
            continue
        kept.append(file)
        length += seconds
        if length >= target:
            yield part(kept, length)
            kept, length = [], 0.0
    if kept:
        yield part(kept, length)


def proof_parts() -> list[Part]:
    """Return what only `make proof` runs."""
    known = durations()
    large = (("RINGFENCE_SOAK", "1"), ("RINGFENCE_SOAK_WALLS", "5"))
    parts = []
    for wall in WALLS:
        for file in marked("proof"):
            if wall == "none" or needs_an_engine(ROOT / file):
                seconds = known.get(f"proof {file}" if wall == "none" else f"proof {file} {wall}", 60.0)
                name = f"{file.removeprefix('tests/').removesuffix('.py')}{'' if wall == 'none' else f' {wall}'}"
                marks = "proof or not proof" if file in IN_ONE_PIECE else "proof"
                command = (*PYTEST, "-m", marks, "--wall", wall, file)
                parts.append(Part(name, command, seconds, environment=large, may_be_empty=True))
    for name in ("container", "podman", "gvisor"):
        chosen = (*PYTEST, "--backend", name, "tests/behaviour", "-m")
        parts.append(Part(f"everywhere {name}", (*chosen, "everywhere and not measures"), 300.0))
        parts.append(Part(f"measures {name}", (*chosen, "everywhere and measures"), 1000.0, load=3))
    return [*parts, *_machines()]


def _machines() -> list[Part]:
    """Return what runs in virtual machines with cgroup v2."""
    smoke = ("tests/v2/run", "--as", "root,user,user-service", "--", "python3", "tests/v2/smoke.py")
    environment = (("TIMEOUT_S", "1800"),)
    return [
        Part(name, command, 900.0, tests=False, apart=False, environment=environment)
        for name, command in (("machine host", ("tests/v2/run",)), ("machine smoke", smoke))
    ]


def why_not(part: Part) -> str | None:
    """Return why this host cannot run a part at all, or None."""
    if part.name.startswith("machine "):
        if os.geteuid() != 0:
            return "only root can build the disk of the machine"
        if shutil.which("qemu-system-x86_64") is None:
            return "qemu-system-x86_64 is not installed"
    if part.name.startswith(("everywhere ", "measures ")):
        import backends_declared

        return backends_declared.missing(part.name.partition(" ")[2])
    return None


# ── running ──────────────────────────────────────────────────────────────────────────────────────


class Running:
    """A part that was started."""

    def __init__(self, part: Part, *, apart: bool) -> None:
        self.part = part
        stem = re.sub(r"[^a-z0-9]+", "-", part.name)
        self._log, self._outcomes = WORK / f"{stem}.log", WORK / f"{stem}.json"
        self._outcomes.unlink(missing_ok=True)
        self._started = time.monotonic()
        # A part ends with this process, also when it is killed.
        command = ["setpriv", "--pdeathsig", "TERM"]
        command += [*([str(ROOT / "scripts" / "apart")] if apart and part.apart else []), *part.command]
        if part.tests:
            command += ["--outcomes", str(self._outcomes)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **dict(part.environment)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ended(self) -> Done | None:
        """Return how the part ended, or None while it runs. Ends a part that takes too long."""
        seconds = time.monotonic() - self._started
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            if seconds > LONGEST_S + SECONDS_TO_END:
                self._process.kill()
            elif seconds > LONGEST_S:
                self._process.terminate()
            return None
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        outcomes = read(self._outcomes) if self.part.tests else Outcomes()
        why = ""
        if outcomes is None:
            why = f"pytest ended early, with exit code {code}"
        elif code == 5 and not self.part.may_be_empty and not outcomes.skipped:
            why = "no test was chosen"
        elif code not in ((0, 1, 5) if self.part.tests else (0,)) or (code == 1 and not outcomes.failed):
            why = f"exit code {code}"
        outcomes = outcomes or Outcomes()
        ok = not why and not outcomes.failed
        log = self._log.read_text(errors="replace")
        if ok:
            self._log.unlink()
        return Done(self.part.name, ok, outcomes, seconds, usage.ru_utime + usage.ru_stime, why, log)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def run(parts: Iterable[Part], at_once: int, *, apart: bool) -> Iterator[Done]:
    """Run parts, `at_once` at a time and the longest first; yield each as it ends."""
    waiting = sorted(parts, key=lambda part: (-min(part.load, at_once), -part.seconds))
    running: list[Running] = []
    try:
        while waiting or running:
            free = at_once - sum(min(each.part.load, at_once) for each in running)
            while waiting and (found := next((p for p in waiting if min(p.load, at_once) <= free), None)):
                waiting.remove(found)
                running.append(Running(found, apart=apart))
                free -= min(found.load, at_once)
            time.sleep(0.1)
            for each in list(running):
                if (done := each.ended()) is not None:
                    running.remove(each)
                    yield done
    finally:
        for each in running:
            each.end()


def can_be_apart() -> bool:
    if os.geteuid() != 0:
        return False
    return subprocess.run([ROOT / "scripts" / "apart", "true"], capture_output=True).returncode == 0


# ── resuming ─────────────────────────────────────────────────────────────────────────────────────


def state_of_the_code() -> str | None:
    """Return a name for the commit and every change on top of it; None where there is no git."""
    commands = (
        ["rev-parse", "HEAD"],
        ["diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD"],
        ["ls-files", "-z", "--others", "--exclude-standard"],
    )
    told = [subprocess.run(["git", *each], cwd=ROOT, capture_output=True) for each in commands]
    if any(each.returncode != 0 for each in told):
        return None
    found = hashlib.sha256(b"\0".join(each.stdout for each in told))
    for name in os.fsdecode(told[2].stdout).split("\0"):
        found.update((ROOT / name).read_bytes() if (ROOT / name).is_file() else b"")
    found.update(repr(what_runs_it()).encode())
    return f"{told[0].stdout.decode().strip()[:12]}-{found.hexdigest()[:12]}"


def what_runs_it() -> list[str]:
    """Return what is not in git and decides what passes: kernel, interpreter, packages and engines."""
    packages = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    engines = [str(shutil.which(name)) for name in ("docker", "podman", "runsc", "qemu-system-x86_64")]
    return [os.uname().release, str(os.geteuid()), sys.version, *packages, *engines]


class Progress:
    """The parts that passed, on disk, for a run that is stopped and started again on the same code."""

    def __init__(self, path: Path | None, code: str | None = None) -> None:
        self._path, self._code = path, code
        rows = json.loads(path.read_text()) if path is not None and path.exists() else []
        self.done = [Done(**{**row, "outcomes": parsed(row["outcomes"])}) for row in rows]

    def add(self, done: Done) -> None:
        if not done.ok:
            return
        self.done.append(dataclasses.replace(done, log=""))
        changed = self._code is not None and state_of_the_code() != self._code  # since the run began
        if self._path is not None and not changed:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps([dataclasses.asdict(each) for each in self.done]))
            part.replace(self._path)


# ── reporting ────────────────────────────────────────────────────────────────────────────────────


def line_of(done: Done, number: int, of: int) -> str:
    told = done.outcomes
    # No "N passed, N failed" but in the last line of all: that is what CI reads.
    counts = f"{told.passed} ok" if done.outcomes.seconds else "ok" if done.ok else ""
    counts += f", {sum(told.skipped.values())} skipped" if told.skipped else ""
    counts += f", FAILED: {len(told.failed) or ''}" if not done.ok else ""
    times = f"{done.seconds:.0f} s, of which {done.cpu_seconds:.0f} s CPU"
    return f"[{number:2}/{of}] {done.name:24} {counts:32} {times}{f'   {done.why}' if done.why else ''}"


def table(found: Iterable[Done]) -> list[str]:
    """Return the table of a proof: one row for each kind of part, with the parts that passed before counted too."""
    kinds: dict[str, list[Done]] = {}
    for done in found:
        kinds.setdefault(done.name.rstrip(" 0123456789"), []).append(done)
    rows = [f"{'what':28} {'parts':>5} {'ok':>6} {'skipped':>8} {'failed':>7} {'s':>6} {'CPU s':>6}"]
    for kind, parts in sorted(kinds.items()):
        ok = sum(part.outcomes.passed for part in parts)
        skipped = sum(sum(part.outcomes.skipped.values()) for part in parts)
        failed = sum(max(len(part.outcomes.failed), not part.ok) for part in parts)
        seconds, cpu = sum(part.seconds for part in parts), sum(part.cpu_seconds for part in parts)
        rows.append(f"{kind:28} {len(parts):5} {ok:6} {skipped:8} {failed:7} {seconds:6.0f} {cpu:6.0f}")
    return rows


def not_tested(found: Iterable[Done], left_out: dict[str, str], *, proof: bool) -> list[str]:
    """Return one line for each reason why something was not tested here."""
    outcomes = [done.outcomes for done in found]
    reasons: Counter[str] = Counter()
    for each in outcomes:
        reasons.update(each.skipped)
    rows = sorted({row for each in outcomes for row in each.not_available})
    rows += [f"NOT AVAILABLE {name}: {why}" for name, why in left_out.items()]
    rows += [f"{count} skipped: {reason}" for reason, count in reasons.most_common()]
    late = sum(each.only_in_proof for each in outcomes)
    if late and not proof:
        rows.append(f"{late} tests are for make proof only, with whole attack matrices, soak and virtual machines")
    return rows


def report(found: list[Done], left_out: dict[str, str], *, proof: bool) -> bool:
    """Print what failed, what was not tested here and why, and last the counts. Returns whether all is well."""
    failed = [name for done in found for name in done.outcomes.failed]
    broken = [done for done in found if done.why]
    if rows := not_tested(found, left_out, proof=proof):
        print("\nNot tested here:", *rows, sep="\n  ")
    for done in found:
        if not done.ok:
            print(f"\n── {done.name}: {done.why or 'failed'} {'─' * 60}\n{_what_failed(done.log)}")
    if failed:
        print("\nFailed:", *failed, sep="\n  ")
    for done in broken:
        print(f"\n{done.name}: {done.why}")
    passed = sum(done.outcomes.passed for done in found)
    skipped = sum(sum(done.outcomes.skipped.values()) for done in found)
    print(f"{passed} passed, {len(failed) + len(broken)} failed, {skipped} skipped", flush=True)
    return not failed and not broken


def _what_failed(log: str) -> str:
    """Return the part of pytest's output that tells of failures, without its closing line."""
    begin = min((at for word in ("= ERRORS", "= FAILURES") if (at := log.find(word)) >= 0), default=0)
    lines = [line for line in log[begin:].splitlines() if not _CLOSING.search(line)]
    return "\n".join(lines)[-20_000:]


def keep_durations(found: Iterable[Done], path: Path = DURATIONS) -> None:
    """Write how long each file took, for the next run's parts."""
    rows = durations()
    kinds = [
        ("proof " if "/" in done.name else "", done) for done in found if done.name[-1].isdigit() or "/" in done.name
    ]
    rows |= {f"{kind}{key}": 0.0 for kind, done in kinds for key in done.outcomes.seconds}
    for kind, done in kinds:
        for key, seconds in done.outcomes.seconds.items():
            rows[f"{kind}{key}"] = round(rows[f"{kind}{key}"] + seconds, 1)
    rows = {key: rows[key] for key in sorted(rows) if rows[key] >= 0.3}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proof", action="store_true", help="run what make proof runs; resumes on the same code")
    parser.add_argument("--at-once", type=int, default=2 * (os.cpu_count() or 1), help="how many parts run at once")
    parser.add_argument("--only", metavar="TEXT", help="only parts whose name starts with this")
    parser.add_argument("--keep-durations", action="store_true", help="write tests/durations.json from this run")
    asked = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    (ROOT / ".cache" / ".gitignore").write_text("*\n")
    accounts.account()  # two parts that make it at once would disturb each other
    parts = [*test_parts(), *(proof_parts() if asked.proof else [])]
    parts = [part for part in parts if part.name.startswith(asked.only or "")]
    if not parts:
        parser.error(f"no part has a name that starts with {asked.only!r}")
    code = state_of_the_code() if asked.proof else None
    progress = Progress(WORK / f"proof-{code}.state" if code else None, code)
    names = {part.name for part in parts}
    found = [done for done in progress.done if done.name in names]
    left_out = {part.name: why for part in parts if (why := why_not(part)) is not None}
    chosen = [part for part in parts if part.name not in {*left_out, *(done.name for done in found)}]
    if found:
        print(f"{len(found)} of {len(parts)} parts passed before on the same code")
    apart = can_be_apart()
    at_once = asked.at_once if apart else 1
    started = time.monotonic()
    print(f"{len(chosen)} parts, {at_once} at once{'' if apart else ': nothing can be kept apart here'}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the parts that run, as Ctrl-C does
    try:
        for done in run(chosen, at_once, apart=apart):
            found.append(done)
            progress.add(done)
            print(line_of(done, len(found), len(parts) - len(left_out)), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if asked.keep_durations:
        keep_durations(found)
    if asked.proof:
        print("", *table(found), sep="\n")
    print(f"{time.monotonic() - started:.0f} s; {sum(done.cpu_seconds for done in found):.0f} s of CPU time")
    return 0 if report(found, left_out, proof=asked.proof) else 1


if __name__ == "__main__":
    sys.exit(main())
