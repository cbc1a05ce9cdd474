"""ringfence run: a piece of code in a fresh sandbox."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Result, Sandbox
    from ringfence.cli.console import Console
    from ringfence.cli.launch import Job
    from ringfence.cli.source import Code
    from ringfence.policy import Mount

WORKSPACE = "/workspace"
_BUILD = "/tmp/build"  # inside, a file system of this sandbox alone
_SWITCHES = {"python": "-c", "bash": "-c", "javascript": "-e"}  # what takes code as an argument
_MAX_ARGUMENT = 100_000  # the kernel's own limit for one word is 128 KiB


def main(argv: list[str], console: Console) -> int:
    """The exit code of what ran, or ours."""
    from ringfence.cli.tables import run_table

    given = run_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("run", console)
    from ringfence.cli.launch import launch
    from ringfence.cli.settings import Settings
    from ringfence.cli.source import Code

    settings = Settings(given, "offline")
    code = Code(given)
    job = job_for(code, settings.policy.mounts)
    plain = settings.cwd is None and settings.net_log is None
    if console.json and code.language == "python" and not code.args and plain and _no_input(code):
        job.python = code.text.decode("utf-8-sig")
    return launch(job, settings, console)


def _no_input(code: Code) -> bool:
    """Whether nothing is there to be read. With --json a terminal is nothing too: what would ask is not shown."""
    from ringfence.cli.streams import is_null

    return code.from_stdin or os.isatty(0) or is_null(0)


def job_for(code: Code, mounts: tuple[Mount, ...]) -> Job:
    """Code given with -c goes in as an argument, as an interpreter takes it; a file goes in as a file of its name.

    A file that is shown inside anyway runs from there, so that it finds what lies beside it.
    """
    from ringfence.cli.launch import Job
    from ringfence.cli.shown import inside
    from ringfence.core.languages import TABLE, commands

    language = TABLE[code.language]
    if code.inline and code.language in _SWITCHES and len(code.text) <= _MAX_ARGUMENT:
        zero = ["bash"] if code.language == "bash" else []  # bash -c takes $0 before the arguments
        end = ["--"] if code.language == "javascript" and code.args else []
        return Job([language.run[0], _SWITCHES[code.language], code.text.decode(), *zero, *end, *code.args])
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
    return Job(
        [*what.run, *code.args],
        stdin=not code.from_stdin,
        prepare=prepare if needed else None,
        folder=None if there is not None else folder,
    )
