"""Checks of exec(), a command without a shell: a failure is a Result, whose reason says when no program started."""

from __future__ import annotations

import threading
from pathlib import PurePosixPath

from ringfence import GuestError, Policy, Result, Sandbox
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker


def facts(result: Result) -> tuple[str, str, int | None, int | None]:
    return result.status, result.reason, result.exit_code, result.signal


def arguments_arrive_as_they_are(box: Sandbox) -> None:
    words = ["a b", "$HOME", "*", "", "-n", "'\"", "é\n日"]
    result = box.exec(["python3", "-c", "import sys; print(sys.argv[1:])", *words])
    assert (result.stdout, *facts(result)) == (f"{words}\n", "ok", "done", 0, None)


def an_argument_may_be_a_name_that_is_not_text(box: Sandbox) -> None:
    """Python gives such names of files as text with surrogates."""
    assert box.exec(["printf", "%s", "caf\udce9"]).check().stdout_bytes == b"caf\xe9"


def a_failing_command_is_a_result_and_check_raises(box: Sandbox) -> None:
    result = box.exec(["sh", "-c", "echo out; echo err >&2; exit 4"])
    assert (result.stdout, result.stderr, *facts(result)) == ("out\n", "err\n", "error", "exit", 4, None)
    with raises(GuestError) as caught:
        result.check()
    assert caught.value.result is result


def a_command_killed_by_a_signal_says_which(box: Sandbox) -> None:
    assert facts(box.exec(["sh", "-c", "kill -TERM $$"])) == ("error", "signal", None, 15)


def a_program_that_is_not_there_is_127(box: Sandbox) -> None:
    for name in ("no-such-program", "/no/such/program", "./missing"):
        assert facts(box.exec([name])) == ("error", "not-found", 127, None), name


def a_program_that_may_not_be_executed_is_126(box: Sandbox) -> None:
    box.files.write("script.sh", "#!/bin/sh\necho ran\n", mode=0o644)
    assert facts(box.exec(["./script.sh"])) == ("error", "not-executable", 126, None)
    assert facts(box.exec(["/workspace"])) == ("error", "not-executable", 126, None)
    box.files.chmod("script.sh", 0o755)
    assert box.exec(["./script.sh"]).stdout == "ran\n"


def exit_codes_126_and_127_of_a_program_that_ran_are_its_own(box: Sandbox) -> None:
    assert facts(box.exec(["sh", "-c", "exit 127"])) == ("error", "exit", 127, None)
    assert facts(box.exec(["sh", "-c", "exit 126"])) == ("error", "exit", 126, None)
    assert facts(box.exec(["sh", "-c", "exit 125"])) == ("error", "exit", 125, None)


def the_working_directory_is_the_workspace_or_the_one_that_is_named(box: Sandbox) -> None:
    box.files.mkdir("deep/er")
    assert [box.exec(["pwd"], cwd=cwd).stdout for cwd in (None, "deep", "/tmp", PurePosixPath("deep/er"))] == [
        "/workspace\n",
        "/workspace/deep\n",
        "/tmp\n",
        "/workspace/deep/er\n",
    ]


def a_working_directory_that_is_not_there_is_an_error_that_names_it(box: Sandbox) -> None:
    with raises(FileNotFoundError, match="/workspace/nowhere"):
        box.exec(["pwd"], cwd="nowhere")
    box.files.write("file", "")
    with raises(NotADirectoryError, match="/workspace/file"):
        box.exec(["pwd"], cwd="file")
    assert box.exec(["pwd"]).ok


def variables_of_a_call_are_added_and_none_are_the_hosts(box: Sandbox) -> None:
    lines = box.exec(["env"], env={"A": "b=c d", "LANG": "C"}).stdout.splitlines()
    assert {line.partition("=")[0] for line in lines} == {"A", "HOME", "LANG", "PATH", "TMPDIR", "USER"}
    assert {"A=b=c d", "LANG=C"} <= set(lines)


def stdin_streams_and_ends(box: Sandbox) -> None:
    assert box.exec(["cat"]).stdout == ""
    assert box.exec(["tr", "a-z", "A-Z"], stdin="hello").stdout == "HELLO"
    big = b"0123456789abcdef" * 200_000
    counted = box.exec(["sh", "-c", "cat; cat >&2 </dev/null"], stdin=big)
    assert counted.usage.output_bytes == len(big)


def a_command_that_stops_reading_early_is_no_error(box: Sandbox) -> None:
    result = box.exec(["head", "-c", "3"], stdin=b"abcdef" * 1_000_000)
    assert (result.stdout, result.status) == ("abc", "ok")


def a_background_process_outlives_its_command_and_not_its_sandbox(box: Sandbox) -> None:
    result = box.exec(["sh", "-c", "sleep 300 & echo $!"])
    assert result.duration_s < 5
    assert box.exec(["kill", "-0", result.stdout.strip()]).ok


def files_stay_between_commands_of_one_sandbox(box: Sandbox) -> None:
    box.exec(["sh", "-c", "echo 1 > f; mkdir d; echo 2 > /tmp/g"]).check()
    assert box.exec(["sh", "-c", "cat f /tmp/g; test -d d && echo d"]).stdout == "1\n2\nd\n"
    assert box.run("open('f').read()").value == r"'1\n'"


def commands_from_several_threads_each_get_their_own_output(box: Sandbox) -> None:
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        results[number] = [
            box.exec(["sh", "-c", f"echo {number}-{turn}; sleep 0.01; cat"], stdin=str(turn)).stdout
            for turn in range(5)
        ]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [f"{n}-{turn}\n{turn}" for turn in range(5)] for n in range(8)}


def only_named_commands_exist_and_the_denial_says_what_would_allow_another(make: MakeSandbox) -> None:
    with make(policy=Policy(commands=["cat"])) as box:
        assert box.exec(["cat"], stdin="x").stdout == "x"
        result = box.exec(["ls"])
    assert facts(result) == ("error", "not-found", 127, None)
    assert [(d.kind, d.target, d.code, d.allow) for d in result.denials] == [
        ("command", "ls", "exec.not-listed", 'commands = [..., "ls"]')
    ]


def a_command_leaves_the_sessions_alone_and_says_so(box: Sandbox) -> None:
    box.run("x = 7").check()
    results = [box.exec(["sh", "-c", "exit 3"]), box.exec(["sleep", "60"], timeout_s=0.3)]
    assert [(r.status, r.state_kept, "state is gone" in r.render()) for r in results] == [
        ("error", True, False),
        ("timeout", True, False),
    ]
    assert box.run("x").value == "7"


CHECKS = (
    in_box(arguments_arrive_as_they_are),
    in_box(an_argument_may_be_a_name_that_is_not_text),
    in_box(a_failing_command_is_a_result_and_check_raises),
    in_box(a_command_killed_by_a_signal_says_which),
    in_box(a_program_that_is_not_there_is_127),
    in_box(a_program_that_may_not_be_executed_is_126),
    in_box(exit_codes_126_and_127_of_a_program_that_ran_are_its_own),
    in_box(the_working_directory_is_the_workspace_or_the_one_that_is_named),
    in_box(a_working_directory_that_is_not_there_is_an_error_that_names_it),
    in_box(variables_of_a_call_are_added_and_none_are_the_hosts),
    in_box(stdin_streams_and_ends),
    in_box(a_command_that_stops_reading_early_is_no_error),
    in_box(a_background_process_outlives_its_command_and_not_its_sandbox),
    in_box(files_stay_between_commands_of_one_sandbox),
    in_box(commands_from_several_threads_each_get_their_own_output),
    with_maker(only_named_commands_exist_and_the_denial_says_what_would_allow_another, "commands"),
    in_box(a_command_leaves_the_sessions_alone_and_says_so),
)
