"""An agent's environment: a workspace that outlives its sandboxes, a policy, a quota and a history."""

from __future__ import annotations

import os
import time

from ringfence._async.compat import blocking, lock
from ringfence._async.files import _MORE_BYTES, _MORE_FILES, AsyncFiles
from ringfence._async.sandbox import AsyncGateway, AsyncSandbox
from ringfence._async.session import AsyncSession
from ringfence.core import arguments, endings
from ringfence.errors import RingfenceError, SandboxClosedError, SandboxError, SnapshotError, UnsupportedError
from ringfence.manager.history import History, add_usage
from ringfence.manager.owner import SandboxOwner
from ringfence.manager.quota import Ledger, merged
from ringfence.records import SandboxInfo
from ringfence.results import Denial, Usage
from ringfence.snapshots import model
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from datetime import datetime
    from typing import Self

    from ringfence._async.process import Place
    from ringfence._async.worker import AsyncWorker
    from ringfence.backends.contract import Backend
    from ringfence.manager.state import StateDirectory
    from ringfence.policy.image import Image
    from ringfence.policy.model import Network, Policy, Quota
    from ringfence.records import HostSummary
    from ringfence.results import Result
    from ringfence.snapshots.model import Snapshot
    from ringfence.values import Argv, BackendName, GuestPath, SessionLanguage

    Making = Callable[[SandboxOwner["AsyncOwnedSandbox"], Policy], "AsyncOwnedSandbox"]

_CHANGES = ("mkdir", "rename", "remove", "chmod")


class AsyncEnvironment:
    """The environment of one agent: a workspace that stays, a policy, a quota, a history."""

    def __init__(
        self,
        agent: str,
        policy: Policy,
        quota: Quota,
        *,
        making: Making,
        state: StateDirectory | None,
        above: SandboxOwner[AsyncOwnedSandbox],
    ) -> None:
        self.agent = agent
        self.policy = policy
        self.quota = quota
        self.files: AsyncFiles = AsyncKeptFiles(self)
        self._making = making
        self._state = state
        self._owner: SandboxOwner[AsyncOwnedSandbox] = SandboxOwner(agent, policy, Ledger(agent, quota), above=above)
        self._history = History()
        self._gate = lock()  # held while the agent's own sandbox is started, kept or ended
        self._box: AsyncOwnedSandbox | None = None
        self._kept: Snapshot | None = None
        self._is_loaded = False  # whether the state directory was searched for the workspace of an earlier manager
        self._written = ""  # digest of the workspace in the state directory
        self._calls: set[object] = set()
        self._used_at = time.monotonic()
        self._over: str | None = None
        self._pid = os.getpid()

    async def run(
        self, code: str, *, language: str = "python", stdin: bytes | str | None = None, timeout_s: float | None = None
    ) -> Result:
        """Run code in the agent's own sandbox, which starts at first use and ends when it was idle for `idle_s`."""
        arguments.check_code(code)
        arguments.check_language(language)
        return await self._do(lambda box: box.run(code, language=language, stdin=stdin, timeout_s=timeout_s))

    async def exec(
        self,
        argv: Argv,
        *,
        stdin: bytes | str | None = None,
        cwd: GuestPath | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a command in the agent's own sandbox."""
        arguments.check_argv(argv)
        return await self._do(lambda box: box.exec(argv, stdin=stdin, cwd=cwd, timeout_s=timeout_s))

    def sandbox(self, *, policy: Policy | None = None) -> AsyncSandbox:
        """Return another sandbox on the agent's quota; `policy` can only narrow the environment's."""
        self._check_there()
        if policy is None:
            return self._making(self._owner, self.policy)
        arguments.check_policy(policy)
        return self._making(self._owner, self.policy.must_allow(policy))

    async def sandboxes(self) -> tuple[SandboxInfo, ...]:
        """Return the agent's running and paused sandboxes, with its own sandbox."""
        return tuple(sandbox._info() for sandbox in self._owner.live())

    async def usage(self) -> Usage:
        """Return the usage of all the agent's sandboxes together: sums, and the highest of the peaks.

        The disk usage is that of the workspace now.
        """
        total = self._owner.usage
        for sandbox in self._owner.live():
            total = add_usage(total, sandbox._used())
        total = replace(total, output_bytes=self._history.output_bytes)
        box = self._box
        if box is not None and box.state == "running":
            disk = await box.files.usage()
            return replace(total, disk_bytes=disk.bytes, disk_files=disk.files)
        return replace(total, disk_bytes=0 if self._kept is None else self._kept.size_bytes)

    async def requests(self) -> tuple[HostSummary, ...]:
        """Return the requests that the gateways of all the agent's sandboxes counted, by host."""
        found = list(self._owner.requests)
        for sandbox in self._owner.live():
            found += await sandbox.network.summary()
        return merged(found)

    async def history(self, *, limit: int = 100) -> tuple[Result, ...]:
        """Return the newest results first, with the output cut to a line."""
        return self._history.newest(limit)

    async def remove(self) -> None:
        """End the agent's sandboxes and delete the workspace."""
        self._check_process()
        async with self._gate:
            self._over = "was removed"
            await self._close_all()
            self._forget()
            if self._state is not None:
                await blocking(self._state.remove, self.agent)

    # the agent's own sandbox

    async def _do(self, work: Callable[[AsyncOwnedSandbox], Awaitable[Result]]) -> Result:
        token = object()
        box = await self._enter(token)
        try:
            result = await work(box)
        finally:
            self._leave(token)
        problem = await self._keep(box)
        if problem is not None:
            result = replace(result, denials=(*result.denials, problem))
        self._history.add(result)
        return result

    async def _enter(self, token: object) -> AsyncOwnedSandbox:
        """Return the agent's own sandbox, running, which is not ended for idleness until `_leave`."""
        self._check_process()
        async with self._gate:
            self._check_there()
            box = self._box
            if box is None or box.state not in ("running", "paused"):
                box = await self._start_own()
            self._calls.add(token)
            self._used_at = time.monotonic()
            return box

    def _leave(self, token: object) -> None:
        self._used_at = time.monotonic()
        self._calls.discard(token)

    async def _start_own(self) -> AsyncOwnedSandbox:
        if self._box is not None:
            await self._box.close()
            self._box = None
        await self._look()
        box = await self._making(self._owner, self.policy).start()
        try:
            if self._kept is not None:
                await box.rollback(self._bound_anew(box, self._kept))
            await box._kept_by_owner()
        except BaseException:
            await box.close()
            raise
        self._box = box
        return box

    async def _look(self) -> None:
        """Load the workspace that an earlier manager kept in the state directory."""
        if self._state is None or self._is_loaded:
            return
        path = await blocking(self._state.kept, self.agent)
        if path is not None:
            self._kept = await blocking(model.Snapshot.load, path)
            self._written = self._kept.digest
        self._is_loaded = True

    def _bound_anew(self, box: AsyncOwnedSandbox, kept: Snapshot) -> Snapshot:
        """Return a kept workspace bound to the current policy, backend and image, which may have changed."""
        if (kept._bound, kept.policy_digest) == (box._bound(), self.policy.digest):
            return kept
        manifest, _ = kept._tree()
        assert kept._holder is not None
        self._kept = model.make(manifest, kept._holder.copy(), box._bound(), self.policy)
        kept.delete()
        return self._kept

    async def _keep(self, box: AsyncOwnedSandbox) -> Denial | None:
        """Keep the workspace as it is now.

        Return a denial when that fails: a guest's tree is no error of the caller.
        """
        async with self._gate:
            return await self._keep_now(box)

    async def _keep_now(self, box: AsyncOwnedSandbox) -> Denial | None:
        if box is not self._box or self._over is not None or box.state != "running":
            return None
        try:
            now = await box.snapshot()
            before = self._kept
            self._kept = now
            if before is not None:
                before.delete()
            if self._state is not None and now.digest != self._written:
                path = await blocking(self._state.workspace, self.agent)
                await blocking(now.export, path)
                self._written = now.digest
        except (RingfenceError, OSError) as error:
            message = f"the workspace was not kept: {error}"
            return Denial("mount", "/workspace", "workspace.not-kept", message, allow=None)
        return None

    def _is_idle(self) -> bool:
        limits = self.policy.limits
        if self._box is None or self._calls or limits.on_idle != "close":
            return False
        if isinstance(self.files, AsyncKeptFiles) and self.files._in_use():
            self._used_at = time.monotonic()
        return time.monotonic() - self._used_at >= limits.idle_s

    async def _rest_if_idle(self) -> None:
        if not self._is_idle():
            return
        async with self._gate:
            if self._box is not None and self._is_idle():
                await self._keep_now(self._box)
                await self._box.close()
                self._box = None

    async def _end(self) -> None:
        """End the environment together with the manager.

        With a state directory the workspace stays there, else it is gone.
        """
        async with self._gate:
            if self._over is not None:
                return
            if self._box is not None and self._state is not None:
                await self._keep_now(self._box)
            self._over = "ended with its manager"
            await self._close_all()
            self._forget()

    async def _close_all(self) -> None:
        for sandbox in self._owner.end():
            await sandbox.close()
        self._box = None

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.delete()
            self._kept = None

    def _check_process(self) -> None:
        """Raise SandboxClosedError in a fork, before a lock is taken: a thread of the parent may hold that lock there
        for good."""
        if self._pid != os.getpid():
            what = f"the environment of agent {self.agent!r}"
            raise endings.of_another_process(what, self._pid, fix="make a new SandboxManager here")

    def _check_there(self) -> None:
        self._check_process()
        if self._over is not None:
            raise SandboxClosedError(
                f"the environment of agent {self.agent!r} {self._over}",
                code="environment-closed",
                fix="manager.environment(agent)",
            )

    def _own_place(self) -> Place:
        if self._box is None:
            raise SandboxError(f"the sandbox of agent {self.agent!r} ended meanwhile", fix="call again")
        return self._box._running_place()


class AsyncKeptFiles(AsyncFiles):
    """Files of an agent's workspace. The first use starts the agent's sandbox."""

    def __init__(self, environment: AsyncEnvironment) -> None:
        super().__init__(environment._own_place)
        self._environment = environment
        self._workers: list[AsyncWorker] = []

    def _caps(self) -> dict[str, int]:
        limits = self._environment.policy.limits
        return {"most_bytes": limits.disk + _MORE_BYTES, "most_files": limits.disk_files + _MORE_FILES}

    async def _start(
        self, call: str, args: Mapping[str, object], *, feeds: bool = False, total: bool = False
    ) -> AsyncWorker:
        token = object()
        await self._environment._enter(token)
        try:
            worker = await super()._start(call, args, feeds=feeds, total=total)
        finally:
            self._environment._leave(token)
        self._workers = [*(one for one in self._workers if one._inbox.end is None), worker]
        return worker

    def _in_use(self) -> bool:
        return any(worker._inbox.end is None for worker in self._workers)

    async def _do(self, call: str, path: GuestPath, args: Mapping[str, object]) -> dict[str, object]:
        answer = await super()._do(call, path, args)
        if call in _CHANGES:
            await self._changed()
        return answer

    async def _fed(
        self, call: str, path: GuestPath, args: Mapping[str, object], pieces: AsyncIterator[bytes]
    ) -> dict[str, object]:
        answer = await super()._fed(call, path, args, pieces)
        await self._changed()
        return answer

    async def _changed(self) -> None:
        """Keep what the caller wrote, or raise SnapshotError."""
        box = self._environment._box
        problem = None if box is None else await self._environment._keep(box)
        if problem is not None:
            raise SnapshotError(problem.message, code=problem.code, fix="remove what makes the workspace too large")


# ── a sandbox of a manager: admitted before it starts, accounted for when it ends ────────────────

_SLACK_S = 30.0  # beyond idle_s: the environment keeps the workspace, then ends the sandbox; this is in case it cannot
_ROOM_AHEAD = 8  # processes that the policy must allow, for an interpreter to be started before the first call


class AsyncOwnedSandbox(AsyncSandbox):
    """A sandbox that counts on an owner's quota. A caller uses it like any other sandbox."""

    def __init__(
        self,
        owner: SandboxOwner[AsyncOwnedSandbox],
        *,
        backend: BackendName | Backend,
        image: str | Image,
        policy: Policy,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(backend=backend, image=image, policy=policy, labels=labels)
        self.network = AsyncOwnedGateway(self)
        self._owner = owner
        self._started_at = 0.0
        # Read by the first call of `close`; a later call may be the first that waits until the sandbox is gone.
        self._used_in_all: tuple[Usage, tuple[HostSummary, ...]] = (Usage(), ())
        self._waits = False  # started ahead, and not used yet
        self._ahead: AsyncSession | None = None  # the interpreter of the default session, also started ahead

    async def start(self) -> Self:
        """Start the sandbox. Raise QuotaError when its owner's quota has no room."""
        if self._waits:
            self._waits = False
            await self._set_clocks(0.0)
            return self
        return await super().start()

    async def _start(self) -> None:
        """Admit the sandbox and start it. Called once, however many callers start the sandbox."""
        if self._ended != "closed":
            self._owner.admit(self)
        try:
            await super()._start()
        except BaseException:
            self._owner.ended(self, Usage(), ())
            raise
        self._started_at = time.time()
        self._running_place().before_call = self._count_call

    async def _wait_for_use(self) -> None:
        """Mark a sandbox that was started ahead, and start the interpreter of the default session, too.

        An image without Python has no such interpreter.
        """
        self._waits = True
        if self.policy.limits.processes < _ROOM_AHEAD:
            return
        session = AsyncSession("python", "python", self._running_place, self._tools)
        try:
            await session._prepare()
            await session._ask({"m": "rehearse"})
        except UnsupportedError:
            return  # no Python in the image
        self._ahead = session

    async def session(self, name: str | None = None, *, language: SessionLanguage = "python") -> AsyncSession:
        asked = language == "python" and name in (None, "python")
        if asked and self._ahead is not None and "python" not in self._sessions:
            self._sessions["python"], self._ahead = self._ahead, None
        return await super().session(name, language=language)

    async def close(self) -> None:
        """Kill everything inside and leave nothing behind. Idempotent."""
        if self._box is not None and self._ended != "closed":
            self._used_in_all = self._used(), await self.network.summary()
        await super().close()
        self._owner.ended(self, *self._used_in_all)

    async def set_lifetime(self, lifetime_s: float) -> datetime:
        until = await super().set_lifetime(lifetime_s)
        self._ends_at = until.timestamp()
        return until

    def _another(self) -> AsyncSandbox:
        """Return a fork, which is another sandbox on the same quota."""
        backend, _ = self._made_with
        image = self._launcher.image
        return AsyncOwnedSandbox(self._owner, backend=backend, image=image, policy=self.policy, labels=self.labels)

    def _count_call(self) -> None:
        self._owner.count_call()

    def _used(self) -> Usage:
        """Return the usage so far, also of a paused sandbox."""
        return Usage() if self._box is None else self._box.usage()[0]

    async def _set_clocks(self, slack_s: float) -> None:
        """Start lifetime and idle time anew. `slack_s` is added to idle_s."""
        limits = self.policy.limits
        await self._running_place().link.say(
            op="clocks", lifetime_s=limits.lifetime_s, idle_s=limits.idle_s + slack_s, on_idle=limits.on_idle
        )
        self._started_at = time.time()
        self._ends_at = self._started_at + limits.lifetime_s

    async def _kept_by_owner(self) -> None:
        """Let the owner watch for idleness, so that it can keep the files before the sandbox ends."""
        self._waits = False
        await self._set_clocks(_SLACK_S if self.policy.limits.on_idle == "close" else 0.0)

    def _given_to(self, owner: SandboxOwner[AsyncOwnedSandbox], labels: Mapping[str, str] | None) -> None:
        """Give a sandbox that waited, never used, to `owner`. Raise QuotaError."""
        before = self._owner
        owner.admit(self)
        self._owner = owner
        self.labels = dict(labels or {})
        before.ended(self, Usage(), ())

    def _info(self) -> SandboxInfo:
        from datetime import UTC, datetime

        started, ends = (datetime.fromtimestamp(at, UTC) for at in (self._started_at, self._ends_at))
        return SandboxInfo(self.id, self.state, self.backend, self._owner.agent, self.labels, started, ends)


class AsyncOwnedGateway(AsyncGateway):
    """A gateway whose live rules stay below what the sandbox's owner may have."""

    def __init__(self, sandbox: AsyncOwnedSandbox) -> None:
        super().__init__(lambda: sandbox._box)
        self._sandbox = sandbox

    async def set(self, network: Network) -> None:
        """Replace the rules and cut connections that are no longer permitted. Never goes beyond a manager's policy."""
        ceiling = self._sandbox._owner.ceiling
        ceiling.must_allow(ceiling.replace(network=network))
        await super().set(network)
