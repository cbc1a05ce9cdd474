"""A relayed connection: the socket that the gateway serves, and the stream of frames that the socket stands for."""

from __future__ import annotations

import select
import socket
from typing import TYPE_CHECKING, Protocol

from ringfence.gateway.connection import close_copy
from ringfence.shared import credit
from ringfence.wire import relay_frames
from ringfence.wire.frames import WireError

if TYPE_CHECKING:
    from typing import Any

    from ringfence.shared.credit import Shared
    from ringfence.shared.event_loop import Loop


class RelayedSocket(socket.socket):
    """The gateway's end of a pair of sockets: for the gateway, a connection that was accepted at `place` inside.

    Two marks say what a pair of local sockets cannot show: that a side broke off, and did not just end.
    """

    def __init__(self, place: tuple[str, int], *, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self._place = place
        self.broken_by_gateway = False
        self.broken_by_guest = False

    def getsockname(self) -> tuple[str, int]:
        return self._place

    def setsockopt(self, *args: Any) -> None:  # the signature has three forms
        """Take the two options of accepted connections: no delay, which a pair has not, and to end by a reset."""
        if args[:2] == (socket.SOL_SOCKET, socket.SO_LINGER):
            self.broken_by_gateway = True

    def check_end(self) -> None:
        """Check, after the last byte was read, that the client ended. Raises ConnectionResetError when it broke off."""
        if self.broken_by_guest:
            raise ConnectionResetError("the client broke the connection off")

    def recv(self, *args: Any) -> bytes:
        data = super().recv(*args)
        if not data:
            self.check_end()
        return data


class RelayChannel(Protocol):
    """The part of a relay that a stream uses."""

    loop: Loop
    piece: memoryview  # what streams read into, one after the other
    shared: Shared

    @property
    def congested(self) -> bool:
        """Return whether so much waits for guestd that streams must not read."""

    def send(self, kind: int, number: int, payload: bytes | memoryview) -> None:
        """Send a frame to guestd."""

    def wait(self, stream: RelayedStream) -> None:
        """Call the stream's `rewatch` once guestd has taken what is on its way."""

    def remove(self, stream: RelayedStream) -> None:
        """Drop a stream that has ended."""


class RelayedStream:
    """The relay's end of a relayed connection. The relay's thread alone uses it."""

    def __init__(self, relay: RelayChannel, number: int, sock: socket.socket, connection: RelayedSocket) -> None:
        self.number = number
        self._relay = relay
        self._sock = sock
        self._connection = connection
        self._credit = credit.FIRST  # bytes that guestd takes
        self._granted = credit.FIRST  # bytes that guestd may send
        self._held = bytearray()  # from the guest, for the gateway
        self._window = credit.Window(relay.shared)
        self._guest_said_all = self._gateway_said_all = self._deaf = False
        self._watched: int | None = None
        self.rewatch()

    def rewatch(self) -> None:
        """Watch the socket for what can be done now; with nothing to do, for the gateway's hang-up."""
        reading = not self._gateway_said_all
        if reading and self._relay.congested:
            self._relay.wait(self)
            self._watch(None if not self._held else select.EPOLLOUT)
            return
        if reading and not self._credit:  # its last bytes may still wait, and the hang-up would be an event for ever
            self._watch(None if not self._held else select.EPOLLOUT)
            return
        self._watch((select.EPOLLIN if reading else 0) | (select.EPOLLOUT if self._held else 0))

    def _watch(self, events: int | None) -> None:
        if events == self._watched:
            return
        loop = self._relay.loop
        fd = self._sock.fileno()
        if events is None:
            loop.unwatch(fd)
        elif self._watched is None:
            loop.watch(fd, events, self._on_event)
        else:
            loop.change(fd, events)
        self._watched = events

    # the gateway

    def _on_event(self, events: int) -> None:
        if self._held and events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
            self._flush()
        hung_up = bool(events & (select.EPOLLHUP | select.EPOLLERR))
        if self._watched is None:
            return
        if self._gateway_said_all:
            if hung_up:
                self._gone()
        elif hung_up or self._watched & events & select.EPOLLIN:
            self._read(hung_up=hung_up)

    def _read(self, *, hung_up: bool) -> None:
        if not self._credit:
            self.rewatch()
            return
        piece = self._relay.piece
        try:
            count = self._sock.recv_into(piece, min(self._credit, len(piece)))
        except BlockingIOError:
            return
        except OSError:  # the gateway closed without reading all: on a network, a reset
            self._connection.broken_by_gateway = True
            count = 0
        if count:
            self._credit -= count
            self._relay.send(relay_frames.DATA, self.number, piece[:count])
            self.rewatch()
        elif self._connection.broken_by_gateway or hung_up:
            self._gone()
        else:
            self._gateway_said_all = True
            self._relay.send(relay_frames.END, self.number, relay_frames.ENDED)
            self.rewatch()

    def _gone(self) -> None:
        """Report to guestd that the gateway has closed its end, and drop the stream."""
        word = relay_frames.BROKEN if self._connection.broken_by_gateway else relay_frames.GONE
        self._relay.send(relay_frames.END, self.number, word)
        self._drop()

    # the guest

    def take(self, kind: int, payload: bytes) -> None:
        """Act on a frame from inside. Raises WireError."""
        if kind == relay_frames.DATA:
            self._give(payload)
        elif kind == relay_frames.CREDIT:
            self._credit += relay_frames.credit(payload)
            if self._credit > credit.MOST:
                raise WireError("more credit than there can be")
            self.rewatch()
        elif relay_frames.is_end(payload):
            if self._guest_said_all:
                raise WireError("a second end")
            self._guest_said_all = True
            self._settle()
        else:
            self.abort()

    def _give(self, data: bytes) -> None:
        self._granted -= len(data)
        if self._granted < 0 or self._guest_said_all:
            raise WireError("more than was granted, or more after the end")
        if self._held:
            self._held += data
            return
        sent = self._sent(data)
        self._held += data[sent:]
        self._passed(sent)

    def _flush(self) -> None:
        sent = self._sent(self._held)
        del self._held[:sent]
        self._passed(sent)

    def _sent(self, data: bytes | bytearray) -> int:
        """Send to the gateway and return how many bytes it took; all once the gateway reads no more."""
        if not self._deaf:
            try:
                return self._sock.send(data)
            except BlockingIOError:
                return 0
            except OSError:
                self._deaf = True
        return len(data)

    def _passed(self, count: int) -> None:
        granted = self._window.passed(count, at_once=not self._held)
        if granted and not self._guest_said_all:
            self._relay.send(relay_frames.CREDIT, self.number, relay_frames.pack_credit(granted))
            self._granted += granted
        self._settle()

    def _settle(self) -> None:
        if self._guest_said_all and not self._held:
            if self._gateway_said_all:
                self._drop()
                return
            if not self._deaf:
                self._deaf = True
                try:
                    self._sock.shutdown(socket.SHUT_WR)
                except OSError:
                    self.rewatch()
                    return
        self.rewatch()

    def abort(self) -> None:
        """End the stream because the guest broke off or is gone."""
        self._connection.broken_by_guest = True
        self._drop()

    def after_fork(self) -> None:
        """Close a forked child's copy of the relay's end, which would keep the gateway's from ending."""
        close_copy(self._sock)

    def _drop(self) -> None:
        self._watch(None)
        self._sock.close()
        self._window.close()
        self._relay.remove(self)
