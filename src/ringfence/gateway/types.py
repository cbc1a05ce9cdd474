"""Data that the parts of the gateway share about a connection: target, refusal, log entry.

Nothing here decides or connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.values import Struct, final

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from ringfence.policy.model import Rule

    Verdict: TypeAlias = Literal["allowed", "denied", "failed"]


@final
class Target(Struct):
    """Where a connection goes: a canonical name that the policy permits, and the rule that permits the name."""

    name: str  # canonical: policy.hosts.canonical_host
    port: int
    rule: Rule | None  # None: an entry of network.allow, any request

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


class Refusal(Exception):  # noqa: N818  # the policy's answer, not our error
    """The connection or request is not permitted, or could not be made. `code` is stable: "net.private-address"."""

    def __init__(self, code: str, message: str, *, allow: str | None = None, verdict: Verdict = "denied") -> None:
        super().__init__(message)
        self.code = code
        self.message = message  # one sentence, shown to the guest: nothing of the host in it (H10)
        self.allow = allow  # the policy line that would permit it; None: never
        self.verdict = verdict
        self.host_message = message
        self.host_allow = allow
        self.asked_for: tuple[Target, str] | None = None  # target and path of the refused request

    def for_host(self, message: str, allow: str | None) -> None:
        """Set the words for the caller's log and denials, in which an address of the host's network is no leak."""
        self.host_message = message
        self.host_allow = allow

    @property
    def kind(self) -> Literal["network", "secret"]:
        """Return the kind of the Denial that the refusal becomes."""
        return "secret" if self.code.startswith("secret.") else "network"


class OverBudget(Refusal):
    """The sandbox has used up its upload, download or connections."""


class LogEntry:
    """An entry of the log that is still being written."""

    def __init__(self, number: int, target: str, port: int) -> None:
        self.number = number
        self.host = target
        self.port = port
        self.began = 0.0  # time.monotonic
        self.at = 0.0  # time.time
        self.verdict: Verdict = "allowed"
        self.code = "net.allowed"
        self.rule: str | None = None
        self.method: str | None = None
        self.path: str | None = None
        self.status: int | None = None
        self.sent = 0
        self.received = 0
        self.duration_s: float | None = None  # None while the connection is open
