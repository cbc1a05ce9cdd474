"""Counts how far the sender of a relayed stream may be ahead of the receiver. The receiver keeps the count.

Every stream begins with little credit. A stream whose bytes are taken at once gets more, out of a sum that all streams
of a sandbox share: a thousand streams that stand still take little memory, and a few fast streams are not held up.
"""

from __future__ import annotations

FIRST = 1 << 16
MOST = 1 << 22
SHARED = 1 << 24


class Shared:
    """The credit that all streams of a sandbox share."""

    def __init__(self) -> None:
        self.left = SHARED


class Window:
    """The credit of one direction of a stream."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._size = FIRST
        self._passed = 0

    def passed(self, count: int, *, at_once: bool) -> int:
        """Count bytes that were passed on; `at_once`: no byte is left waiting. Return new credit, 0 for none yet."""
        self._passed += count
        if self._passed < self._size // 4:
            return 0
        grown = min(self._size, MOST - self._size, self._shared.left) if at_once else 0
        self._size += grown
        self._shared.left -= grown
        credit, self._passed = self._passed + grown, 0
        return credit

    def close(self) -> None:
        """Return this direction's credit to the shared sum. To be called once."""
        self._shared.left += self._size - FIRST
