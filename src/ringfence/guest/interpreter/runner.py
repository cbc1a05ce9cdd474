"""Runs a piece of Python in this process, as `python -c` would, and reports value and exception as data of the guest.

The host trusts nothing here: when guest code runs, every right is gone.
"""

from __future__ import annotations

import _ast
import _signal  # type: ignore[import-not-found]  # as in fast_stdlib
import _sitebuiltins
import _thread
import atexit
import builtins
import os
import sys
import types

from ringfence.guest.interpreter.display import DisplayFunction, flush, on_import
from ringfence.guest.interpreter.line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.guest.guestd.protocols import ProcessWork

_MAX_TEXT = 1 << 16
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing ast
_TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_CO_COROUTINE = 0x80
_HEAD, _, _TAIL = __file__.rpartition("runner")  # a path, or <runner> in a new interpreter
_OURS = tuple(f"{_HEAD}{name}{_TAIL}" for name in ("display", "runner", "session"))
# The values that the planner gives: the C library keeps every assignment that it has seen.
_USUAL = {"PATH": "/usr/bin:/bin", "HOME": "/workspace", "TMPDIR": "/tmp", "USER": "user", "LANG": "C.UTF-8"}


def run(job: ProcessWork, line_fd: int) -> int:
    """Run the code and return the process's exit code.

    Output is flushed, exit handlers have run, non-daemon threads have ended.
    """
    line = Line(line_fd)
    prepare(job)
    cells = Cells(line)
    cells.install()
    says = cells.execute(str(job["code"]), "<run>")
    code = _finish(_code_of(says))
    if says["exception"] is not None:
        line.send({"m": "done", "n": 0, **says})
    return code


def _code_of(says: dict[str, object]) -> int:
    if isinstance(says["exception"], dict):
        return 130 if says["exception"]["name"] == "KeyboardInterrupt" else 1
    return says["exit"] if isinstance(says["exit"], int) else 0


def rehearse() -> None:
    """Touch what every run touches, while the sandbox waits: the first write to a page after a fork copies it."""
    saved = dict(os.environ), sys.displayhook, sys.modules["__main__"], list(sys.meta_path)
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    cells = Cells(Line(null))
    cells.install()
    _code_of(cells.execute("x = 1\nlen('')\nprint(end='')\n", "<run>"))
    os.close(null)
    for number in (_signal.SIGINT, _signal.SIGPIPE):  # set to what they are: no process inside is to be interrupted yet
        _signal.signal(number, _signal.getsignal(number))
    ours = {name: sys.modules[name] for name in _left or _ours()}
    _forget_ours()
    sys.modules.update(ours)
    new_randomness()
    _settle([], list(sys.path))
    _has_threads()

    flush()
    os.environ.update(_USUAL)
    os.environ.clear()
    os.environ.update(saved[0])
    sys.displayhook, sys.modules["__main__"], sys.meta_path[:] = saved[1:]
    for name in ("_", "display"):
        builtins.__dict__.pop(name, None)


def prepare(job: ProcessWork) -> None:
    """Make this process a guest's interpreter.

    With the guest's variables and path, and without modules of this package.
    """
    env: dict[str, str] = job["env"]
    os.environ.clear()
    os.environ.update(env)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    if job.get("executable"):
        sys.executable = str(job["executable"])
    _forget_ours()
    new_randomness()
    _settle(job.get("args", []), ["", *(sys.path if job["sys_path"] is None else job["sys_path"])])


def _settle(args: list[str], path: list[str]) -> None:
    """Do what a new interpreter does before it runs code."""
    sys.argv = ["-c", *args]
    sys.path[:] = path
    if "threading" in sys.modules:
        sys.modules["threading"].main_thread()._set_native_id()  # noqa: SLF001  # what it does in a new thread
    _site_builtins()


_left: list[str] = []  # our names that are left, if most were dropped before the fork


def forget_early() -> None:
    """Drop our modules' names in the process that all guests are forked from.

    Looking through all names would copy fifty pages in each guest. The packages stay, so that `from
    ringfence.guest.files import worker` still finds what is loaded.
    """
    for name in _ours():
        if not hasattr(sys.modules[name], "__path__"):
            del sys.modules[name]
    _left[:] = _ours()


def _ours() -> list[str]:
    return [name for name in sys.modules if name == "ringfence" or name.startswith("ringfence.")]


def _forget_ours() -> None:
    """Drop our modules: the guest's import of such a name finds the image's module, or nothing."""
    for name in _left or _ours():
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("ringfence.")]


def _site_builtins() -> None:
    for name in ("quit", "exit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()  # noqa: SLF001  # what site itself does


def _has_threads() -> bool:
    """Return whether a thread is left to wait for, or a function is registered for the end of all threads."""
    threading = sys.modules.get("threading")
    return threading is not None and bool(_thread._count() or getattr(threading, "_threading_atexits", True))  # noqa: SLF001  # what it knows itself


def _finish(code: int) -> int:
    """Do what the interpreter does at its end, without tearing every module down."""
    try:
        if _has_threads():
            sys.modules["threading"]._shutdown()  # noqa: SLF001  # what the interpreter itself calls
        atexit._run_exitfuncs()  # noqa: SLF001  # the same
    except SystemExit as error:
        code = exit_code(error)
    return code if flush() else code or 120


# ── pieces of Python, one after another in one namespace ──────────────────────────────────────────


class Cells:
    """A `__main__` module, and the display of its values."""

    def __init__(self, line: Line) -> None:
        self.display = DisplayFunction(line)
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
        """Execute a piece. Return {"exit": code of SystemExit or None, "exception": what was raised or None}.

        Raises nothing.
        """
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
            if not task.done():  # interrupted: the task is cancelled first
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
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = trace
        text = self._describe(error, trace)
        try:
            if text and sys.excepthook is sys.__excepthook__:
                print(text, end="", file=sys.stderr)  # the interpreter's own printer would not show lines of a cell
            else:
                sys.excepthook(type(error), error, trace)
        except BaseException as second:  # noqa: BLE001  # a guest's own hook may raise anything
            sys.__excepthook__(type(second), second, second.__traceback__)

    def _describe(self, error: BaseException, trace: types.TracebackType | None) -> str:
        """Note the exception and return the whole traceback, empty when the guest's code spoilt it."""
        import traceback

        try:
            message = str(error)
            full = traceback.TracebackException(type(error), error, trace)
            full.stack[:] = [frame for frame in full.stack if frame.filename not in _OURS]
            text = "".join(full.format())
        except BaseException as second:  # noqa: BLE001  # a guest's __str__ may raise anything
            message = f"<unprintable: {type(second).__name__}>"
            text = ""
        half = _MAX_TEXT // 4
        shown = text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"
        name = type(error).__name__[:200]
        self._says["exception"] = {"name": name, "message": message[:half], "traceback": shown}
        return text


def _compile(source: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Return the module's code and, apart, the last expression, whose value is shown as a prompt would."""
    tree = compile(source, name, "exec", _ONLY_AST | _TOP_LEVEL_AWAIT, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        last = compile(_ast.Interactive([tree.body.pop()]), name, "single", _TOP_LEVEL_AWAIT, dont_inherit=True)
    return compile(tree, name, "exec", _TOP_LEVEL_AWAIT, dont_inherit=True), last


def _show_source(source: str, name: str) -> None:
    """Make tracebacks show the guest's lines.

    linecache brings a dozen modules; it gets the text when the guest imports it.
    """
    first = not _sources_to_fill
    _sources_to_fill[name] = source
    if first:
        on_import("linecache", _fill_linecache)


_sources_to_fill: dict[str, str] = {}  # sources that linecache does not have yet


def _fill_linecache(linecache: Any) -> None:
    while _sources_to_fill:
        name, source = _sources_to_fill.popitem()
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def _fork_by_default(context: Any) -> None:
    """Make multiprocessing fork, as before 3.14: a fork server needs the main program in a file."""
    context._default_context._default_context = context._concrete_contexts["fork"]  # noqa: SLF001  # `set_start_method` may be called once, by the guest


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def new_randomness() -> None:
    """Renew what a fork shares and a fresh process would not (H11, K05). `random` reseeds itself after a fork."""
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(48), 48.0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4), "little"))
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].__dict__["_name_sequence"] = None
