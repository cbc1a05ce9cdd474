"""The line from an interpreter with guest code to the host: messages of JSON and bytes, in a session both ways.

The line belongs to the guest: any code in this process can send anything. The host takes all of it as data.
"""

from __future__ import annotations

import _thread
import os
import struct

from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER = struct.Struct("<II")  # length of the JSON, length of the bytes after it
MAX_JSON = 1 << 18
MAX_BYTES = 1 << 24


class Line:
    def __init__(self, fd: int) -> None:
        """`fd`: where messages are written. In a session the next descriptor is where the host's messages are read."""
        self._fd = fd
        self._heard = fd + 1
        self._pid = os.getpid()
        self._lock = _thread.allocate_lock()
        self._half = bytearray()  # a part of a message: an interrupt may come while it is read
        self._main = _thread.get_ident()  # the thread that an interrupt would come to
        self._busy = False  # whether that thread moves bytes, which an interrupt would lose: it has to wait
        self._late = False  # whether an interrupt waits

    def fileno(self) -> int:
        """Return the descriptor of the host's messages."""
        return self._heard

    @property
    def ours(self) -> bool:
        """Return whether this process made the line. A fork did not, and its messages would mix with the parent's."""
        return os.getpid() == self._pid

    def after_fork(self) -> None:
        """Own the line, in a process that takes the place of the process that made it."""
        self._pid = os.getpid()
        self._main = _thread.get_ident()
        self._lock = _thread.allocate_lock()

    def may_interrupt(self) -> bool:
        """Return whether an interrupt may be raised now.

        False: `_end_busy` raises it when the bytes are where they belong.
        """
        self._late = self._busy
        return not self._busy

    def _begin_busy(self) -> None:
        if _thread.get_ident() == self._main:
            self._busy = True

    def _end_busy(self) -> None:
        if _thread.get_ident() != self._main:
            return
        self._busy = False
        if self._late:
            self._late = False
            raise KeyboardInterrupt

    def send(self, message: dict[str, object], data: bytes = b"") -> None:
        text = fast_stdlib.dumps(message)
        rest = memoryview(HEADER.pack(len(text), len(data)) + text + data)
        with self._lock:
            self._begin_busy()
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                return  # the host does not read any more, and ends this process
            finally:
                self._end_busy()

    def receive(self, *, in_cell: bool = False) -> tuple[dict[str, Any], bytes] | None:
        """Return the host's next message; None when there will be none. `in_cell`: an interrupt may come meanwhile."""
        if not self._fill(HEADER.size, in_cell):
            return None
        text, data = HEADER.unpack_from(self._half)
        body = HEADER.size + text
        if not self._fill(body + data, in_cell):
            return None
        whole = bytes(self._half)
        self._half.clear()
        return fast_stdlib.loads(whole[HEADER.size : body]), whole[body:]

    def _fill(self, count: int, in_cell: bool) -> bool:
        """Read no byte beyond `count`: a process that polls the descriptor has to see the next message there."""
        while len(self._half) < count:
            # Between cells the process waits in `read`, which goes on in a copy of this memory. A poll does not.
            if in_cell:
                fast_stdlib.readable(self._heard, None)  # an interrupt may come here, where nothing is read yet
            before = len(self._half)
            self._begin_busy()
            try:
                self._half += os.read(self._heard, count - before)
            except OSError:
                return False
            finally:
                self._end_busy()
            if len(self._half) == before:
                return False
        return True
