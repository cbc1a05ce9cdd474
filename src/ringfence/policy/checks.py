"""Checks of single policy values: each takes a value and its key, and returns the canonical form.

Whatever its arguments, a check raises PolicyError and nothing else. Constructors and the TOML loader share the checks.
"""

from __future__ import annotations

import os

from ringfence.errors import PolicyError
from ringfence.shared.paths import is_within
from ringfence.values import frozen_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    Check: TypeAlias = Callable[[object, str], Any]


# ── sizes: bytes as an int, or a number with K, M or G ────────────────────────────────────────────

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 1 << 60  # far above any machine, far below where kernel counters wrap
_DIGITS = frozenset("0123456789")
_FIX = 'write bytes, or a whole number with K, M or G, such as "512M"'


def parse_size(value: object, key: str = "size") -> int:
    """Return the bytes that a size such as `536870912` or `"512M"` means. Raises PolicyError that names `key`."""
    if isinstance(value, str):
        size = _from_text(value, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = int(value)
    else:
        raise PolicyError(f"{key} must be a size, not {type(value).__name__}", key=key, fix=_FIX)
    if not 0 < size <= LARGEST:
        raise PolicyError(f"{key} must be between 1 byte and {LARGEST >> 30}G, not {shorten(value)}", key=key, fix=_FIX)
    return size


def format_size(size: int) -> str:
    """Return the shortest exact spelling of a size: 536870912 is "512M"."""
    for unit in ("G", "M", "K"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def shorten(value: object) -> str:
    """Return `value` for a message: quoted, escaped and cut, because it may be long or hostile."""
    if isinstance(value, int) and not -(1 << 64) < value < 1 << 64:
        return "a number of more than 64 bits"
    shown = ascii(value[:60]) if isinstance(value, (str, bytes)) else ascii(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"


def _from_text(text: str, key: str) -> int:
    digits = text
    factor = 1
    if text[-1:] in UNITS:
        digits = text[:-1]
        factor = UNITS[text[-1]]
    if not digits or len(digits) > 20 or not _DIGITS.issuperset(digits):
        raise PolicyError(f"{key} is {shorten(text)}, which is not a size", key=key, fix=_FIX)
    return int(digits) * factor


LONGEST_TEXT = 131_072  # one string of argv or environ on Linux (MAX_ARG_STRLEN)
LONGEST_LIST = 10_000
_TEN_YEARS_S = 315_360_000.0
_NAME_START = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_NAME_REST = _NAME_START | frozenset("0123456789")


def text(value: object, key: str) -> str:
    """Return a str without NUL and lone surrogates, not longer than the kernel takes."""
    if not isinstance(value, str):
        raise PolicyError(f"{key} must be a string, not {type(value).__name__}", key=key)
    if "\0" in value:
        raise PolicyError(f"{key} holds a NUL byte: {shorten(value)}", key=key, fix="remove the NUL byte")
    if len(value) >= LONGEST_TEXT:
        raise PolicyError(f"{key} is longer than {LONGEST_TEXT} characters", key=key, fix="shorten it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        fix = "use text that can be written as UTF-8"
        raise PolicyError(f"{key} holds a lone surrogate: {shorten(value)}", key=key, fix=fix) from None
    return str(value)


def items(value: object, key: str) -> tuple[object, ...]:
    """Return the entries of a list or tuple. A bare str, the usual mistake, is refused."""
    if isinstance(value, (str, bytes)):
        fix = f"write a list: [{shorten(value)}]"
        raise PolicyError(f"{key} must be a list, not a bare {type(value).__name__}", key=key, fix=fix)
    if not isinstance(value, (list, tuple)):
        raise PolicyError(f"{key} must be a list, not {type(value).__name__}", key=key)
    if len(value) > LONGEST_LIST:
        raise PolicyError(f"{key} has more than {LONGEST_LIST} entries", key=key, fix="shorten it")
    return tuple(value)


def each(value: object, key: str, check: Check) -> tuple[Any, ...]:
    """Return the entries of a list, each checked by `check` and none repeated."""
    found: dict[Any, int] = {}
    for index, item in enumerate(items(value, key)):
        place = f"{key}[{index}]"
        entry = check(item, place)
        if entry in found:
            fix = "remove one of them"
            raise PolicyError(f"{place} repeats {shorten(str(entry))} of {key}[{found[entry]}]", key=place, fix=fix)
        found[entry] = index
    return tuple(found)


def listed(check: Check) -> Check:
    """Return the check of a list from the check of its entries."""
    return lambda value, key: each(value, key, check)


def choice(*allowed: str) -> Check:
    """Return the check that accepts only the words `allowed`."""

    def check(value: object, key: str) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        words = ", ".join(f'"{word}"' for word in allowed)
        raise PolicyError(
            f"{key} must be one of {words}, not {shorten(value)}", key=key, fix=suggestion(value, allowed)
        )

    return check


def flag(value: object, key: str) -> bool:
    """Return True or False. A number that would pass for a bool is refused."""
    if isinstance(value, bool):
        return value
    raise PolicyError(f"{key} must be true or false, not {shorten(value)}", key=key)


def integer(largest: int, smallest: int = 1) -> Check:
    """Return the check of a whole number in a range. A bool is not a number."""

    def check(value: object, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise PolicyError(f"{key} must be a whole number, not {shorten(value)}", key=key)
        if not smallest <= value <= largest:
            raise PolicyError(f"{key} must be between {smallest} and {largest}, not {shorten(value)}", key=key)
        return int(value)

    return check


def number(smallest: float, largest: float, unit: str = "") -> Check:
    """Return the check of a finite number in a range, as a float. NaN is refused: it fails every comparison."""

    def check(value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PolicyError(f"{key} must be a number{unit}, not {shorten(value)}", key=key)
        if not smallest <= value <= largest:
            span = f"between {smallest:g} and {largest:.0f}{unit.removeprefix(' of')}"
            raise PolicyError(f"{key} must be {span}, not {shorten(value)}", key=key)
        return float(value)

    return check


seconds = number(0.001, _TEN_YEARS_S, " of seconds")


def variable(value: object, key: str) -> str:
    """Return the name of an environment variable: not empty, printable, without "="."""
    name = text(value, key)
    if not name or "=" in name or not name.isprintable():
        fix = "use letters, digits and underscores"
        raise PolicyError(f"{key}: {shorten(name)} is not the name of a variable", key=key, fix=fix)
    return name


def identifier(value: object, key: str) -> str:
    """Return a name of ASCII letters, digits and underscores, which a shell could use too."""
    name = text(value, key)
    if not name or len(name) > 255 or name[0] not in _NAME_START or not _NAME_REST.issuperset(name):
        fix = "use letters, digits and underscores, a digit not first"
        raise PolicyError(f"{key}: {shorten(name)} is not a name", key=key, fix=fix)
    return name


def environment(value: Any, key: str) -> Mapping[str, str]:
    """Return environment variables by name, frozen."""
    if not isinstance(value, dict) and not _is_mapping(value):
        fix = 'give names with their values: {"NAME": "value"}, in a policy file [env] and below it NAME = "value"'
        raise PolicyError(f"{key} must be a mapping of strings, not {type(value).__name__}", key=key, fix=fix)
    if len(value) > LONGEST_LIST:
        raise PolicyError(f"{key} has more than {LONGEST_LIST} variables", key=key, fix="shorten it")
    found = {}
    for name, content in value.items():
        checked = variable(name, key)
        found[checked] = text(content, f"{key}.{checked}")
    return frozen_map(found)


def _is_mapping(value: object) -> bool:
    import collections.abc  # 2 ms, which the usual dict does not pay

    return isinstance(value, collections.abc.Mapping)


def program(value: object, key: str) -> str:
    """Return the name of a program. A path is refused: the caller does not choose where the guest finds the program."""
    name = text(value, key)
    if "/" in name:
        fix = f"write its name only: {shorten(name.rsplit('/', 1)[1])}"
        raise PolicyError(f"{key}: {shorten(name)} is a path, commands are names", key=key, fix=fix)
    if not name or name in (".", "..") or len(name) > 255 or not name.isprintable() or name != name.strip():
        raise PolicyError(f"{key}: {shorten(name)} is not the name of a program", key=key)
    return name


def suggestion(value: object, allowed: tuple[str, ...] | list[str]) -> str | None:
    """Return the word of `allowed` that was probably meant, as the fix of an error; None when no word is near."""
    if not isinstance(value, str):
        return None
    from ringfence.text import nearest

    near = nearest(value, allowed)
    return f'did you mean "{near}"?' if near else None


# ── paths, as text: absolute, without "..", one spelling each; no file system is touched ──────────

_LONGEST = 4095  # PATH_MAX without its NUL
# File systems that the sandbox makes itself and needs for isolation; a mount over these would replace them.
_RESERVED = ("/proc", "/sys", "/dev")


def host_path(value: object, key: str) -> str:
    """Return an absolute host path. A relative path is resolved now, from the current working directory."""
    path = plain_path(value, key)
    if path.startswith("~"):
        fix = "pass os.path.expanduser(…), or write ./~ for a folder of that name"
        raise PolicyError(f'{key}: "~" is not expanded here: {shorten(path)}', key=key, fix=fix)
    if os.path.isabs(path):
        return os.path.normpath(path).replace("//", "/")
    try:
        return os.path.abspath(path)
    except OSError:
        fix = "write an absolute path"
        raise PolicyError(f"{key}: the working directory of {shorten(path)} is gone", key=key, fix=fix) from None


def plain_path(value: object, key: str) -> str:
    """Return a path of any type as a non-empty str."""
    try:
        path = os.fspath(value)  # type: ignore[call-overload]  # refuses what is no path, which is the point
    except TypeError:
        raise PolicyError(f"{key} must be a path, not {type(value).__name__}", key=key) from None
    path = text(path, key)
    if not path or len(path.encode()) > _LONGEST:
        raise PolicyError(f"{key} must have 1 to {_LONGEST} bytes", key=key)
    return path


def guest_target(value: object, key: str) -> str:
    """Return where a mount appears inside: absolute, not "/", not over a file system that the sandbox makes itself."""
    path = plain_path(value, key)
    parts = path.split("/")
    if not path.startswith("/"):
        fix = f"write it from the root: {shorten('/' + path)}"
        raise PolicyError(f"{key}: {shorten(path)} is not absolute", key=key, fix=fix)
    if ".." in parts:
        raise PolicyError(f'{key}: {shorten(path)} holds ".."', key=key, fix="write the path without it")
    found = "/" + "/".join(part for part in parts if part not in ("", "."))
    if found == "/":
        raise PolicyError(f"{key}: nothing can be mounted onto /", key=key, fix='choose a folder, such as "/data"')
    for reserved in _RESERVED:
        if is_within(found, reserved):
            fix = "choose another target"
            raise PolicyError(f"{key}: {shorten(found)} is in {reserved}, which is the sandbox's own", key=key, fix=fix)
    return found


def below(value: object, key: str) -> str:
    """Return a path below a mount's source: relative, without ".."."""
    path = plain_path(value, key)
    if path.startswith("/"):
        raise PolicyError(f"{key}: {shorten(path)} is not relative to the source", key=key, fix="remove the first /")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise PolicyError(f"{key}: {shorten(path)} is not below the source", key=key, fix='write it as ".env"')
    return "/".join(parts)
