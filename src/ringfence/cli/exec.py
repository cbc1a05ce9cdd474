"""Run `ringfence exec`, a command in a fresh sandbox, and `ringfence shell`, the same on a terminal."""

from __future__ import annotations

from ringfence.cli.console import Problem
from ringfence.cli.options import exec_table, shell_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.console import Console


# The shell is bash if the image has bash. The prompt names the sandbox, so that no user takes the shell for one of the
# machine.
_SHELL = (
    "if command -v bash >/dev/null 2>&1; then "
    r"PS1='\[\e[1;33m\]\u@\h\[\e[0m\]:\[\e[1;34m\]\w\[\e[0m\]\$ ' exec bash -i; "
    "else PS1='user@ringfence:$PWD\\$ ' exec sh -i; fi"
)


def main(argv: list[str], console: Console) -> int:
    """Run `ringfence exec` and return the exit code of the command, or our own."""
    given = exec_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("exec", console)
    _check_command(given.words)
    from ringfence.cli.launch import CommandJob, launch
    from ringfence.cli.settings import Settings

    return launch(CommandJob(given.words), Settings(given, "dev"), console)


def _check_command(words: list[str]) -> None:
    if not words:
        raise Problem("no command to run", fix="put it after the options: ringfence exec -- ls -l")
    if not words[0]:
        raise Problem("the command is an empty word", fix="a variable may be empty; write: ringfence exec -- ls -l")
    if len(words) == 1 and " " in words[0] and "/" not in words[0]:
        raise Problem(
            f"there is no program {words[0]!r}: a command is given as words, not as one text",
            fix=f"without quotes: ringfence exec -- {words[0]}; for a shell line: ringfence run -l bash -c '...'",
        )


def shell(argv: list[str], console: Console) -> int:
    """Run `ringfence shell` and return the exit code of the shell, or our own."""
    given = shell_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("shell", console)
    from ringfence.cli.launch import CommandJob, launch
    from ringfence.cli.settings import Settings, check_terminal

    settings = Settings(given, "dev")
    check_terminal(given, "without one: ringfence exec -- COMMAND, or ringfence run -l bash - < FILE")
    settings.tty = True
    settings.keep = given.last("--keep")
    settings.start_from = given.last("--from")
    return launch(CommandJob(given.words or ["sh", "-c", _SHELL]), settings, console)
