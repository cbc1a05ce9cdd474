"""The sync half of ringfence._async.waiting."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ringfence.backends.process.box import ProcessBox
    from ringfence.launching import ProcessLauncher
    from ringfence.values import Tool

    T = TypeVar("T")


def opening(made: T) -> T:
    return made


def lock() -> threading.Lock:
    """One caller at a time."""
    return threading.Lock()


def called(tool: Tool, given: tuple[list[object], dict[str, object]], within_s: float) -> tuple[bool, object]:
    """(True, its value), or (False, how it failed). One that takes too long goes on without us."""
    found: list[tuple[bool, object]] = []
    thread = threading.Thread(target=lambda: found.append(_outcome(tool, given)), name="ringfence-tool", daemon=True)
    thread.start()
    thread.join(within_s)
    return found[0] if found else (False, f"no answer within {within_s:g} s")


def _outcome(tool: Tool, given: tuple[list[object], dict[str, object]]) -> tuple[bool, object]:
    import inspect

    try:
        value = tool(*given[0], **given[1])
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
    except Exception as error:  # noqa: BLE001  # a tool may raise anything; the guest hears its kind and no more
        return False, f"it failed with {type(error).__name__}"
    return True, value


def launched(launcher: ProcessLauncher) -> ProcessBox:
    return launcher.launch()


def blocking(work: Callable[..., T], *args: object) -> T:
    return work(*args)
