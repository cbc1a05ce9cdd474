"""Run a sandbox for the command: start, pass streams and signals on, remove, report the result.

The sandbox is closed on every way out. A signal ends the guest first and then this process.
"""

from __future__ import annotations

import gc
import os
import time

from ringfence.cli.console import ERR, OUT, OutputClosed, Problem, Stopped, write
from ringfence.errors import RingfenceError
from ringfence.text import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from ringfence import Result, Sandbox, Snapshot
    from ringfence.cli.console import Console
    from ringfence.cli.settings import Settings
    from ringfence.records import Request
    from ringfence.types import Process
    from ringfence.values import Json
else:
    import _signal as signal  # `signal` without its enums, which would cost 4 ms

_TAIL = 8 * 1024
_NUDGE_S = 0.25
_SIGNALS: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGQUIT: "Ctrl-\\",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
}
_EXIT_CODES = {
    "wall-clock": 124,
    "cpu-time": 124,
    "guest-lost": 125,
    "protection-lost": 125,
    "not-executable": 126,
    "not-found": 127,
    "caller": 130,
    "interrupted": 130,
    "memory": 137,
}
_SNAPSHOT_SUFFIX = ".snapshot"
_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class Stop:
    """The handler of the signals that end the command. The first ends the guest; a second ends the command."""

    __slots__ = ("at_once", "closing", "number")

    def __init__(self) -> None:
        self.number: int | None = None
        self.closing = False
        self.at_once: Callable[[], None] | None = None  # also called for the second signal

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            if self.at_once is not None:
                self.at_once()
            os._exit(128 + number)  # every process inside dies with this one
        self.number = number
        if not self.closing:
            raise Stopped(number)


class Nudges:
    """Interrupts waits now and then, within `with`.

    Python notices a signal that comes just before a wait only when the wait ends, and before 3.13 also one of two
    simultaneous signals that another thread takes. Only for Python's own waits, which resume after an interruption.
    """

    __slots__ = ("_handler", "_timer")

    def __enter__(self) -> None:
        self._handler = signal.signal(signal.SIGALRM, _nothing)
        self._timer = signal.setitimer(signal.ITIMER_REAL, _NUDGE_S, _NUDGE_S)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, *self._timer)
        signal.signal(signal.SIGALRM, self._handler)


def _nothing(_: int, __: FrameType | None) -> None:
    return


class CommandJob:
    """A program to run: `argv` inside, with our standard input if `stdin`, after `prepare` has put files there.

    `prepare` also compiles the code where needed, and returns the compiler's result when compiling failed.

    `python` is the same program as one piece of code for the library, whose result says more; for --json, where no
    reader watches the streams. `folder` holds the code's file on this machine, if that folder is not shown inside.
    """

    __slots__ = ("argv", "folder", "prepare", "python", "stdin")

    def __init__(
        self,
        argv: list[str],
        *,
        stdin: bool = True,
        prepare: Callable[[Sandbox], Result | None] | None = None,
        folder: str | None = None,
    ) -> None:
        self.argv = argv
        self.stdin = stdin
        self.prepare = prepare
        self.folder = folder
        self.python: str | None = None


def launch(job: CommandJob, settings: Settings, console: Console) -> int:
    """Run the job in a fresh sandbox and return the exit code. Raises Problem and RingfenceError when nothing ran."""
    if settings.explain:
        _explain(_sandbox(settings), console)
        return 0
    if settings.net_log is not None and settings.net_log == settings.report:
        raise Problem(f"--net-log and --report are both {settings.report}", fix="name a file for each")
    net_log = None if settings.net_log is None else _create("--net-log", settings.net_log)
    console.report = None if settings.report is None else _create("--report", settings.report)
    box = _sandbox(settings)  # after the report is opened, because an error here goes there too
    stop = Stop()
    old = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in old.items():
            if handler is not signal.SIG_IGN:  # nohup and shells' background jobs ignore some signals on purpose
                signal.signal(number, stop)
        if job.python is not None:
            _collect_again()
            result = _run_code(job.python, settings)
            tail = b""
        else:
            result, tail = _run(box, job, settings, console, stop)
            result = _with_findings(result, box)
    except BaseException:
        # The flag decides, not the exception: a Stopped that is raised inside a lock may come out as another exception.
        if stop.number is None:
            raise
        message = f"stopped by {_SIGNALS[stop.number]}: everything inside was killed"
        try:
            console.fail(message, code="stopped", fix=None)
        except (OutputClosed, Problem):
            pass  # the terminal went with the signal; the exit code still says it
        return 128 + stop.number
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if net_log is not None:
            write_net_log(net_log, box, console)
    console.record(result.to_dict)
    if not console.json:
        _write_notes(result, tail, job, settings, console)
    else:
        console.out_json(result.to_dict())
    return exit_code(result)


def _explain(box: Sandbox, console: Console) -> None:
    box._launcher.preflight()  # noqa: SLF001  # starts a sandbox where needed, because a user asks
    plan = box.plan()
    text = plan.explain().rstrip("\n")
    if console.json:
        from ringfence.rendering import to_dict

        console.out_json({**to_dict(plan), "explain": text})
    else:
        console.out(f"{text}\n")


def _sandbox(settings: Settings) -> Sandbox:
    """Return the sandbox, not started; a plain one is already being made. Raises Problem for a missing snapshot."""
    snapshot = None
    if settings.start_from is not None:
        snapshot = load_snapshot(settings.start_from)
    else:
        _begin(settings)
    from ringfence import Sandbox

    return Sandbox(backend=settings.backend, image=settings.image, policy=settings.policy, snapshot=snapshot)


def _begin(settings: Settings) -> None:
    """Begin to make a plain sandbox, which nothing can refuse, while the rest of the library is loaded."""
    from ringfence.host import zygote_start

    if not zygote_start.is_command() or not zygote_start.is_plain(settings.backend, settings.image, settings.policy):
        return
    from ringfence.backends.auto import find_image
    from ringfence.backends.process.backend import Process, begin_ahead

    try:
        process = Process()
        begin_ahead(process.plan(settings.policy, find_image(settings.image), process.facts()))
    except (RingfenceError, OSError):
        return  # no error here: the start tries again and says why


def _run(box: Sandbox, job: CommandJob, settings: Settings, console: Console, stop: Stop) -> tuple[Result, bytes]:
    try:
        _start(box)
        began = time.monotonic()
        _collect_again()
        refused = None if job.prepare is None else job.prepare(box)
        if refused is not None:
            return refused, _show(refused, settings, console)
        limits = settings.policy.limits
        left = max(min(limits.timeout_s, limits.lifetime_s) - (time.monotonic() - began), 0.001)
        if settings.tty:
            return _on_terminal(box, job, settings, console, stop, left)
        process = box.spawn(job.argv, cwd=settings.cwd, timeout_s=left)
        if job.stdin:
            from ringfence.cli.streams import feed

            feed(process)
        else:
            process.close_stdin()
        with Nudges():
            return _relay(process, settings, console)
    finally:
        stop.closing = True
        _end(box, settings)


def _on_terminal(
    box: Sandbox, job: CommandJob, settings: Settings, console: Console, stop: Stop, left: float
) -> tuple[Result, bytes]:
    from ringfence.cli.terminal import Terminal, size, variables

    terminal = Terminal(raw_output=settings.raw)
    stop.at_once = terminal.give_back
    with terminal:
        cols, rows = size()
        guest = box._pty(  # noqa: SLF001  # a terminal of the library has no time limit of its own
            job.argv, cols=cols, rows=rows, cwd=settings.cwd, env=variables(), timeout_s=left
        )
        with Nudges():
            result = terminal.hand_to(guest)
    if settings.keep is not None:
        _keep(box, settings.keep, console)
    return result, b""


def _keep(box: Sandbox, name: str, console: Console) -> None:
    console.note(f"kept {save_snapshot(box, name):,} bytes of files as {name}; to go on: ringfence shell --from {name}")


def _show(result: Result, settings: Settings, console: Console) -> bytes:
    """Write a compiler's output and return the end of its standard error."""
    if not console.json:
        from ringfence.cli.streams import OutputStreams

        streams = OutputStreams(raw=settings.raw)
        streams.write(OUT, result.stdout_bytes)
        streams.write(ERR, result.stderr_bytes)
        streams.finish()
    return result.stderr_bytes[-_TAIL:]


def _end(box: Sandbox, settings: Settings) -> None:
    """Close the sandbox. A command does not wait for the removal, which the zygote finishes.

    With writable mounts the command waits, because the findings of the last scan are part of the result.
    """
    from ringfence.host.zygote_start import is_command

    if is_command() and not any(mount.mode == "rw" for mount in settings.policy.mounts):
        from ringfence._sync.run import let_go

        let_go(box)
    else:
        box.close()


def _with_findings(result: Result, box: Sandbox) -> Result:
    """Return the result with the findings of the last scan of writable mounts among its denials."""
    from ringfence._sync.run import findings

    found = findings(box.denials())
    if not found:
        return result
    from ringfence.values import replace

    return replace(result, denials=(*result.denials, *found))


def _run_code(code: str, settings: Settings) -> Result:
    import warnings

    from ringfence import run
    from ringfence.errors import WeakerLimitWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeakerLimitWarning)  # the result says so
        return run(code, policy=settings.policy, backend=settings.backend, image=settings.image)


def _start(box: Sandbox) -> None:
    _load_rest()
    box.start()


def _load_rest() -> None:
    """Import the modules that the run will need, while the sandbox is being made."""
    import _datetime  # type: ignore[import-not-found]  # noqa: F401  # a C module without a stub; it is used later, as the others are

    import ringfence._sync.link
    import ringfence._sync.process
    import ringfence._sync.run
    import ringfence.cli.streams  # noqa: F401  # as above


def _collect_again() -> None:
    """Switch the garbage collector on, without the objects made so far, which live until the end. Saves 1 ms."""
    gc.freeze()
    gc.enable()


def _relay(process: Process, settings: Settings, console: Console) -> tuple[Result, bytes]:
    """Pass a process's output on until the process ends. Return the result and the end of standard error."""
    from ringfence.cli.streams import OutputStreams
    from ringfence.events import Exit, Gap, Stderr, Stdout

    streams = OutputStreams(raw=settings.raw)
    for event in process:
        if isinstance(event, Exit):
            streams.finish()
            return event.result, streams.stderr_tail
        if isinstance(event, Gap):
            console.note(f"{event.lost_bytes} bytes of output are lost: they came faster than they were read")
        elif not console.json and isinstance(event, Stdout | Stderr):
            streams.write(OUT if isinstance(event, Stdout) else ERR, event.data)
    raise AssertionError("a process ended without an Exit event")


def _write_notes(result: Result, tail: bytes, job: CommandJob, settings: Settings, console: Console) -> None:
    if not console.quiet and (has_notes(result) or _importable()):
        from ringfence.cli.notes import notes

        for line in [*_importable(), *notes(result, job, settings, tail)]:
            console.say(line)


def _importable() -> list[str]:
    """Return a warning for each folder of Python's import path that the guest could write."""
    from ringfence.host import import_path

    return [f"{folder}: {import_path.IMPORTABLE}" for folder in import_path.guests_folders()]


def _create(name: str, path: str) -> int:
    """Open a file to write before the guest exists: a file that cannot be written is an error before the run."""
    from ringfence.policy.host_paths import LinkError, descriptor, open_itself

    try:
        # Do not wait for a pipe that a guest left there: the pipe has no reader.
        fd = open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY | os.O_NONBLOCK)
        if descriptor(path) is None:
            os.set_blocking(fd, True)
        return fd
    except LinkError as error:  # through a link, a guest would choose the file that is overwritten (L15)
        raise Problem(f"{name} {path}: {error.strerror}", fix=error.fix, code="link") from None
    except OSError as error:
        raise Problem(
            f"{name} {path}: cannot be written: {error.strerror}", fix=f"name a file that you may write: {name} FILE"
        ) from None


def die_of_interrupts() -> None:
    """Let Ctrl-C end this process silently. Called at the end, when there is nothing left to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


# How an ending becomes an exit code, as `ringfence help exit` says.


def exit_code(result: Result) -> int:
    """Return the exit code for `result`. A guest may exit with our codes too; --json and --report tell them apart."""
    if result.reason in _EXIT_CODES:
        return _EXIT_CODES[result.reason]
    if result.reason == "signal" and result.signal is not None:
        return 128 + result.signal
    if result.exit_code is not None:
        return result.exit_code
    return 0 if result.status == "ok" else 1


def has_notes(result: Result) -> bool:
    """Return whether there may be notes besides the guest's output."""
    return bool(result.status != "ok" or result.denials or result.enforcement.weaker)


# The files a user asked for: the log of --net-log, and the snapshots of --keep and --from.


def write_net_log(fd: int, box: Sandbox, console: Console) -> None:
    """Write the gateway's decisions as JSON lines, say how many are no longer kept, and close the file."""
    import json

    try:
        requests = box.network.log()
        for request in requests:
            write(fd, json.dumps(_fields(request)).encode() + b"\n", name="--net-log")
        ended = sum(host.allowed + host.denied + host.failed for host in box.network.summary())
        if ended > len(requests):  # a guest can ask for names without end, to push an earlier line out
            console.say(f"--net-log holds the last {len(requests)} connections of {ended}")
    finally:
        os.close(fd)


def _fields(request: Request) -> dict[str, Json]:
    """Return the fields of a request by name, the time in ISO 8601."""
    fields = {name: getattr(request, name) for name in type(request).__fields__}
    return {**fields, "at": request.at.isoformat()}


def snapshot_name(option: str, raw: str) -> str:
    """Check the name of a snapshot: a file name without a folder."""
    if not 0 < len(raw) <= 64 or not _NAME_LETTERS.issuperset(raw) or raw[0] in ".-":
        raise Problem(
            f"{option} {raw!r} is no name for a snapshot",
            fix=f"letters, digits, '.', '_' and '-', 64 at most: {option} before-upgrade",
        )
    return raw


def _folder() -> str:
    """Return the folder of named snapshots. The user's own links are followed: no guest may write there (L19)."""
    from ringfence.host.state import disk_directory

    return os.path.realpath(disk_directory("named"))


def load_snapshot(called: str) -> Snapshot:
    """Load the snapshot of that name. Raises Problem when there is none, SnapshotError when the file was altered."""
    from ringfence import Snapshot

    path = f"{_folder()}/{called}{_SNAPSHOT_SUFFIX}"
    if not os.path.exists(path):
        raise Problem(f"--from {called}: there is no such snapshot", fix=_which(called), code="snapshot-missing")
    return Snapshot.load(path)


def _which(called: str) -> str:
    known = sorted(
        entry.removesuffix(_SNAPSHOT_SUFFIX) for entry in os.listdir(_folder()) if entry.endswith(_SNAPSHOT_SUFFIX)
    )
    near = nearest(called, known)
    if near:
        return f"did you mean --from {near}?"
    return f"there are: {', '.join(known)}" if known else f"make one: ringfence shell --keep {called}"


def save_snapshot(box: Sandbox, called: str) -> int:
    """Save the sandbox's files under that name, replacing an older snapshot. Return the size in bytes."""
    snapshot = box.snapshot()
    snapshot.export(f"{_folder()}/{called}{_SNAPSHOT_SUFFIX}")
    return snapshot.size_bytes
