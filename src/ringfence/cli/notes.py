"""Write the notes after a run that was stopped, denied something or less strictly limited, with the option that helps.

Text of the guest goes through `Console.say`. It becomes part of an option to copy only if a shell would not change it.
"""

from __future__ import annotations

import os

from ringfence.cli.console import quoted
from ringfence.cli.settings import absolute, inside, is_hidden, working_folder
from ringfence.policy import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.cli.launch import CommandJob
    from ringfence.cli.settings import Settings
    from ringfence.results import Denial, Result

_ABSENT = (b"No such file or directory", b"ENOENT", b"FileNotFoundError", b"cannot find")
_NOT_IN_IMAGE = "exec.not-in-image"
_MAX_NOTES = 20


def notes(result: Result, job: CommandJob, settings: Settings, stderr_tail: bytes) -> list[str]:
    """Return the lines for standard error, the most useful last."""
    lines = _weaker(result)
    denials = tuple(denial for denial in result.denials if denial.code != _NOT_IN_IMAGE)
    if denials:
        from ringfence.rendering import telling

        shown = telling(denials, _MAX_NOTES)
        lines += [_denial(denial, alike) for denial, alike in shown]
        if len(denials) > len(shown):
            lines.append(f"{len(denials) - len(shown)} more kinds of denial: --report FILE has them all")
    return lines + _ending(result, job, settings, stderr_tail)


def _ending(result: Result, job: CommandJob, settings: Settings, stderr_tail: bytes) -> list[str]:
    argv = job.argv
    limits = settings.policy.limits
    match result.reason:
        case "wall-clock":
            return [f"stopped after {limits.timeout_s:g} s, the time limit; for more: --timeout S"]
        case "cpu-time":
            return [f"stopped after {limits.cpu_time_s:g} s of CPU time, the limit; for more: --limit cpu_time_s=S"]
        case "memory":
            return [
                f"killed: it needed more memory than its limit of {format_size(limits.memory)}; for more: --memory SIZE"
            ]
        case "protection-lost":
            return []  # the denial says so
        case "guest-lost":
            return ["lost: the guest killed its own supervisor, and how the guest ended is not known"]
        case "not-found" if any(denial.code == "exec.not-listed" for denial in result.denials):
            return []  # the denial says so
        case "not-found":
            tools = [denial for denial in result.denials if denial.code == _NOT_IN_IMAGE]
            name = tools[0].target if tools else argv[0]
            return [*missing_program(name, settings), *(denial.message for denial in tools)]
        case "compile":
            return ["it did not compile: nothing ran"]
        case "not-executable":
            return [f"{argv[0]} is there inside but may not be run: is it executable, and a program for this machine?"]
        case "exit" | "exception" | "signal":
            return _missing_module(job, stderr_tail) or _not_shown(argv, settings, stderr_tail)
        case _:
            return []


def _weaker(result: Result) -> list[str]:
    names = result.enforcement.weaker
    if not names:
        return []
    controls = [(name, getattr(result.enforcement, name)) for name in names]
    weaker = "; ".join(
        f"{name}: {control.mechanism}" + (f", {control.note}" if control.note else "") for name, control in controls
    )
    return [
        f"weaker than the policy's default here: {weaker}",
        "what would enforce it fully: ringfence doctor; to refuse such a run: --strict",
    ]


def _denial(denial: Denial, alike: int) -> str:
    from ringfence.rendering import word_of

    times = f" ({denial.count} times)" if denial.count > 1 else ""
    others = f"; and {alike} more like it" if alike else ""
    return f"{word_of(denial)}: {denial.message}{times}{others}{_what_allows(denial)}"


def _what_allows(denial: Denial) -> str:
    if denial.allow is None:
        return ""
    if denial.code in ("net.not-allowed", "net.port") and quoted(denial.target) == denial.target:
        return f"; to allow it: --allow-net {denial.target}"
    return f"; to allow it, in the policy: {denial.allow}"


def missing_program(name: str, settings: Settings) -> list[str]:
    """Return why a program is missing inside, and the option that would show it."""
    if "/" in name:
        return [_missing_path(name, settings)]
    if settings.image != "host":  # a program of this machine would not find its libraries there
        return [f"no program {name} in image {settings.image}: build one with it, or use another image"]
    host = which(name)
    if host is None:
        return [f"no program {name} inside, and none on this machine either: check the name, or install it"]
    real = os.path.realpath(host)
    return [
        f"no program {name} inside. This machine has it at {host}, which is not shown",
        f"to show it: ringfence exec --ro {quoted(_installation(real))} -- {quoted(real)} ...",
    ]


def _installation(program: str) -> str:
    """Return the folder of a program's installation, or the program if that folder holds other programs too."""
    folder = os.path.dirname(program)
    top = os.path.dirname(folder) if os.path.basename(folder) in ("bin", "sbin") else folder
    home = os.path.expanduser("~")
    shared = ("/", "/usr", "/usr/local", "/opt", home, f"{home}/.local", os.path.dirname(home))
    return program if top in shared else top


def _missing_path(name: str, settings: Settings) -> str:
    host = absolute(name)
    if not os.path.exists(host):
        return f"no program {name} inside, and none on this machine either: check the path"
    if inside(host, settings.policy.mounts) is None:
        shown = "." if not name.startswith("/") and ".." not in name else os.path.dirname(host)
        return f"{name} is on this machine but not shown inside: add --ro {quoted(shown)}"
    return f"{name} is shown inside but cannot start: its interpreter (in the first line) or its loader is missing"


def _not_shown(argv: list[str], settings: Settings, stderr_tail: bytes) -> list[str]:
    """Return a note when a path of this machine that is not shown inside explains the failure."""
    mounts = settings.policy.mounts
    for word in argv[1:]:
        if 0 < len(word) < 4096 and "\0" not in word and _is_own_file(word) and inside(absolute(word), mounts) is None:
            if is_hidden(absolute(word), mounts):
                return [f"{word} is hidden by --hide or the policy"]
            return [f"{word} is on this machine but not shown inside: add --ro {quoted(word)}"]
    here = working_folder()
    git = _git_elsewhere(here) if here is not None and b"not a git repository" in stderr_tail else None
    if git is not None and inside(git, mounts) is None:
        both = f"--copy . --copy {quoted(git)}"
        return [f"this is a worktree of a git repository that is not shown inside: {git}; on a copy of both: {both}"]
    if here is not None and inside(here, mounts) is None and any(words in stderr_tail for words in _ABSENT):
        return ["this folder is not shown inside: add --ro . (or --rw . to let it write, --copy . for a copy)"]
    return []


def _git_elsewhere(folder: str) -> str | None:
    """Return the repository of a linked worktree: `.git` is a file that names a worktree, which names `.git` back.

    A guest that may write here may have made that file, even as a FIFO, to make the user show a folder of the guest's
    choice. The guest cannot make the way back.
    """
    from ringfence.policy.secrets import read_head

    dot_git = os.path.join(folder, ".git")
    try:
        led = read_head(dot_git, 4096).decode().strip()
        git, worktree, _ = led.removeprefix("gitdir: ").partition("/worktrees/")
        if not worktree or not led.startswith("gitdir: /"):
            return None
        back = read_head(f"{led.removeprefix('gitdir: ')}/gitdir", 4096).decode().strip()
        return git if os.path.samefile(back, dot_git) else None
    except (OSError, ValueError):
        return None


def _missing_module(job: CommandJob, stderr_tail: bytes) -> list[str]:
    """Return a note when an import failed because only FILE was shown. Compares names, opens nothing."""
    _, found, rest = stderr_tail.rpartition(b"ModuleNotFoundError: No module named '")
    if not found or job.folder is None:
        return []
    name = rest.partition(b"'")[0].partition(b".")[0].decode("utf-8", "replace")
    try:
        beside = os.listdir(job.folder)
    except OSError:
        return []
    if name not in beside and f"{name}.py" not in beside:
        return []
    return [f"{name} is beside the file but not shown inside: add --ro {quoted(job.folder)}"]


def _is_own_file(word: str) -> bool:
    """Return whether a word names a file of the user: an existing relative path, or one in this or the home folder."""
    if word.startswith("-"):
        return False
    places = (os.path.expanduser("~"), working_folder() or "/nowhere")
    return os.path.exists(word) and (
        not word.startswith("/") or word.startswith(tuple(f"{place}/" for place in places))
    )


def which(name: str) -> str | None:
    """Return the path of a program in this machine's PATH, or None."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)
        if folder and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None
