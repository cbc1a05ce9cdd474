"""The run of the whole suite leaves no test out, says what happened, and goes on where it stopped."""

from __future__ import annotations

import collections
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import suite
from outcomes import WALLS, Outcomes, needs_an_engine

ROOT = Path(__file__).resolve().parents[1]


def option(part: suite.Part, name: str) -> str | None:
    return part.command[part.command.index(name) + 1] if name in part.command else None


def test_every_file_is_in_one_part_of_each_wall_or_in_all_its_shares() -> None:
    found: collections.Counter[tuple[str, str | None, str | None]] = collections.Counter()
    for part in suite.test_parts():
        wall = option(part, "--wall")
        if wall is not None:
            found.update((word, wall, option(part, "--share")) for word in part.command if word.startswith("tests/"))
    walls = {file: WALLS if needs_an_engine(ROOT / file) else ("none",) for file in suite.files()}
    assert {(file, wall) for file, of in walls.items() for wall in of} == {(file, wall) for file, wall, _ in found}
    assert set(found.values()) == {1}
    shares = collections.Counter((file, wall) for file, wall, share in found if share is not None)
    several = {(file, wall): {str(share) for f, w, share in found if (f, w) == (file, wall)} for file, wall in shares}
    for key, names in several.items():
        assert names == {f"{number}/{len(names)}" for number in range(1, len(names) + 1)}, key
    assert {file for file, _ in shares} & set(suite.IN_ONE_PIECE) == set()


SOME = """
import pytest
@pytest.mark.parametrize("name", ["docker", "podman", "plain"])
def test_each(name): pass
@pytest.mark.proof
def test_late(): pass
def test_skipped(): pytest.skip("nothing is here")
def test_broken(): raise ValueError
"""


def collect(folder: Path, *words: str) -> str:
    """Run pytest with our options on a file that names an engine in a comment."""
    path = folder / "backends" / "test_some.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SOME)
    command = [*suite.PYTEST, "-p", "conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *words]
    done = subprocess.run(
        [*command, "-rN", "--collect-only", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return (
        " ".join(sorted(line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line)) or done.stderr
    )


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), "test_broken test_each[docker] test_each[plain] test_each[podman] test_skipped"),
        (("-m", "proof"), "test_late"),
        (("--wall", "none"), "test_broken test_each[plain] test_skipped"),
        (("--wall", "podman"), "test_each[podman]"),
        (("--share", "1/2"), "test_each[docker] test_each[plain] test_each[podman]"),
        (("--share", "2/2"), "test_broken test_skipped"),
    ],
)
def test_a_part_has_the_tests_of_its_wall_and_share(tmp_path: Path, words: tuple[str, ...], chosen: str) -> None:
    assert collect(tmp_path, *words) == chosen


def part(name: str, code: str, **more: object) -> suite.Part:
    return suite.Part(name, (sys.executable, "-c", code), 1.0, tests=False, **more)  # type: ignore[arg-type]  # passed on


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "WORK", tmp_path)


def test_parts_run_side_by_side_and_a_heavy_one_beside_few() -> None:
    begun = time.monotonic()
    parts = [*(part(f"light {n}", "import time; time.sleep(1)") for n in range(4)), part("heavy", "", load=3)]
    assert {done.name for done in suite.run(parts, 4, apart=False)} == {each.name for each in parts}
    assert time.monotonic() - begun < 3.5


def test_the_last_line_is_the_counts_alone_and_a_part_that_died_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = suite.Done("good", True, Outcomes(passed=3, skipped={"no go here": 2}, only_in_proof=7), 1.0, 1.0)
    bad = suite.Done("bad", False, Outcomes(failed=("tests/x.py::y",)), 1.0, 1.0, log="= FAILURES\nwhy\n1 failed in 1s")
    dead = suite.Done("dead", False, Outcomes(), 1.0, 1.0, why="pytest ended early, with exit code -9")
    assert suite.report([good], {}, proof=False)
    assert not suite.report([good, bad, dead], {"machine host": "qemu is not installed"}, proof=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 passed, 2 failed, 2 skipped"
    assert [line for line in lines if "1 failed" in line] == []
    told = {line.strip() for line in lines}
    assert {
        "why",
        "tests/x.py::y",
        "NOT AVAILABLE machine host: qemu is not installed",
        "2 skipped: no go here",
    } <= told


def test_a_run_goes_on_with_what_has_not_passed(tmp_path: Path) -> None:
    path = tmp_path / "proof.state"
    progress = suite.Progress(path)
    done = list(suite.run([part("good", ""), part("bad", "raise SystemExit(3)")], 2, apart=False))
    for each in done:
        progress.add(each)
    assert {each.name: each.why for each in done} == {"good": "", "bad": "exit code 3"}
    assert [(each.name, each.ok) for each in suite.Progress(path).done] == [("good", True)]


def test_an_interrupt_ends_every_part(tmp_path: Path) -> None:
    running = suite.run([part("long", "import time; time.sleep(60)"), part("quick", "")], 2, apart=False)
    assert next(running).name == "quick"
    begun = time.monotonic()
    running.close()  # type: ignore[attr-defined]  # a generator
    assert time.monotonic() - begun < 10


def outcome_of(folder: Path, text: str, **more: object) -> suite.Done:
    """Run a file of tests as a part."""
    path = folder / "test_some.py"
    path.write_text(text)
    options = ("-p", "conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-m", "not measures")
    environment = (("PYTHONPATH", str(ROOT / "tests")),)
    command = (*suite.PYTEST, *options, str(path))
    (done,) = suite.run([suite.Part("some", command, 1.0, environment=environment, **more)], 1, apart=False)  # type: ignore[arg-type]  # passed on
    return done


LEAVES = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('x', returncode={code})\ndef test_c(): assert 0"


@pytest.mark.parametrize("code", [0, 5])
def test_a_run_that_ends_before_its_last_test_has_not_passed(tmp_path: Path, code: int) -> None:
    done = outcome_of(tmp_path, LEAVES.format(code=code))
    assert (done.ok, done.outcomes.passed) == (False, 1)
    assert done.outcomes.failed == ("test_some.py::test_b and 1 after it: not run to the end",)


def test_a_part_without_tests_has_not_passed_unless_it_may_be_empty(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, "x = 1").why == "no test was chosen"
    assert outcome_of(tmp_path, "x = 1", may_be_empty=True).ok


def test_the_skip_of_a_whole_file_is_counted(tmp_path: Path) -> None:
    done = outcome_of(tmp_path, "import pytest\npytest.skip('not now', allow_module_level=True)\ndef test_a(): pass")
    assert (done.ok, done.outcomes.skipped) == (True, {"not now": 1})


def test_a_child_of_a_test_does_not_tell_the_outcomes(tmp_path: Path) -> None:
    text = "import os\ndef test_a():\n if not os.fork(): raise KeyboardInterrupt\n os.wait()\n os.kill(os.getpid(), 9)"
    assert outcome_of(tmp_path, text).why == "pytest ended early, with exit code -9"


def test_a_part_that_ignores_a_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LONGEST_S", 0.5)
    monkeypatch.setattr(suite, "SECONDS_TO_END", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert [done.why for done in suite.run([part("deaf", code)], 1, apart=False)] == ["exit code -9"]


def pid_in(file: Path) -> int:
    """Wait for a file with a process id."""
    deadline = time.monotonic() + 30
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(file.read_text())


def ended(pid: int) -> bool:
    """Wait until a process is gone or a zombie; return whether it is."""
    deadline = time.monotonic() + 30
    while (alive := is_alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path("/proc", str(pid), "stat").read_text()
    except OSError:  # it is gone
        return False


def test_a_part_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import suite; suite.WORK = Path(sys.argv[1])\n"
        "command = ('sh', '-c', 'echo $$ >$0.part; mv $0.part $0; exec sleep 60', sys.argv[2])\n"
        "one = suite.Part('one', command, 1.0, tests=False)\n"
        "list(suite.run([one], 1, apart=False))"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, tmp_path / "pid"], cwd=ROOT / "tests") as process:
        pid = pid_in(tmp_path / "pid")
        process.kill()
    assert ended(pid)


def test_a_virtual_machine_ends_with_its_script(tmp_path: Path) -> None:
    scripts = tmp_path / "tests" / "v2"
    shutil.copytree(ROOT / "tests" / "v2", scripts)
    key = hashlib.sha256((scripts / "build").read_bytes() + (scripts / "inside").read_bytes()).hexdigest()[:12]
    disk = tmp_path / ".cache" / "v2" / f"bookworm-{key}" / "disk"
    disk.parent.mkdir(parents=True)
    disk.touch()
    machine = tmp_path / "qemu-system-x86_64"
    told = tmp_path / "pid"
    machine.write_text(f"#!/bin/sh\necho $$ >{told}.part; mv {told}.part {told}; exec sleep 60\n")
    machine.chmod(0o755)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen([scripts / "run"], env=environment) as process:
        pid = pid_in(told)
        process.terminate()
    assert ended(pid)
    assert list((tmp_path / ".cache" / "v2").glob("run.*")) == []


def test_the_table_of_a_proof_has_a_row_for_each_kind_of_part() -> None:
    parts = [
        suite.Done("tests 1", True, Outcomes(passed=3, skipped={"no go": 2}), 10.0, 4.0),
        suite.Done("tests 12", False, Outcomes(passed=1, failed=("a", "b")), 20.0, 5.0),
        suite.Done("machine smoke", False, Outcomes(), 7.0, 6.0, why="exit code 1"),
    ]
    assert [row.split() for row in suite.table(parts)] == [
        ["what", "parts", "ok", "skipped", "failed", "s", "CPU", "s"],
        ["machine", "smoke", "1", "0", "0", "1", "7", "6"],
        ["tests", "2", "4", "2", "2", "30", "9"],
    ]


def test_what_passed_counts_on_the_same_code_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = suite.Done("good", True, Outcomes(passed=3), 1.0, 1.0)
    path = tmp_path / "proof.state"
    monkeypatch.setattr(suite, "state_of_the_code", lambda: "changed meanwhile")
    suite.Progress(path, "at the start").add(done)
    assert suite.Progress(path).done == []


def test_every_change_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a", "-C", str(tmp_path))
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "a.bin").write_bytes(b"\0one")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run([*git, *words], check=True)
    names = [suite.state_of_the_code()]
    for name, content in (("a.bin", b"\0two"), ("ä b\nc", b"one"), ("ä b\nc", b"two")):
        (tmp_path / name).write_bytes(content)
        names.append(suite.state_of_the_code())
    monkeypatch.setattr(suite, "what_runs_it", lambda: ["another kernel"])
    names.append(suite.state_of_the_code())
    assert len(set(names)) == 5


def test_every_file_of_tests_has_a_name_by_which_it_is_found() -> None:
    """Without a test in it, a file adds nothing to its part, and says nothing."""
    tests = re.compile(r"^(async )?def test_|^class Test", re.MULTILINE)
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("*.py")}
    others = [name for name in paths if name == "tests/suite.py" or name.startswith("tests/programs/")]
    found = {name for name, path in paths.items() if name not in others and tests.search(path.read_text())}
    assert found == set(suite.files())


needs_root = pytest.mark.skipif(not suite.can_be_apart(), reason="scripts/apart takes root")
APART = str(ROOT / "scripts" / "apart")


def groups_and_folders() -> set[str]:
    found = {str(path) for path in Path("/var/tmp").glob("rf-apart-*")}
    return found | {str(path) for path in Path("/sys/fs/cgroup").glob("**/rf-apart-*")}


@needs_root
def test_a_command_apart_has_its_own_exit_code_processes_and_folders(tmp_path: Path) -> None:
    before = groups_and_folders()
    script = "cat; test $(ls -d /proc/[0-9]* | wc -l) -lt 9 || exit 1; touch /tmp/mine; ls /tmp /run/ringfence; exit 7"
    done = subprocess.run([APART, "sh", "-c", script], input="given\n", capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr, done.returncode) == ("given\n/run/ringfence:\n\n/tmp:\nmine\n", "", 7)
    assert groups_and_folders() - before == set()


@needs_root
@pytest.mark.parametrize("number", [2, 9, 15])
def test_whatever_ends_a_command_apart_nothing_of_it_is_left(number: int, tmp_path: Path) -> None:
    before = groups_and_folders()
    script = "setsid sleep 611 & mkdir /sys/fs/cgroup/*/below 2>/dev/null; echo go; sleep 611"
    with subprocess.Popen([APART, "sh", "-c", script], stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        process.send_signal(number)
        process.wait(30)
    deadline = time.monotonic() + 20
    while (left := groups_and_folders() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert [command for command in commands if b"sleep\x00611" in command] == []
