"""One sandbox at the gateway: its rules, names, budgets, log and open connections. Identity is its listeners or relay.

All but the methods that say so run in the gateway's loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ringfence.errors import PolicyError, SandboxClosedError
from ringfence.gateway import dial as dialling
from ringfence.gateway import rules
from ringfence.gateway.budget import SANDBOX_BURST, SANDBOX_RATE, Bucket
from ringfence.gateway.dial import fault
from ringfence.gateway.log import Logbook
from ringfence.gateway.secrets import trust
from ringfence.gateway.secrets.vault import Vault
from ringfence.gateway.types import OverBudget, Refusal
from ringfence.policy.reach import listening_ports, proxy_port
from ringfence.values import replace

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from ringfence.gateway.budget import Counted, Totals
    from ringfence.gateway.relay.mux import Relay
    from ringfence.gateway.relay.socket import Relayed
    from ringfence.gateway.secrets.ca import Authority
    from ringfence.gateway.service import Service
    from ringfence.gateway.types import Entry, Target
    from ringfence.policy.model import Network
    from ringfence.policy.secrets import Secret
    from ringfence.records import HostSummary, Request
    from ringfence.results import Denial, Usage


# MERGED: The addresses in 127.0.0.0/8 that stand for permitted names in one sandbox: one each, for as long as it lives.
#
# How a name is spelled is `policy.hosts`; this only hands out numbers. Late: nothing is known here before a guest asks.


MOST_NAMES = 4096  # a pattern such as *.a.com lets a guest mint names without end
_FIRST = 127 << 24 | 77 << 16  # 127.77.0.1 and on: nobody's servers, nobody's resolver
MOST_SKIPPED = (1 << 16) - MOST_NAMES - 2


class Names:
    """Not safe from two threads at once: the gateway's loop owns it."""

    def __init__(self, skipped: int = 0) -> None:
        """`skipped` addresses stand for nothing: those of one sandbox are to mean no other host in another.

        A snapshot of memory may hold them, and whoever connects to one by a rule for tcp says no name.
        """
        self._skipped = skipped
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def address_of(self, name: str) -> str | None:
        """The address of a canonical, permitted name, handed out when it is new; None when there are too many."""
        found = self._addresses.get(name)
        if found is None and len(self._addresses) < MOST_NAMES:
            number = _FIRST + self._skipped + len(self._addresses) + 1
            found = ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
            self._addresses[name] = found
            self._names[found] = name
        return found

    def name_of(self, address: str) -> str | None:
        """What a guest connected to, by the address it used."""
        return self._names.get(address)

    def copy(self) -> Names:
        """For a live copy, whose memory holds addresses that its original was told."""
        made = Names(self._skipped)
        made._addresses, made._names = dict(self._addresses), dict(self._names)
        return made


_TURN_S = 0.05  # between two looks whether a target's turn has come
_TURNS_S = 10.0


class Open:
    """A connection that is being served, for the rules of the next moment."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.task: asyncio.Task[None] | None = None  # that serves it
        self.verdict: rules.Verdict | None = None  # None: where it goes is not known yet
        self.cut: Refusal | None = None  # why it was ended from here

    def stop(self) -> None:
        """Cut it."""
        if self.task is not None:
            self.task.cancel(self.cut)

    def let_go(self) -> None:
        """In a fork of the process: it is the parent's, and would not end while we have it too."""
        _let_go(self._sock)


class Registration:
    """Implements targets.Context for connections, and backends.base.Outlet for the sandbox's box."""

    def __init__(
        self,
        service: Service,
        network: Network,
        secrets: tuple[Secret, ...],
        listeners: list[int],
        twin_of: Registration | None = None,
        *,
        relay: Relay | None = None,
    ) -> None:
        """Takes the descriptors over: resolver by UDP, resolver by TCP, proxy, then one for each port.

        With a relay there are none: it listens inside.
        A live copy has the placeholders, the authority and the addresses of names of its original: they are in the
        memory that was copied.
        """
        self._service = service
        self._network = network
        self.vault: Vault = Vault(secrets, {} if twin_of is None else twin_of.env)
        self.env: Mapping[str, str] = self.vault.environment
        self.defaults: Mapping[str, str] = {}
        self.files: Mapping[str, bytes] = {}
        self.rules = rules.compiled(network)
        skipped = int.from_bytes(os.urandom(4), "big") % MOST_SKIPPED
        self.names: Names = Names(skipped) if twin_of is None else twin_of.names.copy()
        self.book = Logbook()
        self.sockets = [socket.socket(fileno=fd) for fd in listeners]
        if relay is None:
            self.ports = tuple(sock.getsockname()[1] for sock in self.sockets[3:])
        else:
            self.sockets.append(relay.datagrams)
            self.ports = listening_ports(network)
        self.is_relayed = relay is not None
        self._weight = 2 if self.is_relayed else 1  # a relayed connection has a pair of sockets more
        self.proxy = proxy_port(network)
        self.open: set[Open] = set()
        self._dialled: weakref.WeakKeyDictionary[Counted, Target] = weakref.WeakKeyDictionary()
        self.entering: set[Relayed] = set()  # by the relay, and not yet served
        self.connections_rate = Bucket(SANDBOX_RATE, SANDBOX_BURST)
        self.queries_rate = Bucket(SANDBOX_RATE, SANDBOX_BURST)
        self.closed = False
        self._ended = threading.Event()
        self._authority: Authority | None = None
        self._reads = trust.is_needed(network, secrets)
        if self._reads and twin_of is not None:
            self._authority = twin_of.authority
        if self._reads:
            self.defaults, self.files = trust.environment(), trust.files(self.authority)
        self._pid = os.getpid()

    # for connections: targets.Context

    @property
    def network(self) -> Network:
        return self._network

    @property
    def authority(self) -> Authority:
        if self._authority is None:
            from ringfence.gateway.secrets.ca import Authority as Made

            self._authority = Made()
        return self._authority

    async def dial(self, target: Target) -> socket.socket:
        await self._turn(target)
        sock = await dialling.dial(self._service.resolver, target, self._network.private, self)
        code = fault(sock.address, self._network.private)
        if code is not None:  # the rules have changed meanwhile
            sock.close()
            raise dialling.refused_address(code, target, sock.address)
        self._service.totals.opened(target, sock)
        self._dialled[sock] = target
        return sock

    async def _turn(self, target: Target) -> None:
        """Nobody is refused at once for a rate: they wait."""
        import asyncio

        last = time.monotonic() + _TURNS_S
        while not self._service.totals.may_dial(target):
            if time.monotonic() > last:
                words = f"too many connections a second are made to {target.name}"
                raise Refusal("net.host-rate", words, verdict="failed")
            await asyncio.sleep(_TURN_S)

    @property
    def totals(self) -> Totals:
        """Of all sandboxes of the process."""
        return self._service.totals

    def begun(self, one: Open) -> None:
        self.open.add(one)
        self._service.totals.connections += self._weight

    def done(self, one: Open) -> None:
        """Twice is nothing more than once."""
        if one in self.open:
            self.open.remove(one)
            self._service.totals.connections -= self._weight

    def log(self, target: Target, *, method: str | None = None, path: str | None = None) -> Entry:
        entry = self.book.begin(target.name, target.port)
        entry.rule = self.rules.decide(target.name, target.port).entry
        entry.method, entry.path = method, path
        return entry

    def finish(self, entry: Entry, *, status: int | None = None, refusal: Refusal | None = None) -> None:
        if status is not None:
            entry.status = status
        self.book.finish(entry, refusal)

    def deny(self, host: str, port: int, refusal: Refusal) -> None:
        """A line for something that never became a connection."""
        self.book.finish(self.book.begin(host, port), refusal)

    def count_up(self, size: int) -> None:
        if self.book.sent + size > self._network.upload:
            raise _over("upload", self._network.upload)
        self._service.totals.count_up(size)
        self.book.sent += size

    def count_down(self, size: int) -> None:
        if self.book.received + size > self._network.download:
            raise _over("download", self._network.download)
        self._service.totals.count_down(size)
        self.book.received += size

    # live rules

    def apply(self, network: Network) -> None:
        """Replace the rules; what they no longer permit in the same way is cut now (G25)."""
        self._network = network
        self.rules = rules.compiled(network)
        closed = self._to_closed_addresses()
        for one in list(self.open):
            if one.verdict is None:
                continue
            target = one.verdict.target
            now = self.rules.decide(target.name, target.port)
            if not now.same_way(one.verdict) or (target.name, target.port) in closed:
                one.cut = now.refusal or Refusal("net.rules-changed", f"the rules for {target} have changed")
                one.stop()

    def _to_closed_addresses(self) -> set[tuple[str, int]]:
        """Targets with a connection to an address that network.private does not open any more."""
        private = self._network.private
        open_ones = [(sock, target) for sock, target in self._dialled.items() if sock.fileno() >= 0]
        return {(target.name, target.port) for sock, target in open_ones if fault(sock.address, private) is not None}

    def set(self, network: Network) -> None:
        """From any thread: returns when the new rules hold. PolicyError for what the sandbox was not built for."""
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
            fix = "start the sandbox with such a rule, or with a secret"
            raise PolicyError(
                "the sandbox was started without rules for methods or paths, so nothing inside trusts its gateway",
                key="network.rules",
                fix=fix,
            )
        self._service.ask(lambda: self.apply(network))

    # for the box and its caller, from any thread: backends.base.Outlet

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

    def end(self) -> list[asyncio.Task[None]]:
        """In the loop, or when there is none. Connections are gone when these tasks are."""
        tasks = [one.task for one in self.open if one.task is not None]
        for one in list(self.open):
            one.stop()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.close()
        self.drop_entering()
        return tasks

    def drop_entering(self) -> None:
        """Of a registration that is closed; from any thread."""
        while self.entering:
            self.entering.pop().close()

    def ended(self) -> None:
        self._ended.set()

    def wait_ended(self, within_s: float) -> bool:
        """After close(), from any thread but the gateway's: whether nothing of it is left."""
        return self._ended.wait(within_s)

    def abandon(self) -> None:
        self.closed = True
        for sock in self.sockets:
            sock.detach()

    def forget(self) -> None:
        self.closed = True
        for sock in self.sockets:
            sock.close()

    def let_go(self) -> None:
        """In a fork of the process: connections are the parent's. Listeners are the business of the box."""
        for one in self.open:
            one.let_go()
        for sock in list(self._dialled):
            _let_go(sock)


def _let_go(sock: socket.socket) -> None:
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)


def _over(name: str, limit: int) -> OverBudget:
    line = f'network.{name} = "{limit * 2}"'
    return OverBudget(f"net.{name}", f"the sandbox has used up its {name} of {limit} bytes", allow=line)
