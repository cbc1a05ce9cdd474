"""The command with a pretended sandbox: streams, signals, reports, and that the sandbox is always closed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

import ringfence
from cli.samples import OK, ended
from ringfence.cli import main
from ringfence.events import Event, Exit, Gap, Stderr, Stdout
from ringfence.records import HostSummary, Request
from ringfence.results import Denial, Result
from ringfence.values import replace


class Process:
    """A pretended process: yields the given events, then ends; `hang` sends this process a signal instead."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.closed = False

    def __iter__(self) -> Iterator[Event]:
        if self.box.signal:
            os.kill(os.getpid(), self.box.signal)
            time.sleep(10)
        if self.box.wants_stdin:
            deadline = time.monotonic() + 10
            while not self.closed and time.monotonic() < deadline:
                time.sleep(0.01)
            yield Stdout(self.box.stdin, "", 0)
        yield from self.box.events
        yield Exit(self.box.result, 0)

    def write(self, data: bytes) -> None:
        self.box.stdin += data

    def close_stdin(self) -> None:
        self.closed = True


class Plan:
    def explain(self) -> str:
        return "the plan\n"


class Files:
    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def write(self, path: str, data: bytes) -> None:
        self.written[path] = data


class Network:
    def __init__(self) -> None:
        self.lines: tuple[Request, ...] = ()

    def log(self) -> tuple[Request, ...]:
        return self.lines

    def summary(self) -> tuple[HostSummary, ...]:
        return ()


class Sandbox:
    """A pretended sandbox: tests set its results before, and look at the calls afterwards."""

    events: tuple[Event, ...] = ()
    result: Result = OK
    signal = 0
    wants_stdin = False
    last: Sandbox | None = None
    network = Network()
    _launcher = SimpleNamespace(preflight=lambda: None)

    def __init__(self, **options: object) -> None:
        self.options = options
        self.files = Files()
        self.stdin = b""
        self.log: list[object] = []
        type(self).last = self

    def plan(self) -> Plan:
        return Plan()

    def start(self) -> None:
        self.log.append("start")

    def spawn(self, argv: list[str], *, cwd: str | None, timeout_s: float) -> Process:
        assert 0 < timeout_s < float("inf")
        self.log.append((argv, cwd))
        return Process(self)

    def denials(self) -> tuple[Denial, ...]:
        return ()

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(vars(ringfence), "Sandbox", Sandbox)
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    Sandbox.events, Sandbox.result, Sandbox.signal, Sandbox.wants_stdin, Sandbox.last = (), OK, 0, False, None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def log() -> list[object]:
    assert Sandbox.last is not None
    return Sandbox.last.log


def test_output_passes_untouched_to_a_pipe(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    Sandbox.events = (Stdout(b"\x1b]0;t\x07\xff", "", 0), Stderr(b"\x1b[2J\r", "", 0), Stdout(b"end", "", 0))
    assert main(["exec", "--", "x", "-y"]) == 0
    assert capfdbinary.readouterr() == (b"\x1b]0;t\x07\xffend", b"\x1b[2J\r")
    assert log() == ["start", (["x", "-y"], None), "close"]


@pytest.mark.parametrize(("options", "shown"), [([], b"a\x1b[1mb\x1b[0m"), (["--raw"], b"a\x1b]0;t\x07\x1b[1mb")])
def test_on_a_terminal_only_colours_pass_unless_raw(
    options: list[str], shown: bytes, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: fd in (1, 2))
    pieces = b"a\x1b]0", b";t\x07\x1b[", b"1mb"
    Sandbox.events = tuple(kind(piece, "", 0) for kind in (Stdout, Stderr) for piece in pieces)
    assert main(["exec", *options, "x"]) == 0
    assert capfdbinary.readouterr() == (shown, shown)


def test_our_input_reaches_it_and_ends(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    Sandbox.wants_stdin = True
    with given_input(b"one\ntwo\xff\n"):
        assert main(["exec", "cat"]) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\xff\n"


class given_input:  # noqa: N801  # read as words in a with statement
    def __init__(self, data: bytes, *, null: bool = False) -> None:
        self.data = data
        self.null = null

    def __enter__(self) -> None:
        self.saved = os.dup(0)
        reader, writer = os.pipe()
        if self.null:
            os.close(reader)
            reader = os.open(os.devnull, os.O_RDONLY)
            self.data = b""
        os.write(writer, self.data)
        os.close(writer)
        os.dup2(reader, 0)
        os.close(reader)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.saved, 0)
        os.close(self.saved)


def test_code_from_standard_input_goes_in_as_a_file_and_input_is_closed() -> None:
    with given_input(b"print(1)\n"):
        assert main(["run", "-", "a", "--json"]) == 0
    assert Sandbox.last is not None
    assert Sandbox.last.files.written == {"/workspace/main.py": b"print(1)\n"}
    assert log()[1] == (["python3", "/workspace/main.py", "a", "--json"], None)


@pytest.mark.parametrize(
    ("argv", "command", "written"),
    [
        (["-c", "1"], ["python3", "-c", "1"], {}),
        (["-c", "1", "-x"], None, None),
        (["-c", "1", "x", "-y"], ["python3", "-c", "1", "x", "-y"], {}),
        (["-l", "bash", "-c", "echo $1", "x"], ["bash", "-c", "echo $1", "bash", "x"], {}),
        (["-l", "javascript", "-c", "1"], ["node", "-e", "1"], {}),
        (["-l", "javascript", "-c", "1", "--", "-x"], ["node", "-e", "1", "--", "-x"], {}),
        (["t.py", "-x"], ["python3", "/workspace/t.py", "-x"], {"/workspace/t.py": b"print(1)"}),
        (["d/t.sh"], ["bash", "/workspace/t.sh"], {"/workspace/t.sh": b"ls"}),
        (["-l", "javascript", "t.py"], ["node", "/workspace/t.py"], {"/workspace/t.py": b"print(1)"}),
    ],
)
def test_code_becomes_a_command_of_its_interpreter(
    argv: list[str], command: list[str] | None, written: dict[str, bytes] | None
) -> None:
    Path("t.py").write_text("print(1)")
    Path("d").mkdir()
    Path("d/t.sh").write_text("ls")
    code = main(["run", *argv])
    if command is None:
        assert (code, Sandbox.last) == (125, None)
        return
    assert Sandbox.last is not None
    assert (code, log()[1], Sandbox.last.files.written) == (0, (command, None), written)


def test_a_shown_folder_is_where_code_starts(tmp_path: Path) -> None:
    Path("data.csv").write_text("1")
    Path("t.py").write_text("print(1)")
    assert main(["run", "--ro", "data.csv", "t.py", "data.csv"]) == 0
    assert log()[1] == (["python3", "/workspace/t.py", "data.csv"], str(tmp_path))


def test_a_file_that_is_shown_runs_from_its_own_place(tmp_path: Path) -> None:
    Path("src").mkdir()
    Path("src/t.py").write_text("import beside")
    assert main(["run", "--ro", ".", "src/t.py", "x"]) == 0
    assert Sandbox.last is not None
    assert (log()[1], Sandbox.last.files.written) == ((["python3", f"{tmp_path}/src/t.py", "x"], str(tmp_path)), {})
    assert main(["run", "--ro", ".", "--hide", "src", "src/t.py"]) == 0
    assert Sandbox.last.files.written == {"/workspace/t.py": b"import beside"}


def test_json_is_one_object_instead_of_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    Sandbox.events = (Stdout(b"hidden", "", 0),)
    Sandbox.result = replace(ended("error", "exit", exit_code=3), stdout_bytes=b"hidden")
    assert main(["exec", "--json", "x"]) == 3
    said = capfd.readouterr()
    assert (json.loads(said.out), said.err) == (Sandbox.result.to_dict(), "")


def test_a_report_is_the_same_object_and_the_output_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Sandbox.events = (Stdout(b"shown", "", 0),)
    (tmp_path / "r.json").write_text("old " * 10_000)
    assert main(["exec", "--report", "r.json", "x"]) == 0
    assert capfd.readouterr().out == "shown"
    assert json.loads((tmp_path / "r.json").read_text()) == OK.to_dict()


def test_a_report_that_cannot_be_written_is_found_out_before(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "--report", "none/r.json", "x"]) == 125
    assert capfd.readouterr().err.startswith("ringfence: --report none/r.json: cannot be written: No such file")
    assert Sandbox.last is None


def test_the_net_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    assert main(["exec", "--net-log", "n.log", "x"]) == 0
    assert (tmp_path / "n.log").read_bytes() == b""
    at = datetime(2026, 1, 2, tzinfo=UTC)
    Sandbox.network.lines = (Request(at, "a.com", 443, "denied", "net.port", None, None, None, None, 0, 0, 0.5),)
    assert main(["exec", "--net-log", "n.log", "--allow-net", "a.com", "x"]) == 0
    assert [json.loads(line) for line in (tmp_path / "n.log").read_text().splitlines()] == [
        {
            "at": "2026-01-02T00:00:00+00:00",
            "host": "a.com",
            "port": 443,
            "verdict": "denied",
            "code": "net.port",
            "rule": None,
            "method": None,
            "path": None,
            "status": None,
            "sent_bytes": 0,
            "received_bytes": 0,
            "duration_s": 0.5,
        }
    ]


def test_an_event_of_the_net_log_is_one_line_whatever_a_guest_names(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    host = 'a.com", "verdict": "allowed"}\r\n{"host": "forged"}\u2028\x85'
    Sandbox.network.lines = (Request(at, host, 443, "denied", "net.name", None, None, "/\n", None, 0, 0, 0.5),)
    assert main(["exec", "--net-log", "n.log", "--allow-net", "a.com", "x"]) == 0
    (line,) = (tmp_path / "n.log").read_text().splitlines()
    assert (json.loads(line)["host"], json.loads(line)["verdict"], json.loads(line)["path"]) == (host, "denied", "/\n")


def test_explain_prints_the_plan_and_runs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "--explain", "x"]) == 0
    assert (capfd.readouterr().out, log()) == ("the plan\n", [])


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGINT, "Ctrl-C"),
        (signal.SIGQUIT, "Ctrl-\\"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGHUP, "SIGHUP"),
    ],
)
def test_a_signal_kills_what_is_inside_and_says_one_line(
    number: int, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Sandbox.signal = number
    assert main(["exec", "x"]) == 128 + number
    assert capfd.readouterr() == ("", f"ringfence: stopped by {name}: everything inside was killed\n")
    assert log()[-1] == "close"


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Sandbox.events = (Stdout(b"", "", 0),)
        assert main(["exec", "x"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_reader_that_has_gone_ends_it_quietly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(fd: int, data: bytes) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    Sandbox.events = (Stdout(b"x", "", 0),)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", gone)
        assert main(["exec", "x"]) == 141
    assert (log()[-1], capfd.readouterr()) == ("close", ("", ""))


def test_a_full_disk_under_our_output_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if fd == 1:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    Sandbox.events = (Stdout(b"x", "", 0),)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert main(["exec", "x"]) == 125
    told = "ringfence: cannot write standard output: No space left on device\nringfence: send it where there is room\n"
    assert capfd.readouterr().err == told
    assert log()[-1] == "close"


def test_a_report_says_why_there_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(fd: int, data: bytes) -> int:
        if fd == 1:
            raise BrokenPipeError(32, "Broken pipe")
        return write(fd, data)

    write = os.write
    Sandbox.events = (Stdout(b"x", "", 0),)
    report = tmp_path / "report"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", gone)
        assert main(["exec", "--report", str(report), "x"]) == 141
    message = "the reader of the output has gone: everything inside was killed"
    assert json.loads(report.read_text()) == {"error": {"code": "output-closed", "message": message, "fix": None}}


def test_a_report_and_a_net_log_are_two_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    same = str(tmp_path / "x")
    assert main(["exec", "--report", same, "--net-log", same, "x"]) == 125
    told = f"ringfence: --net-log and --report are both {same}\nringfence: name a file for each\n"
    assert capfd.readouterr().err == told


def test_a_full_disk_under_the_report_is_said_with_the_option(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "--report", "/dev/full", "x"]) == 125
    told = ["cannot write the file of --report: No space left on device", "name another file: --report FILE"]
    assert capfd.readouterr().err == "".join(f"ringfence: {line}\n" for line in told)


def test_lost_output_and_limits_are_noted_unless_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    Sandbox.events = (Gap(70_000, 0),)
    Sandbox.result = ended("timeout", "wall-clock")
    assert main(["exec", "--timeout", "3", "x"]) == 124
    assert capfd.readouterr().err == (
        "ringfence: 70000 bytes of output are lost: they came faster than they were read\n"
        "ringfence: stopped after 3 s, the time limit; for more: --timeout S\n"
    )
    assert main(["exec", "-q", "--timeout", "3", "x"]) == 124
    assert capfd.readouterr().err == ""


def test_python_code_for_json_alone_is_run_by_the_library(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def run(code: str, **options: object) -> Result:
        asked.append((code, options))
        return OK

    monkeypatch.setitem(vars(ringfence), "run", run)
    Path("t.py").write_text("\ufeff6 * 7")
    with given_input(b"", null=True):
        assert main(["run", "--json", "t.py"]) == 0
        options = {"policy": ringfence.Policy(), "backend": "auto", "image": "host"}
        assert asked == [("6 * 7", options)]
        assert json.loads(capfd.readouterr().out) == OK.to_dict()
        for argv in (["t.py"], ["--json", "t.py", "x"], ["--json", "--ro", "t.py", "t.py"]):
            assert main(["run", *argv]) == 0
    with given_input(b"data"):
        assert main(["run", "--json", "t.py"]) == 0
    assert len(asked) == 1
