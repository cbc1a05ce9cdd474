"""ringfence shell: an interactive shell, or a command, on a terminal in a fresh sandbox."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.console import Console

# bash where the image has it. Its prompt says where one is: nobody should take it for a shell of his own machine.
_SHELL = (
    "if command -v bash >/dev/null 2>&1; then "
    r"PS1='\[\e[1;33m\]\u@\h\[\e[0m\]:\[\e[1;34m\]\w\[\e[0m\]\$ ' exec bash -i; "
    "else PS1='user@ringfence:$PWD\\$ ' exec sh -i; fi"
)


def main(argv: list[str], console: Console) -> int:
    """The exit code of the shell, or ours."""
    from ringfence.cli.tables import shell_table

    given = shell_table().parse(argv, console)
    if given is None:
        from ringfence.cli import show_help

        return show_help("shell", console)
    from ringfence.cli.launch import Job, launch
    from ringfence.cli.settings import Settings, check_terminal

    settings = Settings(given, "dev")
    check_terminal(given, "without one: ringfence exec -- COMMAND, or ringfence run -l bash - < FILE")
    settings.tty = True
    settings.keep, settings.start_from = given.last("--keep"), given.last("--from")
    return launch(Job(given.words or ["sh", "-c", _SHELL]), settings, console)
