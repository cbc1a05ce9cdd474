"""Wrong input: a clear message with a fix, the exit code of `help exit`, and nothing is started."""

# ruff: noqa: E501  # a row of a table is one line

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
import weaker
from ringfence.cli import LATER, main
from ringfence.cli.run import MAX_CODE


@pytest.fixture(autouse=True)
def no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reaching the launch is the failure of every test here."""

    def launched(*_: object) -> int:
        raise AssertionError("it was launched")

    monkeypatch.setattr("ringfence.cli.launch.launch", launched)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data.csv").write_text("a,b\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "latin1.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "ok.py").write_text("print(1)\n")
    (tmp_path / "bad.toml").write_text("version = 1\n[limits]\nmemroy = 1\n")


MISTAKES = [
    ("exec", "no command to run", "put it after the options: ringfence exec -- ls -l"),
    ("exec --", "no command to run", "put it after the options: ringfence exec -- ls -l"),
    ("exec --memory 12Q -- ls", "--memory 12Q: limits.memory is '12Q', which is not a size", "write bytes, or"),
    ("exec --memory 0 -- ls", "--memory 0: limits.memory must be between 1 byte and", "write bytes, or"),
    ("exec --memory -5 -- ls", "--memory -5: limits.memory", "write bytes, or"),
    ("exec --timeout 0 -- ls", "--timeout 0 leaves no time to run", "give more than 0 seconds: --timeout 30"),
    ("exec --timeout -1 -- ls", "--timeout -1 leaves no time to run", "give more than 0 seconds: --timeout 30"),
    ("exec --timeout nan -- ls", "--timeout 'nan' is not a number of seconds", "write, for 90 seconds: --timeout 90"),
    ("exec --timeout 5m -- ls", "--timeout '5m' is not a number of seconds", "write, for 90 seconds: --timeout 90"),
    ("exec --limit cpu=2 -- ls", "--limit 'cpu=2': there is no limit 'cpu'", "did you mean --limit cpus=2? limits are:"),
    ("exec --limit cpus -- ls", "--limit 'cpus': cpus takes a number", "for example: --limit cpus=1.5"),
    ("exec --limit processes=1.5 -- ls", "--limit processes=1.5: limits.processes must be a whole number", "for example:"),
    ("exec --limit processes=many -- ls", "--limit 'processes=many': processes takes a whole number", "for example:"),
    ("exec --limit on_idle=stop -- ls", "--limit on_idle=stop: limits.on_idle must be one of", "for example:"),
    ("exec --ro missing -- ls", "--ro missing: there is no such file or folder on this machine", "check the name"),
    ("exec --ro missing:/data -- ls", "--ro missing: there is no such file or folder", "check the name"),
    ("exec --ro=~/x -- ls", "--ro ~/x: there is no such file or folder", "the shell left ~ as it is"),
    ("exec --ro src:data -- ls", "--ro src:data: 'data' is not a whole path", "the place inside starts with /: --ro src:/data"),
    ("exec --timeout 1e300 -- ls", "--timeout 1e300: limits.timeout_s must be between 0.001 and 315360000 seconds", "for example: --timeout 90"),
    ("exec --ro /proc/self -- ls", "--ro /proc/self: mounts.source:", "it is never shown; name the folder that is needed"),
    ("exec --ro / -- ls", "--ro /: mounts.source: nothing can be mounted onto /", "it is never shown; name the folder that is needed"),
    ("exec --allow-net Public -- ls", "--allow-net Public is not known", "did you mean --allow-net public?"),
    ("exec --ro src:/ -- ls", "--ro src:/: mounts.target: nothing can be mounted onto /", "choose a folder"),
    ("exec --ro src:/a/../b -- ls", "--ro src:/a/../b: mounts.target: '/a/../b' holds \"..\"", "write the path without it"),
    ("exec --ro . --rw . -- ls", "--rw .: ", "leave one of the two out"),
    ("exec --hide .env -- ls", "--hide .env: no folder around it is shown, so it is absent already", "leave it out"),
    ("exec --ro src --hide src -- ls", "--hide src: the same path is shown", "leave one of the two options out"),
    ("exec --env NOPE_NOPE -- ls", "--env NOPE_NOPE: there is no variable NOPE_NOPE here", "give it one: --env NOPE_NOPE=V"),
    ("exec -e =x -- ls", "env: '' is not the name of a variable", "use letters"),
    ("exec --secret TOKEN -- ls", "--secret 'TOKEN' does not say which host may get it", "write the variable and the host"),
    ("exec --secret @a.com -- ls", "--secret '@a.com' does not say", "write the variable and the host"),
    ("exec --secret NOPE_NOPE@a.com -- ls", "--secret NOPE_NOPE: there is no variable NOPE_NOPE here", "set it first"),
    ("exec --secret HOME@a.com -- ls", "--secret HOME@a.com: a.com is not reachable", "add --allow-net a.com"),
    ("exec --allow-net a..com -- ls", "network.allow[0]", ""),
    ("exec --allow-net public --allow-net a.com:8443 -- ls", "--allow-net a.com:8443 and --allow-net public cannot be", ""),
    ("exec --backend proces -- ls", "--backend 'proces' is not known", "did you mean --backend process? it takes one of:"),
    ("exec --isolation shared-kernal -- ls", "--isolation 'shared-kernal' is not known", "did you mean --isolation shared-kernel?"),
    ("exec --isolation kernel -- ls", "--isolation kernel is now called shared-kernel", "write: --isolation shared-kernel"),
    ("exec --tty --report r -- ls", "standard input is not a terminal", "leave --tty out"),
    ("shell --keep ../x", "--keep '../x' is no name for a snapshot", "letters, digits"),
    ("shell", "standard input is not a terminal", "without one: ringfence exec -- COMMAND"),
    ("exec --policy devv -- ls", "there is no policy 'devv'", "did you mean dev? presets are offline, dev, hostile;"),
    ("exec --policy none.toml -- ls", "there is no file 'none.toml'", "to write one: ringfence policy show dev > FILE.toml"),
    ("exec --policy src -- ls", "'src' is not a policy file", "a policy file's name ends in .toml"),
    ("exec --policy bad.toml -- ls", "bad.toml:3: limits.memroy is not a key of a policy", 'did you mean "memory"?'),
    ("exec --cwd sub -- ls", "--cwd sub: ", "add --ro sub, or name a place inside"),
    ("exec --rw . --report out.json -- ls", "--report out.json is in a folder that the guest may write", "name a file else"),
    ("exec --rw . --net-log out -- ls", "--net-log out is in a folder that the guest may write", "name a file elsewhere"),
    ("run nope.py", "there is no file 'nope.py'", "name a file, or give the code: "),
    ("run okk.py", "there is no file 'okk.py'", "did you mean ok.py?"),
    ("run src", "src is a folder, not a file of code", "name the file, and show it the rest: ringfence run --ro src src/main.py"),
    ("run binary.py", "binary.py is not text: it holds NUL bytes", "run takes source text; a program runs with: "),
    ("run latin1.py", "latin1.py is not UTF-8: byte 5 is 0xe9", "save it as UTF-8"),
    ("run empty.py", "empty.py holds no python code", "name a file, or give the code: "),
    ("run -c", "-c needs a value: -c CODE", "see: ringfence run --help"),
    ("run -l pyhton ok.py", "--language 'pyhton' is not known", "did you mean --language python?"),
    ("run -l wasm ok.py", "the language wasm is not in this version", "run takes python, javascript, bash, go,"),
    ("run main.wasm", "the language wasm is not in this version", "run takes python, javascript, bash, go,"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message", "fix"), MISTAKES)
def test_a_mistake_is_said_with_its_fix(line: str, message: str, fix: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(line.split())
    said = capfd.readouterr()
    first, *rest = said.err.splitlines()
    assert (code, said.out) == (125, "")
    assert first.startswith(f"ringfence: {message}")
    assert "".join(rest).startswith(f"ringfence: {fix}" if fix else "")


@pytest.mark.parametrize(("line", "message", "fix"), MISTAKES)
def test_with_json_it_is_an_object(line: str, message: str, fix: str, capfd: pytest.CaptureFixture[str]) -> None:
    verb, *rest = line.split()
    assert main([verb, "--json", *rest]) == 125
    said = capfd.readouterr()
    error = json.loads(said.out)["error"]
    assert (sorted(error), said.err) == (["code", "fix", "message"], "")
    assert error["message"].startswith(message)
    assert (error["fix"] or "").startswith(fix)


def test_empty_code_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-c", ""]) == 125
    assert capfd.readouterr().err.startswith("ringfence: -c holds no python code\n")


@pytest.mark.parametrize(("argument", "message"), [("print('\udce9')", "-c is not UTF-8"), ("a\0b", "-c is not text")])
def test_code_on_the_command_line_is_text_too(argument: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-c", argument]) == 125
    assert capfd.readouterr().err.startswith(f"ringfence: {message}")


def test_code_over_the_cap_is_refused_without_reading_it_all(capfd: pytest.CaptureFixture[str]) -> None:
    with open("large.py", "wb") as file:
        file.write(b"#" * (MAX_CODE + 1))
        file.truncate(1 << 40)
    assert main(["run", "large.py"]) == 125
    assert capfd.readouterr().err.startswith("ringfence: large.py is more than 16 MiB of code\n")


def test_a_file_that_may_not_be_read_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ok.py/x.py"]) == 125
    assert capfd.readouterr().err.startswith("ringfence: cannot read 'ok.py/x.py': Not a directory\n")


def test_no_code_on_a_terminal_is_not_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 0)
    assert main(["run"]) == 125
    assert capfd.readouterr().err.startswith("ringfence: no code to run\nringfence: name a file, or give the code: ")


@pytest.mark.parametrize("verb", LATER)
def test_a_verb_that_is_not_built_says_what_to_use(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "x"]) == 125
    assert capfd.readouterr().err == f"ringfence: {verb} is not in this version\nringfence: {LATER[verb]}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exce", "there is no verb 'exce'\nringfence: did you mean: ringfence exec?"),
        ("ok.py", "there is no verb 'ok.py'\nringfence: to run that file: ringfence run ok.py"),
        ("npm test", "there is no verb 'npm'\nringfence: to run a command: ringfence exec -- npm; verbs: ringfence --help"),
        ("--quiet run", "no verb before --quiet\nringfence: options come after the verb: ringfence VERB [OPTIONS] ..."),
        ("doctor proces", "there is no backend 'proces'\nringfence: did you mean process? backends are: process, container, gvisor"),
        ("doctor vm", "the vm backend is not in this version\nringfence: it takes one of: auto, process, container, gvisor"),
        ("doctor --jsn", "doctor has no option --jsn\nringfence: did you mean --json? see: ringfence doctor --help"),
        ("policy", "policy needs to know what to do\nringfence: one of: check, explain, show, list; see: ringfence policy --help"),
        ("policy chek", "policy has no 'chek'\nringfence: did you mean: ringfence policy check? it has: check, explain, show, list"),
        ("policy check", "policy check needs a policy\nringfence: write: ringfence policy check FILE.toml"),
        ("policy list x", "policy list takes no 'x'\nringfence: see: ringfence policy --help"),
        ("policy check dev --rw .", "policy check takes no --rw\nringfence: what options add up to: ringfence policy show --rw ..."),
        ("policy show dev -p dev", "two policies: dev and --policy\nringfence: leave one of the two out"),
    ],
)  # fmt: skip
def test_other_verbs_end_with_2(line: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capfd.readouterr().err == f"ringfence: {said}\n"


@pytest.mark.parametrize("line", [["exce", "--json"], ["--json", "run"], ["help", "--json", "exce"]])
def test_a_line_without_a_verb_of_ours_is_told_as_json_too(line: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "usage"


def test_an_error_of_ours_is_one_line_and_no_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError("half\nway")

    monkeypatch.setattr("ringfence.cli.launch.launch", broken)
    assert main(["exec", "ls"]) == 125
    said = capfd.readouterr().err
    assert said.startswith("ringfence: internal error: ZeroDivisionError: half\\nway (test_mistakes.py:")
    assert said.count("\n") == 1
    assert said.endswith(" broken); please report\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit on open files: ulimit -n 1024"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), "make room on the file system it is on"),
        (RuntimeError("can't start new thread"), "raise the limit on processes (ulimit -u), or end some"),
    ],
)
def test_an_error_of_the_system_says_what_to_do(
    error: Exception, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise error

    monkeypatch.setattr("ringfence.cli.launch.launch", refused)
    assert main(["exec", "ls"]) == 125
    assert capfd.readouterr().err.splitlines()[1:] == [f"ringfence: {said}"]


def test_ctrl_c_before_anything_ran_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ringfence.cli.launch.launch", interrupted)
    assert main(["exec", "ls"]) == 130


def test_a_working_folder_that_was_removed_is_named_where_it_matters(tmp_path: Path) -> None:
    """The working folder is not shown by default, therefore a command without paths runs."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} -m ringfence"
    environment = {**os.environ, "PYTHONPATH": str(Path(ringfence.__file__).parents[1])}

    def said(words: str) -> tuple[int, str, str]:
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", f"{command} {words}"], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, weaker.without(done.stderr)

    assert said("exec -- pwd") == (0, "/workspace\n", "")
    code, out, err = said("exec --ro . -- pwd")
    assert (code, out, "Traceback" in err) == (125, "", False)
    assert ".: the folder this shell is in was removed" in err
