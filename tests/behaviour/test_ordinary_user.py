"""The library for a user without rights and without set-up: full containment, and weaker limits are reported."""

from __future__ import annotations

import json
import time

import pytest

import leftovers
from accounts import OrdinaryUser
from programs import read_program

HEAD = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import ringfence
from ringfence import Limits, Policy, Sandbox
def say(*what): print(json.dumps(what), flush=True)
"""


def told(user: OrdinaryUser, code: str) -> list[list[object]]:
    done = user.run(HEAD + code)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_runs_with_their_output_value_exception_and_exit_code(ordinary_user: OrdinaryUser) -> None:
    code = """
r = ringfence.run("import os, sys\\nprint('out')\\nprint('err', file=sys.stderr)\\n(os.getuid(), os.getcwd())")
say(r.status, r.stdout, r.stderr, r.value)
r = ringfence.run("def f():\\n    1/0\\nf()")
say(r.status, r.reason, r.exception.name, "    1/0" in r.stderr)
r = ringfence.run("import sys; sys.exit(3)", backend=ringfence.backends.Process(fresh=True))
say(r.status, r.exit_code)
say(ringfence.run("input() * 2", stdin="ab").value, ringfence.run("import os\\nsorted(os.environ)").value)
"""
    assert told(ordinary_user, code) == [
        ["ok", "out\n", "err\n", "(1000, '/workspace')"],
        ["error", "exception", "ZeroDivisionError", True],
        ["error", 3],
        ["'abab'", "['HOME', 'LANG', 'PATH', 'TMPDIR', 'USER']"],
    ]


def test_commands_files_and_processes(ordinary_user: OrdinaryUser) -> None:
    code = read_program("behaviour/ordinary_user_commands_files_and_processes.py")
    assert told(ordinary_user, code) == [
        [[["d", "directory", 0o755], ["d/f", "file", 0o700]], "text"],
        [4, 127],
        ["up\nx"],
        [False],
        [[], "running"],
        ["closed"],
    ]


def test_limits_hold(ordinary_user: OrdinaryUser) -> None:
    code = read_program("behaviour/ordinary_user_limits_hold.py")
    assert told(ordinary_user, code) == [
        ["1"],
        ["5"],
        ["timeout", True],
        ["limit", "cpu-time"],
        [True],
        [f"({1 << 20}, 'No space left on device')"],
        [True, True],
    ]


def test_what_is_weaker_without_a_cgroup_is_said_and_refused_when_strict(ordinary_user: OrdinaryUser) -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    r = ringfence.run("1"); ringfence.run("2")
say(list(r.enforcement.weaker), [w.category.__name__ for w in caught])
try: say(ringfence.run("1", policy=Policy(strict=True)).status)
except ringfence.UnsupportedError as e: say(e.code, bool(e.fix))
"""
    (weaker, warned), strict = told(ordinary_user, code)
    if weaker:
        assert (weaker, warned) == (["cpu", "memory"], ["WeakerLimitWarning"])
        assert strict == ["strict", True]
    else:
        assert (warned, strict) == ([], ["ok"])


def test_the_warning_of_weaker_limits_names_the_callers_line_and_comes_with_the_first_start(
    ordinary_user: OrdinaryUser,
) -> None:
    """A plan does not warn, nor the sandbox that is tried for the plan: the plan itself says the same."""
    code = read_program("behaviour/ordinary_user_warned.py")
    planned, warned, again = told(ordinary_user, code)
    if planned[1]:
        assert (planned[0], warned, again) == (0, [[["WeakerLimitWarning", "<string>", 0]]], [1])


def test_too_little_memory_is_refused_with_the_reason_and_for_this_policy_alone(ordinary_user: OrdinaryUser) -> None:
    """Without a cgroup the memory of a starting process decides; with a cgroup, that the first process is killed."""
    code = """
from ringfence.backends import auto
try:
    ringfence.run("1", backend="process", policy=Policy(limits=Limits(memory="64K", disk="4K")))
except ringfence.UnsupportedError as error:
    say(error.code, "limits.memory is too small" in str(error), error.fix)
    auto.remember(error, Policy())  # as where the backend is chosen
say(auto.known_refusal() is None, ringfence.run("1 + 1").value)
"""
    assert told(ordinary_user, code) == [["memory", True, "a larger limits.memory"], [True, "2"]]


def test_the_host_is_not_visible(ordinary_user: OrdinaryUser) -> None:
    code = f"source = {str(ordinary_user.source)!r}" + read_program("behaviour/ordinary_user_looks_at_the_host.py")
    assert told(ordinary_user, code) == [[str(([False] * 7, True))]]


def test_many_at_once_from_threads(ordinary_user: OrdinaryUser) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool: say(list(pool.map(lambda n: ringfence.run(f"{n}").value, range(24))))
"""
    assert told(ordinary_user, code) == [[[str(n) for n in range(24)]]]


@pytest.mark.parametrize("delay_ms", [0, 60, 120, 200, 400])
def test_killed_it_leaves_no_process(ordinary_user: OrdinaryUser, delay_ms: int) -> None:
    code = f"""
if os.fork() == 0:
    boxes = []
    while True:
        with Sandbox() as box:
            box.spawn(["sh", "-c", "setsid sleep 600 & sleep 600"])
            ringfence.run("1")
pid = os.getpid()
time.sleep({delay_ms / 1000} + 0.1)
import signal
os.killpg(0, signal.SIGKILL)
"""
    others = leftovers.orphans()
    done = ordinary_user.run(HEAD + code)
    assert done.returncode == -9
    deadline = time.monotonic() + 3
    while (left := leftovers.orphans() - others) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == frozenset()
