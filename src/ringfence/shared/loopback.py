"""Gives loopback its second address, in the network namespace of the calling thread."""

from __future__ import annotations

import _socket
import errno
import os
import struct

_LOOPBACK_INDEX = 1  # in every new network namespace
_RTM_NEWADDR, _REQUEST_ACK_CREATE_EXCLUSIVE = 20, 0x1 | 0x4 | 0x400 | 0x200
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
# Besides 127.0.0.1: where loopback has no other address, getaddrinfo with AI_ADDRCONFIG finds none (kernel fact 13).
_EXTRA_ADDRESS = bytes([198, 18, 0, 1])


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
