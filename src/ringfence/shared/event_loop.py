"""Waits for descriptors and calls the handler of each that is ready."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_S = 86_400.0  # the kernel counts milliseconds in 31 bits, and limits may be years


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._dropped: set[int] = (
            set()
        )  # in this round: a later event of the round must not reach a new handler of the same number

    def round(self, wait_s: float) -> None:
        """Wait for at most `wait_s` (-1: without end) and at most a day, then call the handlers of what is ready."""
        self._dropped.clear()
        for fd, events in self._epoll.poll(min(wait_s, _LONGEST_S)):
            handler = self._handlers.get(fd)
            if handler is not None and fd not in self._dropped:
                handler(events)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._dropped.add(fd)

    def handler(self, fd: int) -> Callable[[int], None] | None:
        return self._handlers.get(fd)

    def close(self) -> None:
        self._epoll.close()
