"""ringfence exec: a command in a fresh sandbox."""

from __future__ import annotations

from ringfence.cli.console import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.console import Console


def main(argv: list[str], console: Console) -> int:
    """The exit code of what ran, or ours."""
    from ringfence.cli.tables import exec_table

    given = exec_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("exec", console)
    _check_command(given.words)
    from ringfence.cli.launch import Job, launch
    from ringfence.cli.settings import Settings

    return launch(Job(given.words), Settings(given, "dev"), console)


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
