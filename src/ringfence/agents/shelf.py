"""Sandboxes that wait for somebody. Each is given out once, whichever threads ask."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class Shelf(Generic[T]):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[T] = []

    def take(self) -> T | None:
        with self._lock:
            return self._kept.pop() if self._kept else None

    def put(self, one: T) -> None:
        with self._lock:
            self._kept.append(one)

    def drop(self, is_over: Callable[[T], bool]) -> None:
        """Those that ended by themselves. Not by a new list of what is left: one of these may just be given out."""
        over = [one for one in self if is_over(one)]  # asked without the lock: it may take a moment
        with self._lock:
            for one in over:
                if one in self._kept:
                    self._kept.remove(one)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            return iter(list(self._kept))

    def __len__(self) -> int:
        return len(self._kept)
