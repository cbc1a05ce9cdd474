"""Makes the sockets by which a sandbox reaches the gateway, in its network namespace, before any guest code exists.

The sockets are sent to the library and closed here: no process inside can accept on them. By its listener the gateway
knows what a connection wants.
"""

from __future__ import annotations

import _socket
import errno
import os
import struct

from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from ringfence.guest.guestd.protocols import Outlets

_BACKLOG = 1024
GREETING = b"listeners"  # the packet that brings the descriptors
BESIDES = 3  # listeners of the resolver and the proxy, beside the ports
_RESOLVER = "127.0.0.1"
_LOOPBACK_INDEX = 1  # in every new network namespace
_RTM_NEWADDR, _REQUEST_ACK_CREATE_EXCLUSIVE = 20, 0x1 | 0x4 | 0x400 | 0x200
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
# Besides 127.0.0.1: where loopback has no other address, getaddrinfo with AI_ADDRCONFIG finds none (kernel fact 13).
_EXTRA_ADDRESS = bytes([198, 18, 0, 1])


def make(outlets: Outlets, channel: int) -> None:
    """Listen on every port and send the sockets by `channel`: resolver (UDP, TCP), proxy, then the ports in order."""
    add_address()
    _send(fast_stdlib.from_fd(channel, fast_stdlib.SOCK_SEQPACKET), listeners(outlets))


def hand_over(outlets: Outlets, channel: int) -> None:
    """Listen as `make` does, and send the sockets by guestd's own channel, before its first frame."""
    _send(fast_stdlib.from_fd(os.dup(channel), fast_stdlib.SOCK_STREAM), listeners(outlets))


def _send(packet: socket, sockets: list[socket]) -> None:
    fast_stdlib.send_fds(packet, GREETING, [sock.fileno() for sock in sockets])
    for sock in (*sockets, packet):
        sock.close()


def listeners(outlets: Outlets) -> list[socket]:
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


def add_address() -> None:
    """Add an address to loopback. Raises OSError, as where this process has no right to do that."""
    attributes = b"".join(struct.pack("HH4s", 8, kind, _EXTRA_ADDRESS) for kind in (_IFA_LOCAL, _IFA_ADDRESS))
    body = struct.pack("BBBBI", _socket.AF_INET, 32, 0, 0, _LOOPBACK_INDEX) + attributes
    header = struct.pack("IHHII", 16 + len(body), _RTM_NEWADDR, _REQUEST_ACK_CREATE_EXCLUSIVE, 1, 0)
    sock = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, 0)
    try:
        sock.send(header + body)
        (code,) = struct.unpack_from("i", sock.recv(4096), 16)
    finally:
        sock.close()
    if code not in (0, -errno.EEXIST):
        raise OSError(-code, f"add an address to loopback: {os.strerror(-code)}")
