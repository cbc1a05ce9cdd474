"""The real executable on the real sandbox: what a person types, sees, and gets as exit code."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import weaker
from accounts import OrdinaryUser
from programs import read_program

SOURCE = Path(__file__).resolve().parents[2] / "src"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "RF_TEST_HOST_SECRET": "host-only"}


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "ringfence", *argv]


def ringfence(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
    done = subprocess.run(command(*argv), input=stdin, capture_output=True, timeout=50, env=environment())
    return done.returncode, done.stdout.decode(), weaker.without(done.stderr.decode())


def on_a_terminal(*argv: str, when: bytes = b"", send: bytes = b"") -> tuple[int, bytes]:
    """Return exit code and output of a command on a terminal; `send` is typed when `when` was seen in the output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command(*argv), environment())
    seen = b""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # EIO: the last process on the terminal has gone
            break
        seen += piece
        if send and when in seen:
            os.write(terminal, send)
            send = b""
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), weaker.without(seen.decode()).encode()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_command_that_does_nothing_says_nothing() -> None:
    assert ringfence("exec", "--", "/bin/true") == (0, "", "")


def test_a_commands_output_and_exit_code_are_its_own() -> None:
    assert ringfence("exec", "--", "sh", "-c", "echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")


def test_input_goes_through_in_full() -> None:
    data = b"".join(b"%d\n" % n for n in range(100_000))
    code, out, err = ringfence("exec", "--", "cat", stdin=data)
    assert (code, out.encode() == data, err) == (0, True, "")


def test_output_is_not_cut() -> None:
    code, out, err = ringfence("run", "-c", "print('x' * 5_000_000)")
    assert (code, len(out), err) == (0, 5_000_001, "")


def test_output_comes_while_it_runs() -> None:
    process = subprocess.Popen(
        command("exec", "--", "sh", "-c", "echo first; cat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    assert process.communicate(b"second\n", timeout=30)[0] == b"second\n"
    assert process.returncode == 0


def test_code_gets_its_arguments() -> None:
    assert ringfence("run", "-c", "import sys; print(sys.argv[1:])", "a", "--json") == (0, "['a', '--json']\n", "")


def test_a_file_goes_in_alone(folder: Path) -> None:
    (folder / "other.py").write_text("")
    (folder / "main.py").write_text("import os, sys\nprint(os.listdir('.'), sys.argv, input())\n")
    code, out, err = ringfence("run", "main.py", "x", stdin=b"typed\n")
    assert (code, out, err) == (0, "['main.py'] ['/workspace/main.py', 'x'] typed\n", "")


def test_code_comes_from_standard_input() -> None:
    assert ringfence("run", "-", stdin=b"print(6 * 7)\n") == (0, "42\n", "")
    assert ringfence("run", "-l", "bash", stdin=b'echo "$0"\n') == (0, "/workspace/main.sh\n", "")


def test_nothing_of_this_machines_variables_goes_in() -> None:
    code, out, _ = ringfence("exec", "-e", "GIVEN=1", "--", "env")
    assert code == 0
    assert "GIVEN=1\n" in out
    assert "host-only" not in out


def test_a_shown_file_is_there_under_its_own_name(folder: Path) -> None:
    (folder / "data.csv").write_text("a,b\n")
    (folder / "secret.txt").write_text("x")
    (folder / "analyse.py").write_text("import sys, os\nprint(open(sys.argv[1]).read(), os.listdir('.'))\n")
    assert ringfence("run", "--ro", "data.csv", "analyse.py", "data.csv") == (0, "a,b\n ['data.csv']\n", "")


def test_a_writable_folder_is_written_and_a_copy_is_not(folder: Path) -> None:
    assert ringfence("exec", "--copy", ".", "--", "sh", "-c", "echo 1 > made; cat made") == (0, "1\n", "")
    assert list(folder.iterdir()) == []
    assert ringfence("exec", "--rw", ".", "--", "sh", "-c", "echo 1 > made; pwd") == (0, f"{folder}\n", "")
    assert (folder / "made").read_text() == "1\n"


def test_a_time_limit_is_124_with_the_option() -> None:
    started = time.monotonic()
    assert ringfence("exec", "--timeout", "1", "--", "sleep", "30") == (
        124,
        "",
        "ringfence: stopped after 1 s, the time limit; for more: --timeout S\n",
    )
    assert time.monotonic() - started < 10


@weaker.needs_cgroup
def test_a_memory_limit_is_137_with_the_option() -> None:
    code, out, err = ringfence("run", "--memory", "64M", "-c", "x = bytearray(1 << 30)")
    assert (code, out) == (137, "")
    assert err == "ringfence: killed: it needed more memory than its limit of 64M; for more: --memory SIZE\n"


def test_a_death_by_signal_is_128_and_its_number() -> None:
    assert ringfence("exec", "--", "sh", "-c", "kill -SEGV $$")[0] == 128 + signal.SIGSEGV


def test_a_missing_program_is_127_and_explained() -> None:
    code, out, err = ringfence("exec", "--", "no-such-program")
    assert (code, out) == (127, "")
    assert err == (
        "ringfence: no program no-such-program inside, and none on this machine either: check the name, or install it\n"
    )


def test_a_program_that_may_not_be_run_is_126() -> None:
    assert ringfence("exec", "--", "/etc/passwd")[0] == 126


def test_a_folder_that_is_not_shown_is_explained(folder: Path) -> None:
    (folder / "in.txt").write_text("x")
    code, out, err = ringfence("exec", "--", "cat", "in.txt")
    assert (code, out) == (1, "")
    assert err.endswith("ringfence: in.txt is on this machine but not shown inside: add --ro in.txt\n")


def test_a_place_to_start_that_is_not_there_is_ours() -> None:
    code, out, err = ringfence("exec", "--cwd", "/nonexistent", "--", "ls")
    assert (code, out) == (125, "")
    assert err.startswith("ringfence: /nonexistent: No such file or directory")
    fix = "name a folder that is there inside, such as --cwd /workspace, or show it: --ro /nonexistent"
    assert err.endswith(f"\nringfence: {fix}\n")


def test_json_is_the_whole_result() -> None:
    code, out, err = ringfence("exec", "--json", "--", "sh", "-c", "echo hi; exit 4")
    found = json.loads(out)
    assert (code, err) == (4, "")
    assert (found["status"], found["reason"], found["exit_code"], found["stdout"]) == ("error", "exit", 4, "hi\n")
    assert found["backend"] == "process"


def test_a_report_of_what_was_refused_is_not_the_one_before(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_text('{"status": "ok"}')
    code, _, err = ringfence("exec", "--report", str(report), "--backend", "vm", "--", "true")
    assert (code, err.splitlines()[0]) == (125, "ringfence: the vm backend is not in this version")
    assert json.loads(report.read_text())["error"]["message"] == "the vm backend is not in this version"


@pytest.mark.parametrize(
    "line",
    [
        ("run", "missing.py"),
        ("run", "--policy", "missing", "-c", "1"),
        ("run", "--bogus", "-c", "1"),
        ("exec", "--ro", "missing", "--", "true"),
        ("exec",),
    ],
)
def test_nor_where_the_line_itself_is_refused(tmp_path: Path, line: tuple[str, ...]) -> None:
    for report in (tmp_path / "report", tmp_path / "new"):
        if report.name == "report":
            report.write_text('{"status": "ok"}')
        code, _, err = ringfence(line[0], "--report", str(report), *line[1:])
        assert (code, err.splitlines()[0]) == (125, f"ringfence: {json.loads(report.read_text())['error']['message']}")


def test_a_refused_line_writes_no_report_through_a_link_nor_over_what_is_none(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text('{"mine": 1}')
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "folder").symlink_to(tmp_path)
    code = tmp_path / "code.py"
    code.write_text("print(1)")
    os.link(precious, tmp_path / "twin")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder/precious", "code.py", "twin", "pipe", "missing/report", "/dev/null", "x\ny"):
        assert ringfence("exec", "--report", name, "--bogus")[0] == 125
    assert (precious.read_text(), code.read_text()) == ('{"mine": 1}', "print(1)")


@pytest.mark.parametrize("option", ["--report", "--net-log"])
@pytest.mark.parametrize("name", ["link", "folder/precious", "folder/new", "dangling"])
def test_what_a_line_writes_goes_through_no_link_that_a_guest_could_have_made(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, option: str, name: str
) -> None:
    """L15. Nothing runs, in whatever mode the folder is shown."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious").write_text("mine")
    for link, target in (("link", "precious"), ("folder", ""), ("dangling", "made")):
        (folder / link).symlink_to(outside / target)
    for mode in ("--rw", "--ro", "--copy"):
        code, out, err = ringfence("exec", mode, ".", option, name, "--", "touch", "ran")
        planted = folder / name.split("/", maxsplit=1)[0]
        said = f"{planted} is a link to {os.readlink(planted)}, and a guest could have made it"
        assert (code, out) == (125, "")
        assert err.splitlines() == [
            f"ringfence: {option} {name}: {said}",
            f"ringfence: name {os.path.realpath(folder / name)} itself, if that is what you mean",
        ]
    assert (os.listdir(outside), (outside / "precious").read_text()) == (["precious"], "mine")
    assert not (folder / "ran").exists()


def test_a_report_goes_where_a_shell_leads_it(folder: Path) -> None:
    run = " ".join(command("exec", "--quiet", "--report", "{}", "--", "echo", "said"))
    for where, way in (
        ("/dev/stdout", "> report"),
        ("/dev/stderr", "2> report"),
        ("/dev/fd/7", "7> report"),
        ("/proc/self/fd/7", "7> report"),
        ("/dev/fd/7", "7> >(cat > report)"),
        (">(cat > report)", ""),
        (str(folder / "report"), ""),
        ("report", ""),
    ):
        line = f"{run.format(where)} {way}; wait; sleep 0.2"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=40, env=environment())
        told = (folder / "report").read_text().removeprefix("said\n")
        assert (json.loads(told)["status"], done.returncode) == ("ok", 0), (where, done.stderr)
        (folder / "report").unlink()
    assert ringfence("exec", "--report", "/dev/null", "--", "true")[0] == 0


def test_a_report_is_not_written_to_a_pipe_that_nobody_reads(folder: Path) -> None:
    os.mkfifo(folder / "report")
    code, _, err = ringfence("exec", "--report", "report", "--", "true")
    assert (code, "cannot be written" in err) == (125, True)


def test_code_that_is_a_link_is_not_run_and_a_pipe_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """L16: else the file that the link leads to would be shown, and its text with every error."""
    private = tmp_path_factory.mktemp("outside") / "private"
    private.write_text("secret = 1")
    (folder / "main.py").symlink_to(private)
    code, out, err = ringfence("run", "main.py")
    assert (code, out, "is a link to" in err) == (125, "", True)
    run = " ".join(command("run"))
    for line in (f"{run} <(echo 'print(1)')", f"echo 'print(1)' | {run} /dev/stdin", f"echo 'print(1)' | {run} -"):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=40, env=environment())
        assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_explain_runs_nothing(folder: Path) -> None:
    code, out, err = ringfence("exec", "--rw", ".", "--explain", "--", "touch", "made")
    assert (code, err) == (0, "")
    assert out.startswith("backend: process\n")
    assert list(folder.iterdir()) == []
    code, told, err = ringfence("exec", "--rw", ".", "--explain", "--json", "--", "touch", "made")
    assert (code, err) == (0, "")
    plan = json.loads(told)
    assert (plan["backend"], plan["explain"]) == ("process", out.rstrip("\n"))
    assert plan["enforcement"]["files"]["level"] == "full"


def test_a_reader_that_leaves_ends_it() -> None:
    line = f"{' '.join(command('exec', '--', 'yes'))} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=40, env=environment())
    assert (done.stdout, done.stderr) == ("y\n141\n", "")


def test_a_closed_output_is_no_place_for_the_guests_bytes() -> None:
    line = f"{' '.join(command('exec', '--', 'echo', 'x'))} >&- 2>&- <&-; echo $?"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=40, env=environment())
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_on_a_terminal_only_colours_pass() -> None:
    text = "a\\033]0;title\\007b\\033[31mred\\033[0m\\033[2J\\rover\\n"
    assert on_a_terminal("exec", "--", "printf", text) == (0, b"ab\x1b[31mred\x1b[0m\r\nover\r\n")
    assert on_a_terminal("exec", "--raw", "--", "printf", "a\\033]0;title\\007b\\n") == (0, b"a\x1b]0;title\x07b\r\n")


def test_what_is_typed_reaches_the_guest() -> None:
    code, seen = on_a_terminal("exec", "--", "sh", "-c", "echo ready; cat", when=b"ready", send=b"hello\n\x04")
    assert (code, seen) == (0, b"ready\r\nhello\r\nhello\r\n")


def test_ctrl_c_kills_the_guest_and_says_one_line() -> None:
    code, seen = on_a_terminal("exec", "--", "sh", "-c", "echo ready; sleep 30", when=b"ready", send=b"\x03")
    assert (code, seen) == (130, b"ready\r\n^Cringfence: stopped by Ctrl-C: everything inside was killed\r\n")


def test_sigterm_kills_the_guest_too() -> None:
    process = subprocess.Popen(
        command("exec", "--", "sh", "-c", "echo ready; sleep 30"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (
        143,
        b"",
        b"ringfence: stopped by SIGTERM: everything inside was killed\n",
    )


def test_as_an_ordinary_user_it_is_the_same(ordinary_user: OrdinaryUser) -> None:
    script = "import sys; from ringfence.__main__ import main; sys.exit(main())"
    inside = "id -u; echo out; echo err >&2; exit 3"
    done = ordinary_user.run(script, "exec", "-q", "--", "sh", "-c", inside)
    assert (done.returncode, done.stdout, done.stderr) == (3, "1000\nout\n", "err\n")


def test_the_doctor_finds_the_process_backend() -> None:
    code, out, err = ringfence("doctor", "process")
    assert (code, err) == (0, "")
    assert out.startswith("process: works\n")
    assert "auto: process keeps the policy 'offline'\n" in out


def test_a_protected_file_in_a_writable_folder_is_refused(folder: Path) -> None:
    (folder / ".git" / "hooks").mkdir(parents=True)
    code, _, err = ringfence("exec", "--rw", ".", "--", "sh", "-c", "echo x > .git/hooks/pre-commit")
    assert code != 0
    assert "Read-only file system" in err
    assert list((folder / ".git" / "hooks").iterdir()) == []


def test_a_module_beside_the_file_is_hinted_at_and_found_when_shown(folder: Path) -> None:
    (folder / "main.py").write_text("import helper\nprint(helper.x)\n")
    (folder / "helper.py").write_text("x = 5\n")
    code, out, err = ringfence("run", "main.py")
    assert (code, out) == (1, "")
    assert err.endswith(f"ringfence: helper is beside the file but not shown inside: add --ro {folder}\n")
    assert ringfence("run", "--ro", ".", "main.py") == (0, "5\n", "")


def test_json_of_code_has_its_value_and_exception() -> None:
    found = json.loads(ringfence_without_input("run", "--json", "-c", "6 * 7"))
    assert (found["status"], found["value"]) == ("ok", "42")
    found = json.loads(ringfence_without_input("run", "--json", "-c", "1 / 0"))
    assert (found["reason"], found["exception"]["name"]) == ("exception", "ZeroDivisionError")


def ringfence_without_input(*argv: str) -> bytes:
    return subprocess.run(
        command(*argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=50, env=environment()
    ).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_an_attack_that_is_told_to_end_puts_away_what_it_made(number: signal.Signals) -> None:
    """A closed terminal or a stopped service used to leave folders on the host with files of an attack."""
    with subprocess.Popen(
        command("attack", "A01", "A02", "A03", "D09"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as attack:

        def folders() -> list[Path]:
            return list(Path("/var/tmp").glob(f"ringfence-attack-{attack.pid}-*"))

        deadline = time.monotonic() + 30
        while not folders() and time.monotonic() < deadline:
            time.sleep(0.002)
        attack.send_signal(number)
        _, said = attack.communicate(timeout=30)
    assert (attack.returncode, said) == (128 + number, f"ringfence: stopped by {number.name}\n".encode())
    assert folders() == []


def test_a_name_of_a_guests_moves_no_cursor_in_what_a_verb_prints(folder: Path) -> None:
    name = "evil\rgood\b\b\a\x7f.toml"
    (folder / name).write_text("version = 1\n")
    code, screen = on_a_terminal("policy", "check", name)
    assert (code, screen) == (0, b"evil\r\ngood.toml: no mistakes\r\n")


KEEP = read_program("cli/end_to_end_keep.py")


def test_snapshots_are_kept_where_the_persons_own_links_lead(ordinary_user: OrdinaryUser) -> None:
    """The folder is not named by a caller: no guest may write there or place a link there, and links are followed."""
    done = ordinary_user.run(KEEP)
    assert done.stdout == "4 4\n", done.stderr
