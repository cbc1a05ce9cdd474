"""Owns the loop of a session: an interpreter that is kept alive and executes the host's cells, one at a time.

The interpreter is a guest process: every right is gone before the first cell, and its messages are data.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import _thread
import builtins
import io
import itertools
import os
import sys

from ringfence.guest.interpreter import runner
from ringfence.guest.interpreter.display import flush
from ringfence.guest.interpreter.line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from ringfence.guest.guestd.protocols import ProcessWork

_MOST_ARGUMENTS = 1 << 22  # the host takes fewer bytes, and says so; more than a message holds would end the session


def serve(job: ProcessWork, line_fd: int) -> int:
    """Execute cells until the host has no more. Return the process's exit code."""
    line = Line(line_fd)
    runner.prepare(job)
    return Session(line, list(job.get("tools", []))).serve()


class Session:
    def __init__(self, line: Line, tools: list[str]) -> None:
        self._line = line
        self._cells = runner.Cells(line)
        self._interruptible = False
        self._calls = itertools.count(1)
        self._cell_now: int | None = None  # the number of the cell that runs
        self._hearing = _thread.allocate_lock()  # held by the line's reader: this loop, or a thread that asks
        self._saying = _thread.allocate_lock()  # so that no thread asks after the end of its cell was reported
        self._early: tuple[dict[str, Any], bytes] | None = None  # a message for this loop, read by a thread that asked
        self._input = _Input(self)
        self._tools = tools

    def serve(self) -> int:
        self._cells.install()
        _signal.signal(_signal.SIGINT, self._on_interrupt)
        for name in self._tools:
            self._cells.main.__dict__[name] = self._tool(name)
        while True:
            with self._hearing:
                received, self._early = self._early or self._line.receive(), None
            if received is None:
                return 0
            message, data = received
            if message["m"] == "cell":
                self._cell(message, data)
            elif message["m"] == "copied":
                self._copied(message)
            elif message["m"] in ("ping", "rehearse"):
                if message["m"] == "rehearse":  # while no caller waits, what every cell does is loaded or copied
                    self._cells.execute("None", "<rehearsal>")
                    flush()
                self._line.send({"m": "done", "n": message["n"], "exit": None, "exception": None})

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        if self._interruptible and self._line.may_interrupt():
            raise KeyboardInterrupt

    def _cell(self, message: dict[str, Any], data: bytes) -> None:
        number = message["n"]
        code = data[: message["code"]].decode("utf-8", "surrogatepass")
        before = {name: os.environ.get(name) for name in message["env"]}
        os.environ.update(message["env"])
        self._input.begin(None if message["stdin"] is None else data[message["code"] :], asks=message["asks"])
        says: dict[str, object] = {"exit": None, "exception": None}
        self._cell_now = number
        try:
            self._interruptible = True
            says = self._cells.execute(code, f"<cell {number}>")
            self._interruptible = False
        except KeyboardInterrupt:  # the interrupt came between the end of the cell and this line
            self._interruptible = False
        flush()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        with self._saying:
            self._cell_now = None
            self._line.send({"m": "done", "n": number, **says})

    def _copied(self, message: dict[str, Any]) -> None:
        """Renew this memory, put into another sandbox: what a child does after a fork, and randomness (H11)."""
        import ctypes

        ctypes.pythonapi.PyOS_BeforeFork()
        ctypes.pythonapi.PyOS_AfterFork_Child()
        self._line.after_fork()
        self._hearing = _thread.allocate_lock()
        self._saying = _thread.allocate_lock()
        runner.new_randomness()
        self._line.send({"m": "done", "n": message["n"], "exit": None, "exception": None})

    # what guest code may ask of the host

    def ask(self, message: dict[str, object], data: bytes, answer: str) -> tuple[dict[str, Any], bytes] | None:
        """Send a question and wait for the host's answer. Return None when there will be none.

        One thread at a time: the host makes calls one after another too.
        """
        cell = self._cell_now
        if cell is None or not self._line.ours:
            return None
        with self._hearing:
            with self._saying:
                if self._cell_now != cell:  # the cell ended while this thread waited
                    return None
                self._line.send(message, data)
            while True:
                received = self._line.receive(in_cell=True)
                if received is None:
                    return None
                found = received[0]
                if found["m"] == answer and found.get("id") == message.get("id"):
                    return received
                if found["m"] not in ("answer", "input"):  # the host is past our cell, or it was another's
                    self._early = received
                    return None

    def _tool(self, name: str) -> Callable[..., object]:
        def tool(*args: object, **kwargs: object) -> object:
            import json

            number = next(self._calls)
            data = json.dumps({"args": args, "kwargs": kwargs}).encode()
            if len(data) > _MOST_ARGUMENTS:
                raise RuntimeError(f"{name}: arguments of more than {_MOST_ARGUMENTS} bytes")
            answer = self.ask({"m": "call", "id": number, "name": name}, data, "answer")
            if answer is None:
                why = "its cell is over" if self._line.ours else "a fork cannot call the host"
                raise RuntimeError(f"{name}: {why}")
            if not answer[0]["ok"]:
                raise RuntimeError(str(answer[0]["error"]))
            return json.loads(answer[1])

        tool.__name__ = tool.__qualname__ = name
        return tool


class _Input(io.TextIOBase):
    """Standard input of a session: what came with the cell, or lines that the host is asked for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._text = io.StringIO()
        self._asks = False

    def begin(self, data: bytes | None, *, asks: bool) -> None:
        self._text = io.StringIO((data or b"").decode("utf-8", "replace"))
        self._asks = asks
        sys.stdin = self
        builtins.input = self._input

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    @property
    def encoding(self) -> str:  # type: ignore[override]  # as of every text file that is open
        return "utf-8"

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # io's own stub allows None
        return self._line("", size)

    def read(self, size: int | None = -1, /) -> str:
        if not self._asks:
            return self._text.read(-1 if size is None else size)
        return "".join(iter(self.readline, ""))

    def _line(self, prompt: str, size: int = -1) -> str:
        line = self._text.readline(size)
        if line or not self._asks:
            return line
        answer = self._session.ask({"m": "prompt"}, prompt[: 1 << 16].encode("utf-8", "replace"), "input")
        if answer is None or answer[0]["eof"]:
            return ""
        self._text = io.StringIO(answer[1].decode("utf-8", "replace"))
        return self._text.readline(size)

    def _input(self, prompt: object = "", /) -> str:
        shown = str(prompt)
        if shown and not self._asks:
            print(shown, end="", flush=True)
        flush()
        line = self._line(shown)
        if not line:
            raise EOFError("EOF when reading a line")
        return line.removesuffix("\n")

    def __reduce__(self) -> NoReturn:
        raise TypeError("standard input cannot be pickled")
