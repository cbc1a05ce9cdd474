"""Run `ringfence run`: a piece of code, from FILE, -c or standard input, in a fresh sandbox."""

from __future__ import annotations

import os
import stat

from ringfence.cli.console import Problem
from ringfence.cli.options import run_table
from ringfence.cli.settings import Settings, absolute, inside
from ringfence.core.languages import TABLE, commands
from ringfence.text import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Result, Sandbox
    from ringfence.cli.console import Console
    from ringfence.cli.launch import CommandJob
    from ringfence.cli.options import CommandLine
    from ringfence.policy import Mount


WORKSPACE = "/workspace"
_BUILD = "/tmp/build"  # inside, a file system of this sandbox alone
_SWITCHES = {"python": "-c", "bash": "-c", "javascript": "-e"}  # the switch that takes code as an argument
_MAX_ARGUMENT = 100_000  # the kernel's own limit for one word is 128 KiB
MAX_CODE = 16 * 1024 * 1024

ENDINGS = {
    ".py": "python",
    ".js": "javascript",
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".sh": "bash",
    ".bash": "bash",
    ".go": "go",
    ".rb": "ruby",
    ".java": "java",
    ".c": "c",
    ".cc": "c++",
    ".cpp": "c++",
    ".cxx": "c++",
    ".r": "r",
    ".wasm": "wasm",
}
_USAGE = "name a file, or give the code: ringfence run FILE, ringfence run -c 'print(6 * 7)', ringfence run - < FILE"


def main(argv: list[str], console: Console) -> int:
    """Return the exit code of the code that ran, or our own."""
    given = run_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("run", console)
    from ringfence.cli.launch import launch

    settings = Settings(given, "offline")
    code = Code(given)
    job = job_for(code, settings.policy.mounts)
    plain = settings.cwd is None and settings.net_log is None
    if console.json and code.language == "python" and not code.args and plain and _no_input(code):
        job.python = code.text.decode("utf-8-sig")
    return launch(job, settings, console)


def _no_input(code: Code) -> bool:
    """Return whether there is no input. With --json a terminal counts as none: no question would be shown."""
    from ringfence.cli.streams import is_null

    return code.from_stdin or os.isatty(0) or is_null(0)


def job_for(code: Code, mounts: tuple[Mount, ...]) -> CommandJob:
    """Return the job for a piece of code: -c as an interpreter's argument, a file as a file of the same name.

    A file that is shown inside anyway runs from there and finds its neighbours.
    """
    from ringfence.cli.launch import CommandJob

    language = TABLE[code.language]
    if code.inline and code.language in _SWITCHES and len(code.text) <= _MAX_ARGUMENT:
        zero = ["bash"] if code.language == "bash" else []  # bash -c takes $0 before the arguments
        end = ["--"] if code.language == "javascript" and code.args else []
        return CommandJob([language.run[0], _SWITCHES[code.language], code.text.decode(), *zero, *end, *code.args])
    there = inside(code.path, mounts) if code.path is not None else None
    named = there or (f"{WORKSPACE}/{code.name}" if code.path is not None or not language.compile else None)
    what = commands(language, code.text.decode("utf-8", "replace"), _BUILD if language.compile else WORKSPACE, named)
    folder = os.path.dirname(code.path) if code.path is not None else None

    def prepare(box: Sandbox) -> Result | None:
        if language.compile:
            box.files.mkdir(_BUILD)
        if there is None:
            box.files.write(what.path, code.text)
        if not language.compile:
            return None
        from ringfence._sync.run import compile_once

        limits = box.policy.limits
        compiled = compile_once(box, what.compile, what.env, min(limits.timeout_s, limits.lifetime_s))
        return None if compiled.ok else compiled

    needed = there is None or language.compile
    return CommandJob(
        [*what.run, *code.args],
        stdin=not code.from_stdin,
        prepare=prepare if needed else None,
        folder=None if there is not None else folder,
    )


class Code:
    """A piece of code: `name` is its file name inside, `inline` whether -c gave the code, `path` the file here."""

    __slots__ = ("args", "from_stdin", "inline", "language", "name", "path", "text")

    def __init__(self, given: CommandLine) -> None:
        """Read the code. Raises Problem when there is no code, when it is no text, or when the language cannot run."""
        inline = given.last("--code")
        words = given.words
        path = "-" if inline is None and not words and not os.isatty(0) else None
        if inline is None and words:
            path, words = words[0], words[1:]
        if inline is None and path is None:
            raise Problem("no code to run", fix=_USAGE)
        self.inline = inline is not None
        self.from_stdin = path == "-"
        self.args = words
        self.language = _language(given.last("--language"), path)
        if inline is not None:
            self.text = _checked(inline.encode("utf-8", "surrogateescape"), "-c", self.language)
        else:
            assert path is not None
            self.text = _checked(_read(path), "standard input" if path == "-" else path, self.language)
        self.name = _inner_name(path, self.language)
        self.path = None if path is None or path == "-" else absolute(path)


def _language(named: str | None, path: str | None) -> str:
    ending = os.path.splitext(path or "")[1].lower()
    language = named or ENDINGS.get(ending, "python")
    if language not in TABLE:
        raise Problem(
            f"the language {language} is not in this version",
            fix=f"run takes {', '.join(TABLE)}",
            code="not-in-this-version",
        )
    return language


def _inner_name(path: str | None, language: str) -> str:
    """Return the file name for the code inside, without a folder; tracebacks show the name."""
    base = os.path.basename(path or "-")
    if path is None or path == "-" or not base.strip(".") or len(os.fsencode(base)) > 200:
        return TABLE[language].file
    return base


def _read(path: str) -> bytes:
    fd = 0 if path == "-" else _open(path)
    try:
        pieces = []
        size = 0
        while size <= MAX_CODE:
            piece = os.read(fd, min(1 << 20, MAX_CODE + 1 - size))
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", fix=_USAGE, code="code-unreadable") from None
    finally:
        if fd:
            os.close(fd)


def _open(path: str) -> int:
    from ringfence.policy.host_paths import LinkError, open_itself

    try:
        fd = open_itself(path, os.O_RDONLY | os.O_NOCTTY)
    except LinkError as error:  # through a link, a guest would choose which file the next guest reads (L16)
        raise Problem(f"cannot read {path!r}: {error.strerror}", fix=error.fix, code="link") from None
    except FileNotFoundError:
        raise Problem(f"there is no file {path!r}", fix=_missing_fix(path), code="code-missing") from None
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise Problem(
            f"cannot read {path!r}: {words}", fix="make it readable to you first", code="code-unreadable"
        ) from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        os.close(fd)
        raise Problem(
            f"{path} is a folder, not a file of code",
            fix=f"name the file, and show it the rest: ringfence run --ro {path} {path.rstrip('/')}/main.py",
            code="code-is-folder",
        )
    return fd


def _missing_fix(path: str) -> str:
    folder, base = os.path.split(path)
    try:
        near = nearest(base, os.listdir(folder or "."))
    except OSError:
        near = None
    if near:
        return f"did you mean {os.path.join(folder, near)}?"
    if any(char in path for char in "( \n;="):
        return "if that is the code itself: ringfence run -c CODE"
    return _USAGE


def _checked(data: bytes, where: str, language: str) -> bytes:
    if len(data) > MAX_CODE:
        raise Problem(
            f"{where} is more than {MAX_CODE >> 20} MiB of code",
            fix="keep data out of the code: show it as a file, ringfence run --ro DATA FILE",
            code="code-too-large",
        )
    if b"\0" in data:
        fix = "run takes source text"
        if where not in ("-c", "standard input"):
            shown = "" if where.startswith(("/usr/", "/bin/")) else f"--ro {where} "
            fix += f"; a program runs with: ringfence exec {shown}-- {where}"
        raise Problem(f"{where} is not text: it holds NUL bytes", fix=fix, code="code-binary")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(
            f"{where} is not UTF-8: byte {error.start} is {data[error.start]:#04x}",
            fix="save it as UTF-8, for example: iconv -f latin1 -t utf-8 FILE > NEW",
            code="code-not-utf8",
        ) from None
    if not data.strip():
        raise Problem(f"{where} holds no {language} code", fix=_USAGE, code="code-empty")
    return data
