"""A gateway reduced to interception: it accepts on loopback, dials the test's server, and keeps the log in a list."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.servers import Loop, Server
from ringfence.gateway import stream
from ringfence.gateway.budget import Totals
from ringfence.gateway.connection import Connection
from ringfence.gateway.http.intercept import fixed, intercept, serve_plain
from ringfence.gateway.secrets.ca import Authority
from ringfence.gateway.secrets.vault import Vault
from ringfence.gateway.types import LogEntry, OverBudget, Refusal, Target
from ringfence.policy.model import Network, Rule
from ringfence.policy.secrets import Secret

HOST = "api.example.com"


class Desk:
    """A stand-in for a sandbox's Uplink: everything the sandbox sends goes through the Desk."""

    def __init__(self, server: Server, *secrets: Secret, rule: Rule | None = None, port: int = 443) -> None:
        self.network = Network(allow=[HOST]) if rule is None else Network(rules=[rule])
        self.vault = Vault(secrets)
        self.authority = Authority()
        self.totals = Totals()
        self.target = Target(HOST, port, rule)
        self.lines: list[tuple[LogEntry, int | None, Refusal | None]] = []
        self.upload = 1 << 30
        self.port = 0
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    async def dial(self, target: Target) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._server.port))
        except OSError:
            sock.close()
            raise Refusal("net.unreachable", f"{target} does not answer", verdict="failed") from None
        return sock

    def log(self, target: Target, *, method: str | None = None, path: str | None = None) -> LogEntry:
        entry = LogEntry(len(self.lines), target.name, target.port)
        entry.method, entry.path = method, path
        return entry

    def finish(self, entry: LogEntry, *, status: int | None = None, refusal: Refusal | None = None) -> None:
        self.lines.append((entry, status, refusal))

    def deny(self, host: str, port: int, refusal: Refusal) -> None:
        self.finish(LogEntry(len(self.lines), host, port), refusal=refusal)

    def count_up(self, size: int) -> None:
        self.upload -= size
        if self.upload < 0:
            raise OverBudget("net.upload", "the sandbox has used up its upload")

    def count_down(self, size: int) -> None:
        del size

    @property
    def said(self) -> list[tuple[str | None, str | None, int | None, str | None]]:
        """Return the log for comparison: method, path, status, code of the refusal."""
        return [
            (entry.method, entry.path, status, None if refusal is None else refusal.code)
            for entry, status, refusal in self.lines
        ]

    async def accept(self, listener: socket.socket, *, tls: bool) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            sock.setblocking(False)
            task = asyncio.create_task(self._serve(sock, tls=tls))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket, *, tls: bool) -> None:
        received = await asyncio.get_running_loop().sock_recv(sock, 65_536)
        connection = Connection(sock, self)
        connection.received = received
        if tls:
            await intercept(connection, self.target)
        else:
            await serve_plain(connection, fixed(self.target))


@contextmanager
def open_desk(loop: Loop, desk: Desk, *, tls: bool = True) -> Iterator[Desk]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    desk.port = listener.getsockname()[1]

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(desk.accept(listener, tls=tls))

    task = loop.do(begin())
    try:
        yield desk
    finally:

        async def end() -> None:
            task.cancel()
            others = [task, *desk._tasks]
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        loop.do(end())
        listener.close()


@contextmanager
def trusting(roots: Path) -> Iterator[None]:
    """The gateway trusts the test's roots and no others. No setting of an installed package does this."""
    before = stream.trusted_roots

    def load(context: ssl.SSLContext) -> None:
        context.load_verify_locations(roots)

    stream.trusted_roots = load
    try:
        yield
    finally:
        stream.trusted_roots = before


def wait_until(holds: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait until `condition` is true: the gateway's side of a connection may end a moment after the client's."""
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()
