"""The sync half of ringfence._async.compat: resources, locks, and calls of tools for threads."""

from __future__ import annotations

import _thread
import time

from ringfence.errors import need_linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import TypeVar

    from ringfence.backends.auto import Launcher
    from ringfence.backends.contract import Box
    from ringfence.values import Tool

    T = TypeVar("T")


def opening(made: T) -> T:
    return made


def lock() -> threading.Lock:
    """Return a lock for one caller at a time."""
    return _thread.allocate_lock()


def one_at_a_time() -> AbstractContextManager[object]:
    """Return a guard for a few steps that no other thread may come between."""
    return _thread.RLock()


def called(
    tool: Tool, given: tuple[list[object], dict[str, object]], within_s: float, over: Callable[[], bool]
) -> tuple[bool, object]:
    """Call a tool and return (True, the value) or (False, the reason of the failure).

    A tool that takes longer than `within_s`, or longer than its cell, goes on but its value is dropped.
    """
    import threading

    from ringfence.core.tools import CELL_OVER, LOOK_S

    found: list[tuple[bool, object]] = []
    interrupts: list[KeyboardInterrupt] = []

    def work() -> None:
        try:
            found.append(_outcome(tool, given))
        except KeyboardInterrupt as error:  # for the host, not for the guest: raised in the caller's thread
            interrupts.append(error)

    thread = threading.Thread(target=work, name="ringfence-tool", daemon=True)
    thread.start()
    deadline = time.monotonic() + within_s
    while True:
        thread.join(LOOK_S)
        if not thread.is_alive():
            break
        if over():
            return False, CELL_OVER
        if time.monotonic() >= deadline:
            break
    if interrupts:
        raise interrupts[0]
    return found[0] if found else (False, f"no answer within {within_s:g} s")


def _outcome(tool: Tool, given: tuple[list[object], dict[str, object]]) -> tuple[bool, object]:
    import inspect

    from ringfence.host.import_path import callers_own

    try:
        value = callers_own(tool, *given[0], **given[1])
        if inspect.iscoroutine(value):
            import asyncio

            value = callers_own(asyncio.run, value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a tool may raise anything; the guest gets to know its type and no more
        return False, f"it failed with {type(error).__name__}"
    return True, value


def launched(launcher: Launcher) -> Box:
    need_linux()
    return launcher.launch()


def blocking(work: Callable[..., T], *args: object) -> T:
    return work(*args)


class Every:
    """Calls `work` again and again, in a thread of its own."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        import threading

        self._seconds = seconds
        self._work = work
        self._now = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._go_on, name="ringfence-manager", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        from ringfence.errors import RingfenceError

        while True:
            self._now.wait(self._seconds)
            self._now.clear()
            if self._stopped:
                return
            try:
                self._work()
            except (RingfenceError, OSError, RuntimeError, MemoryError):  # the third: no thread can be started
                continue  # the next turn tries again, and the caller that needs the sandbox gets the error then

    def wake(self) -> None:
        """Start the next turn now."""
        self._now.set()

    def stop(self) -> None:
        """Stop, after waiting for a turn that has begun."""
        self._stopped = True
        self._now.set()
        if self._thread.ident != _thread.get_ident():
            self._thread.join()


def every(seconds: float, work: Callable[[], None]) -> Every:
    return Every(seconds, work)
