"""Every language: default sessions or single runs, compile errors, and the message for a missing tool."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import ringfence
from accounts import OrdinaryUser
from programs import read_program
from ringfence import Limits, Policy, PolicyError, Result, Sandbox
from ringfence.backends import Backend
from ringfence.core.languages import TABLE
from ringfence.images.builder import recipe_of_preset

pytestmark = pytest.mark.everywhere


def js(box: Sandbox, code: str, **given: object) -> Result:
    return box.run(code, language="javascript", **given)  # type: ignore[arg-type]  # options of run, as they come


def sh(box: Sandbox, code: str, **given: object) -> Result:
    return box.run(code, language="bash", **given)  # type: ignore[arg-type]  # options of run, as they come


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


@pytest.mark.everywhere(container="a new interpreter has the line before it has started")
def test_python_code_cannot_say_that_there_is_no_python(box: Sandbox) -> None:
    forged = """
import json, os, struct
text = json.dumps({"m": "failed", "stage": "exec", "errno": 2}).encode()
os.write(3, struct.pack("<II", len(text), 0) + text)
os._exit(127)
"""
    result = box.run(forged)
    assert (result.status, result.reason, result.exit_code) == ("error", "exit", 127)


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
    where = "with the Debian package 'r-base-core'" if language == "r" else "built from the preset 'polyglot'"
    assert [d.message for d in result.denials] == [f"the image 'host' has no program {tool}; one {where} has it"]


def test_the_presets_that_are_named_have_the_tools() -> None:
    for language in TABLE.values():
        assert language.package
        if language.image:
            assert language.package in recipe_of_preset(language.image).apt, language.name


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
    assert 1.4 < result.duration_s < 15


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


def test_sessions_of_each_language_on_each_way_to_start(backend: Backend) -> None:
    with Sandbox(backend=backend) as box:
        js(box, "const x = 1").check()
        sh(box, "x=2").check()
        box.run("x = 3").check()
        assert (js(box, "x").value, sh(box, "echo $x").stdout, box.run("x").value) == ("1", "2\n", "3")


ORDINARY = read_program("behaviour/languages_ordinary.py")


_OWN_BACKEND = "the program chooses its backend"


@pytest.mark.measures  # an interrupted cell has 0.4 s to end, and a killed process 0.5 s to die
@pytest.mark.everywhere(container=_OWN_BACKEND, gvisor=_OWN_BACKEND)
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
