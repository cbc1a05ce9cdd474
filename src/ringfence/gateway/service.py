"""The gateway of this process: an event loop in a daemon thread, which serves every sandbox that registered.

When the gateway stops, nothing passes: connections are cut, and no connection is accepted. Started again, it serves
the same registrations.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from ringfence.gateway.budget import Totals
from ringfence.host import import_path, lifecycle
from ringfence.policy.reach import relayed_streams
from ringfence.shared import fast_stdlib

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from ringfence.gateway.accept import Acceptor
    from ringfence.gateway.dial import Resolver
    from ringfence.gateway.registration import Registration
    from ringfence.gateway.relay.mux import Relay
    from ringfence.gateway.relay.socket import RelayedSocket
    from ringfence.policy.model import Network
    from ringfence.policy.secrets import Secret

_ANSWER_S = 10.0


class GatewayService:
    """Registrations and the thread that serves them. Safe from several threads.

    The thread imports what needs asyncio, while the caller builds a sandbox.
    """

    def __init__(self) -> None:
        self.totals = Totals()  # budgets of all sandboxes together; used in the loop alone
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._acceptor: Acceptor | None = None  # in the loop alone
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []  # until the loop exists
        self._registrations: set[Registration] = set()
        self._resolver: Resolver | None = None
        self._last_detached: asyncio.Task[None] | None = None  # kept, because asyncio may collect a task that is not

    @property
    def resolver(self) -> Resolver:
        """Return the resolver of all sandboxes, made on first use."""
        from ringfence.gateway.dial import Resolver as Made

        with self._lock:
            if self._resolver is None:
                self._resolver = Made()
            return self._resolver

    # from any thread

    def start(self) -> None:
        """Start the thread and return at once. Idempotent."""
        import_path.guard()  # optional packages may be looked for (L12)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ringfence-gateway", daemon=True)
                self._thread.start()

    def register(
        self, network: Network, secrets: tuple[Secret, ...], listeners: list[int], twin_of: object = None
    ) -> Registration:
        """Take the listeners' descriptors over and serve what connects to them from now on."""
        return self._register(network, secrets, listeners, twin_of, None)

    def register_relayed(
        self,
        network: Network,
        secrets: tuple[Secret, ...],
        channel: socket.socket,
        broken: Callable[[], None],
        twin_of: object = None,
    ) -> tuple[Registration, socket.socket]:
        """Take the channel to guestd over. Return also a socket for the frames that are not the gateway's."""
        from ringfence.gateway.relay.mux import Relay

        def enter(sock: RelayedSocket) -> None:
            registration.entering.add(sock)
            if registration.closed:
                registration.close_entering()
            else:
                self._in_loop(lambda: self._acceptor_here().enter(registration, sock))

        relay = Relay(channel, relayed_streams(network), enter=enter, broken=broken)
        registration = self._register(network, secrets, [], twin_of, relay)
        relay.start()
        return registration, relay.link

    def _register(
        self,
        network: Network,
        secrets: tuple[Secret, ...],
        listeners: list[int],
        twin_of: object,
        relay: Relay | None,
    ) -> Registration:
        from ringfence.gateway.registration import Registration as Made

        if secrets:
            from ringfence.gateway.secrets.vault import leave_no_core

            leave_no_core()  # before a value is kept
        twin = twin_of if isinstance(twin_of, Made) else None
        registration = Made(self, network, secrets, listeners, twin, relay=relay)
        with self._lock:
            self._registrations.add(registration)
        self.start()
        self._in_loop(lambda: self._acceptor_here().listen(registration))
        return registration

    def detach(self, registration: Registration) -> None:
        """End a registration, without waiting."""
        with self._lock:
            self._registrations.discard(registration)
            is_serving = self._thread is not None
        if is_serving:
            self._in_loop(lambda: self._detach(registration))
        else:
            registration.cut()
            registration.mark_ended()

    def ask(self, work: Callable[[], None]) -> None:
        """Run `work` in the loop and wait until it has ended. Raises TimeoutError when the gateway does not answer."""
        done = threading.Event()

        def do() -> None:
            work()
            done.set()

        self.start()
        self._in_loop(do)
        if not done.wait(_ANSWER_S):
            raise TimeoutError("the gateway did not answer in time")

    def stop(self) -> None:
        """Cut every connection, accept no more, and wait until the loop has ended. Registrations stay."""
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return

        def halt() -> None:
            assert self._loop is not None
            self._loop.stop()

        self._in_loop(halt)
        thread.join(_ANSWER_S)

    def after_fork(self) -> None:
        """Close a forked child's copies of every sandbox's descriptors; the thread stayed in the parent."""
        for registration in self._registrations:
            registration.after_fork()

    def _in_loop(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._loop is None:
                self._waiting.append(work)
                return
            self._loop.call_soon_threadsafe(work)

    # in the thread

    def _run(self) -> None:
        import asyncio

        from ringfence.gateway.accept import Acceptor as Made

        fast_stdlib.hold_pipe_signal()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._acceptor = acceptor = Made(loop, self.totals)
        with self._lock:
            self._loop = loop
            waiting, self._waiting = self._waiting, []
            registrations = list(self._registrations)
        for registration in registrations:
            acceptor.listen(registration)
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
            registrations = list(self._registrations)
        for registration in registrations:
            for connection in list(registration.connections):
                connection.stop()
        with contextlib.suppress(OSError):
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    def _acceptor_here(self) -> Acceptor:
        assert self._acceptor is not None
        return self._acceptor

    def _detach(self, registration: Registration) -> None:
        import asyncio

        tasks = self._acceptor_here().cut(registration)

        async def see() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=_ANSWER_S)
            registration.mark_ended()

        assert self._loop is not None
        self._last_detached = self._loop.create_task(see())


_services: dict[int, GatewayService] = {}  # by process: a fork has a service of its own, as threads do not come along


def service() -> GatewayService:
    """Return the gateway of this process."""
    pid = os.getpid()
    found = _services.get(pid)
    if found is None:
        lifecycle.at_exit(lifecycle.GATEWAY, close_service)
        lifecycle.after_fork(_after_fork)
        found = _services.setdefault(pid, GatewayService())
    return found


def close_service() -> None:
    """Stop the thread, at exit and in tests that count what is left. The next sandbox with a network starts one."""
    found = _services.pop(os.getpid(), None)
    if found is not None:
        found.stop()


def _after_fork() -> None:
    for of_parent in _services.values():
        of_parent.after_fork()
    _services.clear()
