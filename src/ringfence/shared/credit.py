"""How far a sender of one relayed stream may be ahead of its receiver. Kept by the receiver, the same on both sides.

Every stream begins with little. One whose bytes are taken at once gets more, out of what all streams of a sandbox
share: a thousand that stand still hold little, and a few fast ones are not held up.
"""

from __future__ import annotations

FIRST = 1 << 16
MOST = 1 << 22
SHARED = 1 << 24


class Shared:
    """What is left of it."""

    def __init__(self) -> None:
        self.left = SHARED


class Window:
    """Of one direction of one stream."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._size = FIRST
        self._passed = 0

    def passed(self, count: int, *, at_once: bool) -> int:
        """So many bytes were passed on, `at_once` if nothing is left waiting. Returns new credit, 0 for none yet."""
        self._passed += count
        if self._passed < self._size // 4:
            return 0
        grown = min(self._size, MOST - self._size, self._shared.left) if at_once else 0
        self._size += grown
        self._shared.left -= grown
        credit, self._passed = self._passed + grown, 0
        return credit

    def close(self) -> None:
        """Once."""
        self._shared.left += self._size - FIRST
