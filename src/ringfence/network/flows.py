"""The two HTTP/2 connections of the gateway, and what flows between two of their streams, within their windows."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.settings
import hpack

from ringfence.network.requests import LARGEST_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from ringfence.network.scrubbing import Forms, Scrubber
    from ringfence.network.streams import Stream
    from ringfence.network.swapping import Headers

MOST_STREAMS = 100
_STREAM_WINDOW = 1 << 18
_WINDOW = 1 << 20  # of a connection: the most that waits in memory for a slow peer
_NOISE_AT_ONCE, _NOISE_PER_S = 500, 50.0  # frames that carry nothing
_RESETS_AT_ONCE, _RESETS_PER_S = 100, 10.0
_FRAME_HEAD = 9
_PREFACE = 24  # what a client says before its first frame
_FRAMES_A_TURN = 8
# Of a header block, decoded: what each entry of both tables is, once, and what may be written out in the block itself.
_TABLES, _WRITTEN = 8192, 4
_OWN_TABLE = 4096  # of what we write: a peer may offer more, up to 4 GiB


class Calm(Exception):  # noqa: N818  # the peer is told to be calm
    """The peer floods us."""


class Allowance:
    """So many at once, and so many more each second. Raises Calm beyond."""

    def __init__(self, at_once: int, per_s: float) -> None:
        self._left = float(at_once)
        self._most = float(at_once)
        self._per_s = per_s
        self._at = time.monotonic()

    def take(self) -> None:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        if self._left < 0:
            raise Calm


class _Unsaid(logging.Filter):
    """hpack tells a debug log every header with its value, a secret's among them (I03): nothing of ours is told."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()
        for name in ("hpack.hpack", "hpack.table"):
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        del record
        return not getattr(self._thread, "is_ours", False)

    @contextmanager
    def here(self) -> Iterator[None]:
        self._thread.is_ours = True
        try:
            yield
        finally:
            self._thread.is_ours = False


_unsaid = _Unsaid()


class _Decoder(hpack.Decoder):
    """Ends the connection over a block that names entries of the table again and again: 30 bytes stood for 60,000."""

    def decode(self, data: bytes, raw: bool = False) -> Iterable[hpack.HeaderTuple]:
        self.max_header_list_size = min(LARGEST_HEAD, _TABLES + _WRITTEN * len(data))
        with _unsaid.here():
            return super().decode(data, raw)


class _Encoder(hpack.Encoder):
    """Remembers little, whatever the peer has room for: every entry is our memory, and is searched for each header."""

    @property
    def header_table_size(self) -> int:
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        table = self.header_table
        with _unsaid.here():
            table.maxsize = min(value, _OWN_TABLE)
        if table.resized:
            self.table_size_changes.append(table.maxsize)

    def encode(self, headers: Any, huffman: bool = True) -> bytes:  # of five types
        with _unsaid.here():
            return super().encode(headers, huffman)


class _Turns:
    """Cuts what comes from a peer every few frames: the loop is every sandbox's, and frames may be small and many."""

    def __init__(self, before_frames: int) -> None:
        self._left = before_frames  # until the next frame begins
        self._head = b""
        self._frames = 0

    def cut(self, data: bytes) -> list[bytes]:
        """Between two of these, others have their turn. The last may be empty."""
        parts, start, at = [], 0, 0
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
    """One of the two connections."""

    def __init__(self, stream: Stream, *, is_client: bool) -> None:
        config = h2.config.H2Configuration(client_side=is_client, header_encoding=False)
        self.stream = stream
        self.http = h2.connection.H2Connection(config)
        self.http.decoder, self.http.encoder = _Decoder(), _Encoder()
        self.turns = _Turns(0 if is_client else _PREFACE)
        self.noise = Allowance(_NOISE_AT_ONCE, _NOISE_PER_S)
        self.resets = Allowance(_RESETS_AT_ONCE, _RESETS_PER_S)
        self.has_said_why = False  # it ends: the last frame is made
        self._sending = asyncio.Lock()

    def begin(self, most_streams: int) -> None:
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

    async def flush(self) -> None:
        async with self._sending:  # taken inside: frames go out in the order they were made
            data = self.http.data_to_send()
            if data:
                await self.stream.send(data)


class Flow:
    """The bytes of one direction of one stream, between the side they came from and the side they go to."""

    def __init__(self, source: Side, source_id: int, sink: Side, sink_id: int, scrubber: Scrubber | None) -> None:
        self._source, self._source_id = source, source_id
        self._sink, self._sink_id = sink, sink_id
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
        """Before the first byte."""
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
        """What a scrubber holds back counts as passed on: a long value is longer than a window."""
        size = self._owed - len(self._waiting)
        if size > 0:
            self._owed -= size
            self._source.http.acknowledge_received_data(size, self._source_id)
