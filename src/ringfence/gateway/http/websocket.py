"""Takes secret values out of a websocket's messages, however frames cut the messages (G24).

A hit is overwritten in place, so that frames keep their lengths. Control frames, which may stand between those of a
message, are looked at by themselves.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.gateway.secrets.scrub import Forms

_CONTINUES, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_KINDS = frozenset((_CONTINUES, _TEXT, _BINARY, _CLOSE, _PING, _PONG))
_LAST, _EXTENSIONS, _MASKED = 0x80, 0x70, 0x80
_LONGEST_CONTROL = 125
_LONGER = {126: 2, 127: 8}  # bytes in which the length follows
_MOST_QUEUED = 1024  # frames that wait for the end of what may be a value


class Frames:
    """The frames that a server sends on a websocket. Used as a Scrubber is."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._scrubber = forms.stream()
        self._head = bytearray()  # of a frame, while it is not whole
        self._left = 0  # of a frame, after its head
        self._is_control = self._is_last = False
        self._control = b""
        self._queue: deque[bytes | int] = deque()  # what goes out: heads, and so many bytes of messages, in order
        self._ready = bytearray()  # bytes of messages that may pass

    def feed(self, data: bytes) -> bytes:
        """Return what may pass now. Raises ValueError for bytes of no websocket, or of one with unagreed extensions."""
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                self._take(part)
            else:
                part = data[at : at + self._head_size() - len(self._head)]
                self._head += part
                self._begin_frame()
            at += len(part)
        passed = self._passed()
        if len(self._queue) > _MOST_QUEUED:
            raise ValueError("its messages are cut too small")
        return passed

    def end(self) -> bytes:
        """Return what was held back."""
        self._ready += self._scrubber.end()
        return self._passed()

    def _head_size(self) -> int:
        return 2 if len(self._head) < 2 else 2 + _LONGER.get(self._head[1], 0)

    def _begin_frame(self) -> None:
        head = self._head
        if len(head) < 2:
            return
        kind = head[0] & 0x0F
        if head[0] & _EXTENSIONS or head[1] & _MASKED or kind not in _KINDS:
            raise ValueError("it is not a frame of a server's")
        if len(head) < self._head_size():
            return
        self._left = int.from_bytes(head[2:], "big") if head[1] in _LONGER else head[1]
        self._is_control, self._is_last = kind >= _CLOSE, bool(head[0] & _LAST)
        if self._is_control and (self._left > _LONGEST_CONTROL or not self._is_last):
            raise ValueError("a control frame is too long")
        self._queue.append(bytes(head))
        head.clear()
        if not self._left:
            self._take(b"")

    def _take(self, part: bytes) -> None:
        if self._is_control:
            self._control += part
            if not self._left:
                self._queue.append(self._forms.mask(self._control))
                self._control = b""
            return
        self._queue.append(len(part))
        self._ready += self._scrubber.feed(part)
        if self._is_last and not self._left:
            self._ready += self._scrubber.end()

    def _passed(self) -> bytes:
        out = bytearray()
        while self._queue:
            item = self._queue[0]
            if isinstance(item, bytes):
                out += item
            else:
                out += self._ready[:item]
                missing = item - len(self._ready)
                del self._ready[:item]
                if missing > 0:
                    self._queue[0] = missing
                    break
            self._queue.popleft()
        return bytes(out)
