"""Relays connections inside a box to the gateway by guestd's channel, where listeners cannot be sent to the host.

Each connection is a stream with credit both ways, so that a stream that stands still holds up no other. This module
decides nothing: it reports to the host which address a connection was for, and only the host knows what that means.
"""

from __future__ import annotations

import _socket
import select
import struct

from ringfence.guest.guestd import listeners
from ringfence.shared import framing, loopback
from ringfence.shared.credit import FIRST, Shared, Window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from ringfence.guest.guestd.daemon import Guestd
    from ringfence.guest.guestd.protocols import Keeper, OutletsForm

_PIECE = 1 << 18
_MOST_AT_ONCE = 512  # pieces for one call; the kernel takes 1024
_ACCEPTS = 16  # before other descriptors have their turn
_QUERIES = 256  # DNS messages that wait for their answer
_LONGEST_QUERY = 4096
_NUMBERS = 1 << 32
_PLACE = struct.Struct(">4sH")
_CREDIT = struct.Struct("<I")
END, RESET, GONE = b"\0", b"\1", b"\2"  # no more bytes; broken off; no more bytes, and no reader


def _has_address() -> bool:
    """Return whether loopback got an address. Without it, programs that ask for AI_ADDRCONFIG need the proxy."""
    try:
        loopback.add_address()
    except OSError:
        return False
    return True


class Relaying:
    """The relay of a sandbox, made before there is a guest."""

    def __init__(self, monitor: Keeper, guestd: Guestd, outlets: OutletsForm) -> None:
        self.has_address = _has_address()
        self.monitor = monitor
        self.guestd = guestd
        self._most = outlets["streams"]
        self._datagrams, *self._listeners = listeners.listeners(outlets)
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._queries: dict[int, tuple[str, int]] = {}  # number → the address that asked
        self._last_query = 0
        self._full = False
        self.shared = Shared()
        self.buffer = memoryview(bytearray(_PIECE))  # shared: a new one would be most of a read's cost
        self._waiting: set[_Stream] = set()  # streams that wait for the channel
        self._taker: _Stream | None = None  # the stream of `_taken`: one call for all bytes that came at once
        self._taken: list[bytes] = []
        monitor.watch(self._datagrams.fileno(), select.EPOLLIN, lambda _: self._on_query())
        self._accepting(on=True)

    # connections

    def _accepting(self, *, on: bool) -> None:
        for listener in self._listeners:
            if on:
                self.monitor.watch(listener.fileno(), select.EPOLLIN, self._acceptor(listener))
            else:
                self.monitor.unwatch(listener.fileno())
        self._full = not on

    def _acceptor(self, listener: socket) -> Callable[[int], None]:
        return lambda _: self._accept(listener)

    def _accept(self, listener: socket) -> None:
        for _ in range(_ACCEPTS):
            if len(self._streams) >= self._most:
                self._accepting(on=False)  # connections wait in the kernel's queue
                return
            try:
                fd, _peer = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001  # the C class has no other
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the client is gone
                self._most = max(1, min(self._most, len(self._streams)))
                return
            sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0, fd)
            self._open(sock)  # type: ignore[arg-type]  # the C class has every method that is used here

    def _open(self, sock: socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._last += 1
        if self._last >= _NUMBERS:
            sock.close()
            return
        address, port = sock.getsockname()
        self.guestd.relay(framing.OPEN, self._last, _PLACE.pack(_socket.inet_aton(address), port))
        self._streams[self._last] = _Stream(self, self._last, sock)

    def forget(self, stream: _Stream) -> None:
        self._waiting.discard(stream)
        if self._streams.pop(stream.number, None) is not None and self._full:
            self._accepting(on=True)

    def wait(self, stream: _Stream) -> None:
        """Stop a stream until the channel is free, because the host is behind."""
        self._waiting.add(stream)

    def resume(self) -> None:
        """Let waiting streams go on, now that the channel is free."""
        waiting, self._waiting = self._waiting, set()
        for stream in waiting:
            stream.rewatch()

    # frames of the host's

    def take(self, kind: int, number: int, payload: bytes) -> None:
        """Take a frame of the host. Bytes of a stream may be passed on only by `settle`."""
        stream = self._streams.get(number) if kind != framing.PACKET else None
        if kind != framing.DATA or stream is not self._taker:
            self.settle()
            stream = self._streams.get(number) if kind != framing.PACKET else None
        if kind == framing.PACKET:
            self._answer(number, payload)
        elif stream is None:
            return  # the stream has ended here, which the host did not know yet
        elif kind == framing.DATA:
            self._taker = stream
            self._taken.append(payload)
            if len(self._taken) == _MOST_AT_ONCE:
                self.settle()
        elif kind == framing.CREDIT:
            stream.grant(*_CREDIT.unpack(payload))
        elif kind == framing.END:
            stream.end(payload)

    def settle(self) -> None:
        """Pass on what was taken, before the buffer that it lies in is used again."""
        stream, self._taker = self._taker, None
        if stream is not None:
            taken, self._taken = self._taken, []
            stream.give(taken)

    # DNS by UDP

    def _on_query(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                data, peer = self._datagrams.recvfrom(_LONGEST_QUERY + 1)
            except OSError:
                return
            if not data or len(data) > _LONGEST_QUERY or self.guestd.congested:
                continue
            self._last_query = self._last_query % (_NUMBERS - 1) + 1
            self._queries[self._last_query] = peer
            if len(self._queries) > _QUERIES:
                del self._queries[next(iter(self._queries))]
            self.guestd.relay(framing.PACKET, self._last_query, data)

    def _answer(self, number: int, payload: bytes) -> None:
        peer = self._queries.pop(number, None)
        if peer is not None:
            try:
                self._datagrams.sendto(payload, peer)
            except OSError:
                return  # the client no longer waits


class _Stream:
    """A relayed connection."""

    def __init__(self, relaying: Relaying, number: int, sock: socket) -> None:
        self.number = number
        self._relaying = relaying
        self._sock = sock
        self._credit = FIRST  # bytes that the host takes
        self._held = bytearray()  # from the host, for the client
        self._window = Window(relaying.shared)
        self._said_all = False  # whether the client has ended its direction
        self._last_word: bytes | None = None  # the host's end of its direction
        self._shut = False  # whether that end was passed on to the client
        self._events = 0
        self.rewatch()

    def rewatch(self) -> None:
        """Watch the client's socket for what can be done now."""
        reading = not self._said_all and self._credit > 0 and self._last_word != GONE
        if reading and self._relaying.guestd.congested:
            self._relaying.wait(self)
            reading = False
        events = (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if self._held else 0)
        monitor = self._relaying.monitor
        if events == self._events:
            return
        if not events:  # a hang-up would be an event for ever
            monitor.unwatch(self._sock.fileno())
        elif not self._events:
            monitor.watch(self._sock.fileno(), events, self._on_event)
        else:
            monitor.change(self._sock.fileno(), events)
        self._events = events

    def _on_event(self, events: int) -> None:
        """Read or write what is ready.

        An error event is no end by itself: gVisor reports one for a connection that has ended.
        """
        if self._held:
            self._flush()
        if self._events & select.EPOLLIN and events & ~select.EPOLLOUT:
            self._read()

    def _read(self) -> None:
        buffer = self._relaying.buffer
        try:
            count = self._sock.recv_into(buffer, min(self._credit, _PIECE))
        except BlockingIOError:
            return
        except OSError:
            self._break()
            return
        if count:
            self._credit -= count
            self._relaying.guestd.relay(framing.DATA, self.number, buffer[:count])
        else:
            self._said_all = True
            self._relaying.guestd.relay(framing.END, self.number, END)
        self._settle()

    # of the host's

    def give(self, pieces: list[bytes]) -> None:
        sent = 0 if self._held else self._sent(pieces)
        if sent < 0:
            return
        left = sent
        for piece in pieces:
            self._held += piece[left:]
            left = max(0, left - len(piece))
        if sent:
            self._passed(sent)
        else:
            self.rewatch()

    def grant(self, count: int) -> None:
        self._credit += count
        self.rewatch()

    def end(self, word: bytes) -> None:
        if word == RESET:
            self._drop(reset=True)
            return
        self._last_word = word
        self._settle()

    def _flush(self) -> None:
        sent = self._sent([self._held])
        if sent >= 0:
            del self._held[:sent]
            self._passed(sent)

    def _sent(self, pieces: list[bytes] | list[bytearray]) -> int:
        """Send to the client. Return how many bytes it took; -1 when the client is gone."""
        try:
            return self._sock.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError:
            self._break()
            return -1

    def _passed(self, count: int) -> None:
        credit = self._window.passed(count, at_once=not self._held)
        if credit and self._last_word is None:
            self._relaying.guestd.relay(framing.CREDIT, self.number, _CREDIT.pack(credit))
        self._settle()

    def _settle(self) -> None:
        """End the stream, or one direction, if all bytes have passed."""
        if self._last_word is not None and not self._held:
            if self._said_all or self._last_word == GONE:
                self._drop(reset=False)
                return
            if not self._shut and not self._shut_down():
                return
        self.rewatch()

    def _shut_down(self) -> bool:
        self._shut = True
        try:
            self._sock.shutdown(_socket.SHUT_WR)
        except OSError:
            self._break()
            return False
        return True

    def _break(self) -> None:
        """Break the stream off, as the client did."""
        if self._last_word != GONE:
            self._relaying.guestd.relay(framing.END, self.number, RESET)
        self._drop(reset=True)

    def _drop(self, *, reset: bool) -> None:
        if self._events:
            self._relaying.monitor.unwatch(self._sock.fileno())
            self._events = 0
        if reset:
            self._sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
        self._window.close()
        self._relaying.forget(self)
