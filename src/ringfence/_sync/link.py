"""A sandbox's channel for blocking callers. No thread of its own: whoever waits reads for everybody."""

from __future__ import annotations

import select
import threading
import time

from ringfence.errors import SandboxLostError
from ringfence.wire import frames
from ringfence.wire.switchboard import WINDOW, Inbox, Switchboard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.base import Box
    from ringfence.calls import Call

_READ = 1 << 17


class Link:
    """Safe from several threads."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._socket = box.channel
        self._switch = Switchboard()
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._someone_reads = False

    @property
    def over(self) -> str | None:
        return self._switch.over

    def start(self, call: Call) -> Inbox:
        with self._changed:
            inbox = self._switch.open()
        self._send(call.start(inbox.id, WINDOW))
        return inbox

    def say(self, **request: object) -> None:
        self._send(frames.message(**request))

    def write(self, inbox: Inbox, data: bytes) -> None:
        inbox.stdin_in_flight += len(data)
        self._send(frames.pack(frames.STDIN, inbox.id, data))

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            with self._changed:
                self._switch.finish("lost")
                self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Until `ready()`, or False at the deadline. `ready` is asked whenever something arrived."""
        with self._changed:
            while not ready():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._switch.over is not None:
                    raise SandboxLostError("the sandbox is gone")
                if self._someone_reads:
                    self._changed.wait(left)
                else:
                    self._read_for_all(left)
        return True

    def _read_for_all(self, left: float | None) -> None:
        """Caller holds the lock; it is free while we wait for bytes."""
        self._someone_reads = True
        self._changed.release()
        data: bytes | None = None
        try:
            if select.select([self._socket], [], [], left)[0]:
                data = self._socket.recv(_READ)
        except (OSError, ValueError):  # closed by another thread
            data = b""
        finally:
            self._changed.acquire()
            self._someone_reads = False
            if data is not None:
                self._switch.feed(data)
                if self._switch.over == "protocol":
                    self._box.kill()  # what broke the format is not read again, and does not run on (J07)
            self._changed.notify_all()

    def finish(self, why: str) -> None:
        with self._changed:
            self._switch.finish(why)
            self._changed.notify_all()
