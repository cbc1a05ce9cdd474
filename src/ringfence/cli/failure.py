"""Turn an exception that reached the top into a message and an exit code. Imported only for an exception."""

from __future__ import annotations

import errno
import signal

from ringfence.cli.console import OutputClosed, Problem, Stopped
from ringfence.errors import PolicyError, RingfenceError, UnsupportedError
from ringfence.policy.host_paths import LinkError
from ringfence.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ringfence.cli.console import Console


_OURS = 125

# Fixes of the library, in the words of the command's options.
_AS_OPTIONS = {
    "network": "leave --allow-net out; what the code needs goes in with --ro or --copy",
    "secrets": "leave --secret out",
    "isolation": "to accept less: --isolation shared-kernel",
}

# Fixes for errors of the operating system.
_BY_NUMBER = {
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "check the path: a part of it is a file, not a folder",
    errno.EACCES: "check who may read and write it",
    errno.EROFS: "it must be on a file system that can be written",
    errno.ENOSPC: "make room on the file system it is on",
    errno.EDQUOT: "make room: your quota is used up",
    errno.EMFILE: "raise the limit on open files: ulimit -n 1024",
    errno.ENFILE: "this machine has too many open files: end some programs",
    errno.EFBIG: "raise the limit on the size of files: ulimit -f unlimited",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or end some",
    errno.ENOMEM: "this machine has no memory left: end some programs",
}

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # Ctrl-C is Python's own


def report(error: Exception, console: Console, *, bad_argument: int) -> int:
    """Write what happened and what to do now. Return the exit code."""
    if isinstance(error, PolicyError):
        console.fail(_at_line(error), code=error.code, fix=error.fix)
        return bad_argument
    if isinstance(error, UnsupportedError):
        console.fail(str(error), code=error.code, fix=_AS_OPTIONS.get(error.code) or _fixes(error))
        return _OURS
    if isinstance(error, RingfenceError):
        console.fail(str(error), code=error.code, fix=error.fix)
        return _OURS
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        console.fail(named, code="os-error", fix=_system_fix(error))
        return _OURS
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        console.fail("this machine has no room for another thread", code="os-error", fix=_BY_NUMBER[errno.EAGAIN])
        return _OURS
    words = printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    console.fail(f"internal error: {words} ({_where(error)}); please report", code="internal", fix=None)
    return _OURS


def _at_line(error: PolicyError) -> str:
    return f"line {error.line}: {error}" if error.line is not None else str(error)


def _fixes(error: UnsupportedError) -> str | None:
    lines = []
    for missing in error.missing:
        fix = (missing.fix or "").replace('backend="process"', "--backend process")
        line = f"{missing.backend}: {missing.what}" + (f"; fix: {fix}" if fix else "")
        if line not in lines:
            lines.append(line)
    if error.fix and not lines:
        lines.append(error.fix)
    return "\n".join(lines) or None


def _system_fix(error: OSError) -> str | None:
    if isinstance(error, LinkError):
        return error.fix
    if (error.strerror or "").endswith("inside the sandbox"):
        return f"name a folder that is there inside, such as --cwd /workspace, or show it: --ro {error.filename}"
    return _BY_NUMBER.get(error.errno or 0)


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    code = trace.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"


def tidily(verb: Callable[[list[str], Console], int], words: list[str], console: Console) -> int:
    """Run a verb that makes things on this machine and return its exit code; a signal lets the verb clean up first.

    After a signal the exit code is 128 plus its number. A second signal ends the process at once.
    """
    mine = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores a signal
    for number in mine:
        signal.signal(number, _stop)
    try:
        return verb(words, console)
    except Stopped as stopped:
        try:
            console.fail(f"stopped by {signal.Signals(stopped.number).name}", code="stopped", fix=None)
        except (OutputClosed, Problem):
            pass  # the terminal went with the signal; the exit code still says it
        return 128 + stopped.number
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _: FrameType | None) -> None:
    for each in _SIGNALS:
        if signal.getsignal(each) is _stop:
            signal.signal(each, signal.SIG_DFL)
    raise Stopped(number)
