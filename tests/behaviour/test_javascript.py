"""Sessions of JavaScript: declarations, values, imports, errors, interrupts, input."""

from __future__ import annotations

import time

import pytest

import weaker
from ringfence import Limits, Policy, Result, Sandbox
from ringfence.testing.checks.sessions import answered

pytestmark = [pytest.mark.everywhere, weaker.needs_node]


def js(box: Sandbox, code: str, **given: object) -> Result:
    return box.run(code, language="javascript", **given)  # type: ignore[arg-type]  # options of run, as they come


def test_javascript_keeps_its_declarations_and_takes_them_again(box: Sandbox) -> None:
    js(box, "const a = 1; let b = 2; class C { m() { return 7 } }; function f(x) { return x * 2 }").check()
    js(box, "const a = 5; class C { m() { return 8 } }").check()
    result = js(box, "[a, b, new C().m(), f(4)]")
    assert (result.value, result.exit_code, result.state_kept) == ("[ 5, 2, 8, 8 ]", None, True)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("let x = 3", None),
        ("({a: 1})", "{ a: 1 }"),
        ("{a: [1, 'x']}", "{ a: [ 1, 'x' ] }"),
        ("{ let y = 4; y }", "4"),
        ("10n ** 20n", "100000000000000000000n"),
        ("-0", "-0"),
        ("await new Promise((done) => setTimeout(() => done('later'), 5))", "'later'"),
        ("for await (const n of [1, 2]) n", "2"),
        ("require('path').join('a', 'b')", "'a/b'"),
        ("(await import('node:path')).sep", "'/'"),
        (
            "import { sep as s, join } from 'node:path'\nimport os from 'os'\n[s, join('a'), typeof os]",
            "[ '/', 'a', 'object' ]",
        ),
        ("import * as p from 'path'; import fs, { readSync } from 'fs'; [p.sep, readSync.name]", "[ '/', 'readSync' ]"),
        ("'import(x)' + `import(${'y'})` + /import('z')/.source // import('w')", "\"import(x)import(y)import('z')\""),
    ],
)
def test_the_value_of_a_javascript_cell(box: Sandbox, code: str, value: str | None) -> None:
    assert js(box, code).check().value == value


def test_a_module_beside_the_cell_is_imported_and_required(box: Sandbox) -> None:
    box.files.write("one.mjs", "export const n = 1; export default 'd'")
    box.files.write("two.cjs", "module.exports = 2")
    result = js(box, "import d, { n } from './one.mjs'\nconst two = require('./two.cjs');\n[d, n, two]")
    assert result.check().value == "[ 'd', 1, 2 ]"


def test_a_javascript_stack_points_into_the_cell(box: Sandbox) -> None:
    js(box, "function f() {\n  throw new TypeError('no')\n}").check()
    result = js(box, "\nf()")
    assert (result.status, result.reason, result.state_kept) == ("error", "exception", True)
    assert result.exception is not None
    assert (result.exception.name, result.exception.message) == ("TypeError", "no")
    assert result.exception.traceback == "TypeError: no\n    at f (<cell 1>:2:9)\n    at <cell 2>:2:1"
    assert result.stderr == result.exception.traceback + "\n"


def test_a_syntax_error_says_where(box: Sandbox) -> None:
    result = js(box, "let a = 1;\nlet b = ;")
    assert result.exception is not None
    assert result.exception.traceback == "SyntaxError: Unexpected token ';'\n    at <cell 1>:2:9"


def test_what_is_thrown_need_not_be_an_error(box: Sandbox) -> None:
    result = js(box, "throw {code: 5}")
    assert result.exception is not None
    assert (result.exception.name, result.exception.message) == ("object", "{ code: 5 }")
    hostile = js(box, "throw Object.defineProperty(new Error('x'), 'message', {get() { throw 1 }})")
    assert (hostile.status, hostile.reason, hostile.state_kept) == ("error", "exception", True)


def test_javascript_output_comes_before_the_end_and_belongs_to_its_cell(box: Sandbox) -> None:
    for i in range(20):
        result = js(box, f"console.log('x'.repeat(9000), {i}); console.error('e', {i}); {i}")
        assert (result.stdout, result.stderr, result.value) == (f"{'x' * 9000} {i}\n", f"e {i}\n", str(i))


def test_much_output_is_all_there_at_the_end_of_its_cell_and_at_exit() -> None:
    printed = "console.log('x'.repeat(3_000_000)); for (let i = 0; i < 5000; i++) console.error(i); "
    with Sandbox(policy=Policy(limits=Limits(output="16M"))) as box:
        for end in ("7", "8", "process.exit(0)"):
            result = js(box, printed + end)
            assert (len(result.stdout), result.stderr.count("\n")) == (3_000_001, 5000)


AFTER_A_TIMER = "await new Promise((done) => setTimeout(done, 1)); "
ENDLESS = [
    "while (true) {}",
    "await null; while (true) {}",
    "await new Promise(() => {})",
    f"{AFTER_A_TIMER}while (true) {{}}",
    f"{AFTER_A_TIMER}while (true) await null",
    f"{AFTER_A_TIMER}try {{ while (true) {{}} }} finally {{ while (true) {{}} }}",
    "await require('fs').promises.readFile('/dev/null'); while (true) {}",
    "await new Promise(() => setTimeout(() => { while (true) {} }, 1))",
]


@pytest.mark.measures  # an interrupted cell has 0.4 s to end
@pytest.mark.parametrize("code", ENDLESS)
def test_a_javascript_cell_past_its_time_is_interrupted_and_the_state_is_kept(box: Sandbox, code: str) -> None:
    js(box, "const x = 1").check()
    for _ in range(2):
        result = js(box, code, timeout_s=0.4)
        assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", True)
        assert js(box, f"{AFTER_A_TIMER}x").value == "1"


@pytest.mark.measures  # an interrupted cell has 0.4 s to end
@pytest.mark.parametrize("code", [ENDLESS[0], *ENDLESS[2:4]])
def test_an_interrupt_ends_a_cell_beside_a_handler_of_the_guests(box: Sandbox, code: str) -> None:
    """The guest's handler gets the signal, and a loop after an await goes on: the session is killed and says so."""
    js(box, "process.on('SIGINT', () => {})").check()
    result = js(box, code, timeout_s=0.4)
    assert (result.status, result.state_kept) == ("timeout", not code.startswith(AFTER_A_TIMER))
    assert js(box, "1 + 1").value == "2"


def test_interrupt_stops_a_javascript_cell(box: Sandbox) -> None:
    session = box.session(language="javascript")
    session.run("const x = 5").check()
    with session.spawn("while (true) {}") as cell:
        time.sleep(0.3)
        assert session.interrupt()
        result = cell.wait()
    assert (result.status, result.reason, result.state_kept) == ("killed", "interrupted", True)
    assert session.run("x").value == "5"


def test_an_error_nobody_waits_for_does_not_end_the_session(box: Sandbox) -> None:
    code = (
        "const x = 1; setTimeout(() => { throw new Error('late') }, 1); await new Promise((d) => setTimeout(d, 60)); x"
    )
    result = js(box, code)
    assert result.value == "1"
    assert "Error: late\n    at Timeout._onTimeout (<cell 1>:1:" in result.stderr
    assert js(box, "x").value == "1"


def test_process_exit_ends_the_javascript_session(box: Sandbox) -> None:
    js(box, "const x = 1").check()
    result = js(box, "process.exit(3)")
    assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "exit", 3, False)
    assert js(box, "typeof x").value == "'undefined'"


def test_javascript_reads_what_its_cell_was_given_and_no_more(box: Sandbox) -> None:
    assert js(box, "[prompt('a? '), prompt(), prompt()]", stdin="x\ny\n").value == "[ 'x', 'y', null ]"
    assert js(box, "prompt()", stdin="left\nover\n").value == "'left'"
    assert js(box, "require('fs').readFileSync(0, 'utf8')", stdin="all\nof it").value == "'all\\nof it'"
    assert js(box, "let t = ''; for await (const p of process.stdin) t += p; t", stdin="streamed").value == "'streamed'"
    assert js(box, "prompt()").value == "null"


def test_a_spawned_javascript_cell_asks_its_caller(box: Sandbox) -> None:
    code = "const n = prompt('name? '); console.log('hi', n); display([1]); n"
    seen = answered(box.session(language="javascript"), code)
    assert seen == ["name? ", "hi zoe\n", ("[ 1 ]", False), ("'zoe'", True), "ok"]


def test_javascript_shows_rich_objects(box: Sandbox) -> None:
    code = "display({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>x</b>', 'application/json': {a: 1}})})"
    (output,) = js(box, code).check().outputs
    assert (output.html, output.json) == ("<b>x</b>", {"a": 1})


def test_env_is_for_one_javascript_cell(box: Sandbox) -> None:
    assert [js(box, "process.env.A", env={"A": "1"}).value, js(box, "process.env.A").value] == ["'1'", None]


def test_tools_are_functions_of_javascript_too() -> None:
    with Sandbox(tools={"add": lambda a, b: {"sum": a + b}}) as box:
        assert js(box, "add(1, 2).sum").value == "3"
        failed = js(box, "add('x', 2)")
        assert failed.exception is not None
        assert failed.exception.message == "add: it failed with TypeError"


def test_a_forked_node_is_a_plain_node(box: Sandbox) -> None:
    box.files.write("child.cjs", "process.send(process.argv.length)")
    code = "const c = require('child_process').fork('./child.cjs'); await new Promise((done) => c.on('message', done))"
    assert js(box, code).value == "2"
