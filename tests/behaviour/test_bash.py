"""Sessions of bash: what stays, how a cell fails or ends, interrupts, input."""

from __future__ import annotations

import time

import pytest

from ringfence import PolicyError, Result, Sandbox

pytestmark = pytest.mark.everywhere


def sh(box: Sandbox, code: str, **given: object) -> Result:
    return box.run(code, language="bash", **given)  # type: ignore[arg-type]  # options of run, as they come


def test_bash_keeps_directory_variables_functions_aliases_and_arrays(box: Sandbox) -> None:
    sh(box, "mkdir d; cd d; x=5; declare -a list=(1 2); f() { echo f $1; }; alias g='echo g'; export Y=6").check()
    result = sh(box, 'echo $PWD $x ${list[1]}; f 1; g 2; env | grep "^Y="')
    assert (result.stdout, result.stderr, result.value) == ("/workspace/d 5 2\nf 1\ng 2\nY=6\n", "", None)
    assert (result.status, result.exit_code, result.state_kept) == ("ok", None, True)


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        ("false", ""),
        ("nosuch", "bash: nosuch: command not found\n"),
        ("if then", "bash: syntax error near unexpected token `then'\n"),
        ("echo 'unclosed", "bash: unexpected EOF while looking for matching `''\n"),
        ("set -u; echo $nothing; echo not reached", "bash: nothing: unbound variable\n"),
    ],
)
def test_a_bash_cell_that_fails_keeps_the_state(box: Sandbox, code: str, stderr: str) -> None:
    sh(box, "x=1").check()
    result = sh(box, code)
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", None, True)
    assert (result.stdout, result.stderr) == ("", stderr)
    assert sh(box, "set +u; echo $x").stdout == "1\n"


def test_break_and_the_like_do_not_end_a_bash_session(box: Sandbox) -> None:
    sh(box, "x=1; break; continue; return 2")
    assert sh(box, "echo $x").stdout == "1\n"


def test_exit_ends_bash_and_is_told(box: Sandbox) -> None:
    sh(box, "x=1; trap 'echo bye' EXIT").check()
    result = sh(box, "exit 3")
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", 3, False)
    assert (result.stdout, result.stderr) == ("bye\n", "")
    assert sh(box, "echo [$x]").stdout == "[]\n"
    killed = sh(box, "kill -9 $$")
    assert (killed.status, killed.reason, killed.signal, killed.state_kept) == ("error", "signal", 9, False)


@pytest.mark.parametrize("code", ["sleep 60; echo no", "while :; do :; done; echo no", "(sleep 60; echo no) | cat"])
def test_a_bash_cell_past_its_time_is_interrupted_and_the_state_is_kept(box: Sandbox, code: str) -> None:
    sh(box, "x=1").check()
    result = sh(box, code, timeout_s=0.3)
    assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", True)
    assert result.stdout == ""
    assert sh(box, "echo $x").stdout == "1\n"


def test_interrupt_stops_a_bash_cell(box: Sandbox) -> None:
    session = box.session(language="bash")
    session.run("x=5").check()
    with session.spawn("sleep 60") as cell:
        time.sleep(0.3)
        assert session.interrupt()
        result = cell.wait()
    assert (result.status, result.reason, result.state_kept) == ("killed", "interrupted", True)
    assert session.run("echo $x").stdout == "5\n"


def test_bash_reads_what_its_cell_was_given_and_no_more(box: Sandbox) -> None:
    assert sh(box, 'read a; read b; echo "$a-$b"', stdin="x\ny\nz\n").stdout == "x-y\n"
    assert sh(box, "cat", stdin=b"\x00\xff raw").stdout_bytes == b"\x00\xff raw"
    assert sh(box, "cat").stdout == ""


def test_a_spawned_bash_cell_is_written_to(box: Sandbox) -> None:
    with box.session(language="bash").spawn("read a; echo got $a; cat") as cell:
        cell.write("one\n")
        cell.write("two\n")
        cell.close_stdin()
        assert cell.wait().stdout == "got one\ntwo\n"


def test_more_input_than_a_bash_cell_takes_holds_nobody_up(box: Sandbox) -> None:
    session = box.session(language="bash")
    with session.spawn("read a; echo $a; sleep 0.3") as cell:
        for _ in range(8):
            cell.write("x" * 65535 + "\n")
        assert cell.wait().stdout == "x" * 65535 + "\n"
    before = box.usage().cpu_s or 0
    time.sleep(0.5)
    assert (box.usage().cpu_s or 0) - before < 0.2, "the driver spins"
    with session.spawn("cat | wc -c") as cell:
        for _ in range(8):
            cell.write("x" * 65536)
        cell.close_stdin()
        assert cell.wait().stdout.strip() == "524288"


def test_env_is_for_one_bash_cell(box: Sandbox) -> None:
    code = "echo [$A]; bash -c 'echo [$A]'"
    given = {"A": "it's\n2"}
    assert [sh(box, code, env=given).stdout, sh(box, code).stdout] == ["[it's 2]\n[it's 2]\n", "[]\n[]\n"]
    with pytest.raises(PolicyError, match="no variable of bash"):
        sh(box, code, env={"a.b": "1"})


def test_a_background_process_of_a_cell_lives_on(box: Sandbox) -> None:
    sh(box, "sleep 0.2 && touch made & ").check()
    assert not box.files.exists("made")
    sh(box, "wait").check()
    assert box.files.exists("made")


def test_a_long_bash_cell_is_taken_whole(box: Sandbox) -> None:
    assert sh(box, f": {'x' * 300_000}\necho end").stdout == "end\n"
