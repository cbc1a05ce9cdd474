"""Sessions: state between cells, how a cell ends, and what its end does to the state."""

from __future__ import annotations

import time

from ringfence import Exit, PolicyError, Prompt, Sandbox, SandboxClosedError, Stdout
from ringfence.testing.model import in_box, raises

STUBBORN = """
import time
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass
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


def interrupt_stops_the_cell_and_keeps_the_state(box: Sandbox) -> None:
    session = box.session()
    session.run("x = 5\nimport time").check()
    assert not session.interrupt(), "nothing runs"
    with session.spawn("print('up', flush=True); time.sleep(60)") as cell:
        assert isinstance(next(iter(cell)), Stdout)
        time.sleep(0.2)
        assert session.interrupt()
        result = cell.wait()
    assert (result.status, result.reason, result.state_kept) == ("killed", "interrupted", True)
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


def a_prompt_is_answered_while_the_cell_runs(box: Sandbox) -> None:
    with box.session().spawn("print('hello ' + input('name? '))") as cell:
        seen = []
        for event in cell:
            seen.append(type(event))
            if isinstance(event, Prompt):
                assert event.text == "name? "
                cell.write("fox\n")
        assert (seen.count(Prompt), seen[-1]) == (1, Exit)
        assert "hello fox\n" in cell.wait().stdout


def objects_are_shown_by_type(box: Sandbox) -> None:
    code = """
class Shown:
    def __repr__(self): return "plain"
    def _repr_html_(self): return "<b>rich</b>"
Shown()
"""
    result = box.run(code)
    assert [(output.text, output.html, output.is_value) for output in result.outputs] == [
        ("plain", "<b>rich</b>", True)
    ]


def bash_keeps_its_variables_functions_and_directory(box: Sandbox) -> None:
    box.run("x=6; twice() { echo $(($1 * 2)); }; mkdir -p d; cd d", language="bash").check()
    assert box.run("twice $x; pwd", language="bash").stdout == "12\n/workspace/d\n"


def a_wrong_name_or_language_is_refused(box: Sandbox) -> None:
    box.session("s").run("1").check()
    with raises(PolicyError, match="speaks python"):
        box.session("s", language="bash")
    for name in ("", "x" * 65, "a\nb"):
        with raises(PolicyError, match="no name for a session"):
            box.session(name)


CHECKS = (
    in_box(variables_imports_and_the_working_directory_stay),
    in_box(two_sessions_share_files_and_no_state),
    in_box(output_belongs_to_the_cell_that_printed_it),
    in_box(a_cell_past_its_time_is_interrupted_and_the_state_is_kept),
    in_box(a_cell_that_ignores_the_interrupt_is_killed_with_its_session),
    in_box(interrupt_stops_the_cell_and_keeps_the_state),
    in_box(restart_forgets_and_close_ends),
    in_box(exit_ends_the_cell_and_the_end_of_the_process_the_session),
    in_box(a_prompt_is_answered_while_the_cell_runs),
    in_box(objects_are_shown_by_type),
    in_box(bash_keeps_its_variables_functions_and_directory),
    in_box(a_wrong_name_or_language_is_refused),
)
