"""Plain HTTP between a guest and the network: each request read by h11, checked, and written anew (G11, G12).

Nothing that a guest sent is passed on as it came but bodies: two readings of one request cannot differ when only one
is ever sent. The target is checked again for each request of a kept connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h11

from ringfence.network import refusing, rules
from ringfence.network.targets import Refusal, Target
from ringfence.policy.hosts import canonical_host, split_port

if TYPE_CHECKING:
    import socket

    from ringfence.network.registration import Open, Registration
    from ringfence.network.targets import Client, Entry

    Headers = list[tuple[bytes, bytes]]

HEAD_S = 15.0  # for a whole head
KEPT_S = 60.0  # until the next request on a kept connection
IDLE_S = 300.0  # without a byte of a body, or of an answer
LONGEST_HEAD = 1 << 16
_READ = 1 << 16
# Between two neighbours only; `upgrade` would turn the connection into something that is not looked at (G12).
_HOP = frozenset(
    b"connection proxy-connection keep-alive te trailer upgrade proxy-authorization proxy-authenticate".split()
)


class Head:
    """A request's head, and what came after it."""

    def __init__(self, conn: h11.Connection, request: h11.Request) -> None:
        self.conn = conn
        self.request = request
        self.method = request.method.decode("ascii")
        self.target = request.target.decode("ascii")
        self.headers: Headers = list(request.headers)

    def host(self) -> str | None:
        found = [value for name, value in self.headers if name == b"host"]
        return found[0].decode("latin-1") if found else None


async def read_head(client: Client, within_s: float) -> Head | None:
    """The next request, None at the end of the connection. Raises Refusal for what is not strictly HTTP/1."""
    loop = asyncio.get_running_loop()
    data = client.received
    try:
        async with asyncio.timeout(within_s):
            while b"\r\n\r\n" not in data:
                _check_lines(data)
                if len(data) > LONGEST_HEAD:
                    raise _bad("the head of the request is too long")
                more = await loop.sock_recv(client.sock, _READ)
                if not more:
                    if data:
                        raise Refusal("net.closed", "the client closed within a request", verdict="failed")
                    return None
                data += more
    except TimeoutError:
        if not data:
            return None
        raise Refusal("net.slow", "the request did not come in time", verdict="failed") from None
    finally:
        client.received = data
    _check_lines(data[: data.index(b"\r\n\r\n")])
    client.received = b""
    return _parsed(data)


def _check_lines(head: bytes) -> None:
    """What h11 would still read: lines that end in LF alone, folded lines, NUL."""
    rest = head.replace(b"\r\n", b"")
    if b"\n" in rest or b"\r" in rest.removesuffix(b"\r") or b"\0" in rest:
        raise _bad("a line of the request does not end in CR LF, or holds a control character")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise _bad("a header of the request is folded")


def _parsed(data: bytes) -> Head:
    conn = h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_HEAD)
    try:
        conn.receive_data(data)
        request = conn.next_event()
    except h11.RemoteProtocolError as error:
        raise _bad(f"the request is not HTTP: {error}") from None
    if not isinstance(request, h11.Request):
        raise _bad("the request is not HTTP")
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise _bad("the request says its length in two ways")
    return Head(conn, request)


def _bad(message: str) -> Refusal:
    return Refusal("net.bad-request", message)


async def serve_requests(registration: Registration, one: Open, client: Client, upstream: socket.socket | None) -> None:
    """Requests to the one target that `one` has, as a server would get them, until either side is done."""
    verdict = one.verdict
    assert verdict is not None
    await serve_checked(registration, client, Exchange(registration, one), upstream, verdict.target)


async def serve_checked(
    registration: Registration, client: Client, exchange: Exchange, upstream: socket.socket | None, target: Target
) -> None:
    exchange.keep(target, upstream)
    within = HEAD_S
    try:
        while (head := await read_head(client, within)) is not None:
            path = origin_path(head, target)
            if not await exchange.forward(client, head, target, path):
                return
            within = KEPT_S
    except Refusal as refusal:
        registration.deny(target.name, target.port, refusal)
        await refusing.say_and_close(client.sock, refusing.http_response(refusal))
    finally:
        exchange.close()


def origin_path(head: Head, target: Target) -> str:
    """The path of a request that must be for `target`. Raises Refusal when it names another host (G11)."""
    if head.target.startswith("/"):
        path = head.target
    else:
        named, path = absolute(head.target)
        if named != (target.name, target.port):
            raise Refusal("net.host-header", f"the request is for another host than {target.name}")
    check_host(head, target)
    return path


def check_host(head: Head, target: Target) -> None:
    host = head.host()
    if host is None:
        raise Refusal("net.host-header", "the request names no host")
    try:
        name, port = split_port(host)
        named = canonical_host(name), 80 if port is None else port
    except ValueError:
        named = "", 0
    # A client that connected to another port may leave it out, as some do.
    if named not in ((target.name, target.port), (target.name, 80)):
        raise Refusal("net.host-header", f"the Host header names another host than {target.name}")


def absolute(url: str) -> tuple[tuple[str, int], str]:
    """Host and port, and path with query, of `http://host:port/path`. Raises Refusal for every other form."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme.lower() != "http":
        raise _bad("a proxy request is for an http:// URL; for https use CONNECT")
    cut = min([rest.index(char) for char in "/?" if char in rest], default=len(rest))
    authority, path = rest[:cut], rest[cut:]
    try:
        name, port = split_port(authority)
        found = canonical_host(name), 80 if port is None else port
    except ValueError as error:
        raise _bad(f"the URL's host is not one: {error}") from None
    return found, path if path.startswith("/") else f"/{path}"


class Exchange:
    """Requests of one client, and the connection to where the last one went."""

    def __init__(self, registration: Registration, one: Open) -> None:
        self._registration = registration
        self._one = one
        self._target: Target | None = None
        self._upstream: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def keep(self, target: Target, upstream: socket.socket | None) -> None:
        self._target, self._upstream = target, upstream

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    async def forward(self, client: Client, head: Head, target: Target, path: str) -> bool:
        """One request and its answer; True when the client's connection goes on. Raises Refusal before any answer."""
        registration = self._registration
        entry = registration.log(target, method=head.method, path=path.partition("?")[0])
        try:
            sent = rules.check_request(target.rule, head.method, path, head.headers)
            registration.vault.swap(target, sent, head.headers, verified=False)  # a placeholder is refused (I05)
            kept = await self._upstream_for(target)
            turn = _Turn(self._loop, registration, client, head, entry)
            try:
                again = await turn.run(kept, _outgoing(head, target, sent))
            finally:
                if not turn.reusable:
                    self.close()
        except Refusal as refusal:
            registration.finish(entry, refusal=refusal)
            await refusing.say_and_close(client.sock, refusing.http_response(refusal))
            return False
        except (OSError, h11.ProtocolError, TimeoutError, EOFError):
            broken = Refusal("net.broken", f"the exchange with {target} broke off", verdict="failed")
            registration.finish(entry, refusal=broken)
            if entry.status is None:
                await refusing.say_and_close(client.sock, refusing.http_response(broken))
            return False
        finally:
            registration.finish(entry, refusal=self._one.cut)
        return again

    async def _upstream_for(self, target: Target) -> socket.socket:
        """The kept connection when it leads there, and is still whole."""
        if self._upstream is not None and (self._target != target or _is_stale(self._upstream)):
            self.close()
        if self._upstream is None:
            self._upstream = await self._registration.dial(target)
        self._target = target
        return self._upstream


def _is_stale(sock: socket.socket) -> bool:
    """Nothing may have come between two answers: an end, or words that nobody asked for."""
    try:
        sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _outgoing(head: Head, target: Target, path: str) -> h11.Request:
    named = {
        word.strip().lower() for name, value in head.headers if name == b"connection" for word in value.split(b",")
    }
    dropped = _HOP | named | {b"host"}
    host = target.name if target.port == 80 else f"{target.name}:{target.port}"
    headers = [(b"Host", host.encode()), *((n, v) for n, v in head.headers if n.lower() not in dropped)]
    return h11.Request(method=head.request.method, target=path.encode(), headers=headers)


class _Turn:
    """One request and its answer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, registration: Registration, client: Client, head: Head, entry: Entry
    ) -> None:
        self._loop = loop
        self._registration = registration
        self._client = client
        self._down = head.conn
        self._entry = entry
        self._up = h11.Connection(h11.CLIENT)
        self.reusable = False

    async def run(self, upstream: socket.socket, request: h11.Request) -> bool:
        await self._to_network(upstream, self._up.send(request))
        first = self._down.next_event()
        if isinstance(first, h11.EndOfMessage):  # most requests have no body
            await self._to_network(upstream, self._up.send(first))
            await self._answer(upstream)
        else:
            await self._both_ways(upstream, first)
        self.reusable = self._up.our_state is h11.DONE and self._up.their_state is h11.DONE
        self._client.received = self._down.trailing_data[0]
        return self._down.our_state is h11.DONE and self._down.their_state is h11.DONE

    async def _both_ways(self, upstream: socket.socket, first: object) -> None:
        """The answer may come before the body is through: then the rest of it goes nowhere."""
        body = asyncio.ensure_future(self._body(upstream, first))
        answer = asyncio.ensure_future(self._answer(upstream))
        try:
            await asyncio.wait({body, answer}, return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                body.result()
            await answer
        finally:
            for task in (body, answer):
                task.cancel()
            await asyncio.gather(body, answer, return_exceptions=True)

    async def _body(self, upstream: socket.socket, event: object) -> None:
        while True:
            if event is h11.NEED_DATA:
                async with asyncio.timeout(IDLE_S):
                    self._down.receive_data(await self._loop.sock_recv(self._client.sock, _READ))
            elif isinstance(event, h11.Data | h11.EndOfMessage):
                await self._to_network(upstream, self._up.send(event))
                if isinstance(event, h11.EndOfMessage):
                    return
            else:
                raise EOFError
            event = self._down.next_event()

    async def _to_network(self, upstream: socket.socket, data: bytes | None) -> None:
        if not data:
            return
        self._registration.count_up(len(data))
        self._entry.sent += len(data)
        async with asyncio.timeout(IDLE_S):
            await self._loop.sock_sendall(upstream, data)

    async def _answer(self, upstream: socket.socket) -> None:
        while True:
            event = self._up.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(IDLE_S):
                    data = await self._loop.sock_recv(upstream, _READ)
                self._registration.count_down(len(data))
                self._entry.received += len(data)
                self._up.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    raise EOFError  # nobody asked to switch
                await self._to_guest(self._down.send(event))
            elif isinstance(event, h11.Response):
                self._entry.status = event.status_code
                headers = [(name, value) for name, value in event.headers.raw_items() if name.lower() not in _HOP]
                await self._to_guest(
                    self._down.send(h11.Response(status_code=event.status_code, headers=headers, reason=event.reason))
                )
            elif isinstance(event, h11.Data):
                await self._to_guest(self._down.send(h11.Data(data=event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self._to_guest(self._down.send(h11.EndOfMessage()))
                return
            else:
                raise EOFError

    async def _to_guest(self, data: bytes | None) -> None:
        if data:
            async with asyncio.timeout(IDLE_S):
                await self._loop.sock_sendall(self._client.sock, data)
