"""Whose sandboxes these are: admits them against a quota, lists those that live, and keeps what ended ones used."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ringfence.agents.history import add_usage
from ringfence.agents.requests import merged
from ringfence.agents.sources import Sources
from ringfence.errors import SandboxClosedError
from ringfence.results import Usage

if TYPE_CHECKING:
    from typing import Any

    from ringfence.agents.ledger import Ledger
    from ringfence.events import HostSummary
    from ringfence.policy.model import Policy
    from ringfence.values import State


class Owned(Protocol):
    """What an owner asks of a sandbox, sync or async."""

    id: str
    policy: Policy

    @property
    def state(self) -> State: ...


S = TypeVar("S", bound=Owned)
_MOST_HOSTS = 1000  # guests choose the names they ask for


class Owner(Generic[S]):
    """One agent's, or with `agent` None the manager's own. Safe from several threads."""

    def __init__(
        self, agent: str | None, ceiling: Policy, ledger: Ledger | None = None, *, above: Owner[Any] | None = None
    ) -> None:
        self.agent = agent
        self.ceiling = ceiling
        self.sources: Sources = Sources(ceiling, None if above is None else above.sources)
        self.usage = Usage()  # of those that have ended
        self.requests: tuple[HostSummary, ...] = ()  # of those that have ended
        self._ledger = ledger
        self._lock = threading.Lock()
        self._live: dict[str, S] = {}
        self._over = False

    def admit(self, sandbox: S) -> None:
        """Before it starts. Raises QuotaError, PolicyError for a mount that leads beyond the ceiling, and
        SandboxClosedError after `end`."""
        self.sources.check(sandbox.policy)
        if self._ledger is not None:
            self._ledger.admit(sandbox.id, sandbox.policy, lambda: _lives(sandbox))
        with self._lock:
            if not self._over:
                self._live[sandbox.id] = sandbox
                return
        if self._ledger is not None:
            self._ledger.release(sandbox.id)
        raise SandboxClosedError(
            f"sandbox {sandbox.id} cannot start: the environment or manager that it was made for has ended",
            fix="make the environment again, or a new SandboxManager",
        )

    def end(self) -> list[S]:
        """Admit no more, not even what was made before; those that are now to be closed."""
        with self._lock:
            self._over = True
            return list(self._live.values())

    def ended(self, sandbox: S, usage: Usage, requests: tuple[HostSummary, ...]) -> None:
        """Idempotent: only the first time counts."""
        with self._lock:
            if self._live.pop(sandbox.id, None) is None:
                return
            self.usage = add_usage(self.usage, usage)
            self.requests = merged((*self.requests, *requests))[:_MOST_HOSTS]
        if self._ledger is not None:
            self._ledger.release(sandbox.id, sent_bytes=usage.sent_bytes)

    def count_call(self) -> None:
        """Raises QuotaError."""
        if self._ledger is not None:
            self._ledger.count_run()

    def all(self) -> list[S]:
        """Those that were admitted and have not been said to have ended."""
        with self._lock:
            return list(self._live.values())

    def live(self) -> list[S]:
        """Those that run or are paused."""
        return [sandbox for sandbox in self.all() if sandbox.state in ("running", "paused")]


def _lives(sandbox: Owned) -> bool:
    return sandbox.state in ("new", "running", "paused")
