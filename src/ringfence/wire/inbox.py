"""Sorts a sandbox's frames into an inbox for each job. Does no I/O: the async and the sync link do."""

from __future__ import annotations

import time

from ringfence.text import printable
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
else:
    from _collections import deque  # the same without its module: 2 ms of a command's start

WINDOW = 1 << 20  # output bytes that a guest may be ahead of its reader, and the most that an inbox holds
PIECE = 64  # bytes charged for each piece of output besides its own: a frame of one byte is not free (F16)
STDIN_WINDOW = 1 << 20
_GIVE_BACK = 1 << 17
_WORDS = 200  # characters kept of a monitor's last message


class Inbox:
    """The output and events that have arrived for a job. Items are (kind, bytes) of output; the end is an event."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.items: deque[tuple[int, bytes]] = deque()
        self.end: dict[str, object] | None = None
        self.stdin_in_flight = 0
        self.stdin_closed = False
        self.pid = 0  # of a session's interpreter, on this host
        self.interrupted: str | None = None  # why guestd interrupted the running cell
        self._taken = 0
        # Two counters, each written by one side only: a thread may sort while another thread empties this inbox.
        self._arrived = 0
        self._granted = WINDOW + PIECE

    def put(self, kind: int, data: bytes) -> None:
        """Add output. Raises WireError when the sandbox sends more than was granted (J07)."""
        self._arrived += len(data) + PIECE
        if self._arrived > self._granted:
            raise frames.WireError("more output than was granted")
        self.items.append((kind, data))

    def take(self) -> tuple[int, bytes] | None:
        """Return the oldest output; None when no output waits."""
        try:
            item = self.items.popleft()
        except IndexError:  # no check before: another thread may take the item meanwhile
            return None
        self._taken += len(item[1]) + PIECE
        return item

    def credit(self) -> int:
        """Return how many bytes may be granted to the guest again; 0 while too few for a message."""
        if self._taken < _GIVE_BACK:
            return 0
        taken = self._taken
        self._taken = 0
        self._granted += taken
        return taken


class Switchboard:
    """The inboxes of a sandbox's jobs, by id."""

    def __init__(self) -> None:
        self._reader = frames.FrameReader()
        self._inboxes: dict[int, Inbox] = {}
        self._next = 1
        self.over: str | None = None  # why nothing more will come
        self._paused_at: float | None = None
        self._stood_s = 0.0

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def stood_still(self) -> float:
        """Return for how many seconds the sandbox's clocks have stood still so far."""
        return self._stood_s + (0.0 if self._paused_at is None else time.monotonic() - self._paused_at)

    def open(self) -> Inbox:
        inbox = Inbox(self._next)
        self._next += 1
        if self.over is None:
            self._inboxes[inbox.id] = inbox
        else:
            inbox.end = {"ev": "over", "why": self.over}  # the sandbox has ended, and no event will come any more
        return inbox

    def feed(self, data: bytes) -> None:
        """Sort arrived bytes. A broken format, like an end of file, ends all jobs: `over` says why."""
        if self.over is not None:
            return
        if not data:
            self.finish("lost")
            return
        try:
            for frame in self._reader.feed(data):
                self._sort(frame)
        except frames.WireError:
            self.finish("protocol")

    def finish(self, why: str) -> None:
        self.over = self.over or why
        for inbox in self._inboxes.values():
            inbox.end = inbox.end or {"ev": "over", "why": self.over}
        self._inboxes.clear()

    def _sort(self, frame: frames.Frame) -> None:
        if frame.kind != frames.JSON:
            inbox = self._inboxes.get(frame.stream)
            if inbox is None:
                raise frames.WireError("output of a job that does not run")
            inbox.put(frame.kind, frame.payload)
            return
        event = frames.event(frame.payload)
        if event["ev"] == "end":
            self.finish(str(event["why"]))
            return
        if event["ev"] == "crashed":
            self.finish(f"its monitor crashed: {printable(str(event['error']), _WORDS)}")
            return
        if event["ev"] in ("paused", "resumed"):
            self._stood_s = self.stood_still()
            self._paused_at = time.monotonic() if event["ev"] == "paused" else None
            return
        number = event.get("id")
        inbox = self._inboxes.get(number) if isinstance(number, int) else None
        if inbox is None:
            raise frames.WireError("an event of a job that does not run")
        self._note(inbox, event)

    def _note(self, inbox: Inbox, event: dict[str, object]) -> None:
        if event["ev"] == "took":
            count = event["bytes"]
            assert isinstance(count, int)
            inbox.stdin_in_flight -= count
        elif event["ev"] == "stdin-closed":
            inbox.stdin_closed = True
        elif event["ev"] == "started":
            pid = event["pid"]
            assert isinstance(pid, int)
            inbox.pid = pid
        elif event["ev"] == "interrupted":
            inbox.interrupted = str(event["why"])
        else:
            inbox.end = event
            del self._inboxes[inbox.id]
