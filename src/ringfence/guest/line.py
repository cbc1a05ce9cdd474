"""The line between an interpreter that runs guest code and the host: messages of JSON and bytes, both ways.

It is the guest's: whoever runs code in this process can say anything here. The host takes all of it as data.
"""

from __future__ import annotations

import _thread
import os
import struct

from . import lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER = struct.Struct("<II")  # length of the JSON, of the bytes behind it
MAX_JSON = 1 << 18
MAX_BYTES = 1 << 24


class Line:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._lock = _thread.allocate_lock()
        self.busy = False  # a message is half written: an interrupt has to wait

    def fileno(self) -> int:
        return self._fd

    @property
    def ours(self) -> bool:
        """False in a fork: its messages would come between its parent's."""
        return os.getpid() == self._pid

    def adopt(self) -> None:
        """This process took the place of the one that made the line."""
        self._pid = os.getpid()
        self._lock = _thread.allocate_lock()

    def send(self, message: dict[str, object], data: bytes = b"") -> None:
        text = lean.dumps(message)
        rest = memoryview(HEADER.pack(len(text), len(data)) + text + data)
        with self._lock:
            self.busy = True
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                return  # the host does not listen any more; it ends us
            finally:
                self.busy = False

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """The next message of the host's. None when there will be none."""
        head = self._exactly(HEADER.size)
        if head is None:
            return None
        lengths = HEADER.unpack(head)
        text, data = self._exactly(lengths[0]), self._exactly(lengths[1])
        if text is None or data is None:
            return None
        return lean.loads(text), data

    def _exactly(self, count: int) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            try:
                piece = os.read(self._fd, count - len(found))
            except OSError:
                piece = b""
            if not piece:
                return None
            found += piece
        return bytes(found)
