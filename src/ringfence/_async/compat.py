"""The differences between async and sync callers besides `await`: opening resources, locks, and work that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringfence.core.tools import CELL_OVER, LOOK_S
from ringfence.errors import RingfenceError, need_linux
from ringfence.host.import_path import callers_own, callers_own_awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

    from ringfence.backends.auto import Launcher
    from ringfence.backends.contract import Box
    from ringfence.values import Tool

T = TypeVar("T")


class Opening(Awaitable[T], AbstractAsyncContextManager[T, None], Generic[T]):
    """The result of a call that opens something: `p = await box.spawn(…)` or `async with box.spawn(…) as p`.

    The second form also ends what was opened.
    """

    def __init__(self, making: Coroutine[Any, Any, T]) -> None:
        self._making = making
        self._made: Any = None

    def __await__(self) -> Generator[object, None, T]:
        return self._making.__await__()

    async def __aenter__(self) -> T:
        self._made = await self._making
        entered: T = await self._made.__aenter__()
        return entered

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self._made.__aexit__(exc_type, exc, tb)


def opening(making: Coroutine[Any, Any, T]) -> Opening[T]:
    return Opening(making)


def lock() -> asyncio.Lock:
    """Return a lock that is held across awaits; waiting tasks get it in turn."""
    return asyncio.Lock()


def one_at_a_time() -> contextlib.AbstractContextManager[object]:
    """Return a guard for steps without an await. It does nothing: no other task of the loop can come between."""
    return contextlib.nullcontext()


async def called(
    tool: Tool, given: tuple[list[object], dict[str, object]], within_s: float, over: Callable[[], bool]
) -> tuple[bool, object]:
    """Call a tool and return (True, the value) or (False, the reason of the failure).

    A tool that takes longer than `within_s`, or longer than its cell, goes on but its value is dropped; a coroutine is
    cancelled.
    """
    task = asyncio.ensure_future(_outcome(tool, given))
    deadline = time.monotonic() + within_s
    try:
        while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
            if over():
                return False, CELL_OVER
            if time.monotonic() >= deadline:
                return False, f"no answer within {within_s:g} s"
        return (False, _failed(asyncio.CancelledError())) if task.cancelled() else task.result()
    finally:
        task.cancel()


async def _outcome(tool: Tool, given: tuple[list[object], dict[str, object]]) -> tuple[bool, object]:
    args, kwargs = given
    try:
        if inspect.iscoroutinefunction(tool):
            return True, await callers_own_awaited(tool(*args, **kwargs))
        value, error = await _in_thread_of_its_own(lambda: callers_own(tool, *args, **kwargs))
        if isinstance(error, KeyboardInterrupt):
            raise error
        if error is not None:
            return False, _failed(error)
        return True, await callers_own_awaited(value) if isinstance(value, Awaitable) else value
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise  # for the host, not for the guest
    except BaseException as error:  # noqa: BLE001  # a tool may raise anything
        return False, _failed(error)


def _in_thread_of_its_own(work: Callable[[], object]) -> asyncio.Future[tuple[object, BaseException | None]]:
    """Run `work` in a new thread. The future has (the value, the exception that was raised).

    The loop's executor is not used: a few slow tools there would keep every sandbox of the program from starting and
    ending, and the program from its end.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def tell(value: object, error: BaseException | None) -> None:
        if not found.done():
            found.set_result((value, error))

    def go() -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001  # passed to the waiting task
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(tell, value, error)

    run = contextvars.copy_context().run
    threading.Thread(target=lambda: run(go), name="ringfence-tool", daemon=True).start()
    return found


def _failed(error: BaseException) -> str:
    """Return what the guest gets to know about an exception: its type and no more."""
    return f"it failed with {type(error).__name__}"


async def launched(launcher: Launcher) -> Box:
    """Return a box that a thread launched. When the caller is cancelled meanwhile, the box is closed again."""
    need_linux()
    made: list[Box] = []
    try:
        await blocking(lambda: made.append(launcher.launch()))
    except BaseException:
        for box in made:
            box.close()
        raise
    return made[0]


async def blocking(work: Callable[..., T], *args: object) -> T:
    """Run `work` in a thread and return the value. Wait for the thread even when the caller is cancelled.

    Therefore nothing is left half-made.
    """
    # Not a task, which the end of `asyncio.run` would cancel while its thread goes on.
    run = contextvars.copy_context().run
    working = asyncio.get_running_loop().run_in_executor(None, lambda: run(work, *args))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return working.result()
    working.exception()  # retrieved, because no other code does
    raise cancelled


class Every:
    """Calls `work` again and again, in the loop that this object was made in."""

    def __init__(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._seconds = seconds
        self._work = work
        self._now = asyncio.Event()
        self._task = asyncio.ensure_future(self._go_on())

    async def _go_on(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._now.wait()
            except TimeoutError:
                pass  # the interval is over
            self._now.clear()
            try:
                await self._work()
            except (RingfenceError, OSError, RuntimeError, MemoryError):  # the third: no thread can be started
                continue  # the next turn tries again, and the caller that needs the sandbox gets the error then

    def wake(self) -> None:
        """Start the next turn now."""
        self._now.set()

    async def stop(self) -> None:
        """Stop, and cut short a turn that has begun."""
        self._task.cancel()
        await asyncio.wait([self._task])


def every(seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> Every:
    return Every(seconds, work)
