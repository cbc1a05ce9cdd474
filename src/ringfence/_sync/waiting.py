"""The sync half of ringfence._async.waiting."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ringfence.backends.process.box import ProcessBox
    from ringfence.launching import ProcessLauncher

    T = TypeVar("T")


def opening(made: T) -> T:
    return made


def lock() -> threading.Lock:
    """One caller at a time."""
    return threading.Lock()


def launched(launcher: ProcessLauncher) -> ProcessBox:
    return launcher.launch()


def blocking(work: Callable[..., T], *args: object) -> T:
    return work(*args)
