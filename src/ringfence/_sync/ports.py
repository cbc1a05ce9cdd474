"""An address on the host's loopback that reaches one port inside, for blocking callers: threads pass the bytes."""

from __future__ import annotations

import errno
import socket
import threading
import time

from ringfence.errors import RingfenceError
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from ringfence._sync.connection import Connection

_PIECE = 1 << 16
MOST_CONNECTIONS = 64
# Errors of accept() after which the next call may work.
_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PAUSE_S = 0.1


class Address:
    """A local address that reaches one port inside. Closed with the sandbox."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self.host = "127.0.0.1"
        self._connect = connect
        self._listener = socket.create_server((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"
        self._lock = threading.Lock()
        self._open: dict[socket.socket, Connection | None] = {}
        threading.Thread(target=self._accept, name="ringfence-expose", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _FOR_NOW:
                    return  # closed
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                full = len(self._open) >= MOST_CONNECTIONS or self._listener.fileno() < 0
                if not full:
                    self._open[connection] = None
            if full:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="ringfence-expose", daemon=True).start()
            except RuntimeError:  # no thread can be started now: this connection is closed, the next may work
                with self._lock:
                    self._open.pop(connection, None)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        fast_stdlib.hold_pipe_signal()
        inner: Connection | None = None
        try:
            inner = self._connect()
            with self._lock:
                self._open[connection] = inner
            threading.Thread(target=_send, args=(connection, inner), name="ringfence-expose", daemon=True).start()
            while data := inner.read():
                connection.sendall(data)
            connection.shutdown(socket.SHUT_RDWR)  # wakes the other thread
        except (OSError, RingfenceError, RuntimeError):
            _shut(connection)  # one side is gone, or there is no thread for the other direction
        finally:
            with self._lock:
                self._open.pop(connection, None)
            try:
                if inner is not None:
                    inner.end()
            except RingfenceError:
                pass  # the sandbox ended first
            connection.close()

    def close(self) -> None:
        """Accept no new connections and end the open connections. Idempotent."""
        _shut(self._listener)
        self._listener.close()
        with self._lock:
            found = list(self._open.items())
        for connection, inner in found:
            _shut(connection)
            if inner is not None:
                _break_off(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.close()


def _send(connection: socket.socket, inner: Connection) -> None:
    try:
        while data := connection.recv(_PIECE):
            inner.write(data)
        inner.close_stdin()
    except (OSError, RingfenceError):
        # The client broke off, or the server is gone. A silent server would keep the connection open for ever.
        _break_off(inner)


def _break_off(inner: Connection) -> None:
    """Kill the connection inside; its reader sees the end and cleans up."""
    try:
        inner.break_off()
    except (OSError, RingfenceError):
        return  # the sandbox ended first


def _shut(connection: socket.socket) -> None:
    """Shut the connection down, which wakes the thread that waits for it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def opened(connect: Callable[[], Connection]) -> Address:
    return Address(connect)
