"""Checks of run(): a Result has what the code wrote, returned and raised, with sessions and without."""

from __future__ import annotations

import hashlib

from ringfence import Policy, Result, Sandbox
from ringfence.testing.model import MakeSandbox, in_box, with_maker


def verdict(result: Result) -> tuple[str, str]:
    return result.status, result.reason


def output_and_value_of_a_program(box: Sandbox) -> None:
    result = box.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert verdict(result) == ("ok", "done")
    assert (result.stdout, result.stderr, result.value, result.exception) == ("out\n", "err\n", "42", None)
    assert (result.truncated, result.usage.output_bytes, result.signal) == (False, 8, None)


def only_a_last_expression_has_a_value(box: Sandbox) -> None:
    cases = [("x = 1", None), ("None", None), ("'é\\n'", r"'é\n'"), ("x = 3\nx", "3"), ("for i in 1, 2: i", None)]
    assert [box.run(code).value for code, _ in cases] == [value for _, value in cases]


def an_exception_is_told_with_its_source_lines(box: Sandbox) -> None:
    result = box.run("def half(n):\n    return n / 0\n\nhalf(4)")
    assert verdict(result) == ("error", "exception")
    assert result.exception is not None
    assert (result.exception.name, result.exception.message) == ("ZeroDivisionError", "division by zero")
    assert "line 4, in <module>" in result.exception.traceback
    assert "    return n / 0\n" in result.exception.traceback


def a_syntax_error_points_at_the_place(box: Sandbox) -> None:
    result = box.run("x = (1,\ny = 2")
    assert result.exception is not None
    assert (*verdict(result), result.exception.name) == ("error", "exception", "SyntaxError")
    assert "x = (1," in result.exception.traceback


def a_signal_to_itself_is_told_as_a_signal(box: Sandbox) -> None:
    for name, number in (("SIGKILL", 9), ("SIGSEGV", 11), ("SIGABRT", 6)):
        result = box.run(f"import os, signal\nos.kill(os.getpid(), signal.{name})")
        assert (*verdict(result), result.exit_code, result.signal) == ("error", "signal", None, number)
        assert not result.state_kept
    assert box.run("1").value == "1"


def text_beyond_ascii_goes_both_ways(box: Sandbox) -> None:
    text = "häßlich 日本語 🦊 \u202e"
    result = box.run(f"print({text!r}); print(input()); {text!r}", stdin=text)
    assert (result.stdout, result.value) == (f"{text}\n{text}\n", repr(text))


def bytes_that_are_no_text_are_kept_as_bytes(box: Sandbox) -> None:
    result = box.run("import sys\nx = sys.stdout.buffer.write(bytes(range(256)))")
    assert result.stdout_bytes == bytes(range(256))
    assert result.stdout == bytes(range(256)).decode("utf-8", "replace")


def input_without_stdin_is_an_end_of_file(box: Sandbox) -> None:
    result = box.run("input()")
    assert result.exception is not None
    assert result.exception.name == "EOFError"


def stdin_larger_than_every_buffer_arrives_whole(box: Sandbox) -> None:
    text = "".join(map(chr, range(32, 127))) * (50 << 10)
    result = box.run("import sys, hashlib\nhashlib.sha256(sys.stdin.read().encode()).hexdigest()", stdin=text)
    assert result.value == repr(hashlib.sha256(text.encode()).hexdigest())


def stdin_that_nobody_reads_does_not_hold_up_the_end(box: Sandbox) -> None:
    result = box.run("print('done')", stdin=b"x" * (8 << 20))
    assert (result.status, result.stdout) == ("ok", "done\n")


def stderr_flooded_before_stdout_does_not_lock_up(box: Sandbox) -> None:
    result = box.run("import sys\nx = sys.stderr.write('e' * 3_000_000)\nx = sys.stdout.write('o' * 3_000_000)")
    assert (result.status, result.truncated, result.usage.output_bytes) == ("ok", True, 6_000_000)


def variables_are_the_policys_and_the_calls(make: MakeSandbox) -> None:
    with make(policy=Policy(env={"FROM_POLICY": "1", "BOTH": "policy"})) as box:
        result = box.run(
            "import os\n[os.environ.get(n) for n in ('FROM_POLICY', 'FROM_CALL', 'BOTH')]",
            env={"BOTH": "call", "FROM_CALL": "2"},
        )
    assert result.value == "['1', '2', 'call']"


def a_run_starts_in_an_empty_workspace_that_is_home(box: Sandbox) -> None:
    code = "import os\n(os.getcwd(), os.listdir(), os.path.expanduser('~'), os.environ['USER'], os.getuid() != 0)"
    assert box.run(code).value == "('/workspace', [], '/workspace', 'user', True)"


def what_a_child_process_writes_is_part_of_the_output(box: Sandbox) -> None:
    command = ["sh", "-c", "echo b; echo c >&2; exit 3"]
    result = box.run(f"import subprocess\nprint('a', flush=True)\nsubprocess.run({command}).returncode")
    assert (result.stdout, result.stderr, result.value) == ("a\nb\n", "c\n", "3")


def a_child_that_lives_on_and_holds_the_pipe_does_not_hold_up_the_result(box: Sandbox) -> None:
    code = "import subprocess\nx = subprocess.Popen(['sleep', '60'], start_new_session=True)\nprint('parent')"
    result = box.run(code)
    assert (result.stdout, result.status) == ("parent\n", "ok")
    assert result.duration_s < 10


def an_endless_run_is_a_timeout_and_the_sandbox_goes_on(box: Sandbox) -> None:
    assert verdict(box.run("while True: pass", timeout_s=0.5)) == ("timeout", "wall-clock")
    assert box.run("2 + 2").value == "4"


def bash_has_streams_and_variables(box: Sandbox) -> None:
    result = box.run('echo "$V"; echo err >&2; pwd; false', language="bash", env={"V": "v"})
    assert (result.stdout, result.stderr) == ("v\n/workspace\n", "err\n")
    assert verdict(result) == ("error", "exit")


def javascript_has_streams_and_variables(box: Sandbox) -> None:
    result = box.run("console.log(process.env.V); console.error('err')", language="javascript", env={"V": "v"})
    assert (result.status, result.stdout, result.stderr) == ("ok", "v\n", "err\n")


def the_result_says_what_held_and_under_which_policy(box: Sandbox) -> None:
    result = box.run("1")
    assert (result.policy_digest, result.backend) == (Policy().digest, box.backend)
    assert result.enforcement == box.enforcement
    assert result.enforcement.files.level == result.enforcement.network.level == "full"


CHECKS = (
    in_box(output_and_value_of_a_program),
    in_box(only_a_last_expression_has_a_value),
    in_box(an_exception_is_told_with_its_source_lines),
    in_box(a_syntax_error_points_at_the_place),
    in_box(a_signal_to_itself_is_told_as_a_signal),
    in_box(text_beyond_ascii_goes_both_ways),
    in_box(bytes_that_are_no_text_are_kept_as_bytes),
    in_box(input_without_stdin_is_an_end_of_file),
    in_box(stdin_larger_than_every_buffer_arrives_whole),
    in_box(stdin_that_nobody_reads_does_not_hold_up_the_end),
    in_box(stderr_flooded_before_stdout_does_not_lock_up),
    with_maker(variables_are_the_policys_and_the_calls),
    in_box(a_run_starts_in_an_empty_workspace_that_is_home),
    in_box(what_a_child_process_writes_is_part_of_the_output),
    in_box(a_child_that_lives_on_and_holds_the_pipe_does_not_hold_up_the_result),
    in_box(an_endless_run_is_a_timeout_and_the_sandbox_goes_on),
    in_box(bash_has_streams_and_variables),
    in_box(javascript_has_streams_and_variables, "node"),
    in_box(the_result_says_what_held_and_under_which_policy),
)
