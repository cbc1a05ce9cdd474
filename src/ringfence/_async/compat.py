"""What differs between async and sync callers besides `await`: handing out resources, and work that blocks."""

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
    """`p = await box.spawn(…)` or `async with box.spawn(…) as p`; the second also ends it."""

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
    """Held across awaits; whoever waits is served in turn."""
    return asyncio.Lock()


def one_at_a_time() -> contextlib.AbstractContextManager[object]:
    """For what is done without an await. Tasks of one loop take turns as it is; threads do not."""
    return contextlib.nullcontext()


async def called(
    tool: Tool, given: tuple[list[object], dict[str, object]], within_s: float, over: Callable[[], bool]
) -> tuple[bool, object]:
    """(True, its value), or (False, how it failed). One that takes too long, or longer than its cell, goes on
    without us; a coroutine is cancelled."""
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
        raise  # the host's, not the guest's
    except BaseException as error:  # noqa: BLE001  # a tool may raise anything
        return False, _failed(error)


def _in_thread_of_its_own(work: Callable[[], object]) -> asyncio.Future[tuple[object, BaseException | None]]:
    """(its value, what it raised). Not by the loop's executor: there a few tools that take long would keep every
    sandbox of the program from starting and ending, and the program from its end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def tell(value: object, error: BaseException | None) -> None:
        if not found.done():
            found.set_result((value, error))

    def go() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001  # told to who waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, value, error)

    run = contextvars.copy_context().run
    threading.Thread(target=lambda: run(go), name="ringfence-tool", daemon=True).start()
    return found


def _failed(error: BaseException) -> str:
    """The guest hears its kind and no more."""
    return f"it failed with {type(error).__name__}"


async def launched(launcher: Launcher) -> Box:
    """A box, made in a thread. When the caller is cancelled meanwhile, it is closed again."""
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
    """Run `work` in a thread. It is waited for however often the caller is cancelled: nothing is left half-made."""
    # No task, which the end of `asyncio.run` would cancel while its thread goes on.
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
    working.exception()  # looked at: nobody else hears of it
    raise cancelled


class Every:
    """Does `work` again and again, in the loop it was made in."""

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
                pass  # its time has come
            self._now.clear()
            try:
                await self._work()
            except (RingfenceError, OSError, RuntimeError, MemoryError):  # the third: no thread can be started
                continue  # the next turn tries again, and whoever needs the thing hears of it then

    def wake(self) -> None:
        """Now, not only in a while."""
        self._now.set()

    async def stop(self) -> None:
        """A turn that has begun is cut short."""
        self._task.cancel()
        await asyncio.wait([self._task])


def every(seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> Every:
    return Every(seconds, work)
