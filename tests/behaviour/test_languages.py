"""Sessions of JavaScript and bash: state, values, errors, interrupts; and what is said when the tool is not there."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

import ringfence
from accounts import OrdinaryUser
from ringfence import Display, Exit, Limits, Policy, PolicyError, Prompt, Result, Sandbox, Stdout
from ringfence.backends import Backend


def js(box: Sandbox, code: str, **given: object) -> Result:
    return box.run(code, language="javascript", **given)  # type: ignore[arg-type]  # options of run, as they come


def sh(box: Sandbox, code: str, **given: object) -> Result:
    return box.run(code, language="bash", **given)  # type: ignore[arg-type]  # the same


# ── JavaScript ───────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("code", ["while (true) {}", "await null; while (true) {}", "await new Promise(() => {})"])
def test_a_javascript_cell_past_its_time_is_interrupted_and_the_state_is_kept(box: Sandbox, code: str) -> None:
    js(box, "const x = 1").check()
    result = js(box, code, timeout_s=0.4)
    assert (result.status, result.reason, result.state_kept) == ("timeout", "wall-clock", True)
    assert js(box, "x").value == "1"


def test_a_loop_that_began_after_a_timer_is_killed_within_a_second(box: Sandbox) -> None:
    js(box, "const x = 1").check()
    result = js(box, "await new Promise((done) => setTimeout(done, 1)); while (true) {}", timeout_s=0.4)
    assert (result.status, result.state_kept) == ("timeout", False)
    assert result.duration_s < 1.4
    assert js(box, "typeof x").value == "'undefined'"


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
    seen: list[object] = []
    code = "const n = prompt('name? '); console.log('hi', n); display([1]); n"
    with box.session(language="javascript").spawn(code) as cell:
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


# ── bash ─────────────────────────────────────────────────────────────────────────────────────────


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


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def test_each_language_has_a_default_session_of_its_own(box: Sandbox) -> None:
    js(box, "1").check()
    sh(box, "true").check()
    box.run("1").check()
    assert [(s.name, s.language) for s in box.sessions()] == [
        ("javascript", "javascript"),
        ("bash", "bash"),
        ("python", "python"),
    ]


@pytest.mark.parametrize(("language", "program"), [("javascript", "node"), ("bash", "bash")])
def test_an_interpreter_the_policy_does_not_list_is_not_found(language: str, program: str) -> None:
    with Sandbox(policy=Policy(commands=["ls"])) as box:
        result = box.run("1", language=language)
        assert (result.status, result.reason, result.exit_code, result.state_kept) == ("error", "not-found", 127, False)
        assert [(d.kind, d.target, d.code) for d in result.denials] == [("command", program, "exec.not-listed")]
        assert box.run("1 + 1").value == "2"


def test_python_code_cannot_say_that_there_is_no_python(box: Sandbox) -> None:
    forged = """
import json, os, struct
text = json.dumps({"m": "failed", "stage": "exec", "errno": 2}).encode()
os.write(3, struct.pack("<II", len(text), 0) + text)
os._exit(127)
"""
    result = box.run(forged)
    assert (result.status, result.reason, result.exit_code) == ("error", "exit", 127)


# ── once ─────────────────────────────────────────────────────────────────────────────────────────

GO = """
package main
import ("fmt"; "os")
func main() { var s string; fmt.Scan(&s); fmt.Println("hi", s); os.Exit(4) }
"""
JAVA = """
import java.util.*;
public class Greeter {
    public static void main(String[] a) {
        System.out.println("hi " + new Scanner(System.in).nextLine());
        System.exit(4);
    }
}
"""
C = """
#include <stdio.h>
int main(void) { char s[9]; scanf("%8s", s); printf("hi %s\\n", s); return 4; }
"""
CPP = """
#include <iostream>
int main() { std::string s; std::cin >> s; std::cout << "hi " << s << std::endl; return 4; }
"""
# The tool that has to be there, and a program.
PROGRAMS = {
    "javascript": ("node", "console.log('hi', require('fs').readFileSync(0, 'utf8')); process.exitCode = 4"),
    "bash": ("bash", "read a; echo hi $a; exit 4"),
    "go": ("go", GO),
    "ruby": ("ruby", "puts 'hi ' + gets; exit 4"),
    "java": ("javac", JAVA),
    "c": ("gcc", C),
    "c++": ("g++", CPP),
    "r": ("Rscript", 'cat("hi", readLines(file("stdin"), 1)); quit(status = 4)'),
}


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_program_reads_writes_and_ends_with_its_own_code(language: str) -> None:
    tool, code = PROGRAMS[language]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed here")
    result = ringfence.run(code, language=language, stdin="zoe", policy=Policy(limits=Limits(memory="1G", disk="256M")))
    assert (result.status, result.reason, result.exit_code) == ("error", "exit", 4), result.stderr
    assert result.stdout.split() == ["hi", "zoe"]


@pytest.mark.parametrize("language", sorted(set(PROGRAMS) - {"javascript", "bash"}))
def test_a_tool_that_is_not_there_is_named_with_the_image_that_has_it(language: str) -> None:
    tool, code = PROGRAMS[language]
    if shutil.which(tool) is not None:
        with Sandbox(policy=Policy(commands=["ls"])) as box:
            result = box.run(code, language=language)
        told = [(d.target, d.code) for d in result.denials]
        assert (result.reason, told) == ("not-found", [(tool, "exec.not-listed")])
        return
    result = ringfence.run(code, language=language)
    assert (result.status, result.reason, result.exit_code) == ("error", "not-found", 127)
    assert [d.message for d in result.denials] == [
        f"the image 'host' has no program {tool}; one built from the preset 'polyglot' has it"
    ]


@pytest.mark.parametrize(
    ("language", "code"), [("c", "int main(void) { return x; }"), ("c++", "int main() { return x; }")]
)
def test_what_does_not_compile_is_told_apart_and_does_not_run(box: Sandbox, language: str, code: str) -> None:
    result = box.run(code, language=language)
    assert (result.status, result.reason, result.exit_code, result.stdout) == ("error", "compile", 1, "")
    assert "x" in result.stderr
    assert not [entry for entry in box.files.list("/tmp") if "run-" in entry.path]


def test_the_time_limit_covers_compiling_and_running() -> None:
    result = ringfence.run("int main(void) { for (;;); }", language="c", timeout_s=1.5)
    assert (result.status, result.reason) == ("timeout", "wall-clock")
    assert 1.4 < result.duration_s < 2.6


def test_the_compiler_is_inside_the_sandbox_too() -> None:
    result = ringfence.run('#include "/etc/shadow"\nint main(void) { return 0; }', language="c")
    assert (result.reason, "root:" in result.stderr) == ("compile", False)


def test_a_run_of_javascript_has_value_exception_and_exit_code() -> None:
    result = ringfence.run("import os from 'os'\nconst n = await Promise.resolve(41)\nn + 1", language="javascript")
    assert (result.status, result.exit_code, result.value) == ("ok", 0, "42")
    result = ringfence.run("console.log(1)\nnope()", language="javascript")
    assert (result.status, result.reason, result.exit_code, result.stdout) == ("error", "exception", 1, "1\n")
    assert result.exception is not None
    assert result.exception.traceback == "ReferenceError: nope is not defined\n    at <run>:2:1"
    later = ringfence.run("setTimeout(() => console.log('later'), 50)", language="javascript")
    assert (later.status, later.stdout, later.exit_code) == ("ok", "later\n", 0)


def test_an_unknown_language_lists_the_known_ones(box: Sandbox) -> None:
    known = "one of: python, javascript, bash, go, ruby, java, c, c\\+\\+, r"
    for call in (box.run, ringfence.run):
        with pytest.raises(PolicyError, match="unknown language 'cobol'") as caught:
            call("x", language="cobol")
        assert re.fullmatch(known, caught.value.fix or "")


# ── however it is started ────────────────────────────────────────────────────────────────────────


def test_sessions_of_each_language_on_each_way_to_start(backend: Backend) -> None:
    with Sandbox(backend=backend) as box:
        js(box, "const x = 1").check()
        sh(box, "x=2").check()
        box.run("x = 3").check()
        assert (js(box, "x").value, sh(box, "echo $x").stdout, box.run("x").value) == ("1", "2\n", "3")


ORDINARY = """
import json, warnings
warnings.simplefilter("ignore")
import ringfence
from ringfence import Sandbox
with Sandbox() as box:
    for language, first, second in (("javascript", "const x = 1", "console.log(x, prompt())"),
                                    ("bash", "x=1; cd /tmp", "read y; echo $x $y $PWD")):
        box.run(first, language=language).check()
        print(json.dumps(box.run(second, language=language, stdin="in\\n").stdout))
        r = box.run("while (true) {}" if language == "javascript" else "sleep 60", language=language, timeout_s=0.5)
        print(json.dumps([r.status, r.state_kept]))
r = ringfence.run("int main(void) { return 6; }", language="c")
print(json.dumps([r.status, r.exit_code]))
"""


def test_the_same_as_an_ordinary_user(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(ORDINARY)
    assert done.returncode == 0, done.stderr
    assert [json.loads(row) for row in done.stdout.splitlines()] == [
        "1 in\n",
        ["timeout", True],
        "1 in /tmp\n",
        ["timeout", True],
        ["error", 6],
    ]
