"""The `ringfence` command: its verbs. Every run of the command ends in an exit code and a sentence, never a traceback.

Start-up time is a feature: this module imports only what `ringfence exec` uses, and a verb when the verb is called.
"""

from __future__ import annotations

import os

from ringfence.__main__ import GUEST_VERBS
from ringfence.cli.console import Console, OutputClosed, Problem
from ringfence.errors import need_linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn, TypeAlias

    Verb: TypeAlias = Callable[[list[str], Console], int]

__all__ = ["main"]

EXIT_USAGE = 2
EXIT_OURS = 125
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

VERBS = ("run", "exec", "shell", "doctor", "policy", "attack", "image")
MAKERS = ("doctor", "attack", "image")  # ended by a signal, they first remove what they made

# Verbs of later versions, and what does their job until then. No help names them; calling one says so.
LATER = {
    "serve": "from Python, in your own server: ringfence.run(code), ringfence.Sandbox()",
    "keys": "there is no server yet, so there are no keys",
    "sandbox": "sandboxes end with the process that made them; there is no server to ask",
    "audit": "each run's facts go to a file with: ringfence exec --report FILE -- COMMAND",
    "mcp": "from a tool of your own: ringfence run --json FILE",
    "browser": "on this machine: ringfence run FILE",
}


def main(argv: list[str]) -> int:
    """Run one command line (without the program's name) and return the exit code. Raises nothing."""
    try:
        return _guarded(argv, Console())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OutputClosed:
        return EXIT_PIPE
    except Problem:  # the message itself could not be written
        return EXIT_OURS


def _guarded(words: list[str], console: Console) -> int:
    try:
        return _dispatch(words, console)
    except Problem as problem:
        console.fail(str(problem), code=problem.code, fix=problem.fix)
        return _bad_argument(words) if problem.status is None else problem.status
    except OutputClosed:
        message = "the reader of the output has gone: everything inside was killed"
        console.record(lambda: {"error": {"code": "output-closed", "message": message, "fix": None}})
        raise
    except KeyboardInterrupt:
        raise
    except Exception as error:  # noqa: BLE001  # the last line: people get a sentence, not a traceback
        from ringfence.cli.failure import report

        return report(error, console, bad_argument=_bad_argument(words))


def _bad_argument(words: list[str]) -> int:
    return EXIT_OURS if words and words[0] in GUEST_VERBS else EXIT_USAGE


def _dispatch(words: list[str], console: Console) -> int:
    if not words:
        from ringfence.cli.console import ERR, write
        from ringfence.cli.help import TEXTS

        write(ERR, TEXTS[""].encode())
        return EXIT_USAGE
    verb = words[0]
    rest = words[1:]
    if verb in VERBS:
        if verb != "policy" and not {"--help", "-h"} & set(rest):
            need_linux()
        if verb in MAKERS:
            from ringfence.cli.failure import tidily

            return tidily(_verb(verb), rest, console)
        return _verb(verb)(rest, console)
    if verb in ("--help", "-h"):
        return show_help("", console)
    if verb == "help":
        return _help(rest, console)
    if verb in ("--version", "-V"):
        from ringfence import __version__

        console.out(f"ringfence {__version__}\n")
        return 0
    if verb in LATER:
        _later(verb, rest, console)
    console.json = "--json" in words
    raise _unknown(verb)


def _verb(verb: str) -> Verb:
    if verb == "exec":
        from ringfence.cli.exec import main as chosen
    elif verb == "run":
        from ringfence.cli.run import main as chosen
    elif verb == "policy":
        from ringfence.cli.policy import main as chosen
    elif verb == "doctor":
        from ringfence.cli.doctor import main as chosen
    elif verb == "shell":
        from ringfence.cli.exec import shell as chosen
    elif verb == "image":
        from ringfence.cli.image import main as chosen
    else:
        from ringfence.cli.attack import main as chosen
    return chosen


def show_help(topic: str, console: Console) -> int:
    """Print the help text of a topic."""
    from ringfence.cli.help import TEXTS

    console.out(TEXTS[topic])
    return 0


def _help(rest: list[str], console: Console) -> int:
    from ringfence.cli.help import TEXTS

    console.json = "--json" in rest
    rest = [word for word in rest if word != "--json"]
    topic = rest[0] if rest and rest[0] not in ("--help", "-h") else ""
    if topic in TEXTS:
        return show_help(topic, console)
    if topic in LATER:
        _later(topic, [], console)
    from ringfence.text import nearest

    near = nearest(topic, TEXTS)
    see = f"did you mean: ringfence help {near}?" if near else "see: ringfence --help"
    raise Problem(f"there is no help on {topic!r}", fix=see)


def _later(verb: str, rest: list[str], console: Console) -> NoReturn:
    console.json = "--json" in (rest[: rest.index("--")] if "--" in rest else rest)
    raise Problem(f"{verb} is not in this version", fix=LATER[verb], code="not-in-this-version", status=EXIT_OURS)


def _unknown(verb: str) -> Problem:
    from ringfence.text import nearest

    if verb.startswith("-"):
        return Problem(f"no verb before {verb}", fix="options come after the verb: ringfence VERB [OPTIONS] ...")
    near = nearest(verb, [*VERBS, "help"])
    if near:
        return Problem(f"there is no verb {verb!r}", fix=f"did you mean: ringfence {near}?")
    if os.path.isfile(verb):
        return Problem(f"there is no verb {verb!r}", fix=f"to run that file: ringfence run {verb}")
    return Problem(
        f"there is no verb {verb!r}", fix=f"to run a command: ringfence exec -- {verb}; verbs: ringfence --help"
    )
