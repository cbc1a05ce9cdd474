"""Connects to one port inside and passes bytes between that server and the standard streams, with the guest's rights.

This is how the host reaches a server in the sandbox: the connection is made inside, so nothing else can be reached.
"""

from __future__ import annotations

import _socket
import os
import select

from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.guest.guestd.protocols import ProcessWork

_PIECE = 1 << 16
_LOCAL = ((_socket.AF_INET, "127.0.0.1"), (_socket.AF_INET6, "::1"))


def work(job: ProcessWork, report_fd: int) -> int:
    try:
        connection = _connected(int(job["port"]))
    except OSError as error:
        os.write(report_fd, fast_stdlib.dumps({"errno": error.errno}))
        return 1
    os.write(report_fd, fast_stdlib.dumps({"errno": 0}))
    os.close(report_fd)
    try:
        _pass(connection)
    except OSError:
        return 1  # a side is gone
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
    """Pass bytes until the server is done. Each direction is independent: an answer may come early."""
    connection.setblocking(False)
    os.set_blocking(1, False)
    inwards = outwards = b""
    asks = True
    while True:
        poll = select.poll()
        for fd, events in (
            (0, 0 if inwards or not asks else select.POLLIN),
            (1, select.POLLOUT if outwards else 0),
            (connection.fileno(), (0 if outwards else select.POLLIN) | (select.POLLOUT if inwards else 0)),
        ):
            if events:  # registered without events, a hang-up would be reported for ever
                poll.register(fd, events)
        ready = dict(poll.poll())
        happened = ready.get(connection.fileno(), 0)
        if 0 in ready:
            inwards = os.read(0, _PIECE)
            asks = bool(inwards)
            if not asks:
                connection.shutdown(_socket.SHUT_WR)
        elif inwards and happened & ~select.POLLIN:
            try:
                inwards = inwards[connection.send(inwards) :]
            except BlockingIOError:
                continue
            except OSError:
                inwards, asks = b"", False  # the server reads no more; its last bytes may still come
        if 1 in ready:
            outwards = outwards[os.write(1, outwards) :]
        elif not outwards and happened & ~select.POLLOUT:
            outwards = connection.recv(_PIECE)
            if not outwards:
                return
