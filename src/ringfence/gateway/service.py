"""The gateway: one event loop in one daemon thread of this process, serving every sandbox that registered.

If it stops, nothing passes: connections are cut and nobody accepts. Started again, it serves the same registrations.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from ringfence.host import import_path
from ringfence.policy.reach import RESOLVER_PORT, relayed_streams
from ringfence.shared import fast_stdlib

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Coroutine

    from ringfence.gateway.budget import Totals
    from ringfence.gateway.dial import Resolver
    from ringfence.gateway.registration import Open, Registration
    from ringfence.gateway.relay.socket import Relayed
    from ringfence.policy.model import Network
    from ringfence.policy.secrets import Secret

_TCP, _NODELAY = 6, 1
_ACCEPTS = 32  # before others have their turn
_PAUSE_S = 0.05
_ASK_S = 10.0
_STREAM_RESOLVERS = 16  # DNS connections at once


class Service:
    """Safe from several threads. What needs asyncio is imported by the thread, while its caller builds a sandbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []  # for a loop that is not there yet
        self._registrations: set[Registration] = set()
        self._resolver: Resolver | None = None
        self._totals: Totals | None = None
        self._last: asyncio.Task[None] | None = None

    @property
    def resolver(self) -> Resolver:
        if self._resolver is None:
            from ringfence.gateway.dial import Resolver as Made

            self._resolver = Made()
        return self._resolver

    @property
    def totals(self) -> Totals:
        """Budgets of all sandboxes together. The loop's."""
        if self._totals is None:
            from ringfence.gateway.budget import Totals as Made

            self._totals = Made()
        return self._totals

    def let_go(self) -> None:
        """In a fork of the process."""
        for registration in self._registrations:
            registration.let_go()

    # from any thread

    def start(self) -> None:
        """Idempotent. Returns at once."""
        import_path.guard()  # optional packages may be looked for (L12)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ringfence-gateway", daemon=True)
                self._thread.start()

    def register(
        self, network: Network, secrets: tuple[Secret, ...], listeners: list[int], twin_of: object = None
    ) -> Registration:
        """Takes the descriptors over. From here on, what connects to them is served."""
        from ringfence.gateway.registration import Registration as Made

        return self._known(Made(self, network, secrets, listeners, twin_of if isinstance(twin_of, Made) else None))

    def register_relayed(
        self,
        network: Network,
        secrets: tuple[Secret, ...],
        channel: socket.socket,
        broken: Callable[[], None],
        twin_of: object = None,
    ) -> tuple[Registration, socket.socket]:
        """Takes the channel to guestd over, and gives another for all that is not the gateway's."""
        from ringfence.gateway.registration import Registration as Made
        from ringfence.gateway.relay.mux import Relay

        def enter(sock: Relayed) -> None:
            registration.entering.add(sock)
            if registration.closed:
                registration.drop_entering()
            else:
                self._soon(lambda: self._enter(registration, sock))

        relay = Relay(channel, relayed_streams(network), enter=enter, broken=broken)
        twin = twin_of if isinstance(twin_of, Made) else None
        registration = self._known(Made(self, network, secrets, [], twin, relay=relay))
        relay.start()
        return registration, relay.link

    def _known(self, registration: Registration) -> Registration:
        with self._lock:
            self._registrations.add(registration)
        self.start()
        self._soon(lambda: self._listen(registration))
        return registration

    def detach(self, registration: Registration) -> None:
        """End it, without waiting."""
        with self._lock:
            self._registrations.discard(registration)
            serving = self._thread is not None
        if serving:
            self._soon(lambda: self._forget(registration))
        else:
            registration.end()
            registration.ended()

    def ask(self, work: Callable[[], None]) -> None:
        """Have `work` done in the loop and wait for it. TimeoutError when the gateway does not answer."""
        done = threading.Event()

        def do() -> None:
            work()
            done.set()

        self.start()
        self._soon(do)
        if not done.wait(_ASK_S):
            raise TimeoutError("the gateway did not answer in time")

    def stop(self) -> None:
        """Cut every connection and accept no more; registrations stay. Waits for it."""
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return

        def halt() -> None:
            assert self._loop is not None
            self._loop.stop()

        self._soon(halt)
        thread.join(_ASK_S)

    def _soon(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._loop is None:
                self._waiting.append(work)
                return
            self._loop.call_soon_threadsafe(work)

    # the thread

    def _run(self) -> None:
        import asyncio

        fast_stdlib.hold_pipe_signal()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        with self._lock:
            self._loop = loop
            waiting, self._waiting = self._waiting, []
            known = list(self._registrations)
        for registration in known:
            self._listen(registration)
        for work in waiting:
            loop.call_soon(work)
        try:
            loop.run_forever()
        finally:
            self._wind_up(loop)

    def _wind_up(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        with self._lock:
            self._loop = self._thread = None
        with contextlib.suppress(OSError):
            loop.run_until_complete(self._cut_all())
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    async def _cut_all(self) -> None:
        with self._lock:
            known = list(self._registrations)
        for registration in known:
            for one in list(registration.open):
                one.stop()

    def _listen(self, registration: Registration) -> None:
        """In the loop. Twice is nothing more than once."""
        from ringfence.gateway import dns

        if registration.closed or self._loop is None:
            return
        if registration.is_relayed:
            (relayed,) = registration.sockets
            self._loop.add_reader(relayed.fileno(), dns.on_relayed, registration, relayed)
            return
        datagrams, streams, proxy, *ports = registration.sockets
        self._loop.add_reader(datagrams.fileno(), dns.on_datagrams, registration, datagrams)
        self._loop.add_reader(streams.fileno(), self._accept, registration, streams, _serve_resolver)
        self._loop.add_reader(proxy.fileno(), self._accept, registration, proxy, _serve_proxy)
        for listener in ports:
            self._loop.add_reader(listener.fileno(), self._accept, registration, listener, _serve_name)

    def _forget(self, registration: Registration) -> None:
        assert self._loop is not None
        for sock in registration.sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
        tasks = registration.end()

        async def see() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=_ASK_S)
            registration.ended()

        import asyncio

        self._last = self._loop.create_task(see())  # held, or it might be collected

    def _accept(self, registration: Registration, listener: socket.socket, serve: _Serve) -> None:
        import_path.keep_first()  # whatever the caller has done since (L12)
        for _ in range(_ACCEPTS):
            if not self._has_its_turn(registration):
                self._pause(registration, listener, serve)
                return
            try:
                sock, _peer = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or it was closed inside before we came
                self._pause(registration, listener, serve)
                return
            sock.setblocking(False)
            sock.setsockopt(_TCP, _NODELAY, 1)
            self._begin(registration, sock, serve)

    def _enter(self, registration: Registration, sock: Relayed) -> None:
        """In the loop: a connection by a relay. Its port says what is wanted, as a listener would."""
        assert self._loop is not None
        port = sock.getsockname()[1]
        serve = (
            _serve_resolver if port == RESOLVER_PORT else _serve_proxy if port == registration.proxy else _serve_name
        )
        if registration.closed or (serve is _serve_name and port not in registration.ports):
            registration.entering.discard(sock)
            sock.close()
        elif self._has_its_turn(registration):
            registration.entering.discard(sock)
            self._begin(registration, sock, serve)
        else:
            self._loop.call_later(_PAUSE_S, self._enter, registration, sock)

    def _has_its_turn(self, registration: Registration) -> bool:
        return registration.connections_rate.take() and self.totals.rate.take()

    def _pause(self, registration: Registration, listener: socket.socket, serve: _Serve) -> None:
        """Nobody is refused: they wait in the kernel's queue."""
        assert self._loop is not None
        loop = self._loop
        loop.remove_reader(listener.fileno())

        def again() -> None:
            if not registration.closed and listener.fileno() >= 0:
                loop.add_reader(listener.fileno(), self._accept, registration, listener, serve)

        loop.call_later(_PAUSE_S, again)

    def _begin(self, registration: Registration, sock: socket.socket, serve: _Serve) -> None:
        from ringfence.gateway.registration import Open
        from ringfence.gateway.splice import reset
        from ringfence.gateway.types import Refusal

        assert self._loop is not None
        most = registration.network.connections
        if len(registration.open) >= most + (_STREAM_RESOLVERS if serve is _serve_resolver else 0):
            line = f"network.connections = {most * 2}"
            refusal = Refusal("net.connections", f"{most} connections are open, the most there may be", allow=line)
            registration.deny("*", 0, refusal)
            reset(sock)
            return
        full = self.totals.is_full()
        if full is not None:
            registration.deny("*", 0, full)
            reset(sock)
            return
        if serve is not _serve_resolver:
            registration.book.connections += 1
        one = Open(sock)
        registration.begun(one)
        serve(self, registration, one, sock)

    def take(self, registration: Registration, one: Open, sock: socket.socket, work: _Work) -> None:
        """In the loop: have a connection served by a task."""
        assert self._loop is not None
        one.task = task = self._loop.create_task(_guarded(work, registration, sock))

        def done(_: object) -> None:
            work.close()  # nobody has begun it where its task was cancelled first
            registration.done(one)

        task.add_done_callback(done)


if TYPE_CHECKING:
    _Work = Coroutine[None, None, None]
    _Serve = Callable[[Service, "Registration", "Open", socket.socket], None]


async def _guarded(work: _Work, registration: Registration, sock: socket.socket) -> None:
    """Whatever goes wrong with one connection ends that connection."""
    from ringfence.gateway.splice import reset
    from ringfence.gateway.types import Refusal

    try:
        await work
    except OSError:
        return  # a peer that went away in the middle of a word
    except Exception as error:  # noqa: BLE001  # a fault of ours ends this connection, closed, and is in the log
        fault = Refusal("net.internal", f"the gateway failed: {type(error).__name__}", verdict="failed")
        registration.deny("(gateway)", 0, fault)
    finally:
        reset(sock)


def _serve_resolver(service: Service, registration: Registration, one: Open, sock: socket.socket) -> None:
    from ringfence.gateway.dns import serve_stream

    service.take(registration, one, sock, serve_stream(registration, sock))


def _serve_proxy(service: Service, registration: Registration, one: Open, sock: socket.socket) -> None:
    from ringfence.gateway.proxy import serve_proxy
    from ringfence.gateway.types import Client

    service.take(registration, one, sock, serve_proxy(registration, one, Client(sock)))


def _serve_name(service: Service, registration: Registration, one: Open, sock: socket.socket) -> None:
    from ringfence.gateway.accept import named, serve_tunnel
    from ringfence.gateway.splice import reset
    from ringfence.gateway.types import Client

    one.verdict = verdict = named(registration, sock)
    if verdict is None:
        registration.done(one)
        reset(sock)
    else:
        service.take(registration, one, sock, serve_tunnel(registration, one, Client(sock), None))


_services: dict[int, Service] = {}  # by process: a fork has its own, as threads do not come along


def close_service() -> None:
    """Stop the thread; the next sandbox with a network starts one. At exit, and in tests that count what is left."""
    found = _services.pop(os.getpid(), None)
    if found is not None:
        found.stop()


def service() -> Service:
    """The one of this process."""
    pid = os.getpid()
    return _services.get(pid) or _services.setdefault(pid, Service())


def _after_fork() -> None:
    """A child that keeps a connection open keeps it from ending: for the guest, and for the server."""
    for of_parent in _services.values():
        of_parent.let_go()
    _services.clear()


os.register_at_fork(after_in_child=_after_fork)
