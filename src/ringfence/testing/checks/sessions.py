"""Checks of sessions: state between cells, how a cell ends, and what the end does to the state."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ringfence import Limits, Policy, PolicyError, Sandbox, SandboxClosedError
from ringfence.events import Display, Exit, Prompt, Stdout
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker

if TYPE_CHECKING:
    from ringfence.types import Session
    from ringfence.values import SessionLanguage

STUBBORN = """
import time
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""
FORGED = """
import json, os, struct
text = json.dumps({"m": "done", "n": 1, "exit": None, "exception": None}).encode()
os.write(3, struct.pack("<II", len(text), 0) + text)
raise SystemExit(7)
"""
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
LEAVING = "import signal, sys\nsignal.signal(2, lambda *_: sys.exit(0))\nwhile True: pass"
ENDED_BY_SIGINT: tuple[tuple[SessionLanguage, str], ...] = (
    ("python", "import signal\nsignal.signal(2, signal.SIG_DFL)\nwhile True: pass"),
    ("python", "import os, signal\nsignal.signal(2, lambda *_: os._exit(0))\nwhile True: pass"),
    ("bash", "exec sleep 30"),
    ("bash", f"exec python3 -c '{LEAVING}'"),
)
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
MANY = """
class Many:
    def _repr_mimebundle_(self, **kwargs):
        return {"": "x", 5: "x", "a\\nb": "x", "é/é": "x", "a" * 200: "x", **{f"a/{n}": "x" for n in range(1000)}}
display(Many())
"""


def variables_imports_and_the_working_directory_stay(box: Sandbox) -> None:
    box.run("import os, math\nx = 41\nos.mkdir('d'); os.chdir('d')").check()
    result = box.run("(x + 1, math.floor(2.5), os.getcwd())")
    assert (result.value, result.exit_code, result.state_kept) == ("(42, 2, '/workspace/d')", None, True)


def two_sessions_share_files_and_no_state(box: Sandbox) -> None:
    one, two = box.session("one"), box.session("two")
    one.run("x = 1; open('f', 'w').write('hi')").check()
    assert two.run("('x' in globals(), open('f').read())").value == "(False, 'hi')"
    assert [session.name for session in box.sessions()] == ["one", "two"]
    assert box.session("one") is one


def output_belongs_to_the_cell_that_printed_it(box: Sandbox) -> None:
    for number in range(10):
        result = box.run(f"import sys\nprint('x' * 5000, {number}); print('e', {number}, file=sys.stderr)\n{number}")
        expected = (f"{'x' * 5000} {number}\n", f"e {number}\n", str(number))
        assert (result.stdout, result.stderr, result.value) == expected


def a_cell_past_its_time_is_interrupted_and_the_state_is_kept(box: Sandbox) -> None:
    box.run("x = 1\nimport time").check()
    result = box.run("try:\n    time.sleep(60)\nfinally:\n    print('bye')", timeout_s=0.5)
    assert (result.status, result.reason, result.state_kept, result.stdout) == ("timeout", "wall-clock", True, "bye\n")
    assert box.run("x").value == "1"


def a_cell_that_ignores_the_interrupt_is_killed_with_its_session(box: Sandbox) -> None:
    box.run("x = 1").check()
    result = box.run(STUBBORN, timeout_s=0.5)
    assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", False)
    assert box.run("'x' in globals()").value == "False"


def an_interpreter_that_the_time_limit_ends_has_timed_out(box: Sandbox) -> None:
    for language, code in ENDED_BY_SIGINT:
        result = box.run(code, language=language, timeout_s=1)
        ended = (result.status, result.reason, result.ok, result.state_kept)
        assert ended == ("timeout", "wall-clock", False, False), (language, code, result.render())
    assert box.run("1 + 1").value == "2"


def _interrupted(session: Session, code: str, after_s: float) -> tuple[str, str, bool]:
    """Interrupt `code` after its first output; return status, reason, and whether the state is kept."""
    with session.spawn(code) as cell:
        assert isinstance(next(iter(cell)), Stdout)
        time.sleep(after_s)
        assert session.interrupt()
        result = cell.wait()
    return result.status, result.reason, result.state_kept


def an_interpreter_that_an_interrupt_ends_was_interrupted(box: Sandbox) -> None:
    code = "import os\nprint('up', flush=True)\nos.execvp('sleep', ['sleep', '60'])"
    assert _interrupted(box.session(), code, 0.5) == ("killed", "interrupted", False)


def interrupt_stops_the_cell_and_keeps_the_state(box: Sandbox) -> None:
    session = box.session()
    session.run("x = 5\nimport time").check()
    assert not session.interrupt(), "nothing runs"
    ended = _interrupted(session, "print('up', flush=True); time.sleep(60)", 0.2)
    assert ended == ("killed", "interrupted", True)
    assert session.run("x").value == "5"


def restart_forgets_and_close_ends(box: Sandbox) -> None:
    session = box.session("s")
    session.run("x = 1").check()
    session.restart()
    assert session.run("'x' in globals()").value == "False"
    session.close()
    assert box.sessions() == ()
    with raises(SandboxClosedError, match="session s was closed"):
        session.run("1")
    assert box.session("s").run("1").value == "1"


def exit_ends_the_cell_and_the_end_of_the_process_the_session(box: Sandbox) -> None:
    box.run("x = 1").check()
    result = box.run("import sys; sys.exit(3)")
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", None, True)
    result = box.run("import os; os._exit(3)")
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", 3, False)


def a_traceback_points_into_the_cell(box: Sandbox) -> None:
    box.run("def f():\n    raise ValueError('no')").check()
    result = box.run("f()")
    assert (result.status, result.reason, result.state_kept) == ("error", "exception", True)
    assert result.exception is not None
    lines = [line for line in result.exception.traceback.splitlines() if line.strip(" ~^")]  # 3.13 marks calls
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 1, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
        "    raise ValueError('no')",
        "ValueError: no",
    ]
    assert result.stderr == result.exception.traceback


def leaving_with_kills_a_cell_and_with_it_the_session(box: Sandbox) -> None:
    session = box.session()
    session.run("x = 5").check()
    with session.spawn("import time; time.sleep(60)") as cell:
        pass
    assert cell.wait().status == "killed"
    assert session.run("'x' in globals()").value == "False"


def a_kill_that_comes_after_the_cells_end_is_not_the_next_ones(box: Sandbox) -> None:
    session = box.session()
    session.run("kept = 1").check()
    for _ in range(5):
        cell = session.spawn("1")
        time.sleep(0.2)  # the cell has ended, and its end was not read yet
        assert not cell.kill().state_kept
        assert session.run("import time; time.sleep(0.1); 2").value == "2"


def a_session_that_talks_nonsense_is_not_believed_and_the_sandbox_goes_on(box: Sandbox) -> None:
    for junk in ("b'x' * 5000", "b'\\xff' * 8", "b'\\x02\\0\\0\\0\\0\\0\\0\\0{}'"):
        result = box.run(f"import os; os.write(3, {junk})")
        assert (result.status, result.reason, result.state_kept) == ("lost", "guest-lost", False)
    assert box.run("1 + 1").value == "2"


def a_cell_that_forges_its_end_ends_and_chooses_nothing(box: Sandbox) -> None:
    result = box.run(FORGED)
    assert (result.status, result.exit_code, result.state_kept) == ("ok", None, True)
    assert box.run("1 + 1").value == "2"


_FLOOD = """
import json, os, struct
text = json.dumps({"m": "display", "value": False, "mimes": [["text/plain", 1]]}).encode()
said = (struct.pack("<II", len(text), 1) + text + b"1") * 100
for _ in range(1000):
    rest = said
    while rest:
        rest = rest[os.write(3, rest):]
"""


def a_flood_of_small_messages_is_not_listened_to_for_ever(box: Sandbox) -> None:
    result = box.run(_FLOOD)
    assert (result.status, result.reason, result.state_kept) == ("lost", "guest-lost", False)
    assert len(result.outputs) <= 20_000
    assert box.run("for i in range(30_000): display(i)").state_kept, "a cell that only shows too much loses its state"
    assert box.run("1 + 1").value == "2"


def memory_ends_the_session_and_says_so(make: MakeSandbox) -> None:
    with make(policy=Policy(limits=Limits(memory="64M", disk="1M"))) as box:
        box.run("x = 1").check()
        result = box.run("y = bytearray(1 << 30)\nfor i in range(0, len(y), 4096): y[i] = 1")
        ends = [("oom", "memory", False), ("error", "exception", True)]
        assert (result.status, result.reason, result.state_kept) in ends, result.render()
        assert box.run("1 + 1").value == "2"


def a_session_that_could_not_start_starts_later(make: MakeSandbox) -> None:
    with make(policy=Policy(limits=Limits(processes=8))) as box:
        with box.spawn(["python3", "-c", HOG]) as filling:
            next(iter(filling))
            with contextlib.suppress(OSError):
                box.session("late").run("1", timeout_s=3)
        assert box.session("late").run("1 + 1").value == "2"


def input_is_fed_or_refused(box: Sandbox) -> None:
    assert box.run("(input('a? '), input())", stdin="x\ny\n").value == "('x', 'y')"
    refused = box.run("input()")
    assert refused.exception is not None
    assert refused.exception.name == "EOFError"
    assert box.run("import sys; sys.stdin.read()", stdin="all\nof it").value == "'all\\nof it'"


def a_spawned_cell_asks_its_caller(box: Sandbox) -> None:
    seen = answered(box.session(), "n = input('name? ')\nprint('hi', n)\ndisplay(1)\nn")
    assert seen == ["name? ", "hi zoe\n", ("1", False), ("'zoe'", True), "ok"]


def answered(session: Session, code: str) -> list[object]:
    """Return what a cell that asks for a name did, in order."""
    seen: list[object] = []
    with session.spawn(code) as cell:
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
    return seen


def top_level_await_keeps_its_loop(box: Sandbox) -> None:
    box.run("import asyncio\nq = asyncio.Queue()\nawait q.put(3)").check()
    assert box.run("await q.get()").value == "3"


def calls_from_threads_queue(box: Sandbox) -> None:
    session = box.session()
    session.run("n = 0").check()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: session.run("n += 1").check(), range(8)))
    assert session.run("n").value == "8"


def env_is_for_one_cell(box: Sandbox) -> None:
    code = "import os\nos.environ.get('A')"
    assert [box.run(code, env={"A": "1"}).value, box.run(code).value] == ["'1'", None]


def an_object_is_shown_in_all_its_representations(box: Sandbox) -> None:
    (output,) = box.run(RICH).check().outputs
    assert dict(output.data) == {
        "text/plain": b"rich",
        "text/html": b"<b>rich</b>",
        "text/latex": b"$x$",
        "image/svg+xml": b"<svg/>",
        "image/png": b"PNG",
        "application/json": b'{"a": [1]}',
    }
    assert (output.json, output.is_value) == ({"a": [1]}, False)
    (many,) = box.run(MANY).check().outputs
    assert (len(many.data) <= 32, all(mime.startswith("a/") for mime in many.data if mime != "text/plain")) == (
        True,
        True,
    )


def bash_keeps_its_variables_functions_and_directory(box: Sandbox) -> None:
    box.run("x=6; twice() { echo $(($1 * 2)); }; mkdir -p d; cd d", language="bash").check()
    assert box.run("twice $x; pwd", language="bash").stdout == "12\n/workspace/d\n"


def a_wrong_name_or_language_is_refused(box: Sandbox) -> None:
    box.session("s").run("1").check()
    with raises(PolicyError, match="runs python"):
        box.session("s", language="bash")
    with raises(PolicyError, match="no session runs 'cobol'"):
        box.session(language="cobol")  # type: ignore[arg-type]  # the point of this check
    for name in ("", "x" * 65, "a\nb"):
        with raises(PolicyError, match="no name for a session"):
            box.session(name)


CHECKS = (
    in_box(variables_imports_and_the_working_directory_stay),
    in_box(two_sessions_share_files_and_no_state),
    in_box(output_belongs_to_the_cell_that_printed_it),
    in_box(a_cell_past_its_time_is_interrupted_and_the_state_is_kept),
    in_box(a_cell_that_ignores_the_interrupt_is_killed_with_its_session),
    in_box(an_interpreter_that_the_time_limit_ends_has_timed_out),
    in_box(an_interpreter_that_an_interrupt_ends_was_interrupted),
    in_box(interrupt_stops_the_cell_and_keeps_the_state),
    in_box(restart_forgets_and_close_ends),
    in_box(exit_ends_the_cell_and_the_end_of_the_process_the_session),
    in_box(a_traceback_points_into_the_cell),
    in_box(leaving_with_kills_a_cell_and_with_it_the_session),
    in_box(a_kill_that_comes_after_the_cells_end_is_not_the_next_ones),
    in_box(a_session_that_talks_nonsense_is_not_believed_and_the_sandbox_goes_on),
    in_box(a_cell_that_forges_its_end_ends_and_chooses_nothing),
    in_box(a_flood_of_small_messages_is_not_listened_to_for_ever),
    with_maker(memory_ends_the_session_and_says_so, "memory-limit"),
    with_maker(a_session_that_could_not_start_starts_later, "process-limit"),
    in_box(input_is_fed_or_refused),
    in_box(a_spawned_cell_asks_its_caller),
    in_box(top_level_await_keeps_its_loop),
    in_box(calls_from_threads_queue),
    in_box(env_is_for_one_cell),
    in_box(an_object_is_shown_in_all_its_representations),
    in_box(bash_keeps_its_variables_functions_and_directory),
    in_box(a_wrong_name_or_language_is_refused),
)
