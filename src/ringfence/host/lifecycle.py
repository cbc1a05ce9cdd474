"""The registry of what this process keeps between sandboxes, to close at its exit and to drop in a forked child.

A module registers its functions when it makes the first thing to keep. Stages end in order: what a later stage keeps is
needed until the earlier stages have ended.
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
    """Call `close`, which must be idempotent, when this process exits. Registering a function again changes nothing."""
    _registry.at_exit[(stage, close)] = None
    if not _registry.has_exit:
        _registry.has_exit = True
        atexit.register(close_all)


def after_fork(forget: Callable[[], object]) -> None:
    """Call `forget` in every forked child of this process. `forget` must take no lock: a lost thread may have it."""
    _registry.after_fork[forget] = None
    if not _registry.has_fork:
        _registry.has_fork = True
        os.register_at_fork(after_in_child=_forget_all)


def close_all() -> None:
    """End everything that this process keeps, and wait until that is gone. Called at exit, and by tests.

    The functions stay registered: sandboxes may be made again.
    """
    _call_each([close for _, close in sorted(_registry.at_exit, key=lambda one: one[0])])


def _forget_all() -> None:
    _call_each(list(_registry.after_fork))


def _call_each(functions: list[Callable[[], object]]) -> None:
    """Call every function, whatever an earlier one raises. Raises the first of their errors afterwards."""
    errors: list[Exception] = []
    for function in functions:
        try:
            function()
        except Exception as error:  # noqa: BLE001  # another's trouble is no reason to keep what is ours
            errors.append(error)
    if errors:
        raise errors[0]
