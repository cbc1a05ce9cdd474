# Generated from ringfence/_async by scripts/unasync: do not edit.
"""Surface of what later versions bring: addresses, managers. Every use says so."""

from __future__ import annotations

from ringfence.errors import UnsupportedError
from ringfence.policy.model import Policy
from ringfence.policy.quota import Quota

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from ringfence._sync.files import Files
    from ringfence._sync.sandbox import Sandbox
    from ringfence.backends import Backend
    from ringfence.events import HostSummary, SandboxInfo
    from ringfence.policy.image import Image
    from ringfence.results import Result, Usage
    from ringfence.values import Argv, BackendName, GuestPath, HostPath


def _later(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}: not in this version")


class Environment:
    """What one agent owns: a workspace that stays, a policy, a quota, a history."""

    agent: str
    policy: Policy
    quota: Quota
    files: Files

    def run(
        self, code: str, *, language: str = "python", stdin: bytes | str | None = None, timeout_s: float | None = None
    ) -> Result:
        """In the agent's own sandbox, started on first use, ended by `idle_s`."""
        raise _later("environments")

    def exec(
        self,
        argv: Argv,
        *,
        stdin: bytes | str | None = None,
        cwd: GuestPath | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        raise _later("environments")

    def sandbox(self, *, policy: Policy | None = None) -> Sandbox:
        """Another one on the same quota; `policy` can only narrow."""
        raise _later("environments")

    def sandboxes(self) -> tuple[SandboxInfo, ...]:
        raise _later("environments")

    def usage(self) -> Usage:
        raise _later("environments")

    def requests(self) -> tuple[HostSummary, ...]:
        raise _later("environments")

    def history(self, *, limit: int = 100) -> tuple[Result, ...]:
        """Newest first, output cut to a line."""
        raise _later("environments")

    def remove(self) -> None:
        """End its sandboxes, delete its workspace."""
        raise _later("environments")


class SandboxManager:
    """Many sandboxes for many agents, here or on a server (`connect`). `policy` is a ceiling."""

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
        raise _later("managers")

    def environment(self, agent: str, *, policy: Policy | None = None, quota: Quota | None = None) -> Environment:
        """The agent's, made if there is none. Agent ids: a-z, 0-9, `.`, `_`, `-`, at most 64."""
        raise _later("managers")

    def environments(self) -> tuple[Environment, ...]:
        raise _later("managers")

    def sandbox(self, *, policy: Policy | None = None, labels: Mapping[str, str] | None = None) -> Sandbox:
        """A warm one when there is one."""
        raise _later("managers")

    def get(self, sandbox_id: str) -> Sandbox:
        """Raises LookupError, the same for another tenant's id."""
        raise _later("managers")

    def sandboxes(self, *, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        raise _later("managers")

    def close(self) -> None:
        raise _later("managers")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.close()


def connect(url: str | None = None, key: str | None = None) -> SandboxManager:
    """A server's sandboxes. Without arguments: RINGFENCE_URL and RINGFENCE_KEY."""
    raise _later("servers")
