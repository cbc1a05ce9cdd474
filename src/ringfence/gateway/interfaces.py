"""The two faces of a sandbox's registration: `Uplink` for traffic, `Directory` for names and rules.

A registration has both. The modules that serve a connection know only these two, so that each can be read, and
tested, without the registration, the service and its thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket

    from ringfence.gateway.budget import Totals
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.secrets.ca import Authority
    from ringfence.gateway.secrets.vault import Vault
    from ringfence.gateway.types import LogEntry, Refusal, Target
    from ringfence.policy.model import Network


class Uplink(Protocol):
    """The way to the network of the sandbox that a connection belongs to: it dials, counts, logs and holds secrets.

    The listener or the relay by which the connection came decides which sandbox that is, and never what the guest sent.
    """

    @property
    def network(self) -> Network:
        """The rules of this moment; they may be replaced while a connection is open."""

    @property
    def vault(self) -> Vault:
        """The sandbox's secrets and their placeholders."""

    @property
    def authority(self) -> Authority:
        """The sandbox's own certificate authority, made on first use."""

    @property
    def totals(self) -> Totals:
        """The budgets of all sandboxes of this process together."""

    async def dial(self, target: Target) -> socket.socket:
        """Return a connected, non-blocking socket; the caller closes it. Raises Refusal.

        The name is looked up once, every answer is checked, and a checked address is dialled.
        """

    def log(self, target: Target, *, method: str | None = None, path: str | None = None) -> LogEntry:
        """Begin a log entry, for each request that is seen. The verdict is "allowed" until `finish` says other."""

    def finish(self, entry: LogEntry, *, status: int | None = None, refusal: Refusal | None = None) -> None:
        """End a log entry; a denial is listed as well. Bytes are what was added to entry.sent and .received."""

    def deny(self, host: str, port: int, refusal: Refusal) -> None:
        """Log the refusal of something that never became a connection."""

    def count_up(self, size: int) -> None:
        """Count bytes before they go to the network. Raises OverBudget; then they must not go."""

    def count_down(self, size: int) -> None:
        """Count bytes that came from the network. Raises OverBudget; then they must not be passed on."""


class Directory(Protocol):
    """What a sandbox may look up and connect to: the rules, and the addresses that stand for names inside."""

    def may_look_up(self) -> bool:
        """Count one DNS query; return False when the sandbox makes too many."""

    def decide(self, name: str, port: int) -> Verdict:
        """Return what the rules say about a canonical name on a port."""

    def resolves(self, name: str) -> bool:
        """Return whether some port of a canonical name is permitted, so that the name has an address inside."""

    def address_of(self, name: str) -> str | None:
        """Return the address that stands for a permitted name inside; None when the sandbox has too many."""

    def name_of(self, address: str) -> str | None:
        """Return the name that an address inside stands for; None when it stands for none."""

    def deny(self, host: str, port: int, refusal: Refusal) -> None:
        """Log the refusal of a look-up, or of a connection that means no host."""
