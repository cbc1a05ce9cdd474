"""The async half: the same behaviour, an event loop that is never held up, cancelling that kills the guest first."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import ringfence
import weaker
from ringfence import AsyncSandbox, Limits, Policy, PolicyError, SandboxClosedError, SandboxError, SandboxLostError
from ringfence._async.compat import blocking
from ringfence._async.connection import AsyncConnection
from ringfence.events import Exit, Gap, Prompt, Stdout


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` as a program would, with asyncio's debug mode, which reports forgotten coroutines and handles."""
    asyncio.run(main(), debug=True)  # type: ignore[arg-type]  # coroutine functions all


async def count(box: AsyncSandbox) -> int:
    """Return the number of processes inside: PID 1, the spawner and the counting process make 3."""
    result = await box.run("import os\nsum(p.isdigit() for p in os.listdir('/proc'))")
    return int(result.value or -1)


def test_run_async_gives_what_run_gives() -> None:
    async def main() -> None:
        result = await ringfence.run_async("import sys\nprint(input())\nsys.exit(3)", stdin="in", env={"A": "b"})
        assert (result.status, result.exit_code, result.stdout) == ("error", 3, "in\n")
        assert (await ringfence.run_async("echo hi", language="bash")).stdout == "hi\n"

    run(main)


def test_twenty_runs_at_once() -> None:
    async def main() -> None:
        results = await asyncio.gather(*(ringfence.run_async(f"{n} * {n}") for n in range(20)))
        assert [r.value for r in results] == [str(n * n) for n in range(20)]

    run(main)


def test_run_works_inside_a_running_loop_too() -> None:
    async def main() -> None:
        assert ringfence.run("1").value == "1"

    run(main)


def test_a_sandbox_runs_executes_spawns_and_holds_files() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            assert box.state == "running"
            await box.files.write("d/f", "text")
            assert await box.files.read_text("d/f") == "text"
            assert [info.path async for info in box.files.list(recursive=True)] == ["d", "d/f"]
            assert b"".join([chunk async for chunk in box.files.chunks("d/f", offset=2)]) == b"xt"
            assert (await box.exec(["cat", "d/f"])).stdout == "text"
            assert (await box.run("1 + 1")).value == "2"
            async with box.spawn(["sh", "-c", "echo a; cat"]) as process:
                events = aiter(process)
                assert isinstance(await anext(events), Stdout)
                await process.write("b")
                await process.close_stdin()
                rest = [event async for event in process]
                assert isinstance(rest[-1], Exit)
                assert rest[-1].result.stdout == "a\nb"
            awaited = await box.spawn(["sleep", "60"])
            assert [info.running for info in await box.processes()] == [False, True]
            assert (await awaited.kill()).status == "killed"
        with pytest.raises(SandboxClosedError, match="was closed"):
            await box.run("1")

    run(main)


def test_async_iterables_and_files_can_be_written() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            await asyncio.sleep(0)
            yield b"x" * 100_000

    async def main() -> None:
        async with AsyncSandbox() as box:
            info = await box.files.write("f", pieces())
            assert info.size == 500_000

    run(main)


def test_many_calls_on_one_sandbox_at_once() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            writing = [asyncio.ensure_future(box.files.write(f"f{n}", "x" * 200_000)) for n in range(10)]
            results = await asyncio.gather(
                *(box.exec(["sh", "-c", f"sleep 0.05; cat; echo {n}"], stdin=str(n)) for n in range(15)),
            )
            assert [r.stdout for r in results] == [f"{n}{n}\n" for n in range(15)]
            await asyncio.gather(*writing)
            assert len([info async for info in box.files.list()]) == 10

    run(main)


def test_the_loop_goes_on_while_sandboxes_start_work_and_end() -> None:
    from ringfence.backends.process import pool

    pool.close_all()  # the first start, with its zygote, is the slowest
    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - before)

    async def main() -> None:
        beat = asyncio.ensure_future(heartbeat())
        await asyncio.sleep(0.02)
        async with AsyncSandbox() as box:
            await box.exec(["sleep", "0.3"])
            await box.files.write("f", b"x" * (8 << 20))
            await box.files.read("f")
        await ringfence.run_async("import time; time.sleep(0.2)")
        beat.cancel()

    asyncio.run(main())
    assert longest < 0.25  # on a busy machine; a blocked start alone would take as long as a whole zygote


def test_cancelling_an_exec_kills_its_work_and_leaves_the_sandbox() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            before = await count(box)
            task = asyncio.ensure_future(box.exec(["sh", "-c", "setsid sleep 600 & sleep 600"]))
            async with asyncio.timeout(20):
                while await count(box) < before + 3:
                    pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(20):  # what was killed may be counted until the kernel has ended it
                while await count(box) > before:
                    pass

    run(main)


def test_one_may_read_a_cells_events_while_another_waits_for_its_end() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            session = await box.session()
            cell = await session.spawn("print('hello', input('who? '))", timeout_s=20)

            async def answer() -> list[str]:
                kinds = []
                async for event in cell:
                    kinds.append(type(event).__name__)
                    if isinstance(event, Prompt):
                        await cell.write("you\n")
                return kinds

            async with asyncio.timeout(15):
                results = await asyncio.gather(cell.wait(), answer(), cell.wait())
            assert (results[0].stdout, results[1], results[2]) == (
                "hello you\n",
                ["Prompt", "Stdout", "Exit"],
                results[0],
            )

    run(main)


@weaker.needs_cgroup
@pytest.mark.parametrize("moment", ["asked", "frozen"])
def test_a_pause_that_is_cancelled_is_none(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            process = await box.spawn(["sleep", "600"], timeout_s=1)
            assert box._box is not None
            freezes, freeze = threading.Event(), box._box.freeze

            def slowly() -> bool:
                freezes.set()
                time.sleep(0.2)
                return freeze()

            monkeypatch.setattr(box._box, "freeze", slowly)
            task = asyncio.ensure_future(box.pause())
            await asyncio.sleep(0)
            if moment == "frozen":
                await blocking(freezes.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(20):  # its clock goes on too
                assert ((await process.wait()).status, box.state) == ("timeout", "running")

    run(main)


@weaker.needs_cgroup
def test_a_pause_and_a_resume_at_once_come_one_after_the_other() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            await asyncio.gather(box.pause(), box.resume())
            assert (box.state, (await box.run("1")).value) == ("running", "1")

    run(main)


def test_cancelling_run_async_kills_the_guest() -> None:
    import leftovers

    async def main() -> None:
        await ringfence.run_async("1")
        task = asyncio.ensure_future(ringfence.run_async("import os, time\nos.fork()\ntime.sleep(600)"))
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # the next sandboxes may get the same descriptor numbers: nothing of the old ones may be registered
        assert [r.value for r in await asyncio.gather(*(ringfence.run_async(str(n)) for n in range(6)))] == list(
            "012345"
        )

    before = leftovers.count()
    run(main)
    assert leftovers.wait_for_nothing(before) == []


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 10, 30, 60])
def test_cancelling_while_a_sandbox_starts_leaves_none(delay_ms: int) -> None:
    from ringfence.backends.process import pool

    pool.close_all()

    async def main() -> None:
        policy = Policy(limits=Limits(processes=30))
        tasks = [
            asyncio.ensure_future(ringfence.run_async("import time; time.sleep(60)", policy=policy)) for _ in range(3)
        ]
        await asyncio.sleep(delay_ms / 1000)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [asyncio.CancelledError] * 3

    run(main)
    pool.close_all()
    names = [p.name for p in __import__("leftovers").descendants()]
    assert [name for name in names if name.startswith("rf-")] == []


@pytest.mark.parametrize("end", ["twice", "with its loop"])
def test_a_start_that_is_cancelled_once_more_leaves_no_sandbox(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringfence.backends.auto import Launcher

    real, begun, boxes = Launcher.launch, threading.Event(), []

    def slow(self: Launcher) -> object:
        begun.set()
        time.sleep(0.2)
        boxes.append(real(self))
        return boxes[-1]

    monkeypatch.setattr(Launcher, "launch", slow)

    async def main() -> None:
        task = asyncio.ensure_future(AsyncSandbox().start())
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        if end == "twice":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)
    assert [box.wait_destroyed(5.0) for box in boxes] == [True]


def test_cancelling_while_much_is_sent_garbles_nothing() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            for delay in (0.0, 0.001, 0.005, 0.02):
                task = asyncio.ensure_future(box.exec(["sleep", "60"], stdin=b"x" * (30 << 20)))
                await asyncio.sleep(delay)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            big = asyncio.ensure_future(box.run("#" + "x" * 8_000_000 + "\n1"))
            await asyncio.sleep(0)
            big.cancel()
            with pytest.raises(asyncio.CancelledError):
                await big
            assert (await box.exec(["cat"], stdin="fine")).stdout == "fine"

    run(main)


def test_a_cancel_at_the_very_moment_something_arrives_is_not_lost() -> None:
    """wait_for of Python 3.11 returns instead of being cancelled when both come in one turn of the loop."""

    async def main() -> None:
        async with AsyncSandbox() as box, box.spawn(["cat"]) as process:
            for _ in range(20):
                task = asyncio.ensure_future(process.wait(timeout_s=20))
                await asyncio.sleep(0.001)
                await process.write("x")
                box._place.link._wake()  # type: ignore[union-attr]  # as a frame does
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    run(main)


def test_work_in_a_thread_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    """A caller that returned while the thread still writes would close the file under the thread."""
    events: list[str] = []

    def work() -> None:
        time.sleep(0.2)
        events.append("work ended")

    async def caller() -> None:
        try:
            await blocking(work)
        finally:
            events.append("caller let go")

    async def main() -> None:
        task = asyncio.ensure_future(caller())
        for _ in range(3):
            await asyncio.sleep(0.02)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert events == ["work ended", "caller let go"]


def test_a_timeout_of_asyncio_is_a_cancel() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.exec(["sleep", "60"]), 0.2)
            assert await count(box) == 3

    run(main)


def test_an_iteration_that_is_left_early_can_be_taken_up_again() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box, box.spawn(["sh", "-c", "echo a; sleep 0.1; echo b"]) as process:
            async for event in process:
                assert isinstance(event, Stdout)
                break
            rest = [event async for event in process]
            assert [type(event) for event in rest] == [Stdout, Exit]

    run(main)


def test_writing_more_than_buffers_hold_does_not_lock_up() -> None:
    async def main() -> None:
        async with AsyncSandbox() as box, box.spawn(["cat"]) as process:
            await process.write(b"x" * (5 << 20))
            await process.close_stdin()
            events = [event async for event in process]
            seen = sum(len(e.data) for e in events if isinstance(e, Stdout))
            lost = sum(e.lost_bytes for e in events if isinstance(e, Gap))
            assert seen + lost == 5 << 20

    run(main)


def test_a_wrong_argument_is_told_before_anything_is_awaited() -> None:
    async def main() -> None:
        with pytest.raises(PolicyError):
            await ringfence.run_async("")
        with pytest.raises(TypeError):
            await ringfence.run_async("1", policy="x")  # type: ignore[arg-type]  # wrong on purpose
        async with AsyncSandbox() as box:
            with pytest.raises(TypeError):
                box.spawn("ls")  # type: ignore[arg-type]  # wrong on purpose

    run(main)


def test_an_ended_lifetime_is_heard_without_a_call() -> None:
    async def main() -> None:
        async with AsyncSandbox(policy=Policy(limits=Limits(lifetime_s=0.4))) as box:
            result = await box.exec(["sleep", "60"])
            assert (result.status, result.reason, box.state) == ("limit", "wall-clock", "closed")

    run(main)


def test_a_killed_monitor_is_lost() -> None:
    import signal

    async def main() -> None:
        async with AsyncSandbox() as box:
            asyncio.get_running_loop().call_later(0.2, _kill_init, box, signal.SIGKILL)
            result = await box.exec(["sleep", "60"])
            assert (result.status, box.state) == ("lost", "lost")
            with pytest.raises(SandboxLostError):
                await box.run("1")

    run(main)


def _kill_init(box: AsyncSandbox, number: int) -> None:
    import signal

    signal.pidfd_send_signal(box._box._init_pidfd, number)  # type: ignore[union-attr]  # a started sandbox has one


def test_another_event_loop_is_told_so_and_may_close_it() -> None:
    box = AsyncSandbox()
    asyncio.run(box.start())
    for use in (lambda: box.run("1"), lambda: box.exec(["true"]), lambda: box.files.write("f", "x")):
        with pytest.raises(SandboxError, match="belongs to the event loop that it was started in"):
            asyncio.run(use())
    asyncio.run(box.close())
    assert box.state == "closed"


def test_a_loop_that_ends_with_a_sandbox_open_leaves_nothing_at_close() -> None:
    boxes: list[AsyncSandbox] = []

    async def main() -> None:
        boxes.append(await AsyncSandbox().start())

    asyncio.run(main())
    assert os.getpid() > 0

    async def end() -> None:
        await boxes[0].close()

    asyncio.run(end())
    assert boxes[0].state == "closed"


def test_asyncio_callers_are_told_nothing_of_a_connection_that_cannot_be_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> bytes:
        async with AsyncSandbox() as box:
            async with box.expose(8000) as address:

                async def cannot() -> AsyncConnection:
                    raise SandboxError("it is paused", code="paused", fix="call resume()")

                address._connect = cannot
                reader, writer = await asyncio.open_connection(address.host, address.port)
                data = await reader.read()
                writer.close()
                return data

    assert asyncio.run(main()) == b""
    assert caplog.records == []
