"""A container's attached stream as a plain socket: the engine's framing is taken off by a thread."""

from __future__ import annotations

import socket
import struct
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HEADER = struct.Struct(">BxxxI")  # stream, length
_STDOUT = 1
_READ = 1 << 17
_SAID = 1 << 14


class Stream:
    """`ours` speaks with guestd: what is sent there goes to its standard input, its output comes back."""

    def __init__(self, attached: Any) -> None:
        self._engine: socket.socket = getattr(attached, "_sock", attached)
        self._attached = attached  # owns the connection
        self._engine.settimeout(None)
        self.ours, self._theirs = socket.socketpair()
        self._said = bytearray()
        self._lock = threading.Lock()
        self._running = 2
        # A thread each way: neither waits for the other, as guestd never lets its input wait for its output.
        for each in (self._pass_in, self._pass_out):
            threading.Thread(target=each, name="ringfence-container", daemon=True).start()

    @property
    def said(self) -> str:
        """What it wrote to its error stream."""
        return self._said.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """guestd sees the end of its input, and ends."""
        for each in (self._theirs, self._engine):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _pass_in(self) -> None:
        try:
            while data := self._theirs.recv(_READ):
                self._engine.sendall(data)
        except OSError:
            return  # one side is gone
        finally:
            self._over()

    def _pass_out(self) -> None:
        held = bytearray()
        try:
            while data := self._engine.recv(_READ):
                held += data
                self._take(held)
        except OSError:
            return  # one side is gone
        finally:
            self._over()

    def _over(self) -> None:
        """Called by each thread at its end; the second one closes."""
        self.close()
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._theirs.close()
                self._attached.close()
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
                self._theirs.sendall(data)
            elif len(self._said) < _SAID:
                self._said += data[:_SAID]
            start = end
        del held[:start]
