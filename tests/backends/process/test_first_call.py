"""The first sandbox of a process: what is begun early ends with it or is used, and its template is replaced."""

from __future__ import annotations

import subprocess
import sys

_CHILDREN = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import ringfence
from ringfence import Mount, Policy, Sandbox
from ringfence import spawn
from ringfence.backends.process import pool

def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return len(file.read().split())

def until(done):
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return done()
"""


def said_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", _CHILDREN + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_call_that_is_refused_starts_nothing() -> None:
    code = """
started = []
spawn.start = lambda *args: started.append(args)
for wrong in (dict(code=7), dict(code="1", policy=7), dict(code="1", timeout_s=-1), dict(code="1", language="cobol"),
              dict(code="1", backend="none"), dict(code="1", image="none"),
              dict(code="1", policy=Policy(mounts=[Mount("/no/such/folder")]))):
    try:
        ringfence.run(**wrong)
    except (TypeError, ValueError, ringfence.RingfenceError):
        continue
    print("not refused:", wrong)
print(started, children())
"""
    assert said_by(code) == "[] 0\n"


def test_what_was_begun_for_a_call_that_fails_is_ended() -> None:
    code = """
from ringfence._sync import running
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


def test_a_fork_does_not_take_what_its_parent_has_begun() -> None:
    code = """
spawn.begin_first()
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
