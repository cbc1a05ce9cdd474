"""HTTP/2 through the gateway: both connections are ours, each stream is a request of its own, checked by itself.

Memory is bounded by windows: what one side sends is acknowledged only when the other has taken it. Floods of
resets, pings, settings, header frames and header tables end the connection (rapid reset, CONTINUATION, HPACK bombs).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import h2.errors
import h2.events
import h2.exceptions

from ringfence.network import requests
from ringfence.network.flows import MOST_STREAMS, Calm, Flow, Side
from ringfence.network.requests import Asked, refusal_body, refusal_headers, status_of
from ringfence.network.streams import STALL_S
from ringfence.network.targets import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.network.scrubbing import Forms
    from ringfence.network.streams import Stream
    from ringfence.network.swapping import Headers
    from ringfence.network.targets import Context, Entry, Target

IDLE_S = 120.0  # without a stream
_WATCH_S = 5.0
GREETING_S = 10.0  # for a server's settings
_MOST_DRAINED = 1 << 18  # of the body of a request that was answered before it was read
_Code = h2.errors.ErrorCodes
_REQUEST_PSEUDO = {b":method", b":scheme", b":path", b":authority"}


class _Pair:
    """One request: its stream on each side."""

    def __init__(self, entry: Entry, up: Flow, down: Flow) -> None:
        self.entry = entry
        self.up = up
        self.down = down
        self.status: int | None = None


async def serve_http2(guest: Stream, server: Stream, target: Target, context: Context) -> None:
    """Until either side ends it. The caller closes both streams. Raises OSError, TimeoutError."""
    await _Connection(guest, server, target, context).run()


class _Connection:
    """Both sides of one connection, and the pairs of streams between them."""

    def __init__(self, guest: Stream, server: Stream, target: Target, context: Context) -> None:
        self._guest = Side(guest, is_client=False)
        self._server = Side(server, is_client=True)
        self._target = target
        self._context = context
        self._forms: Forms = context.vault.forms(target)
        self._pairs: dict[int, _Pair] = {}  # by the guest's stream
        self._above: dict[int, int] = {}  # the guest's stream, by the server's
        self._below: dict[int, int] = {}
        self._unwanted: dict[int, int] = {}  # the guest's streams whose body nobody takes, and how much of it may come
        self._leaves = False  # one side will take no more streams
        self._active_at = time.monotonic()

    async def run(self) -> None:
        try:
            self._server.begin(MOST_STREAMS)
            await self._server.flush()
            greeting = await self._server.stream.receive(GREETING_S)
            early = self._server.http.receive_data(b"".join(self._server.turns.cut(greeting)))
        except h2.exceptions.ProtocolError:
            raise ConnectionAbortedError("the server agreed on HTTP/2 and does not speak it") from None
        except Refusal as refusal:  # a budget is used up
            self._context.finish(self._context.log(self._target), refusal=refusal)
            return
        most = min(MOST_STREAMS, int(self._server.http.remote_settings.max_concurrent_streams))
        self._guest.begin(max(1, most))
        await self._guest.flush()
        tasks = [
            asyncio.create_task(self._read(self._guest, self._of_guest, [])),
            asyncio.create_task(self._read(self._server, self._of_server, early)),
            asyncio.create_task(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._abandon()
        await self._goodbye()
        for task in done:
            task.result()

    async def _read(self, side: Side, handle: Callable[[h2.events.Event], None], events: list[h2.events.Event]) -> None:
        """Until the side ends, or misbehaves."""
        parts: list[bytes] = []
        while True:
            try:
                for event in events:
                    self._handle(handle, side, event)
                await self._guest.flush()
                await self._server.flush()
                if self._leaves and not self._pairs:
                    return
                if parts:
                    await asyncio.sleep(0)
                else:
                    data = await side.stream.receive(STALL_S)
                    if not data:
                        return
                    self._active_at = time.monotonic()
                    parts = side.turns.cut(data)
                events = side.http.receive_data(parts.pop(0))
            except Refusal as refusal:  # a budget is used up
                self._abandon(refusal)
                return
            except Calm:
                _close(side, _Code.ENHANCE_YOUR_CALM)
                return
            except h2.exceptions.ProtocolError:
                side.has_said_why = True  # h2 has written it into what is sent last; its message may quote a header
                return

    def _handle(self, handle: Callable[[h2.events.Event], None], side: Side, event: h2.events.Event) -> None:
        try:
            handle(event)
        except h2.exceptions.ProtocolError:
            # A later frame of the same read has closed the stream already.
            stream_id = getattr(event, "stream_id", None) or 0
            above = stream_id if side is self._guest else self._above.get(stream_id, 0)
            if above in self._pairs:
                _reset(self._guest, above, _Code.INTERNAL_ERROR)
                self._drop(above, _Code.CANCEL)

    async def _watch(self) -> None:
        """Until nothing was asked for and nothing came for a while."""
        while self._pairs or time.monotonic() - self._active_at < IDLE_S:  # noqa: ASYNC110  # it is time that passes
            await asyncio.sleep(_WATCH_S)

    async def _goodbye(self) -> None:
        for side in (self._guest, self._server):
            _close(side, _Code.NO_ERROR)
            try:
                await side.flush()
            except (OSError, TimeoutError, Refusal):
                pass  # the peer is gone

    # from the guest

    def _of_guest(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._request(event)
            case h2.events.DataReceived():
                self._data(self._guest, event, self._pairs.get(event.stream_id), is_up=True)
            case h2.events.TrailersReceived():
                pass  # trailers of a request end here
            case h2.events.StreamEnded():
                self._unwanted.pop(event.stream_id, None)
                if (pair := self._pairs.get(event.stream_id)) is not None:
                    pair.up.end()
            case h2.events.StreamReset():
                self._unwanted.pop(event.stream_id, None)
                self._guest.resets.take()
                self._drop(event.stream_id, _Code(event.error_code) if event.error_code in _CODES else _Code.CANCEL)
            case _:
                self._common(self._guest, event)

    def _request(self, event: h2.events.RequestReceived) -> None:
        stream_id, has_body = event.stream_id, event.stream_ended is None
        if self._leaves:
            self._guest.http.reset_stream(stream_id, _Code.REFUSED_STREAM)
            return
        pairs = [(bytes(name), bytes(value)) for name, value in event.headers]
        pseudo = {name: value.decode("latin-1") for name, value in pairs if name.startswith(b":")}
        method, path = pseudo.get(b":method", ""), pseudo.get(b":path", "")
        entry = self._context.log(
            self._target, method=_printable(method[:64]), path=_printable(path.partition("?")[0][:4096])
        )
        try:
            out = self._checked(pseudo, pairs, has_body=has_body)
            self._forward(stream_id, entry, out, has_body=has_body)
        except Refusal as refusal:
            self._refuse(stream_id, entry, refusal, has_body=has_body)

    def _checked(self, pseudo: dict[bytes, str], pairs: Headers, *, has_body: bool) -> Headers:
        if set(pseudo) - _REQUEST_PSEUDO or pseudo.get(b":scheme") != "https" or not pseudo.get(b":authority"):
            raise requests.malformed("its pseudo-headers are not those of an https request")
        headers = [(name, value) for name, value in pairs if not name.startswith(b":")]
        requests.check_header_block(headers)
        asked = Asked(pseudo[b":method"], pseudo[b":path"], pseudo[b":authority"], tuple(headers), has_body)
        lengths = asked.all_of(b"content-length")
        # A server behind that writes it in HTTP/1.1 would take the next client's request for its body.
        if not has_body and any(value.strip(b"0") for value in lengths):
            raise requests.malformed("it says a length and has no body")
        if len(lengths) > 1 or not all(value.isdigit() for value in lengths):
            raise requests.malformed("its length is said more than once, or is not a number")
        for value in asked.all_of(b"host"):
            requests.check_authority(self._target, value.decode("latin-1"))
        checked = requests.check_request(self._target, asked)
        headers = [pair for pair in headers if pair[0] not in (b"host", b"proxy-authorization")]
        if self._forms:
            headers = requests.identity_only(headers)
        path, headers = self._context.vault.swap(self._target, checked.target, headers, verified=True)
        head = {b":method": asked.method, b":scheme": "https", b":authority": asked.authority, b":path": path}
        return [*((name, text.encode("latin-1")) for name, text in head.items()), *headers]

    def _forward(self, stream_id: int, entry: Entry, headers: Headers, *, has_body: bool) -> None:
        http = self._server.http
        try:
            if http.open_outbound_streams >= http.remote_settings.max_concurrent_streams:
                raise Refusal("net.busy", f"{self._target} takes no more requests at once", verdict="failed")
            below = http.get_next_available_stream_id()
            http.send_headers(below, headers, end_stream=not has_body)
        except h2.exceptions.ProtocolError:  # its message may quote a header
            raise Refusal("net.broken", f"the connection to {self._target} is closing", verdict="failed") from None
        entry.sent += sum(len(name) + len(value) for name, value in headers)
        up = Flow(self._guest, stream_id, self._server, below, None)
        up.is_done = not has_body
        down = Flow(self._server, below, self._guest, stream_id, self._forms.stream() if self._forms else None)
        self._pairs[stream_id] = _Pair(entry, up, down)
        self._above[below], self._below[stream_id] = stream_id, below

    def _refuse(self, stream_id: int, entry: Entry, refusal: Refusal, *, has_body: bool) -> None:
        status = status_of(refusal)
        self._context.finish(entry, status=status, refusal=refusal)
        body = refusal_body(refusal)
        http = self._guest.http
        if http.local_flow_control_window(stream_id) < len(body):
            body = b""  # it has no room now, and nobody comes back to it
        head = [(b":status", str(status).encode()), *refusal_headers(body)]
        http.send_headers(stream_id, head, end_stream=not body)
        if body:
            http.send_data(stream_id, body, end_stream=True)
        if has_body:
            self._unwanted[stream_id] = _MOST_DRAINED

    # from the server

    def _of_server(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                self._response(event)
            case h2.events.InformationalResponseReceived():
                self._inform(event)
            case h2.events.DataReceived():
                self._data(self._server, event, self._pair_below(event.stream_id), is_up=False)
            case h2.events.TrailersReceived():
                if (pair := self._pair_below(event.stream_id)) is not None:
                    pair.down.trailers(self._masked(event.headers))
            case h2.events.StreamEnded():
                if (pair := self._pair_below(event.stream_id)) is not None:
                    pair.down.end()
                    self._close_if_done(self._above[event.stream_id])
            case h2.events.StreamReset():
                if event.stream_id in self._above:
                    self._reset_guest(self._above[event.stream_id], int(event.error_code))
            case _:
                self._common(self._server, event)

    def _pair_below(self, below: int) -> _Pair | None:
        return self._pairs.get(self._above.get(below, -1))

    def _response(self, event: h2.events.ResponseReceived) -> None:
        pair = self._pair_below(event.stream_id)
        if pair is None:
            return
        above = self._above[event.stream_id]
        headers = self._masked(event.headers)
        pair.status = int(headers[0][1])
        plain = [one for one in headers if not one[0].startswith(b":")]
        try:
            if self._forms and pair.entry.method != "HEAD" and pair.status not in (204, 304):
                requests.check_readable(plain, self._target)
        except Refusal as refusal:
            self._forget(above)
            self._server.http.reset_stream(event.stream_id, _Code.CANCEL)
            self._refuse(above, pair.entry, refusal, has_body=not pair.up.is_done)
            return
        pair.entry.received += sum(len(name) + len(value) for name, value in headers)
        if self._forms and requests.is_grpc(plain):
            pair.down.reads_messages(self._forms)
        passed = [one for one in plain if one[0] != b"alt-svc"]
        self._guest.http.send_headers(above, [(b":status", str(pair.status).encode()), *passed])

    def _inform(self, event: h2.events.InformationalResponseReceived) -> None:
        self._server.noise.take()
        if self._pair_below(event.stream_id) is None:
            return
        headers = [pair for pair in self._masked(event.headers) if pair[0] == b":status"]
        self._guest.http.send_headers(self._above[event.stream_id], headers)

    def _masked(self, headers: object) -> Headers:
        assert isinstance(headers, list)
        return [(self._forms.mask_name(bytes(name)), self._forms.mask(bytes(value))) for name, value in headers]

    # from both

    def _data(self, side: Side, event: h2.events.DataReceived, pair: _Pair | None, *, is_up: bool) -> None:
        owed = event.flow_controlled_length or 0
        data = bytes(event.data or b"")
        if not data:
            side.noise.take()
        if pair is None:  # of a stream that was refused or dropped: its bytes count for the connection all the same
            if owed:
                side.http.acknowledge_received_data(owed, event.stream_id)
            if is_up:
                self._drain(event.stream_id, owed)
            return
        padding = owed - len(data)
        if padding:
            side.http.acknowledge_received_data(padding, event.stream_id)
        if is_up:
            pair.entry.sent += len(data)
            pair.up.feed(data, len(data))
        else:
            pair.entry.received += len(data)
            pair.down.feed(data, len(data))

    def _drain(self, stream_id: int, size: int) -> None:
        """Takes a body that is not wanted, up to a size: curl forgets an answer that a reset follows."""
        if stream_id in self._unwanted:
            self._unwanted[stream_id] -= size
            if self._unwanted[stream_id] < 0:
                del self._unwanted[stream_id]
                _reset(self._guest, stream_id, _Code.NO_ERROR)

    def _common(self, side: Side, event: h2.events.Event) -> None:
        match event:
            case h2.events.WindowUpdated():
                self._pump_into(side, event.stream_id or 0)
            case h2.events.RemoteSettingsChanged():
                side.noise.take()
                self._pump_into(side, 0)
            case h2.events.ConnectionTerminated():
                self._leaves = True
            case _:
                side.noise.take()  # pings, priorities, frames nobody knows

    def _pump_into(self, side: Side, stream_id: int) -> None:
        """A window of `side` grew: of one stream, or with 0 of all."""
        is_up = side is self._server
        if stream_id:
            above = self._above.get(stream_id, -1) if is_up else stream_id
            chosen = [above] if above in self._pairs else []
        else:
            chosen = list(self._pairs)
        for above in chosen:
            pair = self._pairs[above]
            (pair.up if is_up else pair.down).pump()
            self._close_if_done(above)

    # ends

    def _close_if_done(self, above: int) -> None:
        pair = self._pairs[above]
        if not pair.down.is_done:
            return
        below = self._below[above]
        self._forget(above)
        self._context.finish(pair.entry, status=pair.status)
        if not pair.up.is_done:  # answered before it had taken everything
            _reset(self._server, below, _Code.CANCEL)
            self._unwanted[above] = _MOST_DRAINED

    def _drop(self, above: int, code: _Code) -> None:
        """The guest does not want the answer any more."""
        if above not in self._pairs:
            return
        pair, below = self._pairs[above], self._below[above]
        self._forget(above)
        _reset(self._server, below, code)
        refusal = Refusal("net.cancelled", "the client cancelled the request", verdict="failed")
        self._context.finish(pair.entry, status=pair.status, refusal=refusal)

    def _reset_guest(self, above: int, code: int) -> None:
        pair = self._pairs[above]
        self._forget(above)
        _reset(self._guest, above, _Code(code) if code in _CODES else _Code.INTERNAL_ERROR)
        refusal = Refusal("net.reset", f"{self._target} reset the request", verdict="failed")
        self._context.finish(pair.entry, status=pair.status, refusal=refusal)

    def _forget(self, above: int) -> None:
        del self._pairs[above]
        del self._above[self._below.pop(above)]

    def _abandon(self, refusal: Refusal | None = None) -> None:
        """Every request that is still open ends, and the log says so."""
        why = refusal or Refusal("net.broken", "the connection broke off in the middle of a request", verdict="failed")
        for above in list(self._pairs):
            pair = self._pairs[above]
            self._forget(above)
            _reset(self._guest, above, _Code.INTERNAL_ERROR)
            self._context.finish(pair.entry, status=pair.status, refusal=why)


_CODES = frozenset(int(code) for code in _Code)


def _printable(text: str) -> str:
    """For the log, where a request stands before it is checked: whoever reads it may do so at a terminal."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def _close(side: Side, code: _Code) -> None:
    if side.has_said_why:
        return
    side.has_said_why = True
    try:
        side.http.close_connection(code)
    except h2.exceptions.ProtocolError:
        pass  # it is closed already


def _reset(side: Side, stream_id: int, code: _Code) -> None:
    try:
        side.http.reset_stream(stream_id, code)
    except h2.exceptions.ProtocolError:
        pass  # the stream, or the connection, has ended already
