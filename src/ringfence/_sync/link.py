"""The channel to a sandbox for blocking callers.

There is no reader thread: a caller that waits reads for all callers.
"""

from __future__ import annotations

import _thread
import select
import time

from ringfence.errors import SandboxLostError
from ringfence.shared import fast_stdlib
from ringfence.wire import frames
from ringfence.wire.inbox import WINDOW, Inbox, Switchboard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.contract import Box
    from ringfence.core.arguments import Call

_READ = 1 << 18
_LAST_WORDS_S = 1.0
_LONGEST_S = 86_400.0  # the kernel counts milliseconds in 31 bits, and limits may be years
_SEND_S = 10.0  # guestd reads at once; after so long it is gone


class _Changed:
    """A lock with notification, like `threading.Condition`, whose module costs a command 5 ms."""

    __slots__ = ("_lock", "_waiting", "acquire", "release")

    def __init__(self) -> None:
        self._lock = _thread.RLock()
        self._waiting: list[_thread.LockType] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, within_s: float | None) -> None:
        """Wait until `notify_all`, with the lock free meanwhile. The caller holds the lock once."""
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiting.append(mine)
        self.release()
        try:
            mine.acquire(timeout=-1 if within_s is None else within_s)
        finally:
            self.acquire()
            if mine in self._waiting:
                self._waiting.remove(mine)

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.release()


class Link:
    """The host's end of a sandbox's channel. Safe from several threads."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._socket = box.channel
        self._socket.settimeout(_SEND_S)
        self._switch = Switchboard()
        self._changed = _Changed()
        self._sending = _thread.allocate_lock()
        self._someone_reads = False

    @property
    def over(self) -> str | None:
        return self._switch.over

    @property
    def paused(self) -> bool:
        return self._switch.paused

    def stood_still(self) -> float:
        return self._switch.stood_still()

    def open(self) -> Inbox:
        """Return a new inbox, with a number, for something that `start` will start."""
        with self._changed:
            return self._switch.open()

    def start(self, call: Call, inbox: Inbox) -> None:
        self._send(call.start(inbox.id, WINDOW))

    def say(self, **request: object) -> None:
        self._send(frames.message(**request))

    note = say  # `say` blocks only until guestd reads

    def tell(self, inbox: Inbox, data: bytes, **request: object) -> None:
        """Send data to the interpreter behind `inbox` by the line, after an optional request about it to guestd."""
        with self._changed:
            inbox.stdin_in_flight += len(data)
        before = frames.message(**request) if request else b""
        self._send(before + frames.pack(frames.LINE, inbox.id, data))

    def write(self, inbox: Inbox, data: bytes) -> None:
        with self._changed:
            inbox.stdin_in_flight += len(data)
        self._send(frames.pack(frames.STDIN, inbox.id, data))

    def _send(self, data: bytes) -> None:
        if self._switch.over is not None:
            return
        try:
            with self._sending:
                self._socket.sendall(data, fast_stdlib.NO_SIGNAL)
        except OSError:
            self._hear_last_words()

    def _hear_last_words(self) -> None:
        """Read what guestd sent before the channel broke: the last messages may say why."""
        deadline = time.monotonic() + _LAST_WORDS_S
        with self._changed:
            while self._switch.over is None and time.monotonic() < deadline:
                if self._someone_reads:
                    self._changed.wait(_LAST_WORDS_S)
                elif not self._read_for_all(0):
                    break
            self._switch.finish("lost")
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until `ready()` returns True; return False at the deadline.

        `ready` is called whenever something arrived.
        """
        with self._changed:
            while not ready():
                if self._switch.over is not None:
                    raise SandboxLostError("the sandbox is gone")
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if self._someone_reads:
                    self._changed.wait(left)
                    if left == 0:
                        return ready()
                elif not self._read_for_all(left) and left == 0:
                    return False
        return True

    def poll(self) -> None:
        """Take what has arrived, without waiting."""
        with self._changed:
            while self._switch.over is None and not self._someone_reads and self._read_for_all(0):
                pass

    def _read_for_all(self, left: float | None) -> bool:
        """Read once; return whether something arrived within `left` seconds or a day.

        The caller holds the lock, which is free meanwhile.
        """
        self._someone_reads = True
        self._changed.release()
        data: bytes | None = None
        try:
            waiter = select.poll()  # not select(): a process may hold more than 1024 descriptors
            waiter.register(self._socket, select.POLLIN)
            if waiter.poll(None if left is None else min(left, _LONGEST_S) * 1000):
                data = self._socket.recv(_READ)
        except (OSError, ValueError):  # closed by another thread
            data = b""
        finally:
            self._changed.acquire()
            self._someone_reads = False
            if data is not None:
                self._switch.feed(data)
                if self._switch.over == "protocol":
                    self._box.kill()  # a sandbox that broke the format is not read again, and does not run on (J07)
            self._changed.notify_all()
        return data is not None

    def finish(self, why: str) -> None:
        with self._changed:
            self._switch.finish(why)
            self._changed.notify_all()
