"""Write the command's own words: messages on standard error, and errors as JSON on standard output.

Writes go to the descriptors, not to `sys.stdout`: they keep their order among the guest's bytes, and no text layer
refuses a name.
"""

from __future__ import annotations

import os

from ringfence.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.values import Json


OUT, ERR = 1, 2

_OURS = 125
_NAMES = {OUT: "standard output", ERR: "standard error"}


class Problem(Exception):  # noqa: N818  # the command's own; the library raises RingfenceError
    """A mistake that the user can correct. Nothing was started.

    `status` is the exit code, or None for the code that the verb has for a bad argument.
    """

    def __init__(self, message: str, *, fix: str | None = None, code: str = "usage", status: int | None = None) -> None:
        super().__init__(message)
        self.fix = fix
        self.code = code
        self.status = status


class OutputClosed(BrokenPipeError):  # noqa: N818  # not a mistake: the reader of our output has gone
    """The reader of our standard output or error has gone."""


class Stopped(BaseException):
    """A signal asked this process to end. Not an Exception: no handler on the way up may swallow that."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Console:
    """The output of one call of the command. `json` and `quiet` are set as soon as the options are read.

    `report` is the open file of --report until its one object is written: the result, or an error. Before that file is
    open, `named_report` is its path as given: a refused command line must not leave an older result in the file.
    """

    __slots__ = ("json", "named_report", "quiet", "report")

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.report: int | None = None
        self.named_report: str | None = None

    def say(self, message: str) -> None:
        """Write a message. Every line starts with `ringfence:`, so that no line of a guest looks like a message."""
        lines = message.splitlines() or [""]
        text = "".join(f"ringfence: {printable(line)}\n" for line in lines)
        write(ERR, text.encode() if text.isascii() or not os.isatty(ERR) else text.encode(_charset(ERR), "replace"))

    def note(self, message: str) -> None:
        """Write a message unless `--quiet` was given."""
        if not self.quiet:
            self.say(message)

    def out(self, text: str) -> None:
        """Write the text that a verb prints. A terminal gets it filtered: file names may hold escapes."""
        data = text.encode("utf-8", "surrogateescape")
        if not text.isascii() or not text.replace("\n", "").isprintable():
            from ringfence.cli.terminal_filter import for_terminal

            data = for_terminal(data, _charset(OUT)) if os.isatty(OUT) else data
        write(OUT, data)

    def out_json(self, value: Json) -> None:
        """Write a JSON document to standard output."""
        write(OUT, dump(value))

    def fail(self, message: str, *, code: str, fix: str | None) -> None:
        """Write an error, as JSON where --json was given, and into the report."""
        error: Json = {"error": {"code": code, "message": message, "fix": fix}}
        try:
            if self.json:
                self.out_json(error)
            else:
                self.say(f"{message}\n{fix}" if fix else message)
        finally:
            self.record(lambda: error)

    def record(self, found: Callable[[], Json]) -> None:
        """Write the object of --report, if that was given. Calls `found` only then, because a result costs 8 ms."""
        fd = self.report
        named = self.named_report
        self.report = self.named_report = None
        if fd is None and named is not None:
            fd = _open_report(named)
        if fd is not None:
            try:
                write(fd, dump(found()), name="--report")
            finally:
                os.close(fd)


def dump(value: Json) -> bytes:
    """Return `value` as an indented JSON document with a line end, in ASCII: a terminal may show guest text in it."""
    import json

    return json.dumps(value, indent=2, ensure_ascii=True).encode() + b"\n"


def write(fd: int, data: bytes, *, name: str = "") -> None:
    """Write all of `data`, even to a non-blocking descriptor. Raises OutputClosed or Problem.

    `name` is the option that named the file, for files other than standard output and error.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            import select

            select.select([], [fd], [])
        except BrokenPipeError as error:
            raise OutputClosed(*error.args) from None
        except OSError as error:
            what = f"the file of {name}" if name else _NAMES[fd]
            fix = f"name another file: {name} FILE" if name else "send it where there is room"
            raise Problem(f"cannot write {what}: {error.strerror}", fix=fix, code="output", status=_OURS) from None


def colours(fd: int) -> bool:
    """Return whether our output to `fd` may be coloured."""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def quoted(word: str) -> str:
    """Return `word` quoted for a shell line that a user may copy."""
    if word and all(char.isascii() and (char.isalnum() or char in "@%+=:,./-_") for char in word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"


def _charset(fd: int) -> str:
    from ringfence.cli.terminal_filter import charset

    return charset(fd)


def _open_report(path: str) -> int | None:
    """Open a new file or an earlier report for writing. Return None for any other file, which is not changed.

    Links that a guest could have made in an earlier run are not followed (A04, L15). A command line that lacks a word
    may have the program to run in the place of FILE. Therefore a file that is no report stays as it is.
    """
    import stat

    from ringfence.policy.host_paths import open_parent

    try:
        parent, name = open_parent(path)
    except (OSError, ValueError):
        return None
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=parent)
    except OSError:
        return None
    finally:
        os.close(parent)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and os.pread(fd, 1, 0) in (b"", b"{"):
        os.ftruncate(fd, 0)
        return fd
    os.close(fd)
    return None
