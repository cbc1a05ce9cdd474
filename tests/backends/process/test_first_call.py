"""The first sandbox of a process: a zygote that was started early is used or ended, and the template is replaced."""

from __future__ import annotations

import subprocess
import sys

import pytest

from programs import read_program
from ringfence import __main__
from ringfence.host import zygote_start

_CHILDREN = read_program("backends/first_call_children.py")


def said_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", _CHILDREN + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_call_that_is_refused_starts_nothing() -> None:
    code = read_program("backends/first_call_refused.py")
    assert said_by(code) == "[] 0\n"


def test_what_was_begun_for_a_call_that_fails_is_ended() -> None:
    code = """
from ringfence._sync import run as running
def fails(*args):
    print(children())
    raise OSError("no")
running.launched = fails
try:
    ringfence.run("1")
except OSError:
    print(children())
"""
    assert said_by(code) == "1\n0\n"


def test_a_zygote_that_nobody_could_adopt_is_ended() -> None:
    code = read_program("backends/first_call_no_adopter.py")
    assert said_by(code) == "1\n0\n"


def test_a_fork_does_not_take_what_its_parent_has_begun() -> None:
    code = """
spawn.begin_first("auto", "host", ringfence.Policy())
child = os.fork()
if child == 0:
    print(spawn.take(spawn.real_executable()), ringfence.run("6 * 7").value, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(ringfence.run("6 * 7").value, children())
"""
    assert said_by(code) == "None 42\n42 1\n"


def test_the_first_template_gives_way_to_one_that_has_loaded_everything() -> None:
    code = """
with Sandbox() as box:
    (one,) = pool._pools.values()
    first = box._box.template
    print(first.young, until(lambda: one._templates._outgrown == [first]))
    print(until(lambda: [t.young for t in one._templates._of_view.values()] == [False]))
    print(box.run("6 * 7").value)
    with box.fork() as other:
        print(other.run("_ * 0 + 1").value, other._box.template is first)
print(until(lambda: not one._templates._outgrown and first._control.fileno() < 0))
print(ringfence.run("'json' in __import__('sys').modules").value)
"""
    assert said_by(code) == "True True\nTrue\n42\n1 False\nTrue\nTrue\n"


def test_a_command_starts_one_zygote() -> None:
    code = """
from ringfence.cli import main
start, started = spawn.start, []
spawn.start = lambda *args: started.append(args) or start(*args)
spawn.begin()
print(main(["exec", "--", "/bin/true"]), len(started))
"""
    assert said_by(code) == "0 1\n"


def test_a_commands_sandbox_is_begun_once_and_before_the_rest_is_loaded() -> None:
    code = """
from ringfence.cli import main
begin, begun = pool.Pool._start, []
def _start(self, *args, **more):
    begun.append("ringfence._sync.sandbox" in sys.modules)
    return begin(self, *args, **more)
pool.Pool._start = _start
del sys.modules["ringfence._sync.sandbox"], vars(ringfence)["Sandbox"]
spawn.begin(program=True)
print(main(["exec", "--", "/bin/echo", "ran"]), begun)
"""
    assert said_by(code) == "ran\n0 [False]\n"


def test_a_command_that_could_not_begin_its_sandbox_early_tries_again() -> None:
    code = read_program("backends/first_call_too_early.py")
    assert said_by(code) == "0 2\n"


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (["exec", "--", "ls", "-l"], [True]),
        (["exec", "ls", "-l"], [True]),
        (["exec"], [True]),
        (["exec", "-q", "--", "ls"], [False]),
        (["exec", "--policy", "mine.toml", "--", "ls"], [False]),
        (["run", "-c", "1"], [False]),
        (["shell"], [False]),
        (["exec", "--help"], []),
        (["exec", "--explain", "--", "ls"], []),
        (["doctor"], []),
        ([], []),
    ],
)
def test_a_command_begins_its_zygote_for_a_program_alone_where_no_option_may_ask_for_more(
    words: list[str], begun: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(zygote_start, "begin", lambda *, program: seen.append(program))
    __main__._begin(words)
    assert seen == begun
