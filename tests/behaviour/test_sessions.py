"""Sessions: state between cells, how a cell ends, and what a session that lies or dies does to its sandbox."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from ringfence import (
    Display,
    Exit,
    Limits,
    Policy,
    PolicyError,
    Prompt,
    Sandbox,
    SandboxClosedError,
    Stdout,
)


def test_variables_imports_and_the_working_directory_stay(box: Sandbox) -> None:
    box.run("import os, math\nx = 41\nos.mkdir('d'); os.chdir('d')").check()
    result = box.run("(x + 1, math.floor(2.5), os.getcwd())")
    assert (result.value, result.exit_code, result.state_kept) == ("(42, 2, '/workspace/d')", None, True)


def test_two_sessions_share_files_and_no_state(box: Sandbox) -> None:
    one, two = box.session("one"), box.session("two")
    one.run("x = 1; open('f', 'w').write('hi')").check()
    assert two.run("('x' in globals(), open('f').read())").value == "(False, 'hi')"
    assert [s.name for s in box.sessions()] == ["one", "two"]
    assert box.session("one") is one


def test_a_traceback_points_into_the_cell(box: Sandbox) -> None:
    box.run("def f():\n    raise ValueError('no')").check()
    result = box.run("f()")
    assert (result.status, result.reason, result.state_kept) == ("error", "exception", True)
    assert result.exception is not None
    assert result.exception.traceback == (
        "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 1, in <module>\n    f()\n'
        "  File \"<cell 1>\", line 2, in f\n    raise ValueError('no')\n"
        "ValueError: no\n"
    )
    assert result.stderr == result.exception.traceback


def test_output_belongs_to_the_cell_that_printed_it(box: Sandbox) -> None:
    for i in range(30):
        result = box.run(f"import sys\nprint('x' * 5000, {i}); print('e', {i}, file=sys.stderr)\n{i}")
        assert (result.stdout, result.stderr, result.value) == (f"{'x' * 5000} {i}\n", f"e {i}\n", str(i))


def test_a_cell_past_its_time_is_interrupted_and_the_state_is_kept(box: Sandbox) -> None:
    box.run("x = 1\nimport time").check()
    result = box.run("try:\n    time.sleep(60)\nfinally:\n    print('bye')", timeout_s=0.3)
    assert (result.status, result.reason, result.state_kept, result.stdout) == ("timeout", "wall-clock", True, "bye\n")
    assert box.run("x").value == "1"


STUBBORN = """
import time
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""


def test_a_cell_that_ignores_the_interrupt_is_killed_within_a_second(box: Sandbox) -> None:
    box.run("x = 1").check()
    result = box.run(STUBBORN, timeout_s=0.3)
    assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", False)
    assert result.duration_s < 1.3
    assert box.run("'x' in globals()").value == "False"


def test_interrupt_stops_the_cell_and_keeps_the_state(box: Sandbox) -> None:
    session = box.session()
    session.run("x = 5\nimport time").check()
    assert not session.interrupt()
    with session.spawn("time.sleep(60)") as cell:
        time.sleep(0.2)
        assert session.interrupt()
        result = cell.wait()
    assert (result.status, result.reason, result.state_kept) == ("killed", "interrupted", True)
    assert session.run("x").value == "5"


def test_leaving_with_kills_a_cell_and_with_it_the_session(box: Sandbox) -> None:
    session = box.session()
    session.run("x = 5").check()
    with session.spawn("import time; time.sleep(60)") as cell:
        pass
    assert cell.wait().status == "killed"
    assert session.run("'x' in globals()").value == "False"


def test_restart_forgets_and_close_ends(box: Sandbox) -> None:
    session = box.session("s")
    session.run("x = 1").check()
    session.restart()
    assert session.run("'x' in globals()").value == "False"
    session.close()
    assert box.sessions() == ()
    with pytest.raises(SandboxClosedError, match="session s was closed"):
        session.run("1")
    assert box.session("s").run("1").value == "1"


def test_exit_ends_the_cell_and_os_exit_the_session(box: Sandbox) -> None:
    box.run("x = 1").check()
    result = box.run("import sys; sys.exit(3)")
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", None, True)
    result = box.run("import os; os._exit(3)")
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", 3, False)


def test_a_session_that_talks_nonsense_is_not_believed_and_the_sandbox_goes_on(box: Sandbox) -> None:
    for junk in ("b'x' * 5000", "b'\\xff' * 8", "b'\\x02\\0\\0\\0\\0\\0\\0\\0{}'"):
        result = box.run(f"import os; os.write(3, {junk})")
        assert (result.status, result.reason, result.state_kept) == ("lost", "guest-lost", False)
    assert box.run("1 + 1").value == "2"


def test_a_cell_that_forges_its_end_ends_and_chooses_nothing(box: Sandbox) -> None:
    forged = """
import json, os, struct
text = json.dumps({"m": "done", "n": 1, "exit": None, "exception": None}).encode()
os.write(3, struct.pack("<II", len(text), 0) + text)
raise SystemExit(7)
"""
    result = box.run(forged)
    assert (result.status, result.exit_code, result.state_kept) == ("ok", None, True)
    assert box.run("1 + 1").value == "2"


def test_memory_ends_the_session_and_says_so() -> None:
    with Sandbox(policy=Policy(limits=Limits(memory="64M", disk="1M"))) as box:
        box.run("x = 1").check()
        result = box.run("y = bytearray(1 << 30)\nfor i in range(0, len(y), 4096): y[i] = 1")
        assert (result.status, result.reason, result.state_kept) in (
            ("oom", "memory", False),
            ("error", "exception", True),
        )
        assert box.run("1 + 1").value == "2"


def test_input_is_fed_or_refused(box: Sandbox) -> None:
    assert box.run("(input('a? '), input())", stdin="x\ny\n").value == "('x', 'y')"
    refused = box.run("input()")
    assert refused.exception is not None
    assert refused.exception.name == "EOFError"
    assert box.run("import sys; sys.stdin.read()", stdin="all\nof it").value == "'all\\nof it'"


def test_a_spawned_cell_asks_its_caller(box: Sandbox) -> None:
    seen: list[object] = []
    with box.session().spawn("n = input('name? ')\nprint('hi', n)\ndisplay(1)\nn") as cell:
        for event in cell:
            match event:
                case Prompt(text=text):
                    seen.append(text)
                    cell.write("zoe\n")
                case Stdout(text=text):
                    seen.append(text)
                case Display(output=output):
                    seen.append((output.text, output.is_value))
                case Exit(result=result):
                    seen.append(result.status)
    assert seen == ["name? ", "hi zoe\n", ("1", False), ("'zoe'", True), "ok"]


def test_top_level_await_keeps_its_loop(box: Sandbox) -> None:
    box.run("import asyncio\nq = asyncio.Queue()\nawait q.put(3)").check()
    assert box.run("await q.get()").value == "3"


def test_calls_from_threads_queue(box: Sandbox) -> None:
    session = box.session()
    session.run("n = 0").check()
    threads = [threading.Thread(target=lambda: session.run("n += 1").check()) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.run("n").value == "8"


def test_env_is_for_one_cell(box: Sandbox) -> None:
    code = "import os\nos.environ.get('A')"
    assert [box.run(code, env={"A": "1"}).value, box.run(code).value] == ["'1'", None]


def test_a_name_and_a_language_that_are_none(box: Sandbox) -> None:
    with pytest.raises(PolicyError, match="no session speaks 'cobol'"):
        box.session(language="cobol")  # type: ignore[arg-type]  # the point of this test
    with pytest.raises(PolicyError, match="is no name for a session"):
        box.session("")
    box.session("mine")
    with pytest.raises(PolicyError, match="session 'mine' speaks python, not bash"):
        box.session("mine", language="bash")


RICH = """
class Rich:
    def __repr__(self): return "rich"
    def _repr_html_(self): return "<b>rich</b>"
    def _repr_png_(self): return b"PNG"
    def _repr_svg_(self): return "<svg/>"
    def _repr_latex_(self): return "$x$"
    def _repr_json_(self): return {"a": [1]}
    def _repr_jpeg_(self): raise ValueError
display(Rich())
"""


def test_an_object_is_shown_in_all_its_representations(box: Sandbox) -> None:
    (output,) = box.run(RICH).check().outputs
    assert dict(output.data) == {
        "text/plain": b"rich",
        "text/html": b"<b>rich</b>",
        "text/latex": b"$x$",
        "image/svg+xml": b"<svg/>",
        "image/png": b"PNG",
        "application/json": b'{"a": [1]}',
    }
    assert output.json == {"a": [1]}


def test_a_terminal_is_one(box: Sandbox) -> None:
    with box.pty(["sh"], cols=100, rows=30) as terminal:
        terminal.write("stty size; tty; exit 3\n")
        shown = "".join(event.text for event in terminal if isinstance(event, Stdout))
        result = terminal.wait()
    assert "30 100\r\n/dev/pts/0\r\n" in shown
    assert (result.status, result.exit_code) == ("error", 3)
    with pytest.raises(SandboxClosedError, match="the terminal of sh is closed"):
        terminal.resize(cols=80, rows=24)


def test_a_terminal_can_be_resized_and_interrupted(box: Sandbox) -> None:
    with box.pty(["bash", "--norc"], cols=80, rows=24) as terminal:
        terminal.resize(cols=132, rows=50)
        terminal.write("stty size; sleep 60\n")
        time.sleep(0.5)
        terminal.write("\x03")
        terminal.write("echo after; exit\n")
        shown = "".join(event.text for event in terminal if isinstance(event, Stdout))
    assert "50 132\r\n" in shown
    assert "\r\nafter\r\n" in shown


def test_a_flood_of_small_messages_is_not_listened_to_for_ever(box: Sandbox) -> None:
    result = box.run("for i in range(100_000): display(i)")
    assert (result.status, result.reason, result.state_kept) == ("lost", "guest-lost", False)
    assert len(result.outputs) <= 20_000
    assert box.run("1 + 1").value == "2"


HOG = """
import os, time
for _ in range(40):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        pass
print('full', flush=True)
time.sleep(60)
"""


def test_a_session_that_could_not_start_starts_later() -> None:
    with Sandbox(policy=Policy(limits=Limits(processes=8))) as box:
        with box.spawn(["python3", "-c", HOG]) as filling:
            next(iter(filling))
            with contextlib.suppress(OSError):
                box.session("late").run("1", timeout_s=3)
        assert box.session("late").run("1 + 1").value == "2"
