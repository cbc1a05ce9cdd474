"""The record of this process in the state directory: one, like the process, for all that must not outlive it."""

from __future__ import annotations

import _thread
import os

from ringfence.backends.process import state

_owners: dict[int, state.Owner] = {}
_lock = _thread.allocate_lock()


def owner() -> state.Owner:
    """Made on first use; after a fork another one."""
    with _lock:
        pid = os.getpid()
        if pid not in _owners:
            _owners.clear()
            _owners[pid] = state.register()
        return _owners[pid]


def close() -> None:
    """At the end of the process: the record goes when nothing is noted in it."""
    with _lock:
        found = _owners.pop(os.getpid(), None)
    if found is not None:
        found.close()
