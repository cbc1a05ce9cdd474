"""HTTP/1.1 through the gateway: each request is parsed, checked, written anew and answered before the next is read.

No byte of the guest's head is passed on unparsed, so that nothing can be smuggled (G12). Bodies stream, in
both directions at once. Messages of h11 may quote a header: they are never shown (I03).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h11

from ringfence.gateway.http import request
from ringfence.gateway.http.request import LARGEST_HEAD, RequestHead, refusal_body, refusal_headers, status_of
from ringfence.gateway.secrets.scrub import WebsocketFrames
from ringfence.gateway.stream import STALL_S
from ringfence.gateway.types import Refusal, Target

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ringfence.gateway.connection import Connection
    from ringfence.gateway.http.request import CheckedRequest
    from ringfence.gateway.secrets.scrub import Forms
    from ringfence.gateway.secrets.vault import Headers
    from ringfence.gateway.stream import ByteStream
    from ringfence.gateway.types import LogEntry


class Route:
    """Where the requests of one connection go.

    `choose` gets the request target and every Host of a request, and returns the permitted target with the request
    target in origin form. `connect` opens a stream to a target. Both raise Refusal.
    """

    def __init__(
        self,
        connection: Connection,
        choose: Callable[[str, list[str]], tuple[Target, str]],
        connect: Callable[[Target], Awaitable[ByteStream]],
        *,
        verified: bool,
    ) -> None:
        self.connection = connection
        self.choose = choose
        self.connect = connect
        self.verified = verified  # the server speaks TLS, and its certificate was checked


class KeptServer:
    """The connection to the server, kept for the next request to the same target."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._target: Target | None = None
        self._stream: ByteStream | None = None
        self.is_reused = False

    async def get(self, target: Target) -> ByteStream:
        """Return the kept stream to `target`, or a new stream. Raises Refusal."""
        stream = self._stream
        if stream is not None and self._target == target and not stream.is_stale():
            self.is_reused = True
            return stream
        self.close()
        self._stream = stream = await self._route.connect(target)
        self._target = target
        self.is_reused = False
        return stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None


IDLE_S = 120.0  # between two requests
HEAD_S = 30.0  # for a whole head, however slowly it comes
_WATCH_S = 1.0  # how often a client that waits for its answer is checked
_LAST_WORD_S = 5.0
_LINGER_S = 1.0
_FIRST = asyncio.FIRST_COMPLETED
_EVENTS_A_TURN = 8  # a read may hold many chunks of a byte or many 1xx, and the loop serves every sandbox
_FRAMES_A_TURN = 1 << 12  # bytes of a websocket, in which a frame may take two
_REPEATABLE = frozenset(("GET", "HEAD", "OPTIONS"))
_MOST_DRAINED = 1 << 18  # of the body of a refused request, so that the connection stays usable


_UNREADABLE = Target("(malformed request)", 0, None)


class Closed(Exception):  # noqa: N818  # an end, not an error
    """The connection is over, and nothing more can be sent."""


async def serve_http1(guest: ByteStream, route: Route) -> None:
    """Serve requests until the guest or the server ends. The caller closes `guest`. Raises OSError, TimeoutError."""
    server = KeptServer(route)
    rest = b""
    try:
        while True:
            rest = await _Exchange(guest, route, server).run(rest)
            if rest:
                await asyncio.sleep(0)  # many small requests in one read, all refused, wait for nothing else
    except Closed:
        return
    finally:
        server.close()


class _Exchange:
    """A request and its response: `above` is h11 towards the guest, `below` towards the server."""

    def __init__(self, guest: ByteStream, route: Route, server: KeptServer) -> None:
        self._guest = guest
        self._route = route
        self._uplink = route.connection.uplink
        self._server = server
        self._above = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD)
        self._below = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD)
        self._entry: LogEntry | None = None
        self._answered = False
        self._is_head = False  # the answer has no body
        self._pumps = False  # the request is on its way to the server, partly or wholly
        self._status = 0
        self._is_chunked = False
        self._came = 0
        self._events = 0
        self._held = b""  # the head of the answer, not yet sent

    async def run(self, rest: bytes) -> bytes:
        """Serve the exchange; return what was read of the next request. Raises Closed when there will be none."""
        try:
            await self._pass_on(await self._head(rest))
        except Refusal as refusal:
            await self._refuse(refusal)
        except (h11.ProtocolError, OSError, TimeoutError):
            await self._break_off()
        except asyncio.CancelledError:
            cut = Refusal("net.cut", "the connection was cut", verdict="failed")
            self._finish(self._route.connection.cut or cut)
            raise
        return self._rest()

    def _rest(self) -> bytes:
        if self._above.our_state is not h11.DONE or self._above.their_state is not h11.DONE:
            raise Closed
        return self._above.trailing_data[0]

    # the request

    async def _head(self, data: bytes) -> h11.Request:
        if not data:
            data = await self._guest.receive(IDLE_S)
            if not data:
                raise Closed
        async with asyncio.timeout(HEAD_S):
            while (end := data.find(b"\r\n\r\n")) < 0:
                if len(data) > LARGEST_HEAD or b"\n\n" in data:
                    break
                more = await self._guest.receive(HEAD_S)
                if not more:
                    raise Closed
                data += more
        if end < 0 or end > LARGEST_HEAD:
            raise request.malformed(f"its head is longer than {LARGEST_HEAD} bytes, or has no end")
        request.check_raw_head(data[: end + 4])
        self._above.receive_data(data)
        try:
            event = self._above.next_event()
        except h11.RemoteProtocolError:
            raise request.malformed("it is not HTTP/1.1") from None
        if type(event) is not h11.Request:
            raise request.malformed("it is not HTTP/1.1")
        self._is_head = event.method == b"HEAD"
        return event

    async def _pass_on(self, head: h11.Request) -> None:
        headers = list(head.headers.raw_items())
        hosts = [value.decode("latin-1") for name, value in headers if name.lower() == b"host"]
        method = head.method.decode("ascii")
        try:
            target, path = self._route.choose(head.target.decode("ascii"), hosts)
        except Refusal as refusal:
            if refusal.asked_for is not None:
                self._begin_line(method, *refusal.asked_for)
            raise
        self._begin_line(method, target, path)
        if not hosts:
            raise request.malformed("it has no Host")
        request.check_header_block(headers)
        asked = RequestHead(method, path, hosts[0], tuple(headers), _has_body(headers))
        checked = request.check_request(target, asked)
        upgrade = _upgrade(target, asked)
        out = self._outgoing(target, asked, checked, upgrade=upgrade)
        stream = await self._server.get(target)
        try:
            await self._ask(stream, out, target, asked)
        except (h11.RemoteProtocolError, OSError) as error:
            if not self._may_repeat(asked, error):
                raise
            self._server.close()
            self._below = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD)
            await self._ask(await self._server.get(target), out, target, asked)

    def _begin_line(self, method: str, target: Target, path: str) -> None:
        self._entry = self._uplink.log(target, method=method[:64], path=path.partition("?")[0][:4096])

    def _may_repeat(self, asked: RequestHead, error: Exception) -> bool:
        """Return whether the request may be sent again, on a new connection.

        A server may close a kept connection just when the gateway uses it again, and then has not seen the request.
        A server that saw the request looks the same, and therefore only safe methods are repeated (RFC 9110, 9.2.2).
        """
        if isinstance(error, TimeoutError) or not self._server.is_reused or self._came or self._guest.is_gone():
            return False
        return asked.method in _REPEATABLE and not asked.has_body

    async def _ask(self, stream: ByteStream, out: h11.Request, target: Target, asked: RequestHead) -> None:
        self._pumps = True
        await self._send(stream, out)
        await self._both_ways(stream, target, asked)

    def _outgoing(self, target: Target, asked: RequestHead, checked: CheckedRequest, *, upgrade: bool) -> h11.Request:
        headers = request.end_to_end(list(asked.headers))
        if self._uplink.vault.forms(target):
            headers = request.identity_only(headers)
            # A compressed websocket could carry a value unseen.
            headers = [pair for pair in headers if pair[0].lower() != b"sec-websocket-extensions"]
        if upgrade:
            headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        path, headers = self._uplink.vault.swap(target, checked.target, headers, verified=self._route.verified)
        try:
            return h11.Request(method=asked.method, target=path, headers=headers)
        except h11.LocalProtocolError:  # its message would quote the header
            raise request.malformed("a header holds characters that it cannot") from None

    async def _send(self, stream: ByteStream, event: h11.Event) -> None:
        data = self._below.send(event)
        if data:
            await stream.send(data)
            self._count_up(len(data))

    async def _give_turn(self) -> None:
        """Let other connections run now and then. Called before each event that is read from h11."""
        self._events += 1
        if self._events % _EVENTS_A_TURN == 0:
            await asyncio.sleep(0)

    async def _request_body(self, stream: ByteStream) -> None:
        while True:
            await self._give_turn()
            try:
                event = self._above.next_event()
            except h11.RemoteProtocolError:
                raise request.malformed("its body does not keep to its length or its chunks") from None
            if event is h11.NEED_DATA:
                self._above.receive_data(await self._guest.receive())
            elif type(event) is h11.Data:
                await self._send(stream, h11.Data(data=bytes(event.data)))
            elif type(event) is h11.EndOfMessage:
                await self._send(stream, h11.EndOfMessage())  # trailers of a request end here
                return
            else:
                raise Closed

    async def _both_ways(self, stream: ByteStream, target: Target, asked: RequestHead) -> None:
        if not asked.has_body:
            if self._above.their_state is not h11.DONE and type(self._above.next_event()) is not h11.EndOfMessage:
                raise Closed
            await self._send(stream, h11.EndOfMessage())
            await self._only_answer(stream, target, asked)
            return
        body = asyncio.create_task(self._request_body(stream))
        answer = asyncio.create_task(self._response(stream, target, asked))
        try:
            while not answer.done():
                await asyncio.wait((answer,) if body.done() else (body, answer), timeout=_WATCH_S, return_when=_FIRST)
                if body.done() and not answer.done():
                    await _settle(body, answer)
                if self._guest.is_gone():
                    raise ConnectionResetError
            await answer
            if not body.done() or body.exception() is not None:
                # Answered early: the body may be half sent, and the server would read the next request as a part of it.
                self._server.close()
        finally:
            for task in (body, answer):
                task.cancel()
            await asyncio.gather(body, answer, return_exceptions=True)

    async def _only_answer(self, stream: ByteStream, target: Target, asked: RequestHead) -> None:
        answer = asyncio.create_task(self._response(stream, target, asked))
        try:
            while not answer.done():
                await asyncio.wait((answer,), timeout=_WATCH_S)
                if self._guest.is_gone():
                    raise ConnectionResetError
            await answer
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    # the response

    async def _response(self, stream: ByteStream, target: Target, asked: RequestHead) -> None:
        forms = self._uplink.vault.forms(target)
        scrubber = forms.stream()
        while True:
            event = await self._next(stream)
            if type(event) is h11.InformationalResponse and event.status_code != 101:
                await self._answer(h11.InformationalResponse(status_code=event.status_code, headers=[]))
            elif type(event) is h11.InformationalResponse:
                await self._switch(stream, event, target)
                return
            elif type(event) is h11.Response:
                headers = request.response_headers(_masked(forms, event))
                if forms and asked.method != "HEAD" and event.status_code not in (204, 304):
                    request.check_readable(headers, target)
                reason = forms.mask(bytes(event.reason))
                await self._answer(h11.Response(status_code=event.status_code, headers=headers, reason=reason))
                self._status = event.status_code
            elif type(event) is h11.Data:
                await self._answer(h11.Data(data=scrubber.feed(bytes(event.data))))
            elif type(event) is h11.EndOfMessage:
                if tail := scrubber.end():
                    await self._answer(h11.Data(data=tail))
                trailers = _masked(forms, event)
                self._finish(None)  # before the client can see the end
                await self._answer(h11.EndOfMessage(headers=trailers if self._is_chunked else []))
                self._after()
                return
            else:
                raise OSError("the server went away in the middle of its response")

    async def _next(self, stream: ByteStream) -> object:
        await self._give_turn()
        while (event := self._below.next_event()) is h11.NEED_DATA:
            await self._send_head()
            data = await stream.receive(STALL_S)
            self._came += len(data)
            self._count_down(len(data))
            self._below.receive_data(data)
        return event

    async def _answer(self, event: h11.Event) -> None:
        if type(event) is h11.Response:
            self._answered = True
            self._is_chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
            self._held = self._above.send(event) or b""  # sent together with the body, if that has come already
            return
        data = self._held + (self._above.send(event) or b"")
        self._held = b""
        if data:
            await self._guest.send(data)

    async def _send_head(self) -> None:
        if self._held:
            head, self._held = self._held, b""
            await self._guest.send(head)

    def _after(self) -> None:
        over = self._below.our_state is h11.DONE and self._below.their_state is h11.DONE
        if not over or self._below.trailing_data[0]:
            # The server closed, or is out of step: bytes after a response are no answer to the next request.
            self._server.close()

    async def _switch(self, stream: ByteStream, event: h11.InformationalResponse, target: Target) -> None:
        """Pass a websocket on: bytes from here, with secret values still taken out of the messages that come back."""
        forms = self._uplink.vault.forms(target)
        self._status = 101
        headers = _masked(forms, event)
        await self._answer(h11.InformationalResponse(status_code=101, headers=headers, reason=b"Switching Protocols"))
        self._answered = True
        early = self._above.trailing_data[0]
        rest = self._below.trailing_data[0]
        self._count_up(len(early))  # the rest was counted when it came
        frames = WebsocketFrames(forms) if forms else None
        up = asyncio.create_task(_copy(self._guest, stream, early, None, self._count_up))
        down = asyncio.create_task(_copy(stream, self._guest, rest, frames, self._count_down))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            ended = await asyncio.gather(up, down, return_exceptions=True)
        if any(isinstance(one, ValueError) for one in ended):
            message = f"{target} sent what is no websocket, or a compressed one, and a secret could be in it"
            self._finish(Refusal("secret.encoded-response", message, verdict="failed"))
        self._finish(next((one for one in ended if isinstance(one, Refusal)), None))  # a budget is used up
        raise Closed

    def _count_up(self, size: int) -> None:
        if self._entry is not None:
            self._entry.sent += size

    def _count_down(self, size: int) -> None:
        if self._entry is not None:
            self._entry.received += size

    # ends

    def _finish(self, refusal: Refusal | None) -> None:
        entry, self._entry = self._entry, None
        if entry is None and refusal is not None and refusal.code == "net.malformed":
            entry = self._uplink.log(_UNREADABLE)  # its target is unknown
        if entry is not None:
            status = status_of(refusal) if refusal is not None and not self._answered else self._status
            self._uplink.finish(entry, status=status or None, refusal=refusal)

    async def _break_off(self) -> None:
        """End the exchange because the guest or the server is gone, or the server does not speak HTTP."""
        refusal = Refusal("net.broken", "the connection broke off in the middle of a request", verdict="failed")
        if self._entry is None or self._guest.is_gone() or (self._server.is_reused and not self._came):
            # The server closed a kept connection, and the request must not be repeated: the client sees it closed.
            self._finish(refusal)
            raise Closed
        self._server.close()
        await self._refuse(refusal)

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer with the refusal instead of a response; raise Closed where no answer is possible any more."""
        self._finish(refusal)
        if self._pumps:
            self._server.close()  # its answer may still come, and must not answer the next request
        if self._answered or self._above.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise Closed
        body = refusal_body(refusal)
        headers = refusal_headers(body)
        stays = refusal.code != "net.malformed" and await self._drained()
        if not stays:
            headers.append((b"connection", b"close"))
        await self._answer(
            h11.Response(status_code=status_of(refusal), headers=headers, reason=b"Refused by Ringfence")
        )
        if not self._is_head:
            await self._answer(h11.Data(data=body))
        await self._answer(h11.EndOfMessage())
        if not stays:
            await self._linger()

    async def _linger(self) -> None:
        """Read what still comes: closing a socket with unread bytes would discard our answer. Raises Closed."""
        left = _MOST_DRAINED
        try:
            while left > 0 and (data := await self._guest.receive(_LINGER_S)):
                left -= len(data)
        except (OSError, TimeoutError):
            pass  # the guest is gone, or has read the answer
        raise Closed

    async def _drained(self) -> bool:
        """Read the rest of the refused request; return whether the next request can follow on the connection."""
        if self._pumps or self._above.their_state is not h11.SEND_BODY or self._above.they_are_waiting_for_100_continue:
            return self._above.their_state is h11.DONE
        left = _MOST_DRAINED
        while left > 0:
            await self._give_turn()
            try:
                event = self._above.next_event()
                if event is h11.NEED_DATA:
                    data = await self._guest.receive(HEAD_S)
                    left -= len(data)
                    self._above.receive_data(data)
                elif type(event) is not h11.Data:
                    return type(event) is h11.EndOfMessage
            except (h11.ProtocolError, OSError, TimeoutError):
                return False
        return False


async def _settle(body: asyncio.Task[None], answer: asyncio.Task[None]) -> None:
    """Raise the error of an ended body, unless the server, which did not take all of it, has answered already."""
    error = body.exception()
    if error is None:
        return
    if isinstance(error, OSError):
        await asyncio.wait((answer,), timeout=_LAST_WORD_S)
    if not answer.done():
        raise error


async def _copy(
    source: ByteStream, sink: ByteStream, first: bytes, frames: WebsocketFrames | None, count: Callable[[int], None]
) -> None:
    data = first
    while True:
        if frames is None:
            await sink.send(data)
        else:
            for start in range(0, len(data), _FRAMES_A_TURN):
                await sink.send(frames.feed(data[start : start + _FRAMES_A_TURN]))
                await asyncio.sleep(0)
        data = await source.receive()
        if not data:
            break
        count(len(data))
    if frames is not None:
        await sink.send(frames.end())


def _masked(forms: Forms, event: h11.InformationalResponse | h11.Response | h11.EndOfMessage) -> Headers:
    return [(forms.mask_name(name), forms.mask(value)) for name, value in event.headers.raw_items()]


def _has_body(headers: Headers) -> bool:
    return any(
        name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value.strip(b"0") != b"")
        for name, value in headers
    )


def _upgrade(target: Target, asked: RequestHead) -> bool:
    """Return whether to ask for a websocket; other upgrades are left out, as HTTP permits. Raises Refusal."""
    words = [word.strip().lower() for value in asked.all_of(b"upgrade") for word in value.split(b",")]
    if b"websocket" not in words:
        return False
    if target.rule is not None and (target.rule.methods or target.rule.paths):
        message = f"{target} is permitted for some requests only, and a websocket's would not be seen"
        raise Refusal("net.upgrade", message, allow=f'"{target.name}" in network.allow instead of rules')
    return True
