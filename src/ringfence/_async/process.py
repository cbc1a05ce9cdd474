"""A running process in a sandbox: events, input, signals, the end."""

from __future__ import annotations

import os
import time

from ringfence._async.compat import one_at_a_time
from ringfence.core import arguments
from ringfence.core.transcript import EventLog, Transcript
from ringfence.errors import SandboxClosedError, SandboxLostError
from ringfence.events import Exit
from ringfence.results import Usage
from ringfence.wire import frames, line
from ringfence.wire.inbox import STDIN_WINDOW, WINDOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import AsyncIterator, Callable, Mapping
    from types import TracebackType
    from typing import Self

    from ringfence._async.link import AsyncLink
    from ringfence.backends.contract import Box
    from ringfence.core.transcript import Piece
    from ringfence.events import Event
    from ringfence.policy.model import Policy
    from ringfence.results import Result
    from ringfence.wire.inbox import Inbox

_CHUNK = 1 << 16
_KILL_S = 3.0
_MOST_MESSAGES = 20_000  # the most messages that a run or a cell may send on its line
_LONGEST_PROMPT = 1 << 16  # bytes; the decoded text may take five times as many
_PAUSED_S = 3600.0
_LATE_S = 5.0  # for a caller that comes back after the deadline: what happened meanwhile still counts


class Place:
    """The parts of a running sandbox that its processes need."""

    def __init__(self, box: Box, link: AsyncLink, policy: Policy, image: str) -> None:
        self.box = box
        self.link = link
        self.policy = policy
        self.image = image
        self.pid = os.getpid()
        self.before_call: Callable[[], None] | None = None  # an agent's quota, which may refuse the call

    def count_call(self) -> None:
        """Count a run, exec, spawn or terminal before the start. Raise QuotaError."""
        if self.before_call is not None:
            self.before_call()


class AsyncProcess:
    """A command, terminal or cell that is running. Leaving `with` kills the process.

    Without `with` the process lives as long as the sandbox, and survives a lost connection.
    """

    def __init__(self, place: Place, call: arguments.Call, inbox: Inbox, *, keep_events: bool) -> None:
        self.id = arguments.new_id("p")
        self.argv = call.argv
        self._place = place
        self._call = call
        self._inbox = inbox
        self._taking = one_at_a_time()  # one caller may read events while another waits for the end or writes input
        mark = 0 if place.box.outlet is None else place.box.outlet.mark()
        # A one-shot sandbox has run nothing yet: its whole usage is the call's.
        before = (Usage(), 0) if call.one_shot else place.box.usage()
        self._transcript = Transcript(place.policy.limits, before, mark)
        self._denied_after = mark  # the gateway's denials after this mark were not events yet
        self._keep_events = keep_events
        self._line: line.LineReader | None = line.LineReader()
        self._messages = 0
        self._hung_up = False  # guestd knows that the line is not read any more
        # At least as large as what one read may bring.
        self._log = EventLog(max(place.policy.limits.output, 2 * WINDOW))
        self._result: Result | None = None
        self._exit_seen = False
        self._done = False  # for a cell that ended: later messages belong to the next cell
        self._stopped_by_us: str | None = None
        self._early_report: Mapping[str, object] | None = None  # why the process did not begin
        self._looked_at = self._transcript.started
        self._kill_at = self._looked_at + call.timeout_s + arguments.GRACE_S
        self._stopped_before = place.link.stood_still()

    async def _begin(self) -> Self:
        """Start the process and return it. When the caller is interrupted meanwhile, the process is killed first."""
        try:
            await self._place.link.start(self._call, self._inbox)
        except BaseException:
            await self._place.link.say(op="kill", id=self._inbox.id, why="interrupted")
            raise
        return self

    @property
    def running(self) -> bool:
        """Return whether the process still runs; False once its end is known here."""
        if self._result is None and self._inbox.end is None:
            self._place.link.poll()
        return self._result is None and self._inbox.end is None

    # events

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over the events from the first that was not read; ends after Exit."""
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._taking:
                event = self._next_event()
            if event is not None:
                return event
            if self._exit_seen:
                raise StopAsyncIteration
            await self._pull(None, enough=lambda: self._log.has_more)

    def _next_event(self) -> Event | None:
        event = self._log.next()
        if event is not None or self._result is None or self._exit_seen:
            return event
        event = self._log.last()
        if event is None:
            self._exit_seen = True
            return Exit(self._result, self._log.cursor)
        return event

    def _read_on(self, after: int) -> None:
        """Have the events read again from the cursor `after`."""
        with self._taking:
            self._log.seek(after)
            self._exit_seen = False

    def _take_denials(self) -> None:
        """Add the gateway's new denials to the events: when something else happens, at the latest before the end."""
        outlet = self._place.box.outlet
        if outlet is None or not self._keep_events:
            return
        with self._taking:
            after, self._denied_after = self._denied_after, outlet.mark()
            if after != self._denied_after:
                for denial in outlet.denials(after):
                    self._log.add(frames.LINE, denial)

    async def _pull(self, deadline: float | None, enough: Callable[[], bool] | None = None) -> bool:
        """Take what arrived, or wait for news or for `enough`.

        Return False at `deadline`. Set the result at the end.
        """
        hard = self._hard_deadline()
        until = hard if deadline is None else min(hard, deadline)
        inbox = self._inbox
        await self._grant()  # a caller that read `running` has taken output too
        try:
            arrived = await self._place.link.wait(lambda: self._has_news() or (enough is not None and enough()), until)
        except SandboxLostError:
            arrived = True
        if not arrived:
            self._looked_at = time.monotonic()
            if self._looked_at < self._hard_deadline():  # the caller's deadline, or a pause has moved ours
                return deadline is None or self._looked_at < deadline
            self._place.box.kill()  # guestd did not keep the deadline, so the host does
            self._inbox.end = {"ev": "over", "why": "timeout"}
        self._looked_at = time.monotonic()
        self._take_output()
        self._take_denials()
        if self._line is None and not self._hung_up and inbox.end is None:
            self._hung_up = True
            await self._place.link.say(op="hang-up", id=inbox.id)
        await self._grant()
        with self._taking:
            if inbox.end is not None and not inbox.items and self._result is None:
                self._finish()
        return True

    def _has_news(self) -> bool:
        """Return whether there is something to take, or another caller has taken the last of it."""
        with self._taking:
            return bool(self._inbox.items) or self._inbox.end is not None or self._done or self._result is not None

    async def _grant(self) -> None:
        """Let guestd send as much output again as was taken."""
        with self._taking:
            credit = self._inbox.credit()
        if credit and self._inbox.end is None:
            await self._place.link.say(op="credit", id=self._inbox.id, bytes=credit)

    def _hard_deadline(self) -> float:
        """Return when the host stops trusting guestd with the time. A caller that was away gets its news first."""
        now = time.monotonic()
        stood = self._place.link.stood_still()
        self._kill_at += stood - self._stopped_before
        self._stopped_before = stood
        if self._place.link.paused:
            return now + _PAUSED_S  # the clocks are stopped
        if now > self._kill_at and now - self._looked_at > arguments.GRACE_S:
            self._kill_at = now + _LATE_S
        return self._kill_at

    def _take_output(self) -> None:
        with self._taking:
            while not self._done and (item := self._inbox.take()) is not None:
                if item[0] == frames.LINE:
                    self._take_message(item[1])
                else:
                    self._transcript.add(*item)
                    self._keep_event(*item)

    def _keep_event(self, kind: int, piece: Piece) -> None:
        if self._keep_events:
            self._log.add(kind, piece)

    def _take_message(self, data: bytes) -> None:
        """Take in what guest code said about itself. Code that breaks the format is not read any more."""
        if self._line is None:
            return
        try:
            said = self._line.feed(data)
        except frames.WireError:
            self._line = None
            self._on_broken_line()
            return
        self._messages += len(said)
        if self._messages > _MOST_MESSAGES:  # a message costs the host more than its bytes (F16)
            self._transcript.outputs_cut = True
            self._line = None
            self._on_broken_line()
            return
        for each in said:
            self._on_message(each)

    def _on_broken_line(self) -> None:
        """React to a line that is not read any more.

        Later values and exceptions are lost; the end is reported from outside.
        """

    def _on_message(self, said: line.Said) -> None:
        if said.kind == "display":
            output = self._transcript.show(line.representations(said), is_value=bool(said.fields["value"]))
            if output is not None:
                self._keep_event(frames.LINE, output)
        elif said.kind == "prompt":
            self._keep_event(frames.LINE, said.data[:_LONGEST_PROMPT].decode("utf-8", "replace"))
        elif said.kind == "failed":
            self._early_report = said.fields
        elif said.kind == "done":
            exception = said.fields["exception"]
            self._transcript.exception = exception if isinstance(exception, dict) else None

    def _finish(self) -> None:
        end = self._inbox.end
        assert end is not None
        place = self._place
        if end["ev"] == "refused":
            from ringfence.core.endings import refused

            raise refused(end)
        if self._early_report is not None:
            end = {**end, "early": dict(self._early_report)}
        _raise_for_cwd(end, self._call)
        if end["ev"] == "over" and self._stopped_by_us is not None:
            end = {**end, "why": self._stopped_by_us}
        self._result = arguments.result(
            self._call,
            end,
            self._transcript,
            place.box,
            place.policy,
            image=place.image,
            number=self.id,
            state_kept=end["ev"] != "over",  # the end of a process ends no session
        )

    async def wait(self, *, timeout_s: float | None = None) -> Result:
        """Return the result at the end.

        Raise TimeoutError when the process still runs after `timeout_s`; it is not killed.
        """
        arguments.check_patience(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._result is None:
            if not await self._pull(deadline):
                raise TimeoutError(f"{self.argv[0]} still runs after {timeout_s:g} s")
        return self._result

    # input and signals

    async def write(self, data: bytes | str) -> None:
        """Write to stdin. Raise BrokenPipeError when stdin is closed."""
        rest = memoryview(arguments.check_stdin(data) or b"")
        inbox = self._inbox
        while rest:
            if not self._call.keeps_stdin or inbox.stdin_closed or inbox.end is not None or self._result is not None:
                raise BrokenPipeError(f"stdin of {self.argv[0]} is closed")
            await self._place.link.write(inbox, bytes(rest[:_CHUNK]))
            rest = rest[_CHUNK:]
            await self._until_taken()

    async def _until_taken(self) -> None:
        """Wait until stdin has room again.

        Output is taken meanwhile, so that neither side can block the other (F17).
        """
        inbox = self._inbox
        while inbox.stdin_in_flight >= STDIN_WINDOW and not inbox.stdin_closed and inbox.end is None:
            await self._pull(None, enough=lambda: inbox.stdin_in_flight < STDIN_WINDOW or inbox.stdin_closed)

    async def close_stdin(self) -> None:
        if self._result is None and self._inbox.end is None:
            self._inbox.stdin_closed = True
            await self._place.link.say(op="eof", id=self._inbox.id)

    async def _feed_stdin(self, data: bytes) -> None:
        """Write all of `data` to stdin, then close stdin."""
        inbox = self._inbox
        rest = memoryview(data)
        while rest and inbox.end is None and not inbox.stdin_closed:
            await self._place.link.write(inbox, bytes(rest[:_CHUNK]))
            rest = rest[_CHUNK:]
            await self._until_taken()
        await self.close_stdin()

    async def signal(self, signal: _signal.Signals) -> None:
        number = arguments.check_signal(signal)
        if self.running:
            await self._place.link.say(op="signal", id=self._inbox.id, signal=number)

    async def kill(self) -> Result:
        """Kill the whole process tree and return its result. Idempotent."""
        return await self._stop("caller")

    async def _stop(self, why: str) -> Result:
        if self._result is None:
            self._stopped_by_us = why
            await self._place.link.say(op="kill", id=self._inbox.id, why=why)
            try:
                return await self.wait(timeout_s=_KILL_S)
            except TimeoutError:
                self._place.box.kill()
                self._inbox.end = {"ev": "over", "why": why}
        return await self.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.kill()


class AsyncPty(AsyncProcess):
    """A process on a terminal. All output is one stream, as Stdout."""

    async def resize(self, *, cols: int, rows: int) -> None:
        size = arguments.check_size(cols, rows)
        if not self.running:
            raise SandboxClosedError(f"the terminal of {self.argv[0]} is closed", code="terminal-closed")
        await self._place.link.say(op="resize", id=self._inbox.id, **size)


async def completed(place: Place, call: arguments.Call) -> Result:
    """Start a process, feed it, and return the result.

    Whatever interrupts the caller, the guest's work is killed first.
    """
    place.count_call()
    process = await AsyncProcess(place, call, place.link.open(), keep_events=False)._begin()
    try:
        if call.stdin:
            await process._feed_stdin(call.stdin)
        return await process.wait()
    except BaseException:
        if process.running:
            await process.kill()
        raise


def _raise_for_cwd(end: dict[str, object], call: arguments.Call) -> None:
    report = arguments.early_report_of(call, end)
    number = report.get("errno")
    if report.get("stage") == "cwd" and isinstance(number, int) and end.get("code") == 125:
        raise OSError(number, f"{os.strerror(number)} inside the sandbox", str(call.job["cwd"]))
