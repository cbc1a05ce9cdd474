"""Runs a piece of Python in this process, as `python -c` would, and tells value and exception as guest-made data.

Nothing here is trusted by the host: by the time guest code runs, every right is gone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in lean
import _thread
import builtins
import os
import sys

from .cells import Cells, exit_code, new_randomness
from .display import flush
from .line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shapes import Work

# As the planner has them: the C library keeps every assignment that it has seen.
_USUAL = {"PATH": "/usr/bin:/bin", "HOME": "/workspace", "TMPDIR": "/tmp", "USER": "user", "LANG": "C.UTF-8"}


def run(job: Work, line_fd: int) -> int:
    """The process's exit code. Output is flushed, exit handlers have run, non-daemon threads have ended."""
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
    """Touch what every run touches while the sandbox still waits: the first write to a page after a fork copies it."""
    saved = dict(os.environ), sys.displayhook, sys.modules["__main__"], list(sys.meta_path)
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    cells = Cells(Line(null))
    cells.install()
    _code_of(cells.execute("x = 1\nlen('')\nprint(end='')\n", "<run>"))
    os.close(null)
    for number in (_signal.SIGINT, _signal.SIGPIPE):  # as they are: nobody inside is to be interrupted yet
        _signal.signal(number, _signal.getsignal(number))
    ours = {name: sys.modules[name] for name in _left or _ours()}
    _forget_ours()
    sys.modules.update(ours)
    new_randomness()
    _settle([], list(sys.path))
    _has_threads()
    import atexit  # noqa: F401  # not more of it: what was preloaded may have asked to be told of an end

    flush()
    os.environ.update(_USUAL)
    os.environ.clear()
    os.environ.update(saved[0])
    sys.displayhook, sys.modules["__main__"], sys.meta_path[:] = saved[1:]
    for name in ("_", "display"):
        builtins.__dict__.pop(name, None)


def prepare(job: Work) -> None:
    """Make this process an interpreter of the guest's: its variables, its path, nothing of ours."""
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
    """What a new interpreter does before it runs anything."""
    sys.argv = ["-c", *args]
    sys.path[:] = path
    if "threading" in sys.modules:
        sys.modules["threading"].main_thread()._set_native_id()  # noqa: SLF001  # what it does in a new thread
    _site_builtins()


_left: list[str] = []  # of our names, where most were forgotten before the fork


def forget_early() -> None:
    """In the process that all guests are forked from: looking through all names would copy fifty pages in each.

    The package stays, so that `from . import` still finds what is loaded.
    """
    for name in _ours():
        if name.startswith("ringfence.guest."):
            del sys.modules[name]
    _left[:] = _ours()


def _ours() -> list[str]:
    return [name for name in sys.modules if name == "ringfence" or name.startswith("ringfence.")]


def _forget_ours() -> None:
    """Our modules are no part of the guest's interpreter: an import of that name finds the image's, or nothing."""
    for name in _left or _ours():
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("ringfence.")]


def _site_builtins() -> None:
    import _sitebuiltins

    for name in ("quit", "exit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()  # noqa: SLF001  # what site itself does


def _has_threads() -> bool:
    """Whether any is left to wait for, or somebody asked to be told when all have ended."""
    threading = sys.modules.get("threading")
    return threading is not None and bool(_thread._count() or getattr(threading, "_threading_atexits", True))  # noqa: SLF001  # what it knows itself


def _finish(code: int) -> int:
    """What the interpreter does at its end, without tearing every module down."""
    try:
        if _has_threads():
            sys.modules["threading"]._shutdown()  # noqa: SLF001  # what the interpreter itself calls
        import atexit

        atexit._run_exitfuncs()  # noqa: SLF001  # the same
    except SystemExit as error:
        code = exit_code(error)
    return code if flush() else code or 120
