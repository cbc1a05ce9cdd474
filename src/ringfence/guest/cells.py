"""Executes pieces of Python one after another in one namespace, and says how each ended."""

from __future__ import annotations

import builtins
import os
import sys
import types

from .display import Display
from .imported import on_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .line import Line

_MAX_TEXT = 1 << 16
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing ast
_TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_CO_COROUTINE = 0x80
_OURS = tuple(__file__.replace("cells", name) for name in ("cells", "imported", "pycode", "session"))


class Cells:
    """One `__main__` module, and the display of its values."""

    def __init__(self, line: Line) -> None:
        self.display = Display(line)
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = builtins
        self._loop: Any = None
        self._says: dict[str, object] = {}

    def install(self) -> None:
        sys.modules["__main__"] = self.main
        sys.displayhook = self._show_value
        self.display.install()
        if sys.version_info >= (3, 14):
            on_import("multiprocessing.context", _fork_by_default)

    def execute(self, source: str, name: str) -> dict[str, object]:
        """{"exit": code of SystemExit or None, "exception": what was raised or None}. Nothing is raised."""
        self._says = {"exit": None, "exception": None}
        self.display.begin()
        _show_source(source, name)
        try:
            body, last = _compile(source, name)
            self._run(body)
            if last is not None:
                self._run(last)
            self.display.show_figures()
        except SystemExit as error:
            self._says["exit"] = exit_code(error)
        except BaseException as error:  # noqa: BLE001  # whatever the guest raised is its result
            self._raised(error)
        return self._says

    def _run(self, code: types.CodeType) -> None:
        if not code.co_flags & _CO_COROUTINE:
            exec(code, self.main.__dict__)  # noqa: S102  # the purpose of this module
            return
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(eval(code, self.main.__dict__))  # noqa: S307  # the same
        try:
            self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: it hears of it, and then we go on
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task], timeout=0.2))
            raise

    def _show_value(self, value: object) -> None:
        if value is not None:
            builtins._ = value  # type: ignore[attr-defined]  # as the interactive prompt does
            self.display.show(value, is_value=True)

    def _raised(self, error: BaseException) -> None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        text = self._describe(error, trace)
        try:
            if text and sys.excepthook is sys.__excepthook__:
                print(text, end="", file=sys.stderr)  # the interpreter's own printer would not show lines of a cell
            else:
                sys.excepthook(type(error), error, trace)
        except BaseException as second:  # noqa: BLE001  # a guest's own hook may raise anything
            sys.__excepthook__(type(second), second, second.__traceback__)

    def _describe(self, error: BaseException, trace: types.TracebackType | None) -> str:
        """Says it and returns the whole traceback, empty when the guest's own code spoilt it."""
        import traceback

        try:
            message = str(error)
            told = traceback.TracebackException(type(error), error, trace)
            told.stack[:] = [frame for frame in told.stack if frame.filename not in _OURS]
            text = "".join(told.format())
        except BaseException as second:  # noqa: BLE001  # a guest's __str__ may raise anything
            message, text = f"<unprintable: {type(second).__name__}>", ""
        half = _MAX_TEXT // 4
        shown = text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"
        name = type(error).__name__[:200]
        self._says["exception"] = {"name": name, "message": message[:half], "traceback": shown}
        return text


def _compile(source: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The module's code, and its last expression apart, so that its value can be shown as a prompt would."""
    import _ast

    tree = compile(source, name, "exec", _ONLY_AST | _TOP_LEVEL_AWAIT, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        last = compile(_ast.Interactive([tree.body.pop()]), name, "single", _TOP_LEVEL_AWAIT, dont_inherit=True)
    return compile(tree, name, "exec", _TOP_LEVEL_AWAIT, dont_inherit=True), last


def _show_source(source: str, name: str) -> None:
    """Tracebacks show the guest's own lines. linecache brings a dozen modules: it is told when somebody imports it."""
    first = not _untold
    _untold[name] = source
    if first:
        on_import("linecache", _tell)


_untold: dict[str, str] = {}  # sources that linecache has not heard of


def _tell(linecache: Any) -> None:
    while _untold:
        name, source = _untold.popitem()
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def _fork_by_default(context: Any) -> None:
    """As before 3.14. Its fork server imports the main program from a file, and what we run has none."""
    context._default_context._default_context = context._concrete_contexts["fork"]  # noqa: SLF001  # `set_start_method` may be called once, by the guest


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def new_randomness() -> None:
    """What a fork shares and a fresh process would not (H11, K05). `random` reseeds itself after a fork."""
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(48), 48.0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4), "little"))
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].__dict__["_name_sequence"] = None
