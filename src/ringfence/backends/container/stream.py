"""A container's attached stream: what guestd writes to its error stream, and the channel where there is no door.

It ends when the container does, and when its engine does.
"""

from __future__ import annotations

import os
import socket
import struct
import threading

from ringfence.guest import lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HEADER = struct.Struct(">BxxxI")  # stream, length
_STDOUT = 1
_READ = 1 << 17
_SAID = 1 << 14
_LAST_WORDS_S = 1.0
ERRORS = {"stderr": 1, "stream": 1}  # what to attach to
ALL = {"stdin": 1, "stdout": 1, **ERRORS}


class Stream:
    """The engine's framing is taken off by a thread. `over` is called when it has ended."""

    def __init__(self, attached: Any, over: Callable[[], None]) -> None:
        self._engine: socket.socket = getattr(attached, "_sock", attached)
        # What owns the connection: were the file alone closed, the rest would complain when it is collected. Not the
        # response around it, whose close gives the connection back for another request.
        response = getattr(attached, "_response", None)
        self._whole = attached if response is None else response.raw
        self._engine.settimeout(None)
        self._said = bytearray()
        self._over = over
        self._taking = threading.Thread(target=self._take_all, name="ringfence-container", daemon=True)

    def begin(self) -> None:
        self._taking.start()

    @property
    def lasts(self) -> bool:
        return self._taking.is_alive()

    @property
    def said(self) -> str:
        """What it wrote to its error stream. For after its end: waits a moment for the last of it."""
        self._taking.join(_LAST_WORDS_S)
        return self._said.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """From any thread. Idempotent."""
        _shut(self._engine)

    def forget(self) -> None:
        """In a forked child of the library, which has no thread of ours: close this copy."""
        _drop(self._engine)

    def _take_all(self) -> None:
        lean.hold_pipe_signal()
        held = bytearray()
        try:
            while data := self._engine.recv(_READ):
                held += data
                self._take(held)
        except OSError:
            return  # one side is gone
        finally:
            self._end()
            self._over()

    def _end(self) -> None:
        self._whole.close()
        self._engine.close()

    def _take(self, held: bytearray) -> None:
        start = 0
        while len(held) - start >= _HEADER.size:
            kind, length = _HEADER.unpack_from(held, start)
            end = start + _HEADER.size + length
            if len(held) < end:
                break
            data = bytes(held[start + _HEADER.size : end])
            if kind == _STDOUT:
                self._output(data)
            elif len(self._said) < _SAID:
                self._said += data[:_SAID]
            start = end
        del held[:start]

    def _output(self, data: bytes) -> None:
        """Of guestd, whose standard output is nothing when it came by a door."""


class ChannelStream(Stream):
    """`ours` speaks with guestd: what is sent there goes to its standard input, its output comes back."""

    def __init__(self, attached: Any, over: Callable[[], None]) -> None:
        super().__init__(attached, over)
        self.ours, self._theirs = socket.socketpair()
        # A thread each way: neither waits for the other, as guestd never lets its input wait for its output.
        self._giving = threading.Thread(target=self._pass_in, name="ringfence-container", daemon=True)

    def begin(self) -> None:
        self._giving.start()
        super().begin()

    def close(self) -> None:
        """guestd sees the end of its input, and ends."""
        _shut(self._theirs)
        super().close()

    def forget(self) -> None:
        _drop(self._theirs)
        super().forget()

    def _pass_in(self) -> None:
        lean.hold_pipe_signal()
        try:
            while data := self._theirs.recv(_READ):
                self._engine.sendall(data)
        except OSError:
            return  # one side is gone
        finally:
            self.close()

    def _output(self, data: bytes) -> None:
        self._theirs.sendall(data)

    def _end(self) -> None:
        self.close()
        self._giving.join()
        self._theirs.close()
        super()._end()


def _drop(sock: socket.socket) -> None:
    """Its `close` alone would wait for a file object around it."""
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is gone
