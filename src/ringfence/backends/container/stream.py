"""A container's attached stream as a plain socket: the engine's framing is taken off by a thread."""

from __future__ import annotations

import select
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
        threading.Thread(target=self._pass, name="ringfence-container", daemon=True).start()

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

    def _pass(self) -> None:
        poll = select.poll()
        poll.register(self._engine, select.POLLIN)
        poll.register(self._theirs, select.POLLIN)
        held = bytearray()
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd == self._theirs.fileno():
                        data = self._theirs.recv(_READ)
                        if not data:
                            return
                        self._engine.sendall(data)
                    else:
                        data = self._engine.recv(_READ)
                        if not data:
                            return
                        held += data
                        self._take(held)
        except (OSError, ValueError):
            return  # one side is gone
        finally:
            self.close()
            self._theirs.close()
            self._attached.close()

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
