"""Runs a piece of Python in this process, as `python -c` would, and reports value and exception as guest-made text.

Nothing here is trusted by the host: by the time guest code runs, every right is gone, and what is written to the report
is data.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import builtins
import os
import sys
import types

from . import lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .shapes import Work

_MAX_TEXT = 1 << 16
_MAX_REPORT = (1 << 18) - 1  # guestd reads no more
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing ast
_NAME = "<run>"


def run(job: Work, report_fd: int) -> int:
    """The process's exit code. Output is flushed, exit handlers have run, non-daemon threads have ended."""
    _prepare(job)
    report: dict[str, object] = {}
    code = _execute(str(job["code"]), report)
    code = _finish(code)
    if report:
        _send(report_fd, report)
    return code


def rehearse() -> None:
    """Touch what every run touches while the sandbox still waits: the first write to a page after a fork copies it."""
    report: dict[str, object] = {}
    saved = dict(os.environ), sys.displayhook, sys.modules["__main__"]
    _execute("x = [str(i) for i in range(100)]\nlen(x)\n", report)
    lean.loads(lean.dumps({"report": report, "names": [f"{i}" for i in range(50)]}))
    os.environ.update({"PATH": "", "HOME": "", "TMPDIR": "", "USER": "", "LANG": ""})
    os.environ.clear()
    os.environ.update(saved[0])
    sys.displayhook, sys.modules["__main__"] = saved[1:]
    builtins.__dict__.pop("_", None)


def _prepare(job: Work) -> None:
    env: dict[str, str] = job["env"]
    os.environ.clear()
    os.environ.update(env)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    sys.argv = ["-c", *job.get("args", [])]
    sys.path[:] = ["", *job["sys_path"]]
    if job.get("executable"):
        sys.executable = str(job["executable"])
    _forget_ours()
    _new_randomness()
    _site_builtins()


def _forget_ours() -> None:
    """Our modules are no part of the guest's interpreter: an import of that name finds the image's, or nothing."""
    for name in [n for n in sys.modules if n == "ringfence" or n.startswith("ringfence.")]:
        del sys.modules[name]


def _new_randomness() -> None:
    """What a fork shares and a fresh process would not (H11, K05). `random` reseeds itself after a fork."""
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(48), 48.0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4), "little"))
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].__dict__["_name_sequence"] = None


def _site_builtins() -> None:
    import _sitebuiltins

    for name in ("quit", "exit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()  # noqa: SLF001  # what site itself does


def _execute(source: str, report: dict[str, object]) -> int:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    _show_source(source)
    sys.displayhook = _remember_value(report)
    try:
        body, last = _compile(source)
        exec(body, main.__dict__)  # noqa: S102  # the purpose of this module
        if last is not None:
            exec(last, main.__dict__)  # noqa: S102
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:  # noqa: BLE001  # whatever the guest raised is its result
        return _raised(error, report)
    return 0


def _compile(source: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The module's code, and its last expression apart, so that its value can be reported as a prompt would show it."""
    import _ast

    tree = compile(source, _NAME, "exec", _ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        last = compile(_ast.Interactive([tree.body.pop()]), _NAME, "single", dont_inherit=True)
    return compile(tree, _NAME, "exec", dont_inherit=True), last


def _remember_value(report: dict[str, object]) -> Callable[[object], None]:
    def displayhook(value: object) -> None:
        if value is not None:
            builtins._ = value  # type: ignore[attr-defined]  # as the interactive prompt does
            report["value"] = repr(value)[:_MAX_TEXT]

    return displayhook


def _show_source(source: str) -> None:
    """Tracebacks show the guest's own lines."""
    import linecache

    linecache.cache[_NAME] = (len(source), None, source.splitlines(keepends=True), _NAME)


def _raised(error: BaseException, report: dict[str, object]) -> int:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    text = _describe(error, trace, report)
    try:
        if text and sys.excepthook is sys.__excepthook__:
            print(text, end="", file=sys.stderr)  # the interpreter's own printer would not show lines of "<run>"
        else:
            sys.excepthook(type(error), error, trace)
    except BaseException as second:  # noqa: BLE001  # a guest's own hook may raise anything
        sys.__excepthook__(type(second), second, second.__traceback__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _describe(error: BaseException, trace: types.TracebackType | None, report: dict[str, object]) -> str:
    """Puts the exception into the report and returns its whole traceback, empty when the guest's own code spoilt it."""
    import traceback

    try:
        message = str(error)
        text = "".join(traceback.format_exception(type(error), error, trace))
    except BaseException as second:  # noqa: BLE001  # a guest's __str__ may raise anything
        message, text = f"<unprintable: {type(second).__name__}>", ""
    name = type(error).__name__[:200]
    report["exception"] = {"name": name, "message": message[:_MAX_TEXT], "traceback": text[:_MAX_TEXT]}
    return text


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _finish(code: int) -> int:
    """What the interpreter does at its end, without tearing every module down."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # noqa: SLF001  # what the interpreter itself calls
        import atexit

        atexit._run_exitfuncs()  # noqa: SLF001  # the same
    except SystemExit as error:
        code = _exit_code(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    return code


def _send(fd: int, report: dict[str, object]) -> None:
    data = lean.dumps(report)
    room = _MAX_TEXT
    while len(data) > _MAX_REPORT:  # six bytes for a character that is not ASCII
        room //= 2
        data = lean.dumps(_cut(report, room))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return


def _cut(report: dict[str, object], room: int) -> dict[str, object]:
    cut: dict[str, object] = {}
    for name, value in report.items():
        cut[name] = _cut(value, room) if isinstance(value, dict) else str(value)[:room]
    return cut
