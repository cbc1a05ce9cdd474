"""Connects to one port inside and passes bytes between it and the standard streams, with the guest's rights.

This is how the host reaches a server in the sandbox: the connection is made inside, so nothing else can be reached.
"""

from __future__ import annotations

import _socket
import os
import select

from . import lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shapes import Work

_PIECE = 1 << 16
_LOCAL = ((_socket.AF_INET, "127.0.0.1"), (_socket.AF_INET6, "::1"))


def work(job: Work, report_fd: int) -> int:
    try:
        connection = _connected(int(job["port"]))
    except OSError as error:
        os.write(report_fd, lean.dumps({"errno": error.errno}))
        return 1
    os.write(report_fd, lean.dumps({"errno": 0}))
    os.close(report_fd)
    try:
        _pass(connection)
    except OSError:
        return 1  # one side is gone
    return 0


def _connected(port: int) -> _socket.socket:
    last = OSError()
    for family, address in _LOCAL:
        connection = _socket.socket(family, _socket.SOCK_STREAM)
        try:
            connection.connect((address, port))
        except OSError as error:
            connection.close()
            last = error
        else:
            return connection
    raise last


def _pass(connection: _socket.socket) -> None:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(connection.fileno(), select.POLLIN)
    coming = True
    while coming:
        for fd, _ in poll.poll():
            if fd == 0:
                data = os.read(0, _PIECE)
                if data:
                    connection.sendall(data)
                else:
                    poll.unregister(0)
                    connection.shutdown(_socket.SHUT_WR)
            else:
                data = connection.recv(_PIECE)
                coming = bool(data)
                while data:
                    data = data[os.write(1, data) :]
