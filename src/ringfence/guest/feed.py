"""Bytes on their way into a guest: held while it does not take them, dropped when nobody reads them any more."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .guestd import Guestd

_PIECE = 1 << 18
_END_OF_INPUT = b"\x04"  # what Ctrl-D is on a terminal


class Feed:
    """One descriptor that is written to, for the job of that number. The host counts what is on its way, and hears
    what the guest has taken: `worth` bytes of it together are worth a message."""

    def __init__(self, guestd: Guestd, number: int, worth: int = 1) -> None:
        self._guestd = guestd
        self._number = number
        self._worth = worth
        self._taken = 0
        self._fd = -1
        self._terminal = False
        self._pending = bytearray()
        self._ended = False
        self._closed = False

    def open(self, fd: int, *, terminal: bool = False) -> None:
        """From now on it goes to `fd`, which is ours to close."""
        os.set_blocking(fd, False)
        self._fd, self._terminal = fd, terminal
        if self._pending or self._ended:
            self._push()

    def write(self, data: bytes) -> None:
        if not self._ended and not self._closed:
            self._pending += data
            self._push()

    def end(self) -> None:
        """No more will come: close it when all is written. On a terminal the end is a character."""
        if self._terminal and not self._ended:
            self._pending += _END_OF_INPUT
        self._ended = True
        self._push()

    def close(self) -> None:
        self._closed = True
        self._pending.clear()
        if self._fd >= 0:
            self._guestd.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_room(self, events: int) -> None:
        if self._terminal and events & select.EPOLLHUP:
            self._lose()  # nobody has it open, and the kernel would say so for ever while it is full
        else:
            self._push()

    def _lose(self) -> None:
        self.close()
        self._guestd.say(ev="stdin-closed", id=self._number)

    def _push(self) -> None:
        if self._fd < 0:
            return
        try:
            while self._pending:
                with memoryview(self._pending) as view:
                    count = os.write(self._fd, view[:_PIECE])
                del self._pending[:count]
                self._taken += count
        except BlockingIOError:
            self._guestd.unwatch(self._fd)
            self._guestd.watch(self._fd, select.EPOLLOUT, self._on_room)
        except OSError:  # EPIPE, on a terminal EIO: nobody reads any more
            self._lose()
            return
        if self._taken >= self._worth:
            self._guestd.say(ev="took", id=self._number, bytes=self._taken)
            self._taken = 0
        if self._pending:
            return
        if self._ended and not self._terminal:
            self.close()
        else:
            self._guestd.unwatch(self._fd)
