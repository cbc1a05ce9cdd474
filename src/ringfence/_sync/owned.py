# Generated from ringfence/_async by scripts/unasync: do not edit.
"""A sandbox that a manager keeps count of: admitted before it starts, accounted for when it ends."""

from __future__ import annotations

import time

from ringfence._sync.gateway import Gateway
from ringfence._sync.sandbox import Sandbox
from ringfence._sync.session import Session
from ringfence.errors import UnsupportedError
from ringfence.events import SandboxInfo
from ringfence.results import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from typing import Self

    from ringfence.agents.owner import Owner
    from ringfence.backends import Backend
    from ringfence.events import HostSummary
    from ringfence.policy.image import Image
    from ringfence.policy.model import Network, Policy
    from ringfence.values import BackendName, SessionLanguage

_SLACK_S = 30.0  # beyond idle_s: whoever keeps the workspace ends the sandbox; this is for when nobody does


_ROOM_AHEAD = 8  # processes that the policy must allow, for one to be spent before anybody asked for it


class OwnedSandbox(Sandbox):
    """As any other for who holds it."""

    def __init__(
        self,
        owner: Owner[OwnedSandbox],
        *,
        backend: BackendName | Backend,
        image: str | Image,
        policy: Policy,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(backend=backend, image=image, policy=policy, labels=labels)
        self.network = OwnedGateway(self)
        self._owner = owner
        self._started_at = 0.0
        # Looked at by the first who closes it: another one may be the first to see it gone.
        self._used_in_all: tuple[Usage, tuple[HostSummary, ...]] = (Usage(), ())
        self._waits = False  # started ahead, and not used yet
        self._ahead: Session | None = None  # the interpreter of its default session, likewise

    def start(self) -> Self:
        """Raises QuotaError when its owner's quota has no room for it."""
        if self._waits:
            self._waits = False
            self._set_clocks(0.0)
            return self
        return super().start()

    def _start(self) -> None:
        """One of several who start it comes here, so that it is admitted once."""
        if self._ended != "closed":
            self._owner.admit(self)
        try:
            super()._start()
        except BaseException:
            self._owner.ended(self, Usage(), ())
            raise
        self._started_at = time.time()
        self._running_place().before_call = self._count_call

    def _wait_for_use(self) -> None:
        """It was started ahead: so is the interpreter of its default session, where the image has Python."""
        self._waits = True
        if self.policy.limits.processes < _ROOM_AHEAD:
            return
        session = Session("python", "python", self._running_place, self._tools)
        try:
            session._prepare()
            session._ask({"m": "rehearse"})
        except UnsupportedError:
            return  # no Python in the image
        self._ahead = session

    def session(self, name: str | None = None, *, language: SessionLanguage = "python") -> Session:
        asked = language == "python" and name in (None, "python")
        if asked and self._ahead is not None and "python" not in self._sessions:
            self._sessions["python"], self._ahead = self._ahead, None
        return super().session(name, language=language)

    def close(self) -> None:
        """Kill everything inside and leave nothing behind. Idempotent."""
        if self._box is not None and self._ended != "closed":
            self._used_in_all = self._used(), self.network.summary()
        super().close()
        self._owner.ended(self, *self._used_in_all)

    def extend(self, lifetime_s: float) -> datetime:
        until = super().extend(lifetime_s)
        self._ends_at = until.timestamp()
        return until

    def _another(self) -> Sandbox:
        """A fork is one more on the same quota."""
        backend, _ = self._made_with
        image = self._launcher.image
        return OwnedSandbox(self._owner, backend=backend, image=image, policy=self.policy, labels=self.labels)

    def _count_call(self) -> None:
        self._owner.count_call()

    def _used(self) -> Usage:
        """So far; of a paused one too."""
        return Usage() if self._box is None else self._box.usage()[0]

    def _set_clocks(self, slack_s: float) -> None:
        """From now on. `slack_s` is added to idle_s."""
        limits = self.policy.limits
        self._running_place().link.say(
            op="clocks", lifetime_s=limits.lifetime_s, idle_s=limits.idle_s + slack_s, on_idle=limits.on_idle
        )
        self._started_at = time.time()
        self._ends_at = self._started_at + limits.lifetime_s

    def _kept_by_owner(self) -> None:
        """Its owner watches its idleness, and keeps its files before it ends."""
        self._waits = False
        self._set_clocks(_SLACK_S if self.policy.limits.on_idle == "close" else 0.0)

    def _given_to(self, owner: Owner[OwnedSandbox], labels: Mapping[str, str] | None) -> None:
        """A sandbox that waited, never used, is somebody's now. Raises QuotaError."""
        before = self._owner
        owner.admit(self)
        self._owner = owner
        self.labels = dict(labels or {})
        before.ended(self, Usage(), ())

    def _info(self) -> SandboxInfo:
        from datetime import UTC, datetime

        started, ends = (datetime.fromtimestamp(at, UTC) for at in (self._started_at, self._ends_at))
        return SandboxInfo(self.id, self.state, self.backend, self._owner.agent, self.labels, started, ends)


class OwnedGateway(Gateway):
    """Live rules stay below what the owner may have."""

    def __init__(self, sandbox: OwnedSandbox) -> None:
        super().__init__(lambda: sandbox._box)
        self._sandbox = sandbox

    def set(self, network: Network) -> None:
        """Replace the rules; connections no longer permitted are cut. Never beyond a manager's policy."""
        ceiling = self._sandbox._owner.ceiling
        ceiling.narrow(ceiling.replace(network=network))
        super().set(network)
