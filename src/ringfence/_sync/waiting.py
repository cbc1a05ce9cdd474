"""The sync half of ringfence._async.waiting."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def opening(made: T) -> T:
    return made


def blocking(work: Callable[..., T], *args: object) -> T:
    return work(*args)
