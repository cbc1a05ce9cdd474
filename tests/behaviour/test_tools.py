"""Host functions that guest code may call: by name, with JSON, within a budget."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

import pytest

import ringfence
from ringfence import AsyncSandbox, Sandbox
from ringfence.core import tools as module
from ringfence.wire import line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.results import GuestException
    from ringfence.values import Json

pytestmark = pytest.mark.everywhere

seen: list[object] = []


def lookup(key: str, *, upper: bool = False) -> Json:
    seen.append(key)
    return {"key": key.upper() if upper else key, "n": [1, 2.5, None, True]}


def secret() -> Json:
    raise ValueError("the password is hunter2")


def odd() -> Json:
    return object()  # type: ignore[return-value]  # the point of it


async def later(x: int) -> Json:
    await asyncio.sleep(0.01)
    return x + 1


@pytest.fixture
def box() -> Iterator[Sandbox]:
    seen.clear()
    with Sandbox(tools={"lookup": lookup, "secret": secret, "later": later, "odd": odd}) as box:
        yield box


def test_calls_are_counted(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 3)
    result = box.run("for i in range(5): lookup(str(i))")
    assert result.exception is not None
    assert result.exception.message == "lookup: more than 3 calls in one cell"
    assert (seen, [d.code for d in result.denials]) == (["0", "1", "2"], ["tool.budget"])
    assert box.run("lookup('again')['key']").value == "'again'"


def test_arguments_that_wait_for_their_turn_are_bounded(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a guest that takes no answers wait on the host; the guest chooses how many calls there are."""
    monkeypatch.setattr(module, "MAX_WAITING", 2_000_000)
    budget, tools = module.Budget(), {"lookup": lookup}
    calls = [budget.take(line.Said("call", {"id": n, "name": "lookup"}, b"x" * 900_000), tools) for n in range(4)]
    assert [len(call.data) for call in calls] == [900_000, 900_000, 0, 0]
    assert {call.refused for call in calls[2:]} == {"arguments of more than 2000000 bytes wait for their turn"}
    assert [(d.target, d.code, d.count) for d in budget.denials] == [("lookup", "tool.arguments", 2)]
    budget.begin(calls[0])
    assert budget.take(line.Said("call", {"id": 4, "name": "lookup"}, b"x"), tools).refused is None
    box._tools["wide"] = lambda: "x" * 300_000  # answers that the guest does not take
    result = box.run(SENDS_MANY)
    assert {(d.target, d.code) for d in result.denials} == {("lookup", "tool.arguments"), ("unknown", "tool.unknown")}


SENDS_MANY = """
import json, os, struct, time
def call(name, data):
    text = json.dumps({"m": "call", "id": 1, "name": name}).encode()
    data = struct.pack("<II", len(text), len(data)) + text + data
    while data: data = data[os.write(3, data):]
for _ in range(20): call("wide", b'{"args":[],"kwargs":{}}')
for _ in range(8): call("lookup", b'{"args":["%s"],"kwargs":{}}' % (b"x" * 900_000))
for _ in range(8): call("unknown", b"x" * 900_000)
time.sleep(0.5)
"""


def test_a_long_name_is_cut_and_says_so(box: Sandbox) -> None:
    budget = module.Budget()
    for name in ("x" * 101, "x" * 101, "x" * 5000, "y" * 100, "a\nb\ud800"):
        budget.take(line.Said("call", {"id": 1, "name": name}, b""), {})
    assert [(denial.target, denial.count) for denial in budget.denials] == [
        ("x" * 100 + "… (101 characters)", 2),
        ("x" * 100 + "… (5000 characters)", 1),
        ("y" * 100, 1),
        ("a\\nb\\ud800", 1),
    ]


def test_a_tool_that_takes_too_long_is_not_waited_for(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.2)
    box._tools["lookup"] = lambda _: time.sleep(2)
    result = box.run("lookup('x')")
    assert result.exception is not None
    assert result.exception.message == "lookup: no answer within 0.2 s"


def test_asyncio_callers_have_tools_too() -> None:
    async def main() -> str | None:
        async with AsyncSandbox(tools={"later": later, "lookup": lookup}) as box:
            return (await box.run("(later(1), lookup('a')['key'])")).value

    assert asyncio.run(main()) == "(2, 'a')"


def test_arguments_larger_than_a_message_are_an_exception_and_the_session_goes_on(box: Sandbox) -> None:
    result = box.run("before = 1\nlookup('x' * (20 << 20))")
    assert result.exception is not None
    assert result.exception.message == "lookup: arguments of more than 4194304 bytes"
    assert (seen, box.run("before").value) == ([], "1")


def test_a_tool_of_an_asyncio_caller_ends_with_its_cell() -> None:
    ended: list[str] = []

    async def slow() -> Json:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("slow")
        return None

    async def main() -> tuple[str, float]:
        async with AsyncSandbox(tools={"slow": slow}) as box:
            await box.run("1")
            begun = time.monotonic()
            return (await box.run("slow()", timeout_s=1)).status, time.monotonic() - begun

    status, took = asyncio.run(main())
    assert (status, ended) == ("timeout", ["slow"])
    assert took < 4


def test_tools_that_take_long_keep_no_other_sandbox_of_an_asyncio_caller_from_starting() -> None:
    over = threading.Event()

    def slow() -> Json:
        over.wait(30)
        return None

    async def main() -> list[str]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with AsyncSandbox(tools={"slow": slow}) as box:
            found = [(await box.run("slow()", timeout_s=0.2)).status for _ in range(2)]
            try:
                async with asyncio.timeout(10):
                    return [*found, (await ringfence.run_async("1")).status]
            finally:
                over.set()

    assert asyncio.run(main()) == ["timeout", "timeout", "ok"]


def test_a_cell_that_ends_does_not_wait_for_the_tool_of_a_thread(box: Sandbox) -> None:
    box._tools["lookup"] = lambda _: time.sleep(10)
    begun = time.monotonic()
    result = box.run("import threading, time\nthreading.Thread(target=lookup, args='x').start()\ntime.sleep(0.5)\n7")
    assert (result.status, result.value) == ("ok", "7")
    assert time.monotonic() - begun < 5


def test_interrupt_does_not_wait_for_a_tool(box: Sandbox) -> None:
    box._tools["lookup"] = lambda _: time.sleep(10)
    box.run("1").check()
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(box.run, "lookup('x')")
        time.sleep(1)
        box.session().interrupt()
        result = running.result()
    assert (result.status, result.reason, result.state_kept) == ("killed", "interrupted", True)
    assert time.monotonic() - begun < 6


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit, BaseException])
@pytest.mark.parametrize("how", ["function", "coroutine"])
def test_a_tool_that_wants_to_leave_has_failed(error: type[BaseException], how: str) -> None:
    def leave() -> Json:
        raise error

    async def leave_later() -> Json:
        raise error

    tool = leave if how == "function" else leave_later

    async def main() -> GuestException | None:
        async with AsyncSandbox(tools={"leave": tool}) as box:
            return (await box.run("leave()", timeout_s=5)).exception

    with Sandbox(tools={"leave": tool}) as box:
        for found in (asyncio.run(main()), box.run("leave()", timeout_s=5).exception):
            assert found is not None
            assert found.message == f"leave: it failed with {error.__name__}"


def test_a_tool_of_an_asyncio_caller_that_finds_nothing_is_heard_at_once() -> None:
    def first() -> Json:
        return next(iter(()))

    async def main() -> GuestException | None:
        async with AsyncSandbox(tools={"first": first}) as box:
            return (await box.run("first()", timeout_s=5)).exception

    found = asyncio.run(main())
    assert found is not None
    assert found.message == "first: it failed with StopIteration"


def test_a_tool_that_the_keyboard_interrupts_interrupts_its_caller(box: Sandbox) -> None:
    def interrupted(_: str) -> Json:
        raise KeyboardInterrupt

    async def main() -> None:
        async with AsyncSandbox(tools={"lookup": interrupted}) as other:
            await other.run("lookup('x')")

    box._tools["lookup"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        box.run("lookup('x')")
    assert box.run("1 + 1").value == "2"
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


FLOOD = """
import json, os, struct, time
data = b'{"args": [], "kwargs": {}}'
for number in range(200):
    text = json.dumps({"m": "call", "id": number, "name": "much"}).encode()
    os.write(3, struct.pack("<II", len(text), len(data)) + text + data)
time.sleep(2)
"""


def test_answers_that_a_guest_does_not_take_are_not_heaped_up_for_it() -> None:
    """Else the answers would fill the memory of the monitor, which no limit of this guest counts."""
    calls: list[None] = []

    def much() -> Json:
        calls.append(None)
        return "x" * (module.MAX_RESULT - 2)

    with Sandbox(tools={"much": much}) as box:
        assert (box.run(FLOOD).status, len(calls) < 4) == ("ok", True)
        assert box.run("[len(much()) for _ in range(5)] == [2**20 - 2] * 5").value == "True"


def test_a_guest_that_prints_much_while_a_tool_works_goes_on_afterwards() -> None:
    done = threading.Event()

    def slow() -> Json:
        done.wait(1)
        return 1

    code = """
import threading
talking = threading.Thread(target=lambda: [print("x" * 999) for _ in range(4000)])
talking.start()
slow()
talking.join()
"""
    with Sandbox(tools={"slow": slow}) as box:
        result = box.run(code, timeout_s=20)
        assert (result.status, result.usage.output_bytes) == ("ok", 4_000_000)


def test_an_interrupt_that_meets_a_tools_answer_ends_the_cell_and_nothing_else() -> None:
    boxes: list[Sandbox] = []

    def stop() -> Json:
        return boxes[0].session().interrupt()

    with Sandbox(tools={"stop": stop}) as box:
        boxes.append(box)
        box.run("x = 1").check()
        for _ in range(10):
            stopped, after = box.run("stop()\nimport time; time.sleep(20)"), box.run("x", timeout_s=10)
            assert (stopped.reason, stopped.state_kept, after.value) == ("interrupted", True, "1")


def test_an_interrupt_while_something_is_shown_is_not_forgotten(box: Sandbox) -> None:
    for _ in range(6):
        with box.session().spawn("import time\nfor _ in range(16_000): display(1)\ntime.sleep(20)") as cell:
            time.sleep(0.1)
            box.session().interrupt()
            result = cell.wait(timeout_s=15)
            assert (result.reason, result.state_kept) == ("interrupted", True)


def strange() -> Json:
    class Odd(dict[str, str]):
        def items(self) -> NoReturn:
            raise KeyError("of the tool's own")

    return Odd(a="b")  # type: ignore[return-value]  # a dict of str is one of Json


def test_a_result_that_raises_when_it_is_looked_at_is_no_json() -> None:
    with Sandbox(tools={"strange": strange}) as box:
        box.run("x = 1").check()
        exception = box.run("strange()").exception
        assert exception is not None
        assert (exception.message, box.run("x").value) == ("strange: its result is not JSON", "1")
