"""Accepts the connections of every registration, by listeners and by relays, and starts a task for each.

Runs in the gateway's loop. What a connection wants is known by its listener, or by the port that a relay names: the
resolver, the proxy, or the host that an address inside stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.gateway import dns
from ringfence.gateway.connection import reset
from ringfence.gateway.proxy import serve_proxy
from ringfence.gateway.tunnel import serve_tunnel, verdict_on
from ringfence.gateway.types import Refusal
from ringfence.host import import_path
from ringfence.policy.reach import RESOLVER_PORT

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Coroutine

    from ringfence.gateway.budget import Totals
    from ringfence.gateway.connection import Connection
    from ringfence.gateway.registration import Registration
    from ringfence.gateway.relay.socket import RelayedSocket

    _Work = Coroutine[None, None, None]
    _Serve = Callable[[Registration, Connection], _Work]

_TCP, _NODELAY = 6, 1
_ACCEPTS = 32  # before other listeners have their turn
_PAUSE_S = 0.05
_STREAM_RESOLVERS = 16  # DNS connections at once


class Acceptor:
    """Accepts connections, registration by registration. A connection beyond the rate waits in the kernel's queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, totals: Totals) -> None:
        self._loop = loop
        self._totals = totals

    def listen(self, registration: Registration) -> None:
        """Serve what connects to the registration's sockets from now on. Idempotent."""
        if registration.closed:
            return
        if registration.is_relayed:
            (relayed,) = registration.sockets
            self._loop.add_reader(relayed.fileno(), dns.on_relayed, registration, relayed)
            return
        datagrams, streams, proxy, *ports = registration.sockets
        self._loop.add_reader(datagrams.fileno(), dns.on_datagrams, registration, datagrams)
        self._loop.add_reader(streams.fileno(), self._accept, registration, streams, _serve_resolver)
        self._loop.add_reader(proxy.fileno(), self._accept, registration, proxy, serve_proxy)
        for listener in ports:
            self._loop.add_reader(listener.fileno(), self._accept, registration, listener, _serve_name)

    def cut(self, registration: Registration) -> list[asyncio.Task[None]]:
        """Close the registration's sockets and stop its connections, which are gone when the tasks have ended."""
        for sock in registration.sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
        return registration.cut()

    def enter(self, registration: Registration, sock: RelayedSocket) -> None:
        """Serve a connection by a relay. Its port says what is wanted, as a listener would."""
        port = sock.getsockname()[1]
        serve: _Serve = _serve_name
        if port == RESOLVER_PORT:
            serve = _serve_resolver
        elif port == registration.proxy:
            serve = serve_proxy
        if registration.closed or (serve is _serve_name and port not in registration.ports):
            registration.entering.discard(sock)
            sock.close()
        elif self._has_its_turn(registration):
            registration.entering.discard(sock)
            self._begin(registration, sock, serve)
        else:
            self._loop.call_later(_PAUSE_S, self.enter, registration, sock)

    def _accept(self, registration: Registration, listener: socket.socket, serve: _Serve) -> None:
        import_path.keep_first()  # the caller may have put a finder first since (L12)
        for _ in range(_ACCEPTS):
            if not self._has_its_turn(registration):
                self._pause(registration, listener, serve)
                return
            try:
                sock, _peer = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the client closed before it was accepted
                self._pause(registration, listener, serve)
                return
            sock.setblocking(False)
            sock.setsockopt(_TCP, _NODELAY, 1)
            self._begin(registration, sock, serve)

    def _has_its_turn(self, registration: Registration) -> bool:
        return registration.connections_rate.take() and self._totals.rate.take()

    def _pause(self, registration: Registration, listener: socket.socket, serve: _Serve) -> None:
        """Leave the listener alone for a moment."""
        self._loop.remove_reader(listener.fileno())

        def again() -> None:
            if not registration.closed and listener.fileno() >= 0:
                self._loop.add_reader(listener.fileno(), self._accept, registration, listener, serve)

        self._loop.call_later(_PAUSE_S, again)

    def _begin(self, registration: Registration, sock: socket.socket, serve: _Serve) -> None:
        """Start a task that serves an accepted connection, or reset the connection if there are too many."""
        refusal = _too_many(registration, serve) or self._totals.is_full()
        if refusal is not None:
            registration.deny("*", 0, refusal)
            reset(sock)
            return
        if serve is not _serve_resolver:
            registration.book.connections += 1
        connection = registration.begin(sock)
        work = serve(registration, connection)
        connection.task = self._loop.create_task(_guarded(work, connection))

        def done(_: object) -> None:
            work.close()  # a task that was cancelled early has never begun this
            connection.reset()
            registration.done(connection)

        connection.task.add_done_callback(done)


def _too_many(registration: Registration, serve: _Serve) -> Refusal | None:
    """Return the refusal of a connection beyond the sandbox's own budget, else None."""
    most = registration.network.connections
    if len(registration.connections) < most + (_STREAM_RESOLVERS if serve is _serve_resolver else 0):
        return None
    line = f"network.connections = {most * 2}"
    return Refusal("net.connections", f"{most} connections are open, the most there may be", allow=line)


async def _guarded(work: _Work, connection: Connection) -> None:
    """Await `work`, and end the connection afterwards. An error ends only this connection."""
    try:
        await work
    except OSError:
        return  # the peer went away
    except Exception as error:  # noqa: BLE001  # our fault ends this connection, closed, and is in the log
        fault = Refusal("net.internal", f"the gateway failed: {type(error).__name__}", verdict="failed")
        connection.uplink.deny("(gateway)", 0, fault)
    finally:
        connection.reset()


def _serve_resolver(registration: Registration, connection: Connection) -> _Work:
    return dns.serve_stream(registration, connection.sock)


async def _serve_name(registration: Registration, connection: Connection) -> None:
    """Serve a connection to an address that stands for a host; the caller resets other connections."""
    connection.verdict = verdict_on(registration, connection.sock)
    if connection.verdict is not None:
        await serve_tunnel(connection, None)
