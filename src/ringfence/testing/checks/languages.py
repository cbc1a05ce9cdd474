"""Checks of languages besides Python: sessions keep their state, programs are compiled and run once."""

from __future__ import annotations

from ringfence import PolicyError, Sandbox
from ringfence.testing.model import in_box, raises

C_PROGRAM = '#include <stdio.h>\nint main(void) { char s[9]; scanf("%8s", s); printf("hi %s", s); return 4; }'


def javascript_keeps_declarations_and_has_values(box: Sandbox) -> None:
    box.run("const a = 1; let b = 2; function f() { return a + b }", language="javascript").check()
    box.run("const a = 5", language="javascript").check()
    result = box.run("import { sep } from 'path'\n[await f(), sep]", language="javascript")
    assert (result.value, result.exit_code, result.state_kept) == ("[ 7, '/' ]", None, True)


def javascript_that_throws_points_into_its_cell(box: Sandbox) -> None:
    result = box.run("\nnope()", language="javascript")
    assert (result.status, result.reason, result.state_kept) == ("error", "exception", True)
    assert result.exception is not None
    assert result.exception.traceback == "ReferenceError: nope is not defined\n    at <cell 1>:2:1"


def javascript_past_its_time_is_interrupted(box: Sandbox) -> None:
    box.run("const x = 1", language="javascript").check()
    result = box.run("while (true) {}", language="javascript", timeout_s=0.5)
    assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", True)
    assert box.run("x", language="javascript").value == "1"


def javascript_in_a_loop_after_it_waited_is_interrupted(box: Sandbox) -> None:
    box.run("const x = 1", language="javascript").check()
    code = "await new Promise((done) => setTimeout(done, 1)); while (true) {}"
    result = box.run(code, language="javascript", timeout_s=0.5)
    assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", True)
    assert box.run("x", language="javascript").value == "1"


def javascript_that_leaves_on_the_interrupt_has_timed_out(box: Sandbox) -> None:
    code = "process.on('SIGINT', () => process.exit(0)); await new Promise((done) => setTimeout(done, 20000))"
    result = box.run(code, language="javascript", timeout_s=1)
    assert (result.status, result.reason, result.ok, result.state_kept) == ("timeout", "wall-clock", False, False)


def bash_keeps_directory_variables_and_functions(box: Sandbox) -> None:
    box.run("mkdir d; cd d; x=5; f() { echo f $1; }", language="bash").check()
    result = box.run("echo $PWD $x; f 1", language="bash")
    assert (result.stdout, result.exit_code, result.state_kept) == ("/workspace/d 5\nf 1\n", None, True)


def bash_that_fails_keeps_its_state_and_one_that_exits_does_not(box: Sandbox) -> None:
    failed = box.run("x=1; false", language="bash")
    assert (failed.status, failed.reason, failed.exit_code, failed.state_kept) == ("error", "exit", None, True)
    ended = box.run("exit 3", language="bash")
    assert (ended.status, ended.reason, ended.exit_code, ended.state_kept) == ("error", "exit", 3, False)
    assert box.run("echo [$x]", language="bash").stdout == "[]\n"


def bash_past_its_time_is_interrupted(box: Sandbox) -> None:
    box.run("x=1", language="bash").check()
    result = box.run("sleep 60; echo no", language="bash", timeout_s=0.5)
    assert (result.status, result.stdout, result.state_kept) == ("timeout", "", True)
    assert box.run("echo $x", language="bash").stdout == "1\n"


def a_compiled_program_runs_or_is_told_not_to_compile(box: Sandbox) -> None:
    ran = box.run(C_PROGRAM, language="c", stdin="zoe")
    if ran.reason == "not-found":
        assert [(denial.target, denial.code) for denial in ran.denials] == [("gcc", "exec.not-in-image")]
        return
    assert (ran.status, ran.reason, ran.exit_code, ran.stdout) == ("error", "exit", 4, "hi zoe")
    refused = box.run("int main(void) { return x; }", language="c")
    assert (refused.status, refused.reason, refused.stdout) == ("error", "compile", "")


def an_unknown_language_lists_the_known_ones(box: Sandbox) -> None:
    with raises(PolicyError, match="unknown language 'cobol'") as caught:
        box.run("x", language="cobol")
    assert caught.value.fix == "one of: python, javascript, bash, go, ruby, java, c, c++, r"


CHECKS = (
    in_box(javascript_keeps_declarations_and_has_values, "node"),
    in_box(javascript_that_throws_points_into_its_cell, "node"),
    in_box(javascript_past_its_time_is_interrupted, "node"),
    in_box(javascript_that_leaves_on_the_interrupt_has_timed_out, "node"),
    in_box(javascript_in_a_loop_after_it_waited_is_interrupted, "node"),
    in_box(bash_keeps_directory_variables_and_functions),
    in_box(bash_that_fails_keeps_its_state_and_one_that_exits_does_not),
    in_box(bash_past_its_time_is_interrupted),
    in_box(a_compiled_program_runs_or_is_told_not_to_compile),
    in_box(an_unknown_language_lists_the_known_ones),
)
