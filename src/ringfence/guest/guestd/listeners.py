"""Makes the sockets by which a sandbox reaches the gateway, in its network namespace, before any guest code exists.

The sockets are sent to the library and closed here: no process inside can accept on them. By its listener the gateway
knows what a connection wants.
"""

from __future__ import annotations

import _socket
import os

from ringfence.shared import fast_stdlib, framing, loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from ringfence.guest.guestd.protocols import OutletsForm

_BACKLOG = 1024
_RESOLVER = "127.0.0.1"


def make(outlets: OutletsForm, channel: int) -> None:
    """Listen on every port and send the sockets by `channel`: resolver (UDP, TCP), proxy, then the ports in order."""
    loopback.add_address()
    _send(fast_stdlib.from_fd(channel, fast_stdlib.SOCK_SEQPACKET), listeners(outlets))


def hand_over(outlets: OutletsForm, channel: int) -> None:
    """Listen as `make` does, and send the sockets by guestd's own channel, before its first frame."""
    _send(fast_stdlib.from_fd(os.dup(channel), fast_stdlib.SOCK_STREAM), listeners(outlets))


def _send(packet: socket, sockets: list[socket]) -> None:
    fast_stdlib.send_fds(packet, framing.GREETING, [sock.fileno() for sock in sockets])
    for sock in (*sockets, packet):
        sock.close()


def listeners(outlets: OutletsForm) -> list[socket]:
    """Return the listeners, non-blocking: resolver (UDP, TCP), proxy, then the ports in order."""
    sockets = [_bound(_socket.SOCK_DGRAM, _RESOLVER, 53), _listening(_RESOLVER, 53)]
    sockets.append(_listening("127.0.0.1", outlets["proxy"]))
    sockets += [_listening("0.0.0.0", port) for port in outlets["ports"]]  # noqa: S104  # in a namespace without a card
    return sockets


def _bound(kind: int, address: str, port: int) -> socket:
    sock = _socket.socket(_socket.AF_INET, kind | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
    sock.bind((address, port))
    return sock  # type: ignore[return-value]  # the C class has every method that is used here


def _listening(address: str, port: int) -> socket:
    sock = _bound(_socket.SOCK_STREAM, address, port)
    sock.listen(_BACKLOG)
    return sock
