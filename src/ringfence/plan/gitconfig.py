"""Reads git's configuration as far as it names other files that git runs or believes: hooks, and further configuration.

Read here and not by git, which would run what a repository tells it to (`core.fsmonitor`) where nobody vouched for it.
"""

from __future__ import annotations

import os

from ringfence.policy.source import read_head

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOOKS = "core.hooksPath"
INCLUDED = "include.path"
_READ = 1 << 20  # bytes of one file
_FILES = 100  # looked into; git itself stops at ten levels
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}


def named_by(configs: Sequence[str], root: str) -> Iterator[tuple[str, str]]:
    """Each path that `configs` and the user's own configuration name, existing or not, with the setting's name.

    `root`: the working tree. Conditions of `includeIf` are taken to hold.
    """
    queue = [*configs, *_own()]
    seen: set[str] = set()
    for config in queue:
        if config in seen or len(seen) >= _FILES:
            continue
        seen.add(config)
        for section, key, value in settings(_text(config)):
            path = os.path.expanduser(value)
            if (section, key) == ("core", "hookspath"):
                yield HOOKS, os.path.join(root, path)
            elif section in ("include", "includeif") and key == "path":
                path = os.path.join(os.path.dirname(config), path)
                yield INCLUDED, path
                queue.append(path)


def _own() -> list[str]:
    """The user's and the machine's: a relative `core.hooksPath` in them means a folder of every repository."""
    own = os.environ.get("GIT_CONFIG_GLOBAL")
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    users = [own] if own else ["~/.gitconfig", f"{folder}/git/config"]
    return [os.path.expanduser(path) for path in (*users, os.environ.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig")]


def _text(path: str) -> str:
    """Nothing for what cannot be read: git would not read it either."""
    try:
        return read_head(path, _READ).decode("utf-8-sig", "surrogateescape")
    except OSError:
        return ""  # as git takes it


def settings(text: str) -> Iterator[tuple[str, str, str]]:
    """Section, key, both in lower case and without a subsection, and value; those without a value are left out."""
    section = ""
    lines = iter(text.replace("\r\n", "\n").split("\n"))
    for line in lines:
        rest = line.strip()
        while _goes_on(rest):
            rest = rest[:-1] + next(lines, "")
        if rest.startswith("["):
            name, _, rest = rest[1:].partition("]") if '"' not in rest.partition("]")[0] else _subsection(rest[1:])
            section = name.split('"')[0].strip().lower().partition(".")[0]
        key, equals, value = rest.partition("=")
        if equals and not key.lstrip().startswith(("#", ";")) and (value := _value(value)):
            yield section, key.strip().lower(), value


def _goes_on(line: str) -> bool:
    return line.endswith("\\") and not line.startswith(("#", ";")) and (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _subsection(rest: str) -> tuple[str, str, str]:
    """As `partition("]")`, where the name in quotes may have a bracket in it."""
    name, _, quoted = rest.partition('"')
    index = 0
    while index < len(quoted) and quoted[index] != '"':
        index += 2 if quoted[index] == "\\" else 1
    return name, "]", quoted[index + 1 :].partition("]")[2]


def _value(text: str) -> str:
    """Without quotes, escapes and a comment. "" for what is no path."""
    value, quoted, signs = "", False, iter(text.strip())
    kept = 0  # blanks at the end count only in quotes
    for sign in signs:
        if sign == "\\":
            escaped = next(signs, "")
            value += _ESCAPES.get(escaped, escaped)
        elif sign == '"':
            quoted = not quoted
        elif sign in "#;" and not quoted:
            break
        else:
            value += sign
            if sign.isspace() and not quoted:
                continue
        kept = len(value)
    return "" if "\0" in value else value[:kept]
