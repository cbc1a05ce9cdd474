"""A session: an interpreter kept alive in a sandbox, and the cells that run in it."""

from __future__ import annotations

import time

from ringfence._async.compat import called, lock, opening
from ringfence._async.process import AsyncProcess
from ringfence.core import arguments
from ringfence.errors import PolicyError, SandboxClosedError, SandboxLostError
from ringfence.values import Struct, final, replace
from ringfence.wire import frames, line
from ringfence.wire.inbox import STDIN_WINDOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfence._async.compat import Opening
    from ringfence._async.process import Place
    from ringfence.core.tools import Asked, Budget
    from ringfence.results import Result
    from ringfence.values import SessionLanguage, Tool
    from ringfence.wire.inbox import Inbox

_SIGINT = 2
_INTERRUPTED = 130  # the exit code that bash has for a cell that SIGINT ended
_CELL_GRACE_S = 0.2  # more than a process has: a cell is interrupted before it is killed


@final
class CellRequest(Struct):
    """One piece of code, checked. `asks`: input() asks the caller."""

    code: str
    stdin: bytes | None
    env: Mapping[str, str]
    timeout_s: float
    cpu_s: float
    asks: bool

    def message(self, number: int) -> bytes:
        code = self.code.encode()
        stdin = self.stdin or b""
        fields = {
            "m": "cell",
            "n": number,
            "code": len(code),
            "env": dict(self.env),
            "stdin": None if self.stdin is None else len(stdin),
            "asks": self.asks,
        }
        return line.pack(fields, code + stdin)


class AsyncCell(AsyncProcess):
    """A cell that runs in a session. Killing a cell kills its session."""

    def __init__(
        self, place: Place, request: CellRequest, inbox: Inbox, *, number: int, session: AsyncSession, keep_events: bool
    ) -> None:
        job = {"kind": "session", "fresh": place.box.python["fresh"]}
        call = arguments.Call(job, (arguments.PROGRAMS[session.language],), request.timeout_s, request.cpu_s)
        super().__init__(place, call, inbox, keep_events=keep_events)
        self._kill_at += _CELL_GRACE_S
        self._request = request
        self._number = number
        self._done_message: line.Said | None = None
        self._nonsense = False
        self._interrupted = False
        self._tools = session._tools
        self._waiting_calls: list[Asked] = []  # calls of tools that wait for the host
        self._answering = False
        self._budget: Budget | None = None

    async def _send(self) -> None:
        request = self._request
        self._inbox.interrupted = None
        await self._place.link.tell(
            self._inbox,
            request.message(self._number),
            op="cell",
            id=self._inbox.id,
            n=self._number,
            timeout_s=request.timeout_s,
            cpu_s=request.cpu_s,
        )

    @property
    def running(self) -> bool:
        """Return whether the cell still runs; False once its end is known here."""
        if self._result is None and self._inbox.end is None:
            self._place.link.poll()
            self._take_output()
            self._look_for_end()
        return self._result is None

    def _on_message(self, said: line.Said) -> None:
        if self._done:
            return  # sent after the end of this cell and before the next cell: belongs to neither
        if said.kind == "done" and said.fields["n"] == self._number:
            self._done_message = said
            self._done = True
        if said.kind == "call":
            from ringfence.core import tools

            self._budget = self._budget or tools.Budget()
            self._waiting_calls.append(self._budget.take(said, self._tools))
        super()._on_message(said)

    def _on_broken_line(self) -> None:
        self._nonsense = self._done = True

    def _look_for_end(self) -> None:
        with self._taking:
            ends = self._result is None and (self._done or (self._inbox.end is not None and not self._inbox.items))
            if ends:
                self._finish()
        if ends and self._inbox.end is None:  # stops the clocks of this cell, not those of the next
            self._place.link.note(op="idle", id=self._inbox.id, n=self._number)

    def _finish(self) -> None:
        place = self._place
        inbox = self._inbox
        end = inbox.end if not self._done else None
        # The interpreter may have ended since the cell did, when no caller read the cell's end at once.
        kept = inbox.end is None and not self._nonsense
        if end is None:
            end = self._ending()
        elif end["ev"] == "refused":
            super()._finish()
        elif end["ev"] == "over" and self._stopped_by_us is not None:
            end = {**end, "why": self._stopped_by_us}
        elif end["ev"] == "exit":
            end = {**end, "why": end["why"] or self._why_exited(end)}
            if self._early_report is not None:
                end["early"] = dict(self._early_report)
        result = arguments.result(
            self._call,
            end,
            self._transcript,
            place.box,
            place.policy,
            image=place.image,
            number=self.id,
            state_kept=kept,
        )
        denied = self._budget.denials if self._budget is not None else ()
        self._result = replace(result, denials=(*result.denials, *denied)) if denied else result

    async def _stop(self, why: str) -> Result:
        """Kill the cell and end the interpreter, even where the cell ended first.

        The next cell must not meet messages that were meant for this cell.
        """
        is_late = self._result is not None
        result = await super()._stop(why)
        if is_late:
            return result
        await self._place.link.wait(lambda: self._inbox.end is not None, time.monotonic() + _KILL_S)
        return replace(result, state_kept=False)

    def _why_exited(self, end: Mapping[str, object]) -> str | None:
        """Return why the interpreter exited: an interrupt may end all of it, although only the cell should end."""
        stopped = end["signal"] == _SIGINT or end["code"] == _INTERRUPTED
        return self._inbox.interrupted or ("interrupted" if self._interrupted and stopped else None)

    def _ending(self) -> dict[str, object]:
        """Return an event for the end of a cell whose session lives. The guest chose the words, the host the reason."""
        if self._nonsense or self._done_message is None:
            return {"ev": "over", "why": "lost"}
        raised = self._transcript.exception is not None
        code = self._done_message.fields["exit"]
        stopped = raised or code == _INTERRUPTED
        why = self._inbox.interrupted or ("interrupted" if self._interrupted and stopped else None)
        return {"ev": "done", "why": why, "code": None, "failed": raised or (isinstance(code, int) and code != 0)}

    async def _pull(self, deadline: float | None, enough: Callable[[], bool] | None = None) -> bool:
        if self._done:
            self._look_for_end()
            return True
        arrived = await super()._pull(deadline, lambda: self._may_answer() or (enough is not None and enough()))
        await self._answer_asked()
        self._look_for_end()
        return arrived

    async def _answer_asked(self) -> None:
        """Answer the waiting calls of tools one after another, even where several callers wait for the cell."""
        mine = False
        try:
            while self._waiting_calls or mine:
                over = self._over()
                asked = self._next_asked(mine=mine, over=over)
                mine = asked is not None
                if asked is None:
                    return
                if not over:
                    await self._answer(asked)
                elif self._inbox.end is None:
                    await self._send_failure(asked)
        finally:
            if mine:
                self._answering = False

    def _next_asked(self, *, mine: bool, over: bool) -> Asked | None:
        """Return the next call to answer, or None.

        `mine`: the caller of this method is the one that answers. It no longer is when there is nothing to answer now.
        """
        with self._taking:
            if self._answering and not mine:
                return None
            self._answering = bool(self._waiting_calls) and (over or self._has_room())
            if not self._answering:
                return None
            asked = self._waiting_calls.pop(0)
            assert self._budget is not None
            self._budget.begin(asked)
            return asked

    def _has_room(self) -> bool:
        """Return whether the guest has taken enough answers: else they would pile up in the host's memory."""
        return self._inbox.stdin_in_flight < STDIN_WINDOW or self._inbox.stdin_closed

    def _may_answer(self) -> bool:
        return bool(self._waiting_calls) and not self._answering and self._has_room()

    def _over(self) -> bool:
        """Return whether tools must stop working for the cell, because the cell or the time ended.

        Takes what has arrived meanwhile.
        """
        late = time.monotonic() >= self._hard_deadline()
        if not self._place.link.paused:
            self._looked_at = time.monotonic()
        return not self.running or self._inbox.interrupted is not None or late

    async def _send_failure(self, asked: Asked) -> None:
        """Answer a call that is not made: a thread of the guest may wait for it, and the session may live on."""
        from ringfence.core import tools

        await self._place.link.tell(self._inbox, tools.failure(asked, tools.CELL_OVER))

    async def _answer(self, asked: Asked) -> None:
        """Make the call that the guest asked for.

        A failure is the guest's to handle; this method never raises for it.
        """
        from ringfence.core import tools

        given = tools.arguments(asked) if asked.refused is None else asked.refused
        if isinstance(given, str):
            message = tools.failure(asked, given)
            if asked.refused is None:
                assert self._budget is not None
                with self._taking:
                    self._budget.deny(asked.name, "tool.arguments", given)
        else:
            done, value = await called(self._tools[asked.name], given, tools.DEADLINE_S, self._over)
            message = tools.answer(asked, value) if done else tools.failure(asked, str(value))
        await self._place.link.tell(self._inbox, message)

    async def write(self, data: bytes | str) -> None:
        """Write to input(). Raise BrokenPipeError when the cell has ended or does not ask."""
        given = arguments.check_stdin(data) or b""
        if not self._request.asks or not self.running:
            raise BrokenPipeError("the cell reads no input from its caller")
        await self._place.link.tell(self._inbox, line.pack({"m": "input", "eof": False}, given))

    async def close_stdin(self) -> None:
        if self._request.asks and self.running:
            await self._place.link.tell(self._inbox, line.pack({"m": "input", "eof": True}))

    async def _interrupt(self) -> bool:
        if not self.running:
            return False
        self._interrupted = True
        from signal import SIGINT  # 2 ms: it loads `enum`

        await self.signal(SIGINT)
        return True


class AsyncSession:
    """An interpreter kept alive. Calls queue; one cell runs at a time."""

    def __init__(
        self, name: str, language: SessionLanguage, place: Callable[[], Place], tools: Mapping[str, Tool]
    ) -> None:
        self.name = name
        self.language = language
        self._running_place = place
        self._tools = tools
        self._gate = lock()
        self._inbox: Inbox | None = None
        self._reader = line.LineReader()
        self._cell: AsyncCell | None = None
        self._count = 0
        self._copy_of: tuple[str, int] | None = None  # the memory image that this session was made from
        self._had: frozenset[int] = frozenset()  # process numbers that the memory had before, in other sandboxes
        self._closed = False

    async def run(
        self,
        code: str,
        *,
        stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        request = self._request(code, arguments.check_stdin(stdin), env, timeout_s, asks=False)
        async with self._gate:
            before = self._cell  # the cell of another caller, which may still wait for it
            try:
                return await self._result_of(await self._begin(request, keep_events=False))
            except BaseException:
                cell = self._cell
                if cell is not None and cell is not before and cell.running:
                    await cell.kill()
                raise

    def spawn(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Opening[AsyncProcess]:
        """Run code without waiting: iterate over the events, answer prompts."""
        return opening(self._spawn(self._request(code, None, env, timeout_s, asks=True)))

    async def _spawn(self, request: CellRequest) -> AsyncProcess:
        async with self._gate:
            return await self._begin(request, keep_events=True)

    def _request(
        self, code: str, stdin: bytes | None, env: Mapping[str, str] | None, timeout_s: float | None, *, asks: bool
    ) -> CellRequest:
        checked, variables = arguments.check_code(code), arguments.check_env(env)
        if self.language == "bash":
            _check_bash_names(variables)
        limits = self._place().policy.limits
        seconds = arguments.check_timeout(timeout_s, limits)
        return CellRequest(checked, stdin, variables, seconds, limits.cpu_time_s, asks)

    def _place(self) -> Place:
        if self._closed:
            raise SandboxClosedError(f"session {self.name} was closed", code="session-closed", fix="box.session(name)")
        return self._running_place()

    async def _begin(self, request: CellRequest, *, keep_events: bool) -> AsyncCell:
        """Start a cell, and the interpreter if there is none. The caller holds the gate."""
        place = self._place()
        place.count_call()
        if self._cell is not None:
            await self._result_of(self._cell)
        place.link.poll()
        try:
            if self._inbox is None or self._inbox.end is not None:
                await self._start()
            assert self._inbox is not None
            self._count += 1
            cell = AsyncCell(place, request, self._inbox, number=self._count, session=self, keep_events=keep_events)
            cell._line = self._reader  # shared by all cells: a message may begin in one cell and end in the next
            self._cell = cell
            await cell._send()
        except BaseException:  # the cell may run, or wait for an interpreter that was never started
            inbox, self._inbox, self._cell = self._inbox, None, None
            if inbox is not None:
                await place.link.say(op="kill", id=inbox.id, why="interrupted")
            raise
        return cell

    async def _start(self, *, apart_from: frozenset[int] = frozenset()) -> None:
        """Start an interpreter.

        `apart_from`: process numbers that it must not have, because a memory image had them.
        """
        place = self._place()
        call = arguments.session_call(
            place.box, language=self.language, env=place.box.env, tools=list(self._tools), apart_from=sorted(apart_from)
        )
        self._inbox, self._reader = place.link.open(), line.LineReader()
        await place.link.start(call, self._inbox)

    async def _prepare(self) -> None:
        """Start the interpreter ahead. It has no cell, and does not count as in use."""
        await self._start()
        assert self._inbox is not None
        await self._place().link.say(op="idle", id=self._inbox.id, n=0)

    async def _ask(self, message: dict[str, object]) -> None:
        """Send a message that is no cell, and wait for its answer.

        Raise SandboxLostError when the interpreter does not answer.
        """
        place, inbox, reader = self._place(), self._inbox, self._reader
        assert inbox is not None
        number = self._count + 1
        await place.link.tell(inbox, line.pack({**message, "n": number}))
        deadline = time.monotonic() + _ANSWER_S
        while await place.link.wait(lambda: bool(inbox.items) or inbox.end is not None, deadline):
            item = inbox.take()
            if item is None:
                break
            if item[0] == frames.LINE and any(said.fields.get("n") == number for said in reader.feed(item[1])):
                return
        raise SandboxLostError(f"session {self.name} does not answer", code="session-lost", fix="try again")

    async def _result_of(self, cell: AsyncCell) -> Result:
        """Return the result of a cell. A session that broke the line's format is killed."""
        try:
            result = await cell.wait()
        except OSError:  # the interpreter could not be started; the next cell tries anew
            self._cell = self._inbox = None
            raise
        if self._cell is cell:
            self._cell = None
            if cell._nonsense:
                await self._kill()
        return result

    async def interrupt(self) -> bool:
        """Stop the running cell and keep the state. Return False when no cell ran."""
        self._place()
        return self._cell is not None and await self._cell._interrupt()

    async def restart(self) -> None:
        """End the interpreter; the next cell gets a new one, without the state."""
        self._place()
        await self._kill()

    async def close(self) -> None:
        """End the session. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._kill()

    async def _kill(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is None or inbox.end is not None:
            return
        place = self._running_place()
        if self._cell is not None:
            self._cell._stopped_by_us = "caller"
        await place.link.say(op="kill", id=inbox.id, why="caller")
        await place.link.wait(lambda: inbox.end is not None, time.monotonic() + _KILL_S)


_KILL_S = 3.0
_ANSWER_S = 10.0


def check_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a session's name is a str, not {type(name).__name__}")
    if not 0 < len(name) <= 64 or not name.isprintable():
        raise PolicyError(f"{name!r} is no name for a session", code="session-name", fix="1 to 64 printable characters")
    return name


def _check_bash_names(env: Mapping[str, str]) -> None:
    for name in env:
        if not name.isascii() or not name.isidentifier():
            raise PolicyError(
                f"no variable of bash can have the name {name!r}", code="env-name", fix="letters, digits and _"
            )


def check_session_language(language: object) -> SessionLanguage:
    if language == "python" or language == "javascript" or language == "bash":
        return language
    known = "python, javascript, bash"
    raise PolicyError(f"no session runs {language!r}", code="language", fix=f"one of: {known}")
