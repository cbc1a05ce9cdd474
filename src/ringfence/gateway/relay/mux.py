"""The host's half of the relay: turns a box's channel into connections for the gateway, and passes the rest on.

Each box with a network behind an engine has a relay, whose thread owns the channel. The channel decides to which
sandbox a connection belongs. Only the address that a connection was made to is taken from inside, and that address
stands for a name only in this sandbox's own table.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TYPE_CHECKING

from ringfence.gateway.connection import close_copy
from ringfence.gateway.dns import NUMBER_BYTES
from ringfence.gateway.relay.socket import RelayedSocket, RelayedStream
from ringfence.shared import fast_stdlib
from ringfence.shared.credit import Shared
from ringfence.shared.event_loop import Loop
from ringfence.wire import relay_frames
from ringfence.wire.frames import HEADER, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

_READ = 1 << 19
_MOST_OUT = 1 << 20  # bytes for guestd; beyond that, streams and the library wait
_MOST_UNREAD = 4 * _MOST_OUT  # bytes for guestd; beyond that it is not read. An honest guestd never gets there
_MOST_HELD = 1 << 26  # bytes for a caller that does not read; jobs have credit, so only hostile bytes reach it


class Relay:
    """The channel of a box and its streams. All but the constructor, `start` and `after_fork` run in a thread."""

    def __init__(
        self, channel: socket.socket, most: int, *, enter: Callable[[RelayedSocket], None], broken: Callable[[], None]
    ) -> None:
        """Take the channel over. The thread calls `enter` with each new connection, `broken` for a protocol error.

        `link` replaces `channel` for the library, without the relay's frames; `datagrams` is the gateway's end for DNS
        messages.
        """
        self._most = most
        self._enter = enter
        self._broken = broken
        self.link, self._library = socket.socketpair()
        self.datagrams, self._queries = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = channel
        for sock in (channel, self._library, self.datagrams, self._queries):
            sock.setblocking(False)
        self._buffer = memoryview(bytearray(_READ))
        self.piece = memoryview(bytearray(relay_frames.MOST_DATA))  # what streams read into, one after the other
        self._sorter = relay_frames.Sorter()
        self.shared = Shared()
        self._cutter = relay_frames.Cutter()
        self._out = bytearray()  # whole frames for guestd
        self._in = bytearray()  # for the library
        self._streams: dict[int, RelayedStream] = {}
        self._waiting: set[RelayedStream] = set()
        self._last = 0
        self._over = self._heard_all = False
        self.loop = Loop()
        self._events = {channel.fileno(): 0, self._library.fileno(): 0}

    def start(self) -> None:
        """Start the thread, which ends with the channel or the library's socket."""
        threading.Thread(target=self._run, name="ringfence-relay", daemon=True).start()

    def after_fork(self) -> None:
        """Close a forked child's copies, which would keep what the parent closes from ending."""
        for stream in list(self._streams.values()):
            stream.after_fork()
        for sock in (self._channel, self._library, self._queries):
            close_copy(sock)

    # in the thread

    def _run(self) -> None:
        fast_stdlib.hold_pipe_signal()
        try:
            self.loop.watch(self._queries.fileno(), select.EPOLLIN, lambda _: self._on_answers())
            self._rewatch()
            while not self._over:
                self.loop.round(-1)
                self._rewatch()
        except WireError:
            self._broken()
        finally:
            self._close()

    def _close(self) -> None:
        for stream in list(self._streams.values()):
            stream.abort()
        for sock in (self._channel, self._library, self._queries):
            sock.close()
        self.loop.close()

    def _rewatch(self) -> None:
        if self._over:
            return
        room = len(self._in) < _MOST_HELD and len(self._out) < _MOST_UNREAD and not self._heard_all
        self._want(self._channel, self._on_channel, reading=room, writing=bool(self._out))
        reading = len(self._out) < _MOST_OUT and not self._heard_all
        self._want(self._library, self._on_library, reading=reading, writing=bool(self._in))
        if self._heard_all and not self._in:
            self._over = True

    def _want(self, sock: socket.socket, handler: Callable[[int], None], *, reading: bool, writing: bool) -> None:
        fd = sock.fileno()
        events = (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if writing else 0)
        before = self._events[fd]
        if events == before:
            return
        if not before:
            self.loop.watch(fd, events, handler)
        elif not events:
            self.loop.unwatch(fd)
        else:
            self.loop.change(fd, events)
        self._events[fd] = events

    # guestd

    def send(self, kind: int, number: int, payload: bytes | memoryview) -> None:
        head = HEADER.pack(len(payload), kind, number)
        if self._out:
            self._out += head
            self._out += payload
            return
        try:
            sent = self._channel.sendmsg([head, payload])
        except OSError:
            sent = 0  # `_flush_out` meets the same error
        if sent < len(head):
            self._out += head[sent:] + payload
        else:
            self._out += memoryview(payload)[sent - len(head) :]

    @property
    def congested(self) -> bool:
        return len(self._out) >= _MOST_OUT

    def wait(self, stream: RelayedStream) -> None:
        """Call the stream's `rewatch` once guestd has taken what is on its way."""
        self._waiting.add(stream)

    def _on_channel(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush_out()
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            count = self._channel.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._heard_all = True  # the library gets the rest, then the end
            for stream in list(self._streams.values()):
                stream.abort()
            return
        for kind, number, payload in self._sorter.feed(self._buffer[:count]):
            if kind == relay_frames.OTHER:
                self._in += payload
            else:
                self._take(kind, number, payload)
        if self._in:
            self._flush_in()

    def _flush_out(self) -> None:
        try:
            del self._out[: self._channel.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()  # guestd is gone; its last frames may still be read
        if not self._out:
            waiting, self._waiting = self._waiting, set()
            for stream in waiting:
                stream.rewatch()

    # the library

    def _on_library(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush_in()
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = self._library.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._over = True  # the sandbox was closed
            return
        self._out += self._cutter.feed(data)
        self._flush_out()

    def _flush_in(self) -> None:
        try:
            del self._in[: self._library.send(self._in)]
        except BlockingIOError:
            return
        except OSError:
            self._over = True

    # frames from inside

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == relay_frames.PACKET:
            self._ask(number, payload)
        elif kind == relay_frames.OPEN:
            self._open(number, relay_frames.place(payload))
        elif number > self._last:
            raise WireError("a frame of a stream that was never opened")
        else:
            stream = self._streams.get(number)
            if stream is not None:  # else it ended here, which guestd did not know yet
                stream.take(kind, payload)

    def _open(self, number: int, place: tuple[str, int]) -> None:
        if number <= self._last:
            raise WireError("a stream that was opened before")
        self._last = number
        if len(self._streams) >= self._most:
            self.send(relay_frames.END, number, relay_frames.BROKEN)
            return
        try:
            ours, theirs = socket.socketpair()
            fast_stdlib.widen(ours, theirs)
        except OSError:  # out of descriptors
            self.send(relay_frames.END, number, relay_frames.BROKEN)
            return
        ours.setblocking(False)
        connection = RelayedSocket(place, fileno=theirs.detach())
        connection.setblocking(False)
        self._streams[number] = RelayedStream(self, number, ours, connection)
        self._enter(connection)

    def remove(self, stream: RelayedStream) -> None:
        """Drop a stream that has ended."""
        self._waiting.discard(stream)
        del self._streams[stream.number]

    # DNS messages: numbered, so that an answer finds its query

    def _ask(self, number: int, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # more queries than the gateway answers now: the guest repeats them
            self._queries.send(number.to_bytes(NUMBER_BYTES, "little") + payload)

    def _on_answers(self) -> None:
        try:
            data = self._queries.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.loop.unwatch(self._queries.fileno())  # the registration has ended
            return
        if not self.congested:
            self.send(relay_frames.PACKET, int.from_bytes(data[:NUMBER_BYTES], "little"), data[NUMBER_BYTES:])
