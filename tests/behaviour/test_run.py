"""run(): what a program writes, returns, raises and exits with is what the Result says."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import ringfence
from accounts import let_others_through
from ringfence import AsyncSandbox, Limits, Mount, Network, Policy, Sandbox
from ringfence.backends import Backend
from ringfence.results import GuestException

pytestmark = pytest.mark.everywhere


def test_output_value_and_exit_code_of_a_program(backend: Backend) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7"
    result = ringfence.run(code, backend=backend)
    assert (result.status, result.reason, result.exit_code, result.signal) == ("ok", "done", 0, None)
    assert (result.stdout, result.stderr, result.value, result.exception) == ("out\n", "err\n", "42", None)
    assert (result.truncated, result.backend, result.image, result.usage.output_bytes) == (False, "process", "host", 8)


@pytest.mark.parametrize(
    ("code", "value"),
    [("x = 1", None), ("None", None), ("'é\\n'", r"'é\n'"), ("x = 3\nx", "3"), ("for i in 1, 2: i", None)],
)
def test_only_a_last_expression_has_a_value(code: str, value: str | None) -> None:
    assert ringfence.run(code).value == value


def test_an_exception_is_told_with_its_source_lines_in_the_result_and_on_stderr(backend: Backend) -> None:
    result = ringfence.run("def half(n):\n    return n / 0\n\nhalf(4)", backend=backend)
    text = (
        "Traceback (most recent call last):\n"
        '  File "<run>", line 4, in <module>\n'
        "    half(4)\n"
        '  File "<run>", line 2, in half\n'
        "    return n / 0\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )
    if sys.version_info >= (3, 13):
        text = text.replace("    half(4)\n", "    half(4)\n    ~~~~^^^\n")
    assert (result.status, result.reason, result.exit_code) == ("error", "exception", 1)
    assert result.exception == GuestException("ZeroDivisionError", "division by zero", text)
    assert result.stderr == text


def test_a_syntax_error_points_at_the_place() -> None:
    result = ringfence.run("x = (1,\ny = 2")
    assert (result.status, result.exit_code) == ("error", 1)
    assert result.exception is not None
    assert result.exception.name == "SyntaxError"
    assert 'File "<run>", line 1' in result.stderr
    assert "x = (1," in result.stderr


def test_an_exception_whose_text_cannot_be_made_is_still_an_exception() -> None:
    result = ringfence.run("class E(Exception):\n    def __str__(self): raise ValueError\nraise E")
    assert (result.status, result.exit_code) == ("error", 1)
    assert result.exception == GuestException("E", "<unprintable: ValueError>", "")
    assert "E: <exception str() failed>" in result.stderr


def test_a_guest_may_replace_excepthook_and_displayhook() -> None:
    code = "import sys\nsys.excepthook = lambda *a: print('mine')\nsys.displayhook = lambda v: print('shown', v)\n5"
    assert ringfence.run(code).stdout == "shown 5\n"
    assert ringfence.run(code.replace("\n5", "\n1/0")).stdout == "mine\n"


def test_chained_exceptions_are_shown_whole() -> None:
    result = ringfence.run("try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('second') from e")
    assert "KeyError: 'a'" in result.stderr
    assert "The above exception was the direct cause" in result.stderr
    assert result.stderr.endswith("RuntimeError: second\n")


@pytest.mark.parametrize(
    ("call", "code", "stderr"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(None)", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(256)", 0, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('no luck')", 1, "no luck\n"),
        ("sys.exit((1, 2))", 1, "(1, 2)\n"),
        ("exit(4)", 4, ""),
        ("quit()", 0, ""),
        ("raise SystemExit(5)", 5, ""),
        ("import os; os._exit(6)", 6, ""),
    ],
)
def test_an_exit_sets_the_code_and_is_no_exception(backend: Backend, call: str, code: int, stderr: str) -> None:
    result = ringfence.run(f"import sys\nprint('before', flush=True)\n{call}\nprint('after')", backend=backend)
    expected = ("ok", "done") if code == 0 else ("error", "exit")
    assert (result.status, result.reason, result.exit_code) == (*expected, code)
    assert (result.stdout, result.stderr, result.exception) == ("before\n", stderr, None)


def test_a_keyboard_interrupt_of_the_guests_own_is_an_exception() -> None:
    result = ringfence.run("raise KeyboardInterrupt")
    assert (result.status, result.reason, result.exit_code) == ("error", "exception", 130)
    assert result.exception is not None
    assert result.exception.name == "KeyboardInterrupt"


@pytest.mark.parametrize(("signal", "number"), [("SIGKILL", 9), ("SIGSEGV", 11), ("SIGTERM", 15), ("SIGABRT", 6)])
def test_a_signal_to_itself_is_told_as_a_signal(backend: Backend, signal: str, number: int) -> None:
    result = ringfence.run(f"import os, signal\nos.kill(os.getpid(), signal.{signal})", backend=backend)
    assert (result.status, result.reason, result.exit_code, result.signal) == ("error", "signal", None, number)


def test_exit_handlers_run_in_reverse_order_and_after_the_threads(backend: Backend) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "first registered")
atexit.register(print, "second registered")
def work():
    time.sleep(0.1)
    print("thread done")
threading.Thread(target=work).start()
print("main done")
"""
    result = ringfence.run(code, backend=backend)
    assert result.stdout == "main done\nthread done\nsecond registered\nfirst registered\n"


def test_an_exit_handler_that_raises_is_told_and_the_others_run() -> None:
    result = ringfence.run("import atexit\natexit.register(print, 'ran')\natexit.register(lambda: 1/0)")
    assert (result.exit_code, result.stdout) == (0, "ran\n")
    assert "ZeroDivisionError" in result.stderr


def test_a_daemon_thread_does_not_keep_a_program_running() -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('end')"
    result = ringfence.run(code)
    assert (result.stdout, result.exit_code) == ("end\n", 0)
    assert result.duration_s < 5


def test_an_exception_in_a_thread_is_on_stderr_and_the_program_goes_on() -> None:
    code = "import threading\nt = threading.Thread(target=lambda: 1/0)\nt.start(); t.join()\nprint('on')"
    result = ringfence.run(code)
    assert (result.stdout, result.exit_code) == ("on\n", 0)
    assert "ZeroDivisionError: division by zero" in result.stderr


def test_endless_recursion_is_an_exception() -> None:
    result = ringfence.run("def f(): f()\nf()")
    assert result.exception is not None
    assert (result.exception.name, result.exit_code) == ("RecursionError", 1)
    assert "repeated" in result.stderr


def test_text_beyond_ascii_goes_both_ways() -> None:
    text = "häßlich 日本語 🦊 \u202e"
    result = ringfence.run(f"print({text!r}); print(input()); {text!r}", stdin=text)
    assert (result.stdout, result.value) == (f"{text}\n{text}\n", repr(text))


def test_output_without_a_last_newline_stays_without() -> None:
    result = ringfence.run("import sys\nsys.stdout.write('a')\nsys.stderr.write('b')")
    assert (result.stdout, result.stderr) == ("a", "b")


def test_bytes_that_are_no_text_are_kept_as_bytes() -> None:
    result = ringfence.run("import sys\nsys.stdout.buffer.write(bytes(range(256)))")
    assert result.stdout_bytes == bytes(range(256))
    assert result.stdout == bytes(range(256)).decode("utf-8", "replace")


def test_a_guest_that_closes_its_streams_ends_well() -> None:
    result = ringfence.run("import os\nprint('x', flush=True)\nos.close(1); os.close(2); os.close(0)")
    assert (result.status, result.stdout) == ("ok", "x\n")


def test_writing_to_a_stream_that_the_guest_closed_fails_as_in_any_python() -> None:
    result = ringfence.run("import os, sys\nos.close(1)\nprint('x')\nsys.stderr.write('end')")
    assert result.stderr.startswith("end")
    assert result.exit_code == 120


@pytest.mark.parametrize(
    ("stdin", "seen"), [(None, "b''"), (b"", "b''"), ("", "b''"), ("a\nb", r"b'a\nb'"), (b"\x00\xff", r"b'\x00\xff'")]
)
def test_stdin_is_what_was_given_and_then_ends(backend: Backend, stdin: bytes | str | None, seen: str) -> None:
    assert ringfence.run("import sys\nsys.stdin.buffer.read()", stdin=stdin, backend=backend).value == seen


def test_input_without_stdin_is_an_end_of_file() -> None:
    result = ringfence.run("input()")
    assert result.exception is not None
    assert result.exception.name == "EOFError"


def test_stdin_larger_than_every_buffer_arrives_whole() -> None:
    data = bytes(range(256)) * (20 << 10)
    result = ringfence.run("import sys, hashlib\nhashlib.sha256(sys.stdin.buffer.read()).hexdigest()", stdin=data)
    import hashlib

    assert result.value == repr(hashlib.sha256(data).hexdigest())


def test_stdin_that_nobody_reads_does_not_hold_up_the_end() -> None:
    result = ringfence.run("print('done')", stdin=b"x" * (8 << 20))
    assert (result.status, result.stdout) == ("ok", "done\n")


def test_a_program_that_floods_output_while_it_is_fed_does_not_lock_up() -> None:
    code = "import sys\nfor b in iter(lambda: sys.stdin.buffer.read(65536), b''):\n    sys.stdout.buffer.write(b * 2)"
    result = ringfence.run(code, stdin=b"x" * (4 << 20))
    assert (result.status, result.usage.output_bytes) == ("ok", 8 << 20)


def test_stderr_flooded_before_stdout_does_not_lock_up() -> None:
    code = "import sys\nsys.stderr.write('e' * 3_000_000)\nsys.stdout.write('o' * 3_000_000)"
    result = ringfence.run(code)
    assert (result.status, result.truncated, result.usage.output_bytes) == ("ok", True, 6_000_000)


def test_variables_are_the_policys_the_calls_and_a_few_of_ours_and_none_of_the_hosts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "abc")
    policy = ringfence.Policy(env={"FROM_POLICY": "1", "BOTH": "policy"})
    code = "import os\nsorted(os.environ)"
    result = ringfence.run(code, policy=policy, env={"BOTH": "call", "FROM_CALL": "2"}, backend=backend)
    ours = ["HOME", "LANG", "PATH", "TMPDIR", "USER"]
    assert result.value == repr(sorted(["FROM_POLICY", "FROM_CALL", "BOTH", *ours]))
    both = ringfence.run("import os\nos.environ['BOTH']", policy=policy, env={"BOTH": "call"}, backend=backend)
    assert both.value == "'call'"


def test_variables_reach_libc_and_child_processes() -> None:
    code = "import subprocess, sys\nprint(subprocess.run(['sh', '-c', 'echo $A'], capture_output=True).stdout)"
    assert ringfence.run(code, env={"A": "b c"}).stdout == "b'b c\\n'\n"


def test_a_run_starts_in_an_empty_workspace_that_is_home(backend: Backend) -> None:
    code = "import os\n(os.getcwd(), os.listdir(), os.path.expanduser('~'), os.getuid(), os.environ['USER'])"
    result = ringfence.run(code, backend=backend)
    assert result.value == "('/workspace', [], '/workspace', 1000, 'user')"


def test_one_run_leaves_nothing_for_the_next() -> None:
    ringfence.run(
        "import os, builtins\nopen('f', 'w').write('x')\nopen('/tmp/g', 'w')\nbuiltins.x = 1\nimport json\njson.x = 1"
    )
    seen = (
        "import os, builtins, json\n"
        "(os.listdir(), 'g' in os.listdir('/tmp'), hasattr(builtins, 'x'), hasattr(json, 'x'))"
    )
    assert ringfence.run(seen).value == "([], False, False, False)"


def test_what_a_child_process_writes_is_part_of_the_output() -> None:
    command = ["sh", "-c", "echo b; echo c >&2; exit 3"]
    code = f"import subprocess\nprint('a', flush=True)\nsubprocess.run({command}).returncode"
    result = ringfence.run(code)
    assert (result.stdout, result.stderr, result.value) == ("a\nb\n", "c\n", "3")


def test_a_child_that_lives_on_and_holds_the_pipe_does_not_hold_up_the_result() -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint('parent')"
    result = ringfence.run(code)
    assert (result.stdout, result.status) == ("parent\n", "ok")
    assert result.duration_s < 5


def test_source_may_have_a_byte_order_of_lines_of_any_kind() -> None:
    assert ringfence.run("x = 1\r\nif x:\r\n    print('yes')\r\n").stdout == "yes\n"


def test_a_long_program_runs() -> None:
    code = "\n".join(f"x{i} = {i}" for i in range(40_000)) + "\nx39999"
    assert ringfence.run(code).value == "39999"


@pytest.mark.everywhere(gvisor="tells mechanisms of its own", container="tells mechanisms of its own")
def test_the_result_says_what_held_and_under_which_policy() -> None:
    result = ringfence.run("1")
    assert result.policy_digest == ringfence.Policy().digest
    assert str(result.enforcement.network) == "empty network namespace"
    assert result.enforcement.syscalls.level == "full"


@pytest.mark.parametrize("code", ["javascript", "bash"])
def test_other_languages_run_with_streams_exit_codes_and_variables(code: str) -> None:
    programs = {
        "bash": 'read line; echo "$line $V"; echo err >&2; pwd; exit 3',
        "javascript": (
            "import fs from 'node:fs';"
            "console.log(fs.readFileSync(0, 'utf8').trim(), process.env.V);"
            "console.error('err'); console.log(process.cwd()); process.exit(3)"
        ),
    }
    result = ringfence.run(programs[code], language=code, stdin="in\n", env={"V": "v"})
    if code == "javascript" and result.reason == "not-found":
        pytest.skip("node is not installed")
    assert (result.status, result.reason, result.exit_code) == ("error", "exit", 3)
    assert (result.stdout, result.stderr) == ("in v\n/workspace\n", "err\n")


def test_a_runs_own_time_sets_the_limit_where_no_policy_was_given() -> None:
    """A time above the default of 30 s changes the limit, CPU time and lifetime, and no other part of the policy."""
    longer = Policy(limits=Limits(timeout_s=4000, cpu_time_s=4000, lifetime_s=4000))
    assert ringfence.run("1", timeout_s=4000).policy_digest == longer.digest
    assert asyncio.run(ringfence.run_async("1", timeout_s=4000)).policy_digest == longer.digest
    assert ringfence.run("1", timeout_s=5).policy_digest == Policy().digest
    assert ringfence.run("while True: pass", timeout_s=0.2).status == "timeout"


@pytest.mark.parametrize("kind", [Sandbox, AsyncSandbox])
def test_short_forms_set_single_parts_of_the_default_policy(kind: type[Sandbox | AsyncSandbox], tmp_path: Path) -> None:
    mounts = [Mount(tmp_path)]
    box = kind(timeout_s=60, memory="1G", cpus=2, disk="1G", env={"A": "b"}, allow_net=["a.com"], mounts=mounts)
    limits = Limits(timeout_s=60, cpu_time_s=60, memory="1G", cpus=2, disk="1G")
    assert box.policy == Policy(limits=limits, env={"A": "b"}, network=Network(allow=["a.com"]), mounts=mounts)
    assert kind(timeout_s=5).policy == Policy(limits=Limits(timeout_s=5))
    assert kind(timeout_s=5, policy=Policy(limits=Limits(cpus=2))).policy == Policy(limits=Limits(timeout_s=5, cpus=2))
    assert kind().policy == kind(policy=None).policy == Policy()


def test_short_forms_of_a_run_hold(tmp_path: Path) -> None:
    let_others_through(tmp_path)
    (tmp_path / "there").write_text("shown")
    code = f"import os\n(open('{tmp_path}/there').read(), os.environ['A'], os.statvfs('/workspace').f_blocks)"
    result = ringfence.run(code, mounts=[Mount(tmp_path)], env={"A": "b"}, disk="8M", memory="64M")
    assert result.value == str(("shown", "b", (8 << 20) // 4096)), result.stderr
    assert ringfence.run("x = b'x' * (1 << 30)", memory="64M").status != "ok"
    mixed = ringfence.run("import os; os.environ['A']", env={"A": "b"}, policy=Policy(), timeout_s=5)
    assert mixed.value == "'b'"
