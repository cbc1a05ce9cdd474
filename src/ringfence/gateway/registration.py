"""A sandbox at the gateway: rules, names, budgets, log and open connections.

A registration is known by its listeners or its relay, never by what a guest says. It runs in the gateway's loop, except
for the methods that say otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from ringfence.errors import PolicyError, SandboxClosedError
from ringfence.gateway import dial, rules
from ringfence.gateway.budget import SANDBOX_BURST, SANDBOX_RATE, Bucket
from ringfence.gateway.connection import Connection, close_copy
from ringfence.gateway.dial import fault
from ringfence.gateway.dns import MOST_SKIPPED, Names
from ringfence.gateway.log import Logbook
from ringfence.gateway.secrets import trust
from ringfence.gateway.secrets.vault import Vault
from ringfence.gateway.types import OverBudget, Refusal
from ringfence.policy.reach import listening_ports, proxy_port
from ringfence.values import replace

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from ringfence.gateway.budget import CountedSocket, Totals
    from ringfence.gateway.dial import Resolver
    from ringfence.gateway.relay.mux import Relay
    from ringfence.gateway.relay.socket import RelayedSocket
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.secrets.ca import Authority
    from ringfence.gateway.types import LogEntry, Target
    from ringfence.policy.model import Network
    from ringfence.policy.secrets import Secret
    from ringfence.records import HostSummary, Request
    from ringfence.results import Denial, Usage

_TURN_S = 0.05  # between two checks whether a target may be dialled
_TURNS_S = 10.0


class ServingLoop(Protocol):
    """The part of the gateway's service that a registration uses."""

    @property
    def resolver(self) -> Resolver:
        """Return the resolver of every sandbox of the process."""

    @property
    def totals(self) -> Totals:
        """Return the budgets of all sandboxes of the process together."""

    def ask(self, work: Callable[[], None]) -> None:
        """Run `work` in the loop and wait until it has ended. Raises TimeoutError."""

    def detach(self, registration: Registration) -> None:
        """End a registration in the loop, without waiting."""


class Registration:
    """Implements `Uplink` and `Directory` for connections, and `backends.contract.Outlet` for the sandbox's box."""

    def __init__(
        self,
        service: ServingLoop,
        network: Network,
        secrets: tuple[Secret, ...],
        listeners: list[int],
        twin_of: Registration | None = None,
        *,
        relay: Relay | None = None,
    ) -> None:
        """Take the listeners over: resolver by UDP, resolver by TCP, proxy, then one listener for each port.

        With a relay there are no listeners, as the relay listens inside.
        `twin_of`: a live copy has the placeholders, the authority and the addresses of names of its original, because
        all of that is in the memory that was copied.
        """
        self._service = service
        self._network = network
        self.vault: Vault = Vault(secrets, {} if twin_of is None else twin_of.env)
        self.env: Mapping[str, str] = self.vault.environment
        self.defaults: Mapping[str, str] = {}
        self.files: Mapping[str, bytes] = {}
        self._rules = rules.compiled(network)
        skipped = int.from_bytes(os.urandom(4), "big") % MOST_SKIPPED
        self.names: Names = Names(skipped) if twin_of is None else twin_of.names.copy()
        self.book = Logbook()
        self.sockets = [socket.socket(fileno=fd) for fd in listeners]
        self._relay = relay
        if relay is None:
            self.ports = tuple(sock.getsockname()[1] for sock in self.sockets[3:])
        else:
            self.sockets.append(relay.datagrams)
            self.ports = listening_ports(network)
        self._weight = 1 if relay is None else 2  # a relayed connection has a pair of sockets more
        self.proxy = proxy_port(network)
        self.connections: set[Connection] = set()
        self._dialled: weakref.WeakKeyDictionary[CountedSocket, Target] = weakref.WeakKeyDictionary()
        self.entering: set[RelayedSocket] = set()  # connections by the relay that are not yet served
        self.connections_rate = Bucket(SANDBOX_RATE, SANDBOX_BURST)
        self._queries_rate = Bucket(SANDBOX_RATE, SANDBOX_BURST)
        self.closed = False
        self._ended = threading.Event()
        self._authority: Authority | None = None
        self._reads = trust.is_needed(network, secrets)
        if self._reads and twin_of is not None:
            self._authority = twin_of.authority
        if self._reads:
            self.defaults = trust.environment()
            self.files = trust.files(self.authority)

    @property
    def is_relayed(self) -> bool:
        """Return whether a relay inside listens, and not the gateway itself."""
        return self._relay is not None

    # for connections: interfaces.Uplink

    @property
    def network(self) -> Network:
        return self._network

    @property
    def authority(self) -> Authority:
        if self._authority is None:
            from ringfence.gateway.secrets.ca import Authority as Made

            self._authority = Made()
        return self._authority

    @property
    def totals(self) -> Totals:
        return self._service.totals

    async def dial(self, target: Target) -> socket.socket:
        await self._turn(target)
        sock = await dial.dial(self._service.resolver, target, self._network.private, self)
        code = fault(sock.address, self._network.private)
        if code is not None:  # the rules have changed meanwhile
            sock.close()
            raise dial.refused_address(code, target, sock.address)
        self.totals.opened(target, sock)
        self._dialled[sock] = target
        return sock

    async def _turn(self, target: Target) -> None:
        """Wait until the target may be dialled: no connection is refused at once for a rate. Raises Refusal."""
        import asyncio

        last = time.monotonic() + _TURNS_S
        while not self.totals.may_dial(target):
            if time.monotonic() > last:
                words = f"too many connections a second are made to {target.name}"
                raise Refusal("net.host-rate", words, verdict="failed")
            await asyncio.sleep(_TURN_S)

    def log(self, target: Target, *, method: str | None = None, path: str | None = None) -> LogEntry:
        entry = self.book.begin(target.name, target.port)
        entry.rule = self.decide(target.name, target.port).entry
        entry.method = method
        entry.path = path
        return entry

    def finish(self, entry: LogEntry, *, status: int | None = None, refusal: Refusal | None = None) -> None:
        if status is not None:
            entry.status = status
        self.book.finish(entry, refusal)

    def deny(self, host: str, port: int, refusal: Refusal) -> None:
        self.book.finish(self.book.begin(host, port), refusal)

    def count_up(self, size: int) -> None:
        if self.book.sent + size > self._network.upload:
            raise _over_budget("upload", self._network.upload)
        self.totals.count_up(size)
        self.book.sent += size

    def count_down(self, size: int) -> None:
        if self.book.received + size > self._network.download:
            raise _over_budget("download", self._network.download)
        self.totals.count_down(size)
        self.book.received += size

    # for look-ups: interfaces.Directory

    def may_look_up(self) -> bool:
        return self._queries_rate.take()

    def decide(self, name: str, port: int) -> Verdict:
        return self._rules.decide(name, port)

    def resolves(self, name: str) -> bool:
        return self._rules.resolves(name)

    def address_of(self, name: str) -> str | None:
        return self.names.address_of(name)

    def name_of(self, address: str) -> str | None:
        return self.names.name_of(address)

    # for the service

    def begin(self, sock: socket.socket) -> Connection:
        """Count an accepted socket as a connection that is served."""
        connection = Connection(sock, self)
        self.connections.add(connection)
        self.totals.connections += self._weight
        return connection

    def done(self, connection: Connection) -> None:
        """Stop counting a connection. Idempotent."""
        if connection in self.connections:
            self.connections.remove(connection)
            self.totals.connections -= self._weight

    def cut(self) -> list[asyncio.Task[None]]:
        """Stop every connection and close the listeners, in the loop or when there is none.

        The connections are gone when the returned tasks have ended.
        """
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        for connection in list(self.connections):
            connection.stop()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.close()
        self.close_entering()
        return tasks

    def close_entering(self) -> None:
        """Close the relay's connections that are not yet served, after `close`. From any thread."""
        while self.entering:
            self.entering.pop().close()

    def mark_ended(self) -> None:
        """Note that nothing of the registration is left; from any thread."""
        self._ended.set()

    # live rules

    def _apply(self, network: Network) -> None:
        """Replace the rules, and cut every connection that they no longer permit in the same way (G25)."""
        self._network = network
        self._rules = rules.compiled(network)
        closed = self._targets_at_closed_addresses()
        for connection in list(self.connections):
            if connection.verdict is None:
                continue
            target = connection.verdict.target
            now = self.decide(target.name, target.port)
            if not now.same_way(connection.verdict) or (target.name, target.port) in closed:
                changed = Refusal("net.rules-changed", f"the rules for {target} have changed")
                connection.stop(now.refusal or changed)

    def _targets_at_closed_addresses(self) -> set[tuple[str, int]]:
        """Return the targets with a connection to an address that network.private does not open any more."""
        private = self._network.private
        dialled = [(sock, target) for sock, target in self._dialled.items() if sock.fileno() >= 0]
        return {(target.name, target.port) for sock, target in dialled if fault(sock.address, private) is not None}

    # for the box and its caller, from any thread: backends.contract.Outlet

    def set(self, network: Network) -> None:
        """Replace the rules; return when they hold. Raises PolicyError for what the sandbox was not built for."""
        if self.closed:
            raise SandboxClosedError("the sandbox has ended, and its gateway with it", fix="start another")
        missing = sorted(set(listening_ports(network)) - set(self.ports))
        if missing and (network.allow or network.rules):
            raise PolicyError(
                f"the sandbox was built without a listener for port {', '.join(map(str, missing))}",
                key="network.ports",
                fix="name every port in the policy that the sandbox starts with",
            )
        if trust.is_needed(network, ()) and not self._reads:
            raise PolicyError(
                "the sandbox was started without rules for methods or paths, so nothing inside trusts its gateway",
                key="network.rules",
                fix="start the sandbox with such a rule, or with a secret",
            )
        self._service.ask(lambda: self._apply(network))

    def requests(self, after: int) -> tuple[Request, ...]:
        return self.book.log(after)

    def summary(self) -> tuple[HostSummary, ...]:
        return self.book.summary()

    def add_to(self, usage: Usage) -> Usage:
        book = self.book
        return replace(usage, sent_bytes=book.sent, received_bytes=book.received, connections=book.connections)

    def mark(self) -> int:
        return self.book.mark()

    def denials(self, after: int) -> tuple[Denial, ...]:
        return self.book.denials(after)

    def close(self) -> None:
        """Cut every connection and close the listeners, without waiting. Idempotent."""
        if not self.closed:
            self.closed = True
            self._service.detach(self)

    def wait_ended(self, within_s: float) -> bool:
        """Return whether, after `close`, nothing of the registration is left. From any thread but the gateway's."""
        return self._ended.wait(within_s)

    def disown_descriptors(self) -> None:
        """Drop the listeners without closing: the caller closed them, and their numbers may be other files now."""
        self.closed = True
        for sock in self.sockets:
            sock.detach()

    def after_fork(self) -> None:
        """Close a forked child's copies of listeners, connections and the relay's sockets. Idempotent.

        While the child has a copy of a connection, the parent's `close` does not end it for guest and server.
        """
        self.closed = True
        for connection in list(self.connections):
            connection.after_fork()
        for sock in (*self._dialled, *self.entering, *self.sockets):
            close_copy(sock)
        if self._relay is not None:
            self._relay.after_fork()


def _over_budget(name: str, limit: int) -> OverBudget:
    line = f'network.{name} = "{limit * 2}"'
    return OverBudget(f"net.{name}", f"the sandbox has used up its {name} of {limit} bytes", allow=line)
