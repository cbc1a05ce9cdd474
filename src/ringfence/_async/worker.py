"""A file worker as the caller sees it: raw bytes both ways, an answer, and a deadline that no guest can stretch."""

from __future__ import annotations

import errno
import time

from ringfence.core import arguments
from ringfence.errors import SandboxError, SandboxLostError
from ringfence.wire import frames
from ringfence.wire.inbox import STDIN_WINDOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfence._async.process import Place

STALL_S = 30.0  # a worker that sends nothing for so long is stopped or stuck
_SHORT_S = 5.0  # a file call is no run: it may take at least so long, whatever limits.timeout_s says
_FRAME = 1 << 18
_KILL_S = 3.0
_AGAIN_S = 0.05
_SIGTERM = 15


class AsyncWorker:
    """A process inside that does one file operation. Killed when it stalls; `total` also limits the whole time."""

    def __init__(
        self, place: Place, call: str, args: Mapping[str, object], *, feeds: bool = False, total: bool = False
    ) -> None:
        self._place = place
        self._call = call
        self._args = dict(args)
        self._feeds = feeds
        self._inbox = place.link.open()
        allowed = max(place.policy.limits.timeout_s, _SHORT_S)
        self._ends_at = time.monotonic() + allowed if total else None
        self._allowed = allowed
        self.stall_s = STALL_S
        self._killed = False

    async def start(self) -> AsyncWorker:
        """Start the worker and return it.

        When the caller is interrupted during the start, the worker is killed first.
        """
        try:
            call = arguments.file_call(self._call, self._args, keeps_stdin=self._feeds)
            await self._place.link.start(call, self._inbox)
        except BaseException:
            await self._place.link.say(op="kill", id=self._inbox.id, why="interrupted")
            raise
        return self

    # bytes

    async def read(self, *, patient: bool = False) -> list[bytes]:
        """Return all bytes that have arrived, at least some; return [] after the end.

        `patient`: wait without a deadline.
        """
        inbox = self._inbox
        while True:
            ended = inbox.end is not None  # read first: what came before the end is in the inbox by then
            found = await self._take()
            if found or ended:
                return found
            await self._wait(lambda: bool(inbox.items) or inbox.end is not None, patient=patient)

    async def _take(self) -> list[bytes]:
        """Return what the inbox holds, and let the worker send as much again."""
        inbox = self._inbox
        found = []
        while (item := inbox.take()) is not None:
            if item[0] == frames.STDOUT:
                found.append(item[1])
        credit = inbox.credit()
        if credit and inbox.end is None:
            await self._place.link.say(op="credit", id=inbox.id, bytes=credit)
        return found

    async def write(self, data: bytes) -> bool:
        """Write to the worker's stdin. Return False when the worker takes no more; the answer says why."""
        inbox = self._inbox
        view = memoryview(data)
        for start in range(0, len(view), _FRAME):
            if inbox.stdin_closed or inbox.end is not None:
                return False
            part = data if len(view) <= _FRAME else bytes(view[start : start + _FRAME])
            await self._place.link.write(inbox, part)
            await self._until_taken()
        return True

    async def _until_taken(self) -> None:
        inbox = self._inbox
        while inbox.stdin_in_flight >= STDIN_WINDOW and not inbox.stdin_closed and inbox.end is None:
            before = inbox.stdin_in_flight
            await self._wait(
                lambda: inbox.stdin_in_flight < before or inbox.stdin_closed or inbox.end is not None,  # noqa: B023  # called within this turn only
                patient=False,
            )

    async def close_stdin(self) -> None:
        if self._inbox.end is None:
            await self._place.link.say(op="eof", id=self._inbox.id)

    async def _wait(self, ready: Callable[[], bool], *, patient: bool) -> None:
        """Wait until `ready` returns True.

        Raise TimeoutError for a worker that takes too long, which is killed first.
        """
        now = time.monotonic()
        until = None if patient else now + self.stall_s
        if self._ends_at is not None:
            until = min(self._ends_at, now + self.stall_s)
        try:
            arrived = await self._place.link.wait(ready, until)
        except SandboxLostError:
            return  # the inbox has an end, which says why
        if not arrived:
            await self.end()
            raise TimeoutError(errno.ETIMEDOUT, self._too_long(), str(self._args.get("path", self._call)))

    def _too_long(self) -> str:
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            return f"files.{self._call}() did not end within {self._allowed:g} s (limits.timeout_s)"
        return f"files.{self._call}() stood still for {self.stall_s:g} s: the worker inside was stopped or starved"

    # the end

    async def answer(self, path: object) -> dict[str, object]:
        """Return the answer that the worker gave at the end; raise the worker's errors as Python's own.

        Unread output is dropped.
        """
        while await self.read():
            pass
        end = self._inbox.end
        assert end is not None
        if end["ev"] == "refused":
            from ringfence.core.endings import refused

            raise refused(end)
        if end["ev"] == "over" or end.get("why") == "lost":
            from ringfence.core.endings import lost_during

            raise lost_during("a file operation", end)
        found = arguments.report_of(end)
        number = found.get("errno")
        if isinstance(number, int) and 0 < number < 4096:
            raise _failure(number, found, path, self._call)
        if end.get("code") != 0:
            why = f"signal {end['signal']}" if end.get("signal") else f"status {end.get('code')}"
            raise SandboxError(f"the file worker ended early ({why})", fix="check whether the sandbox is out of memory")
        return found

    async def stop(self) -> bool:
        """Ask the worker to undo the work and end, and kill a worker that does not.

        Return whether it ended by itself.
        """
        deadline = time.monotonic() + _KILL_S
        inbox = self._inbox
        try:
            while inbox.end is None and time.monotonic() < deadline:
                # Sent again in each turn: a signal is lost when the worker has not started yet.
                await self._place.link.say(op="signal", id=inbox.id, signal=_SIGTERM)
                await self._place.link.wait(
                    lambda: bool(inbox.items) or inbox.end is not None, time.monotonic() + _AGAIN_S
                )
                await self._take()  # the end is reported after the output
        except SandboxLostError:
            return True  # the worker ended with everything inside
        await self.end()
        return not self._killed

    @property
    def ended(self) -> bool:
        return self._inbox.end is not None

    async def rest(self) -> None:
        """Tell guestd that the worker only waits for more work, so that the sandbox counts as idle."""
        await self._place.link.say(op="idle", id=self._inbox.id, n=0)

    async def go_on(self) -> None:
        """Tell guestd that more work follows. A sandbox that was paused because it was idle goes on."""
        await self._place.link.say(op="cell", id=self._inbox.id, n=0, timeout_s=None, cpu_s=None)

    async def let_go(self) -> None:
        """Kill a worker that has nothing more to say, without waiting for the end."""
        if self._inbox.end is None:
            self._killed = True
            await self._place.link.say(op="kill", id=self._inbox.id, why="caller")

    async def end(self) -> None:
        """Kill the worker if it still runs, and wait until the process is gone."""
        if self._inbox.end is not None:
            return
        self._killed = True
        await self._place.link.say(op="kill", id=self._inbox.id, why="caller")
        inbox = self._inbox
        deadline = time.monotonic() + _KILL_S
        try:
            while inbox.end is None:
                if not await self._place.link.wait(lambda: bool(inbox.items) or inbox.end is not None, deadline):
                    self._place.box.kill()
                    inbox.end = {"ev": "over", "why": "caller"}
                await self._take()  # the end is reported after the output
        except SandboxLostError:
            return


def _failure(number: int, found: Mapping[str, object], path: object, call: str) -> OSError:
    from ringfence.wire import file_replies

    if "refused" in found:
        return file_replies.refused(found, str(path))
    return OSError(number, file_replies.explained(number, found, str(path), call=call), str(path))
