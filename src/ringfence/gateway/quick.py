"""The first request of a connection, when it is plain and its answer comes whole: no task, no parser but `simple`.

Whatever is not just that is handed over, at the point it has come to, to those who read everything: a request that
asks for more, a refusal, a response that streams, a server that is slow. Every decision is made by the same functions.
In the gateway's loop. Most requests of most programs end here, at a third of the cost.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING

from ringfence.gateway import simple
from ringfence.gateway.accept import serve_tunnel
from ringfence.gateway.budget import Counted
from ringfence.gateway.dial import fault
from ringfence.gateway.http import request
from ringfence.gateway.proxy import absolute, chooser, not_http, serve_proxy
from ringfence.gateway.splice import reset
from ringfence.gateway.stream import SEND_S, Plain
from ringfence.gateway.types import Client, OverBudget, Refusal
from ringfence.policy.hosts import is_address

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ringfence.gateway.http.http1 import Begun
    from ringfence.gateway.registration import Open, Registration
    from ringfence.gateway.rules import Verdict
    from ringfence.gateway.types import Entry, Target

PATIENCE_S = 1.0  # then it is a task's
_READ = 1 << 16
_UNDER_WAY = (0, errno.EINPROGRESS)


class Quick:
    """One connection. `begin` is called once; then it ends by itself, by `cancel`, or is handed over by `take`."""

    def __init__(
        self,
        registration: Registration,
        one: Open,
        sock: socket.socket,
        take: Callable[[Registration, Open, socket.socket, Coroutine[None, None, None]], None],
    ) -> None:
        """For one target when `one` has its verdict, else a proxy's."""
        self._registration = registration
        self._one = one
        self._sock = sock
        self._take = take
        self._verdict = one.verdict
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reading = self._writing = -1  # descriptors that are watched
        self._server: socket.socket | None = None
        self._dialling: asyncio.Task[socket.socket] | None = None
        self._head = b""
        self._asked: simple.Request | None = None
        self._out = b""
        self._target: Target | None = None
        self._entry: Entry | None = None

    def begin(self) -> None:
        self._timer = self._loop.call_later(PATIENCE_S, self._guarded, self._give_up)
        self._guarded(self._on_request)

    def cancel(self) -> None:
        """Cut it, now."""
        cut = self._one.cut or Refusal("net.cut", "the connection was cut", verdict="failed")
        self._leave()
        self._fail(cut)

    # the request

    def _on_request(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            self._read(self._sock, self._on_request)
            return
        self._head = data
        asked = simple.request(data)
        target = None if asked is None else self._permitted(asked)
        if asked is None or target is None:
            self._hand_over()
            return
        self._asked = asked
        self._target = target
        self._unwatch()
        if is_address(target.name):
            self._connect(target)
        else:
            self._dialling = self._loop.create_task(self._registration.dial(target))
            self._dialling.add_done_callback(self._dialled)

    def _permitted(self, asked: simple.Request) -> Target | None:
        """Where it goes, if nobody has to look at it more closely; what there is to refuse, others refuse."""
        try:
            verdict, path = self._chosen(asked)
            target = verdict.target
            rule = target.rule
            if verdict.refusal is not None or not_http(verdict) is not None:
                return None
            if rule is not None and (rule.methods or rule.paths):
                return None
            plain = request.Asked(asked.method, path, asked.host, (), False)
            path = request.check_request(target, plain).target
            from ringfence.gateway.http import http1  # noqa: F401  # without h11 nobody could take it over
        except (Refusal, ImportError):
            return None
        self._one.verdict = verdict
        self._out = simple.written(asked, path)
        self._entry = self._registration.log(target, method=asked.method, path=path.partition("?")[0][:4096])
        return target

    def _chosen(self, asked: simple.Request) -> tuple[Verdict, str]:
        if self._verdict is None:
            named, path = absolute(asked.target)
            return self._registration.rules.decide(*named), path
        if not asked.target.startswith("/"):
            raise request.malformed("its target is not a path")
        return self._verdict, asked.target

    # the server

    def _connect(self, target: Target) -> None:
        """To an address that the policy names itself: checked as any other."""
        address = target.name.strip("[]")
        totals = self._registration.totals
        try:
            is_its_turn = totals.may_dial(target)
        except Refusal:
            is_its_turn = False  # it is told why where it waits
        if not is_its_turn or fault(address, self._registration.network.private) is not None:
            self._hand_over()
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = server = Counted(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        server.address = address
        self._registration.dialled(target, server)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.connect_ex((address, target.port)) not in _UNDER_WAY:
            self._hand_over()
            return
        self._send()  # a near one is there already

    def _dialled(self, task: asyncio.Task[socket.socket]) -> None:
        if self._dialling is not task:  # it was cut meanwhile
            if not task.cancelled() and task.exception() is None:
                task.result().close()
            return
        self._dialling = None
        if task.cancelled():
            self.cancel()
            return
        error = task.exception()
        if isinstance(error, Refusal):
            self._guarded(lambda: self._go_on(error))
        elif error is not None:
            self._guarded(self._hand_over)
        else:
            self._server = task.result()
            self._guarded(self._send)

    def _send(self) -> None:
        assert self._server is not None
        assert self._entry is not None
        try:
            if not self._entry.sent:
                self._registration.count_up(len(self._out))
                self._entry.sent = len(self._out)
            sent = self._server.send(self._out)
        except OverBudget as refusal:
            self._go_on(refusal)
            return
        except BlockingIOError:
            self._write(self._server, self._send)
            return
        except OSError:
            self._registration.uncount_up(len(self._out))
            self._hand_over()
            return
        if sent != len(self._out):
            raise ConnectionResetError  # a few bytes into a new socket: they always go
        self._unwatch()
        self._read(self._server, self._on_response)

    # the response

    def _on_response(self) -> None:
        assert self._server is not None
        assert self._asked is not None
        assert self._entry is not None
        try:
            data = self._server.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        found = simple.response(data, self._asked)
        if found is None:
            self._go_on(None, data)
            return
        try:
            self._registration.count_down(len(data))
        except OverBudget:
            self._go_on(None, data)  # counted again, and refused there
            return
        self._entry.received = len(data)
        self._registration.finish(self._entry, status=found.status)  # before the client can know that it is over
        self._entry = None
        self._leave()
        self._answer(found.words, keeps=found.keeps)

    def _answer(self, words: bytes, *, keeps: bool) -> None:
        assert self._asked is not None
        try:
            words = words[self._sock.send(words) :]
        except BlockingIOError:
            pass  # there is no room: all of it is sent later
        if words or not self._asked.closes:
            self._hand(self._rest(words, keeps=keeps))
        else:
            self._close()
            self._sock.close()
            self._over()

    async def _rest(self, words: bytes, *, keeps: bool) -> None:
        """What the client did not take at once, and its next requests."""
        from ringfence.gateway.http.http1 import Begun

        assert self._asked is not None
        assert self._target is not None
        stream = None
        if self._server is not None and keeps:
            stream = self._plain(self._server, b"")
        else:
            self._close()
        try:
            async with asyncio.timeout(SEND_S):
                await self._loop.sock_sendall(self._sock, words)
        except BaseException:
            self._close()
            raise
        if self._asked.closes:
            self._close()
            self._sock.close()
        else:
            await self._read_all(Begun(b"", self._target, None, stream, None))

    # to those who read everything

    def _hand_over(self) -> None:
        """Nothing has been sent: it begins there."""
        self._leave()
        self._close()
        client = Client(self._sock, self._head)
        if self._verdict is None:
            self._hand(serve_proxy(self._registration, self._one, client))
        else:
            self._one.verdict = self._verdict
            self._hand(serve_tunnel(self._registration, self._one, client, None))

    def _go_on(self, refusal: Refusal | None, data: bytes = b"") -> None:
        """The request has been sent, or cannot be; what came back goes along."""
        from ringfence.gateway.http.http1 import Begun

        assert self._target is not None
        self._leave()
        stream = None
        if self._server is not None:
            stream = self._plain(self._server, data)
        entry, self._entry = self._entry, None
        self._hand(self._read_all(Begun(self._head, self._target, entry, stream, refusal)))

    def _plain(self, server: socket.socket, data: bytes) -> Plain:
        counts = self._registration
        return Plain(server, data, count_up=counts.count_up, count_down=counts.count_down)

    async def _read_all(self, begun: Begun) -> None:
        from ringfence.gateway.http.intercept import fixed, serve_plain

        choose = chooser(self._registration, self._one) if self._verdict is None else fixed(begun.target)
        await serve_plain(Client(self._sock), self._registration, choose, begun)

    def _hand(self, work: Coroutine[None, None, None]) -> None:
        self._one.quick = None
        self._take(self._registration, self._one, self._sock, work)

    def _give_up(self) -> None:
        """It takes long: a task has the time, and looks after a client that goes away."""
        if self._dialling is not None:
            self._timer = self._loop.call_later(PATIENCE_S, self._guarded, self._give_up)  # it has deadlines of its own
        elif self._reading >= 0 and self._entry is not None:
            self._go_on(None)
        else:
            self._hand_over()

    # ends

    def _guarded(self, step: Callable[[], None]) -> None:
        """Whatever goes wrong with one connection ends that connection."""
        try:
            step()
        except OSError:  # a peer that went away in the middle of a word
            self._leave()
            self._fail(Refusal("net.broken", "the connection broke off in the middle of a request", verdict="failed"))
        except Exception as error:  # noqa: BLE001  # a fault of ours ends this connection, closed, and is in the log
            fault_ = Refusal("net.internal", f"the gateway failed: {type(error).__name__}", verdict="failed")
            self._leave()
            self._registration.deny("(gateway)", 0, fault_)
            self._fail(fault_)

    def _fail(self, refusal: Refusal) -> None:
        if self._entry is not None:
            self._registration.finish(self._entry, refusal=refusal)
        self._close()
        reset(self._sock)
        self._over()

    def _over(self) -> None:
        self._one.quick = None
        self._registration.done(self._one)

    def _leave(self) -> None:
        """Nothing of it is waited for any more."""
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _read(self, sock: socket.socket, step: Callable[[], None]) -> None:
        if self._reading < 0:
            self._reading = sock.fileno()
            self._loop.add_reader(self._reading, self._guarded, step)

    def _write(self, sock: socket.socket, step: Callable[[], None]) -> None:
        if self._writing < 0:
            self._writing = sock.fileno()
            self._loop.add_writer(self._writing, self._guarded, step)

    def _unwatch(self) -> None:
        if self._reading >= 0:
            self._loop.remove_reader(self._reading)
            self._reading = -1
        if self._writing >= 0:
            self._loop.remove_writer(self._writing)
            self._writing = -1
