"""Checks of host functions that guest code may call: by name, with JSON, and nothing else of the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ringfence import PolicyError
from ringfence.testing.model import MakeSandbox, raises, with_maker

if TYPE_CHECKING:
    from ringfence.values import Json

_CALL = """
import json, os, struct
def call(name, data=b'{"args":[],"kwargs":{}}'):
    text = json.dumps({"m": "call", "id": 1, "name": name}).encode()
    os.write(3, struct.pack("<II", len(text), len(data)) + text + data)
"""
FORGED = f"""{_CALL}
for name in ("__import__", "os.system", "lookup.__globals__", ""):
    call(name)
call("lookup", b"[]")
call("lookup", b'{{"args":1,"kwargs":{{}}}}')
import time; time.sleep(1)
"""
FLOOD = f"""{_CALL}
call("first")
for _ in range(50): call("harmless")
call("between")
for number in range(2000): call(f"name{{number}}")
call("drop_table")
call("drop_tables")
"""
TRIES_LAST = f"""{_CALL}
call("slow")
call("drop_table")
"""


MANY_CALLS = """
import threading, time
for _ in range(8):
    threading.Thread(target=slow, daemon=True).start()
time.sleep(20)
"""


THREADS = """
import threading
right, wrong = [], []
def ask(i):
    for n in range(5):
        found = echo(10 * i + n)
        (right if found == 10 * i + n else wrong).append((i, n, found))
threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join(5)
len(right), wrong
"""
AFTERWARDS = """
import threading, time
heard = []
def later():
    time.sleep(0.5)
    try:
        note(1)
    except RuntimeError as error:
        heard.append(str(error))
late = threading.Thread(target=later)
late.start()
"""


def lookup(key: str, *, upper: bool = False) -> Json:
    return {"key": key.upper() if upper else key, "n": [1, 2.5, None, True]}


async def later(number: int) -> Json:
    return number + 1


def secret() -> Json:
    raise ValueError("the password is hunter2")


def leaving() -> Json:
    raise SystemExit(3)


def odd() -> Json:
    return object()  # type: ignore[return-value]  # the point of it


def huge() -> Json:
    return "x" * (32 << 20)


def a_tool_is_called_with_json_and_gives_json_back(make: MakeSandbox) -> None:
    with make(tools={"lookup": lookup, "later": later}) as box:
        assert box.run("lookup('a', upper=True)").value == "{'key': 'A', 'n': [1, 2.5, None, True]}"
        assert box.run("[later(i) for i in range(5)]").value == "[1, 2, 3, 4, 5]"


def what_a_tool_raises_or_cannot_be_said_does_not_reach_the_guest(make: MakeSandbox) -> None:
    with make(tools={"lookup": lookup, "secret": secret, "odd": odd, "huge": huge, "leaving": leaving}) as box:
        result = box.run("secret()")
        assert result.exception is not None
        assert (result.exception.name, result.exception.message) == (
            "RuntimeError",
            "secret: it failed with ValueError",
        )
        assert "hunter2" not in str(result.to_dict())
        left = box.run("leaving()").exception
        assert left is not None
        assert left.message == "leaving: it failed with SystemExit"
        for name in ("odd", "huge"):
            failed = box.run(f"{name}()").exception
            assert failed is not None
            assert failed.message.startswith(f"{name}: its result")
        for size in (2 << 20, 40 << 20):
            failed = box.run(f"lookup('x' * {size})").exception
            assert failed is not None
            assert failed.message.startswith("lookup: arguments of more than")
        assert box.run("lookup('still')['key']").value == "'still'"


def a_name_that_is_not_offered_calls_nothing(make: MakeSandbox) -> None:
    called: list[object] = []
    with make(tools={"lookup": lambda *args, **_: called.append(args)}) as box:
        result = box.run(FORGED)
    assert [(d.kind, d.code, d.target, d.count) for d in result.denials] == [
        *(("tool", "tool.unknown", name, 1) for name in ("__import__", "os.system", "lookup.__globals__", "")),
        ("tool", "tool.arguments", "lookup", 2),
    ]
    assert called == []


def a_tool_gets_text_and_no_lone_surrogates(make: MakeSandbox) -> None:
    called: list[object] = []
    with make(tools={"note": lambda *args, **more: called.append((args, more))}) as box:
        for half in (r"note('\ud800')", r"note({'\udc80': 1})", r"note(**{'\udfff': 1})", r"note(['x', '\ud83d'])"):
            result = box.run(half)
            assert result.exception is not None
            assert result.exception.message == "note: its arguments hold a lone surrogate, which is no text"
            assert [(d.code, d.target) for d in result.denials] == [("tool.arguments", "note")]
        box.run(r"note('\U0001f600 \\ud800', x='\u00e4')").check()
    assert called == [(("\U0001f600 \\ud800",), {"x": "\u00e4"})]


def a_flood_of_calls_hides_no_attempt(make: MakeSandbox) -> None:
    """A name that was tried once is listed among thousands of others; equal attempts are one with a count (O23)."""
    with make(tools={"lookup": lookup}) as box:
        result = box.run(FLOOD)
    assert result.status == "ok", result.render()
    found = {denial.target: denial.count for denial in result.denials}
    assert len(found) == len(result.denials) == 1101
    assert (found["first"], found["harmless"], found["between"], found["drop_table"]) == (1, 50, 1, 1)
    assert sum(found.values()) == 2054
    assert found["(others)"] == 2054 - sum(count for name, count in found.items() if name != "(others)")


def what_a_cell_tries_last_is_told(make: MakeSandbox) -> None:
    """The cell ends before the host can answer."""
    with make(tools={"slow": lambda: time.sleep(0.5)}) as box:
        result = box.run(TRIES_LAST)
    assert [(denial.target, denial.count) for denial in result.denials] == [("drop_table", 1)], result.render()


def a_tool_that_waits_does_not_keep_a_cell_beyond_its_time(make: MakeSandbox) -> None:
    def slow() -> Json:
        time.sleep(3)
        return None

    with make(tools={"slow": slow}) as box:
        result = box.run("slow()", timeout_s=1)
        assert result.status == "timeout", result.render()
        assert box.run("1 + 1").value == "2"


def calls_that_wait_end_with_their_cell(make: MakeSandbox) -> None:
    called: list[float] = []

    def slow() -> Json:
        called.append(time.monotonic())
        time.sleep(1)
        return None

    with make(tools={"slow": slow}) as box:
        box.run("1").check()
        begun = time.monotonic()
        result = box.run(MANY_CALLS, timeout_s=1)
        assert result.status == "timeout", result.render()
        assert time.monotonic() - begun < 3, "eight calls of a second each"
        made = len(called)
        assert made <= 2
        assert box.run("1 + 1").value == "2", "a thread of the cell before took what is for this one"
        assert len(called) == made, "a call of the cell before"


def every_thread_gets_its_own_answer(make: MakeSandbox) -> None:
    def echo(number: int) -> Json:
        time.sleep(0.01)
        return number

    with make(tools={"echo": echo}) as box:
        assert box.run(THREADS).value == "(40, [])"
        assert box.run("echo(5)").value == "5"


def a_call_between_cells_fails_and_the_next_cell_runs(make: MakeSandbox) -> None:
    called: list[object] = []
    with make(tools={"note": called.append}) as box:
        box.run(AFTERWARDS).check()
        time.sleep(1)
        assert box.run("late.join()\nheard").value == "['note: its cell is over']"
        assert called == []


def a_timer_between_cells_of_javascript_cannot_call(make: MakeSandbox) -> None:
    called: list[object] = []
    with make(tools={"note": called.append}) as box:
        code = "let heard; setTimeout(() => { try { note(1) } catch (error) { heard = error.message } }, 500); 0"
        box.run(code, language="javascript").check()
        time.sleep(1)
        assert box.run("heard", language="javascript", timeout_s=5).value == "'note: its cell is over'"
        assert called == []


def a_name_that_is_none_is_refused(make: MakeSandbox) -> None:
    for name in ("", "a b", "class", "_x", "1a", "a.b"):
        with raises(PolicyError, match="is no name for a tool"):
            make(tools={name: lookup})


CHECKS = (
    with_maker(a_tool_is_called_with_json_and_gives_json_back),
    with_maker(what_a_tool_raises_or_cannot_be_said_does_not_reach_the_guest),
    with_maker(a_name_that_is_not_offered_calls_nothing),
    with_maker(a_tool_gets_text_and_no_lone_surrogates),
    with_maker(a_flood_of_calls_hides_no_attempt),
    with_maker(what_a_cell_tries_last_is_told),
    with_maker(a_tool_that_waits_does_not_keep_a_cell_beyond_its_time),
    with_maker(calls_that_wait_end_with_their_cell),
    with_maker(every_thread_gets_its_own_answer),
    with_maker(a_call_between_cells_fails_and_the_next_cell_runs),
    with_maker(a_timer_between_cells_of_javascript_cannot_call, "node"),
    with_maker(a_name_that_is_none_is_refused),
)
