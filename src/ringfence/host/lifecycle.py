"""Ends what this process keeps between sandboxes when it exits, and lets go of it in a forked child. One registry.

Whoever keeps something registers it when the first of it is made. Stages end in order: what later stages hold is needed
until the earlier ones are gone.
"""

from __future__ import annotations

import atexit
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SANDBOXES, GATEWAY, PLACEHOLDERS, RECORD = range(4)  # the stages, in the order in which they end


class _Registry:
    def __init__(self) -> None:
        self.at_exit: dict[tuple[int, Callable[[], object]], None] = {}
        self.after_fork: dict[Callable[[], object], None] = {}
        self.has_exit = self.has_fork = False


_registry = _Registry()


def at_exit(stage: int, close: Callable[[], object]) -> None:
    """Have `close` called when this process exits. It must be idempotent. Registering it again changes nothing."""
    _registry.at_exit[(stage, close)] = None
    if not _registry.has_exit:
        _registry.has_exit = True
        atexit.register(close_all)


def after_fork(forget: Callable[[], object]) -> None:
    """Have `forget` called in every forked child of this process. It takes no lock: another thread may hold it."""
    _registry.after_fork[forget] = None
    if not _registry.has_fork:
        _registry.has_fork = True
        os.register_at_fork(after_in_child=_forget_all)


def close_all() -> None:
    """End everything that this process keeps, and wait until it is gone. At exit, and in tests that count what is left.

    What was registered stays registered: sandboxes may be made again.
    """
    for _, close in sorted(_registry.at_exit, key=lambda one: one[0]):
        close()


def _forget_all() -> None:
    for forget in _registry.after_fork:
        forget()
