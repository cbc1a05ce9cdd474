"""The owner of sandboxes: admits sandboxes against a quota, lists the live ones, adds up the usage of the ended."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ringfence.errors import PolicyError, SandboxClosedError
from ringfence.manager.history import add_usage
from ringfence.manager.quota import merged
from ringfence.policy.model import Policy
from ringfence.results import Usage
from ringfence.values import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ringfence.manager.quota import Ledger
    from ringfence.records import HostSummary
    from ringfence.values import State


# ── the sources of mounts, compared with a ceiling after every link was followed ─────────────────

# A guest can put links where it may write. Policies are compared as text, so a link in a writable mount would lead a
# narrowed mount out of the ceiling.


class Sources:
    """Where the mounts of a ceiling led when it was made.

    Later, a guest may have replaced what is inside another mount.
    """

    def __init__(self, ceiling: Policy, above: Sources | None = None) -> None:
        self.ceilings: tuple[Policy, ...] = (_followed(ceiling), *(() if above is None else above.ceilings))

    def check(self, policy: Policy) -> None:
        """Raise PolicyError for a mount that leads beyond this ceiling, or beyond a ceiling above it."""
        if not policy.mounts:
            return
        followed = _followed(policy)
        try:
            for ceiling in self.ceilings:
                ceiling.must_allow(followed)
        except PolicyError as error:
            raise PolicyError(
                f"{error} (with links followed: {_ways(policy, followed)})",
                key=error.key,
                code="mount-leads-out",
                fix="mount folders that are no links; a manager's mounts must lead where they led when it was made",
            ) from None


def _followed(policy: Policy) -> Policy:
    """Return a policy of the mounts alone, with the paths that they lead to now.

    Two mounts may lead to the same path, so each gets a target of its own.
    """
    return Policy(
        mounts=[
            replace(mount, source=os.path.realpath(mount.source), target=f"/{index}")
            for index, mount in enumerate(policy.mounts)
        ]
    )


def _ways(policy: Policy, followed: Policy) -> str:
    pairs = zip(policy.mounts, followed.mounts, strict=True)
    return ", ".join(f"{mount.source!r} is {real.source!r}" for mount, real in pairs)  # guests may have named them


class Owned(Protocol):
    """The parts of a sandbox, sync or async, that an owner uses."""

    id: str
    policy: Policy

    @property
    def state(self) -> State: ...


S = TypeVar("S", bound=Owned)
_MOST_HOSTS = 1000  # guests choose the names of hosts


class SandboxOwner(Generic[S]):
    """The owner of sandboxes: an agent, or the manager when `agent` is None. Safe from several threads."""

    def __init__(
        self,
        agent: str | None,
        ceiling: Policy,
        ledger: Ledger | None = None,
        *,
        above: SandboxOwner[Any] | None = None,
    ) -> None:
        self.agent = agent
        self.ceiling = ceiling
        self.sources: Sources = Sources(ceiling, None if above is None else above.sources)
        self.usage = Usage()  # of sandboxes that have ended
        self.requests: tuple[HostSummary, ...] = ()  # of sandboxes that have ended
        self._ledger = ledger
        self._lock = threading.Lock()
        self._live: dict[str, S] = {}
        self._over = False

    def admit(self, sandbox: S) -> None:
        """Admit a sandbox before it starts.

        Raises QuotaError, PolicyError for a mount that leads beyond the ceiling, and SandboxClosedError after `end`.
        """
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
        """Admit no more sandboxes, not even those made before; return the sandboxes that now have to be closed."""
        with self._lock:
            self._over = True
            return list(self._live.values())

    def ended(self, sandbox: S, usage: Usage, requests: tuple[HostSummary, ...]) -> None:
        """Record the end of a sandbox. Idempotent: only the first call counts."""
        with self._lock:
            if self._live.pop(sandbox.id, None) is None:
                return
            self.usage = add_usage(self.usage, usage)
            self.requests = merged((*self.requests, *requests))[:_MOST_HOSTS]
        if self._ledger is not None:
            self._ledger.release(sandbox.id, sent_bytes=usage.sent_bytes)

    def count_call(self) -> None:
        """Count a call against the quota. Raise QuotaError."""
        if self._ledger is not None:
            self._ledger.count_run()

    def all(self) -> list[S]:
        """Return the sandboxes that were admitted and whose end was not recorded."""
        with self._lock:
            return list(self._live.values())

    def live(self) -> list[S]:
        """Return the sandboxes that run or are paused."""
        return [sandbox for sandbox in self.all() if sandbox.state in ("running", "paused")]


def _lives(sandbox: Owned) -> bool:
    return sandbox.state in ("new", "running", "paused")


# ── sandboxes that wait for a caller ─────────────────────────────────────────────────────────────

T = TypeVar("T")


class WarmShelf(Generic[T]):
    """Things that wait to be used. Safe from several threads: each thing is given out once."""

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
        """Drop the things that have ended. The list is not replaced: another thread may just be taking from it."""
        over = [one for one in self if is_over(one)]  # called without the lock: it may take a moment
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
