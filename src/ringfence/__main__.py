"""The process of the `ringfence` command: what comes before its line is read, and how it leaves; `python -P -m` too."""

from __future__ import annotations

import gc
import os
import sys

GUEST_VERBS = ("run", "exec", "shell")  # their exit codes below 125 are the guest's


def main() -> int:
    """Run the process's own command line and return its exit code."""
    gc.disable()  # until a guest runs: a start makes much and throws nothing away
    _fill_closed_descriptors()
    _begin(sys.argv[1:])
    from ringfence.cli import main as run_line

    try:
        code = run_line(sys.argv[1:])
    finally:
        from ringfence.cli.launch import die_of_interrupts

        die_of_interrupts()
    _leave(code)
    return code


def _fill_closed_descriptors() -> None:
    """With `>&-` the next file opened would be number 1, and the guest's output would go into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _begin(words: list[str]) -> None:
    """The zygote takes as long to start as we do: begin with it. Not where nothing will run."""
    if (
        sys.platform != "linux"
        or not words
        or words[0] not in GUEST_VERBS
        or {"--help", "-h", "--explain"} & set(words[1:])
    ):
        return
    from ringfence.spawn import begin

    has_options = words[1:] and words[1] != "--" and words[1].startswith("-")
    begin(program=words[0] == "exec" and not has_options)


def _leave(code: int) -> None:
    """At once, when a zygote is there to remove what is left: the interpreter's own end would take as long again."""
    spawn = sys.modules.get("ringfence.spawn")
    if spawn is None or not spawn.is_command():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if "ringfence.backends.process.record" in sys.modules:
        sys.modules["ringfence.backends.process.record"].close()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
