"""What differs between async and sync callers besides `await`: handing out resources, and work that blocks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringfence.errors import RingfenceError
from ringfence.tools import CELL_OVER, LOOK_S

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

    from ringfence.backends.base import Box, Launcher
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
            return True, await tool(*args, **kwargs)
        value = await asyncio.to_thread(tool, *args, **kwargs)
        return True, await value if isinstance(value, Awaitable) else value
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a tool may raise anything; KeyboardInterrupt is the host's
        return False, _failed(error)


def _failed(error: BaseException) -> str:
    """The guest hears its kind and no more."""
    return f"it failed with {type(error).__name__}"


async def launched(launcher: Launcher) -> Box:
    """A box, made in a thread. When the caller is cancelled meanwhile, it is closed again."""
    task = asyncio.ensure_future(asyncio.to_thread(launcher.launch))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            task.result().close()
        raise


async def blocking(work: Callable[..., T], *args: object) -> T:
    """Run `work` in a thread. It is waited for even when the caller is cancelled, so that nothing is left half-made."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # cancelled again: the caller would close what the thread writes to
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # the first one is raised below
        raise


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
            except (RingfenceError, OSError):
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
