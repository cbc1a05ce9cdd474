"""Budgets for all sandboxes of a process together, and for all its connections to a target.

A sandbox's own budgets are in its policy. The budgets here apply besides, so that many sandboxes together neither use
up the process's descriptors nor flood a server. Used in the gateway's loop alone.
"""

from __future__ import annotations

import resource
import socket
import time
from typing import TYPE_CHECKING

from ringfence.gateway.types import OverBudget, Refusal

if TYPE_CHECKING:
    from ringfence.gateway.types import Target

SANDBOX_RATE, SANDBOX_BURST = 2000.0, 4000.0  # connections a second, and DNS queries
PROCESS_RATE, PROCESS_BURST = 8000.0, 16_000.0
TARGET_RATE, TARGET_BURST = 2000.0, 4000.0
TARGET_CONNECTIONS = 4096  # open at once to one name, by all sandboxes of the process
UPLOAD, DOWNLOAD = 1 << 40, 10 << 40  # bytes a day, by all sandboxes of the process
_DAY_S = 86_400.0
_SPARE_DESCRIPTORS = 256  # for files that are no connections
_MOST_CONNECTIONS = 16_384
_MOST_IDLE_TARGETS = 1024


class Bucket:
    """A token bucket: a rate with a burst."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = time.monotonic()

    def take(self) -> bool:
        """Take a token; return False when there is none."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class CountedSocket(socket.socket):
    """A connection to a target, which counts among the target's until `close`."""

    owner: _TargetCount | None = None
    address = ""  # the address that was dialled

    def close(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.open -= 1
        super().close()


class _TargetCount:
    def __init__(self) -> None:
        self.open = 0
        self.rate = Bucket(TARGET_RATE, TARGET_BURST)


class Totals:
    """What all sandboxes of a process use together, and the most they may use."""

    def __init__(self) -> None:
        self.connections = 0  # open now
        self.pipes = 0  # of connections that move much: a pipe has two descriptors, as a connection has
        self.most_connections = _most_connections()
        self.most_to_one = TARGET_CONNECTIONS
        self.upload = UPLOAD
        self.download = DOWNLOAD
        self.rate = Bucket(PROCESS_RATE, PROCESS_BURST)
        self._sent = self._received = 0  # since the day began
        self._day = time.monotonic()
        self._targets: dict[str, _TargetCount] = {}

    def is_full(self) -> Refusal | None:
        """Return the refusal of a further connection; None while there is room."""
        if self.connections + self.pipes < self.most_connections:
            return None
        words = f"the sandboxes of this process have {self.connections} connections open, the most there may be"
        return Refusal("net.host-connections", words, verdict="failed")

    def may_pipe(self) -> bool:
        """Return whether there is room for a further pipe: connections come first, as copying needs no pipe."""
        return self.connections + self.pipes < self.most_connections // 2

    def count_up(self, size: int) -> None:
        """Count bytes that are about to go. Raises OverBudget; then they must not go."""
        if self._sent + size > self.upload:
            self._new_day("upload", self.upload)
        self._sent += size

    def count_down(self, size: int) -> None:
        """Count bytes that came. Raises OverBudget; then they must not be passed on."""
        if self._received + size > self.download:
            self._new_day("download", self.download)
        self._received += size

    def _new_day(self, name: str, limit: int) -> None:
        now = time.monotonic()
        if now - self._day < _DAY_S:
            words = f"the sandboxes of this process have used up their {name} of {limit} bytes a day"
            raise OverBudget(f"net.host-{name}", words)
        self._day = now
        self._sent = self._received = 0

    def may_dial(self, target: Target) -> bool:
        """Return whether `target` may be dialled now, and not a moment later. Raises Refusal when too many are open."""
        found = self._targets.get(target.name)
        if found is None:
            self._forget_idle()
            found = self._targets[target.name] = _TargetCount()
        if found.open >= self.most_to_one:
            words = f"the sandboxes of this process have {found.open} connections to {target.name} open"
            raise Refusal("net.host-connections", f"{words}, the most there may be", verdict="failed")
        return found.rate.take()

    def opened(self, target: Target, sock: CountedSocket) -> None:
        """Count a connection, which `may_dial` permitted, until its socket is closed."""
        found = self._targets.setdefault(target.name, _TargetCount())
        found.open += 1
        sock.owner = found

    def open_to(self, name: str) -> int:
        """Return how many connections to a target are open."""
        found = self._targets.get(name)
        return 0 if found is None else found.open

    def _forget_idle(self) -> None:
        if len(self._targets) >= _MOST_IDLE_TARGETS:
            self._targets = {name: found for name, found in self._targets.items() if found.open}


def _most_connections() -> int:
    """Return how many connections the process's descriptors allow: each has a socket on both sides."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(64, min((soft - _SPARE_DESCRIPTORS) // 2, _MOST_CONNECTIONS))
