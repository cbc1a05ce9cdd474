"""What the parts of the gateway hand to each other about one connection: data, and the face of a registration.

Nothing here decides or connects. Everything runs in the gateway's own event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ringfence.values import Struct, final

if TYPE_CHECKING:
    import socket
    from typing import Literal, TypeAlias

    from ringfence.gateway.secrets.ca import Authority
    from ringfence.gateway.secrets.vault import Vault
    from ringfence.policy.model import Network, Rule

    Verdict: TypeAlias = Literal["allowed", "denied", "failed"]


@final
class Target(Struct):
    """Where a connection goes: a canonical name that the policy permits, and the rule that does."""

    name: str  # canonical: policy.hosts.canonical_host
    port: int
    rule: Rule | None  # None: an entry of network.allow, any request

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


class Refusal(Exception):  # noqa: N818  # it is the policy's answer, not an error of ours
    """The connection or request is not permitted, or could not be made. `code` is stable: "net.private-address"."""

    def __init__(self, code: str, message: str, *, allow: str | None = None, verdict: Verdict = "denied") -> None:
        super().__init__(message)
        self.code = code
        self.message = message  # one sentence, shown to the guest: nothing of the host in it (H10)
        self.allow = allow  # the policy line that would permit it; None: never
        self.verdict = verdict
        self.host_message = message
        self.host_allow = allow
        self.asked_for: tuple[Target, str] | None = None  # where a request that was refused was to go, and its path

    def for_host(self, message: str, allow: str | None) -> None:
        """What the caller's log and denials say instead: there, an address of the host's network is no leak."""
        self.host_message = message
        self.host_allow = allow

    @property
    def kind(self) -> Literal["network", "secret"]:
        """Of the Denial that is made of it."""
        return "secret" if self.code.startswith("secret.") else "network"


class OverBudget(Refusal):
    """The sandbox has used up its upload, download or connections."""


class Client:
    """An accepted connection of the guest's: a non-blocking socket, and what was read from it already.

    Whoever is given a Client closes its socket.
    """

    def __init__(self, sock: socket.socket, received: bytes = b"") -> None:
        self.sock = sock
        self.received = received  # not consumed: for TLS the whole ClientHello


class Entry:
    """A line of the log that is still being written."""

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
        self.duration_s: float | None = None  # None: it is still open


class Context(Protocol):
    """The sandbox a connection belongs to. Identity is the listener it came by, nothing the guest sent."""

    @property
    def network(self) -> Network:
        """The rules of this moment; they may be replaced while a connection is open."""

    @property
    def vault(self) -> Vault:
        """The sandbox's secrets and their placeholders: `Vault(policy.secrets)`, made before it starts."""

    @property
    def authority(self) -> Authority:
        """The sandbox's own certificate authority, made when first asked for."""

    async def dial(self, target: Target) -> socket.socket:
        """Connected and non-blocking: the name resolved once, every answer checked, that very address dialled.

        Raises Refusal. The caller closes it.
        """

    def log(self, target: Target, *, method: str | None = None, path: str | None = None) -> Entry:
        """Begin a line: one for each request that is seen. Its verdict is "allowed" until `finish` says other."""

    def finish(self, entry: Entry, *, status: int | None = None, refusal: Refusal | None = None) -> None:
        """End a line; a denial is listed by it as well. Bytes are what was added to entry.sent and .received."""

    def count_up(self, size: int) -> None:
        """Bytes are about to go to the network. Raises OverBudget; then they do not."""

    def count_down(self, size: int) -> None:
        """Bytes came from the network. Raises OverBudget; then they are not passed on."""
