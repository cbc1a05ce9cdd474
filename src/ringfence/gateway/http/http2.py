"""HTTP/2 through the gateway: a connection on each side, and every stream is a request that is checked by itself.

Memory is bounded by windows: what a side sends is acknowledged only when the other side has taken it. Floods of
resets, pings, settings, header frames and header tables end the connection (rapid reset, CONTINUATION, HPACK bombs).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack

from ringfence.gateway.budget import Bucket
from ringfence.gateway.http import request
from ringfence.gateway.http.request import LARGEST_HEAD, RequestHead, refusal_body, refusal_headers, status_of
from ringfence.gateway.stream import STALL_S
from ringfence.gateway.types import Refusal
from ringfence.text import plain_ascii

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from ringfence.gateway.connection import Connection
    from ringfence.gateway.secrets.scrub import Forms, Scrubber
    from ringfence.gateway.secrets.vault import Headers
    from ringfence.gateway.stream import ByteStream
    from ringfence.gateway.types import LogEntry, Target


MOST_STREAMS = 100
_STREAM_WINDOW = 1 << 18
_WINDOW = 1 << 20  # of a connection: the most bytes that wait in memory for a slow peer
_NOISE_AT_ONCE, _NOISE_PER_S = 500.0, 50.0  # frames that carry nothing
_RESETS_AT_ONCE, _RESETS_PER_S = 100.0, 10.0
_FRAME_HEAD = 9
_PREFACE = 24  # what a client says before its first frame
_FRAMES_A_TURN = 8
# The most that a decoded header block may be: both tables once, and so many times the size of the block.
_TABLES, _WRITTEN = 8192, 4
_OWN_TABLE = 4096  # of our encoder: a peer may offer more, up to 4 GiB


class Calm(Exception):  # noqa: N818  # the peer is told to be calm
    """The peer floods the gateway with frames."""


class _HpackSilence(logging.Filter):
    """Keeps our headers out of hpack's debug log, which shows every value, a secret's among them (I03)."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()

    def install(self) -> None:
        """Filter hpack's loggers from now on. Idempotent."""
        for name in ("hpack.hpack", "hpack.table"):
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        del record
        return not getattr(self._thread, "is_ours", False)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Silence hpack in this thread, for our headers alone. The caller's own use of hpack is still logged."""
        self._thread.is_ours = True
        try:
            yield
        finally:
            self._thread.is_ours = False


_HPACK_SILENCE = _HpackSilence()


class _Decoder(hpack.Decoder):
    """A decoder that refuses a block which repeats table entries without end: 30 bytes could mean 60,000."""

    def decode(self, data: bytes, raw: bool = False) -> Iterable[hpack.HeaderTuple]:
        self.max_header_list_size = min(LARGEST_HEAD, _TABLES + _WRITTEN * len(data))
        with _HPACK_SILENCE.here():
            return super().decode(data, raw)


class _Encoder(hpack.Encoder):
    """An encoder with a small table, whatever the peer allows: entries cost memory and are searched for each header."""

    @property
    def header_table_size(self) -> int:
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        table = self.header_table
        with _HPACK_SILENCE.here():
            table.maxsize = min(value, _OWN_TABLE)
        if table.resized:
            self.table_size_changes.append(table.maxsize)

    def encode(self, headers: Any, huffman: bool = True) -> bytes:  # of five types
        with _HPACK_SILENCE.here():
            return super().encode(headers, huffman)


class _FrameTurns:
    """Cuts the bytes of a peer every few frames: the loop serves every sandbox, and frames may be small and many."""

    def __init__(self, before_frames: int) -> None:
        self._left = before_frames  # until the next frame begins
        self._head = b""
        self._frames = 0

    def cut(self, data: bytes) -> list[bytes]:
        """Return `data` in parts, between which other connections have their turn. The last part may be empty."""
        parts = []
        start = 0
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            head = data[at : at + _FRAME_HEAD - len(self._head)]
            at += len(head)
            self._head += head
            if len(self._head) == _FRAME_HEAD:
                self._left, self._head = int.from_bytes(self._head[:3], "big"), b""
                self._frames += 1
                if self._frames % _FRAMES_A_TURN == 0:
                    parts.append(data[start:at])
                    start = at
        return [*parts, data[start:]]


class Side:
    """The connection to the guest, or the connection to the server."""

    def __init__(self, stream: ByteStream, *, is_client: bool) -> None:
        config = h2.config.H2Configuration(client_side=is_client, header_encoding=False)
        self.stream = stream
        self.http = h2.connection.H2Connection(config)
        self.http.decoder = _Decoder()
        self.http.encoder = _Encoder()
        self.turns = _FrameTurns(0 if is_client else _PREFACE)
        self._noise = Bucket(_NOISE_PER_S, _NOISE_AT_ONCE)
        self._resets = Bucket(_RESETS_PER_S, _RESETS_AT_ONCE)
        self.has_said_why = False  # whether the last frame, with the reason, is made
        self._sending = asyncio.Lock()

    def begin(self, most_streams: int) -> None:
        """Make the first frames: settings, with our windows and limits."""
        codes = h2.settings.SettingCodes
        values = {
            codes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
            codes.MAX_HEADER_LIST_SIZE: LARGEST_HEAD,
            codes.MAX_CONCURRENT_STREAMS: most_streams,
        }
        if self.http.config.client_side:
            values[codes.ENABLE_PUSH] = 0
        self.http.local_settings = h2.settings.Settings(
            client=bool(self.http.config.client_side), initial_values={codes.MAX_FRAME_SIZE: 16_384, **values}
        )
        self.http.initiate_connection()
        self.http.increment_flow_control_window(_WINDOW - 65_535)

    def count_noise(self) -> None:
        """Count a frame that carries nothing. Raises Calm beyond the bucket."""
        if not self._noise.take():
            raise Calm

    def count_reset(self) -> None:
        """Count a reset of a stream. Raises Calm beyond the bucket."""
        if not self._resets.take():
            raise Calm

    async def flush(self) -> None:
        """Send what h2 has made."""
        async with self._sending:  # taken inside: frames go out in the order in which they were made
            data = self.http.data_to_send()
            if data:
                await self.stream.send(data)


class Flow:
    """The bytes of a stream in one direction, on the way from source to sink."""

    def __init__(self, source: Side, source_id: int, sink: Side, sink_id: int, scrubber: Scrubber | None) -> None:
        self._source = source
        self._source_id = source_id
        self._sink = sink
        self._sink_id = sink_id
        self._scrubber = scrubber
        self._waiting = bytearray()
        self._owed = 0  # received and not yet acknowledged
        self._trailers: Headers | None = None
        self._ends = False
        self.is_done = False

    def feed(self, data: bytes, owed: int) -> None:
        self._waiting += data if self._scrubber is None else self._scrubber.feed(data)
        self._owed += owed
        self._acknowledge()
        self.pump()

    def reads_messages(self, forms: Forms) -> None:
        """Take the bytes for gRPC messages. Called before the first byte."""
        self._scrubber = forms.messages()

    def trailers(self, headers: Headers) -> None:
        self._trailers = headers

    def end(self) -> None:
        if self._scrubber is not None:
            self._waiting += self._scrubber.end()
        self._ends = True
        self.pump()

    def pump(self) -> None:
        """Send as much as the sink's windows take."""
        http = self._sink.http
        while self._waiting and not self.is_done:
            room = min(http.local_flow_control_window(self._sink_id), http.max_outbound_frame_size)
            if room <= 0:
                return
            part = bytes(self._waiting[:room])
            del self._waiting[:room]
            last = self._ends and not self._waiting and self._trailers is None
            http.send_data(self._sink_id, part, end_stream=last)
            self.is_done = last
            self._acknowledge()
        if self._ends and not self.is_done:
            self.is_done = True
            if self._trailers is not None:
                http.send_headers(self._sink_id, self._trailers, end_stream=True)
            else:
                http.end_stream(self._sink_id)

    def _acknowledge(self) -> None:
        """Open the source's window by what was passed on, and by what a scrubber holds: a value may exceed a window."""
        size = self._owed - len(self._waiting)
        if size > 0:
            self._owed -= size
            self._source.http.acknowledge_received_data(size, self._source_id)


IDLE_S = 120.0  # without a stream
_WATCH_S = 5.0
GREETING_S = 10.0  # for a server's settings
_MOST_DRAINED = 1 << 18  # of the body of a request that was answered before it was read
_Code = h2.errors.ErrorCodes
_REQUEST_PSEUDO = {b":method", b":scheme", b":path", b":authority"}


class _Pair:
    """A request: the log entry, and a flow each way."""

    def __init__(self, entry: LogEntry, up: Flow, down: Flow) -> None:
        self.entry = entry
        self.up = up
        self.down = down
        self.status: int | None = None


async def serve_http2(guest: ByteStream, server: ByteStream, target: Target, connection: Connection) -> None:
    """Serve requests until either side ends. The caller closes both streams. Raises OSError, TimeoutError."""
    _HPACK_SILENCE.install()
    await _Http2Connection(guest, server, target, connection).run()


class _Http2Connection:
    """Both sides of an intercepted connection, and the pairs of streams between the sides."""

    def __init__(self, guest: ByteStream, server: ByteStream, target: Target, connection: Connection) -> None:
        self._guest = Side(guest, is_client=False)
        self._server = Side(server, is_client=True)
        self._target = target
        self._connection = connection
        self._uplink = connection.uplink
        self._forms: Forms = connection.uplink.vault.forms(target)
        self._pairs: dict[int, _Pair] = {}  # by the guest's stream
        self._above: dict[int, int] = {}  # the guest's stream, by the server's stream
        self._below: dict[int, int] = {}
        self._unwanted: dict[int, int] = {}  # by the guest's stream: how much of an unwanted body may still come
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
            self._uplink.finish(self._uplink.log(self._target), refusal=refusal)
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
        """Handle what a side sends, until that side ends or misbehaves."""
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
                side.has_said_why = True  # h2 has made the last frame; the error's text may quote a header
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
        """Wait until there was no request and no byte for a while."""
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
                self._guest.count_reset()
                self._drop(event.stream_id, _Code(event.error_code) if event.error_code in _CODES else _Code.CANCEL)
            case _:
                self._common(self._guest, event)

    def _request(self, event: h2.events.RequestReceived) -> None:
        stream_id = event.stream_id
        has_body = event.stream_ended is None
        if self._leaves:
            self._guest.http.reset_stream(stream_id, _Code.REFUSED_STREAM)
            return
        pairs = [(bytes(name), bytes(value)) for name, value in event.headers]
        pseudo = {name: value.decode("latin-1") for name, value in pairs if name.startswith(b":")}
        method, path = pseudo.get(b":method", ""), pseudo.get(b":path", "")
        entry = self._uplink.log(
            self._target, method=plain_ascii(method, 64), path=plain_ascii(path.partition("?")[0], 4096)
        )
        try:
            out = self._checked(pseudo, pairs, has_body=has_body)
            self._forward(stream_id, entry, out, has_body=has_body)
        except Refusal as refusal:
            self._refuse(stream_id, entry, refusal, has_body=has_body)

    def _checked(self, pseudo: dict[bytes, str], pairs: Headers, *, has_body: bool) -> Headers:
        if set(pseudo) - _REQUEST_PSEUDO or pseudo.get(b":scheme") != "https" or not pseudo.get(b":authority"):
            raise request.malformed("its pseudo-headers are not those of an https request")
        headers = [(name, value) for name, value in pairs if not name.startswith(b":")]
        request.check_header_block(headers)
        asked = RequestHead(pseudo[b":method"], pseudo[b":path"], pseudo[b":authority"], tuple(headers), has_body)
        lengths = asked.all_of(b"content-length")
        # A server that translates this to HTTP/1.1 would take the next client's request for the body.
        if not has_body and any(value.strip(b"0") for value in lengths):
            raise request.malformed("it says a length and has no body")
        if len(lengths) > 1 or not all(value.isdigit() for value in lengths):
            raise request.malformed("its length is said more than once, or is not a number")
        for value in asked.all_of(b"host"):
            request.check_authority(self._target, value.decode("latin-1"))
        checked = request.check_request(self._target, asked)
        headers = [pair for pair in headers if pair[0] not in (b"host", b"proxy-authorization")]
        if self._forms:
            headers = request.identity_only(headers)
        path, headers = self._uplink.vault.swap(self._target, checked.target, headers, verified=True)
        head = {b":method": asked.method, b":scheme": "https", b":authority": asked.authority, b":path": path}
        return [*((name, text.encode("latin-1")) for name, text in head.items()), *headers]

    def _forward(self, stream_id: int, entry: LogEntry, headers: Headers, *, has_body: bool) -> None:
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
        self._above[below] = stream_id
        self._below[stream_id] = below

    def _refuse(self, stream_id: int, entry: LogEntry, refusal: Refusal, *, has_body: bool) -> None:
        status = status_of(refusal)
        self._uplink.finish(entry, status=status, refusal=refusal)
        body = refusal_body(refusal)
        http = self._guest.http
        if http.local_flow_control_window(stream_id) < len(body):
            body = b""  # the stream has no room now, and would not be resumed
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
                request.check_readable(plain, self._target)
        except Refusal as refusal:
            self._forget(above)
            self._server.http.reset_stream(event.stream_id, _Code.CANCEL)
            self._refuse(above, pair.entry, refusal, has_body=not pair.up.is_done)
            return
        pair.entry.received += sum(len(name) + len(value) for name, value in headers)
        if self._forms and request.is_grpc(plain):
            pair.down.reads_messages(self._forms)
        passed = [one for one in plain if one[0] != b"alt-svc"]
        self._guest.http.send_headers(above, [(b":status", str(pair.status).encode()), *passed])

    def _inform(self, event: h2.events.InformationalResponseReceived) -> None:
        self._server.count_noise()
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
            side.count_noise()
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
        """Take an unwanted body, up to a size: curl forgets an answer that a reset follows."""
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
                side.count_noise()
                self._pump_into(side, 0)
            case h2.events.ConnectionTerminated():
                self._leaves = True
            case _:
                side.count_noise()  # pings, priorities, unknown frames

    def _pump_into(self, side: Side, stream_id: int) -> None:
        """Send what fits now that a window of `side` grew: of a stream, or with 0 of the connection."""
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
        self._uplink.finish(pair.entry, status=pair.status)
        if not pair.up.is_done:  # answered before it had taken everything
            _reset(self._server, below, _Code.CANCEL)
            self._unwanted[above] = _MOST_DRAINED

    def _drop(self, above: int, code: _Code) -> None:
        """End a request whose answer the guest no longer wants."""
        if above not in self._pairs:
            return
        pair = self._pairs[above]
        below = self._below[above]
        self._forget(above)
        _reset(self._server, below, code)
        refusal = Refusal("net.cancelled", "the client cancelled the request", verdict="failed")
        self._uplink.finish(pair.entry, status=pair.status, refusal=refusal)

    def _reset_guest(self, above: int, code: int) -> None:
        pair = self._pairs[above]
        self._forget(above)
        _reset(self._guest, above, _Code(code) if code in _CODES else _Code.INTERNAL_ERROR)
        refusal = Refusal("net.reset", f"{self._target} reset the request", verdict="failed")
        self._uplink.finish(pair.entry, status=pair.status, refusal=refusal)

    def _forget(self, above: int) -> None:
        del self._pairs[above]
        del self._above[self._below.pop(above)]

    def _abandon(self, refusal: Refusal | None = None) -> None:
        """End every request that is still open, and log why."""
        broken = Refusal("net.broken", "the connection broke off in the middle of a request", verdict="failed")
        for above in list(self._pairs):
            pair = self._pairs[above]
            self._forget(above)
            _reset(self._guest, above, _Code.INTERNAL_ERROR)
            self._uplink.finish(pair.entry, status=pair.status, refusal=refusal or self._connection.cut or broken)


_CODES = frozenset(int(code) for code in _Code)


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
