"""A manager of many sandboxes for many agents: environments by agent, sandboxes that wait, and the end of all."""

from __future__ import annotations

import os

from ringfence._async.compat import blocking, every, lock
from ringfence._async.environment import AsyncEnvironment, AsyncOwnedSandbox
from ringfence.backends.auto import prepare
from ringfence.core import arguments, endings
from ringfence.errors import PolicyError, SandboxClosedError
from ringfence.manager.owner import SandboxOwner, WarmShelf
from ringfence.manager.state import StateDirectory, check_agent
from ringfence.policy.model import Policy, Quota

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from ringfence._async.compat import Every
    from ringfence._async.sandbox import AsyncSandbox
    from ringfence.backends.contract import Backend
    from ringfence.policy.image import Image
    from ringfence.records import SandboxInfo
    from ringfence.values import BackendName, HostPath

_TICK_S = 1.0  # how late an idle sandbox may be ended, or a waiting sandbox replaced
_MOST_WARM = 1000


class AsyncSandboxManager:
    """Many sandboxes for many agents. `policy` is the ceiling for all of them."""

    def __init__(
        self,
        *,
        policy: Policy = Policy(),  # noqa: B008  # frozen
        quota: Quota = Quota(),  # noqa: B008  # frozen
        backend: BackendName | Backend = "auto",
        image: str | Image = "host",
        warm: int = 0,
        state: HostPath | None = None,
    ) -> None:
        arguments.check_policy(policy)
        _check_quota(quota)
        _check_warm(warm)
        prepare(backend, image, policy)
        self._policy = policy
        self._quota = quota
        self._backend = backend
        self._image = image
        self._warm = warm
        self._state = None if state is None else StateDirectory(state)
        self._check_hidden(policy)
        self._gate = lock()
        self._environments: dict[str, AsyncEnvironment] = {}
        self._own: SandboxOwner[AsyncOwnedSandbox] = SandboxOwner(None, policy)
        self._unowned: SandboxOwner[AsyncOwnedSandbox] = SandboxOwner(None, policy)
        self._waiting: WarmShelf[AsyncOwnedSandbox] = WarmShelf()
        self._ticker: Every | None = None
        self._closed = False
        self._pid: int | None = None  # the process in which the manager was first used

    async def environment(
        self, agent: str, *, policy: Policy | None = None, quota: Quota | None = None
    ) -> AsyncEnvironment:
        """Return the agent's environment, made if there is none. Agent ids: a-z, 0-9, `.`, `_`, `-`, at most 64."""
        name = check_agent(agent)
        self._check_open()
        wanted = self._narrowed(policy)
        _check_quota(quota or self._quota)
        async with self._gate:
            await self._begin()
            found = self._environments.get(name)
            if found is not None and found._over is None:
                return _same(found, policy, quota)
            made = AsyncEnvironment(
                name, wanted, quota or self._quota, making=self._make, state=self._state, above=self._own
            )
            self._environments[name] = made
            return made

    async def environments(self) -> tuple[AsyncEnvironment, ...]:
        """Return the environments sorted by agent; with `state`, also those that an earlier manager kept."""
        self._check_open()
        kept = [] if self._state is None else await blocking(self._state.agents)
        there = [name for name, found in self._environments.items() if found._over is None]
        return tuple([await self.environment(name) for name in sorted({*kept, *there})])

    def sandbox(self, *, policy: Policy | None = None, labels: Mapping[str, str] | None = None) -> AsyncSandbox:
        """Return a sandbox that waited, or a new one that is not started."""
        self._check_open()
        return self._make(self._own, self._narrowed(policy), _checked(labels))

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """Return a running sandbox by its id. Raise LookupError, the same for another tenant's id."""
        for sandbox in self._live():
            if sandbox.id == sandbox_id:
                return sandbox
        raise LookupError(f"no sandbox {sandbox_id!r} runs here")

    async def sandboxes(self, *, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """Return all running and paused sandboxes, of agents and without an agent.

        With `labels`, only sandboxes that have all these labels.
        """
        wanted = _checked(labels).items()
        return tuple(sandbox._info() for sandbox in self._live() if wanted <= sandbox.labels.items())

    async def close(self) -> None:
        """End every sandbox. With `state` the workspaces stay there; without, they are gone. Idempotent."""
        self._closed = True
        if self._is_in_a_fork():
            return  # everything belongs to the parent, which goes on
        try:
            await self._end()
        except BaseException:  # a caller that is interrupted here may not call again
            owners = [self._own, self._unowned, *(one._owner for one in self._environments.values())]
            for sandbox in [sandbox for owner in owners for sandbox in owner.end()]:
                sandbox._end_now()
            if self._state is not None:
                self._state.close()
            raise

    async def _end(self) -> None:
        if self._ticker is not None:
            await self._ticker.stop()
            self._ticker = None
        async with self._gate:
            for environment in self._environments.values():
                await environment._end()
            for sandbox in (*self._own.end(), *self._unowned.end()):
                await sandbox.close()
            self._waiting.clear()
            if self._state is not None:
                self._state.close()

    async def __aenter__(self) -> Self:
        async with self._gate:
            await self._begin()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.close()

    # sandboxes

    def _make(
        self, owner: SandboxOwner[AsyncOwnedSandbox], policy: Policy, labels: Mapping[str, str] | None = None
    ) -> AsyncOwnedSandbox:
        """Return a sandbox that is not started, or one that waited."""
        self._check_open()
        self._check_hidden(policy)
        # Equal policies may hold secrets of other values, which are not compared.
        same = policy is self._policy or (policy == self._policy and not policy.secrets)
        while same and (sandbox := self._waiting.take()) is not None:
            if sandbox.state != "running":
                continue
            try:
                sandbox._given_to(owner, labels)
            except BaseException:
                self._waiting.put(sandbox)
                raise
            if self._ticker is not None:
                self._ticker.wake()
            return sandbox
        return AsyncOwnedSandbox(owner, backend=self._backend, image=self._image, policy=policy, labels=labels)

    def _live(self) -> list[AsyncOwnedSandbox]:
        self._check_open()
        owners = [self._own, *(environment._owner for environment in self._environments.values())]
        return [sandbox for owner in owners for sandbox in owner.live()]

    async def _begin(self) -> None:
        """Prepare what a manager needs from its first use on: state directory, waiting sandboxes, ticker."""
        self._check_open()
        if self._ticker is not None:
            return
        self._pid = os.getpid()
        try:
            if self._state is not None:
                await blocking(self._state.open)
            await self._fill()
            self._check_open()  # `close` may have been called meanwhile, and found nothing to stop
        except BaseException:
            await self._undo_begin()
            raise
        self._ticker = every(_TICK_S, self._tick)

    async def _undo_begin(self) -> None:
        """Close what `_begin` made: where `with` could not begin, no caller calls `close`."""
        self._pid = None
        self._waiting.clear()
        for sandbox in self._unowned.all():
            await sandbox.close()
        if self._state is not None:
            self._state.close()

    async def _tick(self) -> None:
        for environment in list(self._environments.values()):
            await environment._rest_if_idle()
        owners = [self._own, self._unowned, *(one._owner for one in list(self._environments.values()))]
        for sandbox in [sandbox for owner in owners for sandbox in owner.all()]:
            if sandbox.state in ("closed", "lost"):
                await sandbox.close()  # the sandbox ended by itself: `close` records its usage
        await self._forget_removed()
        await self._fill()

    async def _forget_removed(self) -> None:
        over = [name for name, environment in list(self._environments.items()) if environment._over is not None]
        if not over:
            return
        async with self._gate:  # an environment of that name may be made meanwhile
            for name in over:
                if self._environments[name]._over is not None:
                    del self._environments[name]

    async def _fill(self) -> None:
        self._waiting.drop(lambda sandbox: sandbox.state != "running")
        while len(self._waiting) < self._warm and not self._closed:
            sandbox = AsyncOwnedSandbox(self._unowned, backend=self._backend, image=self._image, policy=self._policy)
            await sandbox.start()
            await sandbox._wait_for_use()
            self._waiting.put(sandbox)

    # checks

    def _narrowed(self, policy: Policy | None) -> Policy:
        if policy is None:
            return self._policy
        arguments.check_policy(policy)
        self._check_hidden(policy)
        return self._policy.must_allow(policy)

    def _check_hidden(self, policy: Policy) -> None:
        if self._state is not None:
            self._state.check_hidden(policy)

    def _is_in_a_fork(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    def _check_open(self) -> None:
        if self._is_in_a_fork():
            assert self._pid is not None
            raise endings.of_another_process("the manager", self._pid, fix="make a new SandboxManager here")
        if self._closed:
            raise SandboxClosedError("the manager was closed", code="manager-closed", fix="make a new SandboxManager")


def _check_warm(warm: object) -> None:
    if isinstance(warm, bool) or not isinstance(warm, int) or not 0 <= warm <= _MOST_WARM:
        raise PolicyError(f"warm is {warm!r}; it is a number from 0 to {_MOST_WARM}", key="warm", fix="warm=4")


def _check_quota(quota: object) -> None:
    if not isinstance(quota, Quota):
        raise TypeError(f"quota is a Quota, not {type(quota).__name__}")


def _checked(labels: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(labels or {})
    if not all(isinstance(part, str) for item in found.items() for part in item):
        raise TypeError("labels are a mapping of str to str")
    return found


def _same(found: AsyncEnvironment, policy: Policy | None, quota: Quota | None) -> AsyncEnvironment:
    """Return an environment that exists.

    Raise PolicyError when the caller names another policy or quota than it has.
    """
    for name, asked, has in (("policy", policy, found.policy), ("quota", quota, found.quota)):
        if asked is not None and asked != has:
            raise PolicyError(
                f"the environment of agent {found.agent!r} already exists, with another {name}",
                key=name,
                code="environment-exists",
                fix=f"leave {name} out, or remove() it first",
            )
    return found
