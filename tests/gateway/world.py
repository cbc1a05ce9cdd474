"""A small internet for tests: names that the gateway's resolver knows, and servers on loopback behind the names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.servers import Handler, Loop, Roots, Server, echo, serving
from ringfence import Limits, Network, Policy, Rule, Sandbox
from ringfence.backends import Process
from ringfence.gateway.service import service
from ringfence.results import Result
from ringfence.values import replace

if TYPE_CHECKING:
    from ringfence.backends import Backend

LIMITS = Limits(timeout_s=20, memory="512M", processes=64)


class World:
    """A small internet: `names` has the addresses that the gateway finds, `lookups` the look-ups that it made."""

    def __init__(self, loop: Loop, roots: Roots) -> None:
        self.loop = loop
        self.roots = roots
        self.names: dict[str, list[str]] = {}
        self.lookups: list[str] = []
        self.backend: Backend = Process()

    def lookup(self, name: str, port: int) -> list[str]:
        del port
        self.lookups.append(name)
        if name not in self.names:
            raise OSError("no such name")
        return self.names[name]

    @contextmanager
    def https(self, *names: str, handler: Handler = echo) -> Iterator[Server]:
        """Run a TLS server that these names lead to."""
        self.names.update({name: ["127.0.0.1"] for name in names})
        with serving(self.loop, self.roots.server(*names), handler) as server:
            yield server

    @contextmanager
    def http(self, *names: str, handler: Handler = echo) -> Iterator[Server]:
        self.names.update({name: ["127.0.0.1"] for name in names})
        with serving(self.loop, None, handler) as server:
            yield server

    def policy(self, *allow: str, rules: tuple[Rule, ...] = (), **budgets: int) -> Policy:
        """Names may lead to loopback, where the servers are."""
        network = Network(allow=list(allow), rules=list(rules), private=["127.0.0.0/8"])
        return Policy(limits=LIMITS, network=replace(network, **budgets))

    @contextmanager
    def sandbox(self, policy: Policy) -> Iterator[Sandbox]:
        with Sandbox(policy=policy, backend=self.backend) as box:
            box.files.write("roots.pem", self.roots.path.read_bytes())
            yield box


@contextmanager
def world(loop: Loop, roots: Roots) -> Iterator[World]:
    made = World(loop, roots)
    resolver = service().resolver
    before, resolver.lookup = resolver.lookup, made.lookup
    try:
        yield made
    finally:
        resolver.lookup = before


def curl(box: Sandbox, url: str, *options: str) -> Result:
    """Return the result of curl: the body, then a line with the status."""
    return box.exec(["curl", "-sS", "--cacert", "roots.pem", "-w", "\n%{http_code}", *options, url])


def codes(result: Result) -> list[tuple[str, str]]:
    """Return target and code of each denial."""
    return [(denial.target, denial.code) for denial in result.denials]


@contextmanager
def listening(serve: Callable[[socket.socket], None], address: str = "127.0.0.1") -> Iterator[int]:
    """Run a TCP server; `serve` gets each connection, in a thread."""
    listener = socket.create_server((address, 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=run, args=(connection,), daemon=True).start()

    def run(connection: socket.socket) -> None:
        with connection:
            try:
                serve(connection)
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
