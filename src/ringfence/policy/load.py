"""Reads policies from TOML, with every mistake by key, line and fix, and writes them. Reads only the named file."""

from __future__ import annotations

import os
from bisect import bisect_right

from ringfence.errors import PolicyError
from ringfence.policy.checks import (
    choice,
    environment,
    format_size,
    host_path,
    plain_path,
    shorten,
    suggestion,
    text,
    variable,
)
from ringfence.policy.model import (
    LIMIT_CHECKS,
    MOUNT_CHECKS,
    NAMES,
    NETWORK_CHECKS,
    POLICY_CHECKS,
    RULE_CHECKS,
    Limits,
    Mount,
    Network,
    Policy,
    Rule,
    preset,
)
from ringfence.policy.secrets import SECRET_CHECKS, deferred, origin, read_regular
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from ringfence.policy.checks import Check
    from ringfence.policy.secrets import Secret
    from ringfence.values import HostPath, Struct

    Path: TypeAlias = tuple[str | int, ...]


# ── the line of each key of a TOML text ───────────────────────────────────────────────────────────

# The scanner finds lines only: tomllib decides what the text means. The scanner runs before tomllib and limits nesting
# and dotted keys, because tomllib's time grows with their square. On text that is not TOML the scanner stops, and
# tomllib then refuses the text at or before that place.

_DEEPEST = 16
_SPACE = " \t"
_BLANK = " \t\n"
_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b", '"': '"', "\\": "\\"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class TooDeepError(ValueError):
    """A key or value is nested deeper than any policy; `line` says where."""

    def __init__(self, line: int) -> None:
        super().__init__(f"nested deeper than {_DEEPEST}")
        self.line = line


class _StopError(Exception):
    """The text is not TOML from here on."""


def find_lines(text: str) -> dict[Path, int]:
    """Return the line of each key, table and list entry of `text`, whose line breaks are "\\n". Raises TooDeepError."""
    scanner = _Scanner(text)
    try:
        scanner.document()
    except _StopError:
        pass  # the parser reports the mistake; the lines before are right
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.tables: dict[Path, int] = {}  # arrays of tables and how many each has so far
        self.breaks = [at for at, char in enumerate(text) if char == "\n"]

    def document(self) -> None:
        table: Path = ()
        while self.skip(_BLANK):
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table, 0)
            self.skip(_SPACE)
            if self.peek() not in ("", "\n"):
                raise _StopError

    def line(self) -> int:
        return bisect_right(self.breaks, self.at - 1) + 1

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def expect(self, char: str) -> None:
        if not self.text.startswith(char, self.at):
            raise _StopError
        self.at += len(char)

    def skip(self, blanks: str) -> bool:
        """Move past blanks and comments. Return False at the end of the text."""
        text, end = self.text, len(self.text)
        while self.at < end:
            if text[self.at] == "#":
                found = text.find("\n", self.at)
                self.at = end if found < 0 else found
            elif text[self.at] in blanks:
                self.at += 1
            else:
                return True
            if self.at < end and text[self.at] == "\n" and "\n" not in blanks:
                return True
        return False

    def note(self, path: Path) -> None:
        self.lines.setdefault(path, self.line())

    def header(self) -> Path:
        double = self.text.startswith("[[", self.at)
        start = self.at
        self.at += 2 if double else 1
        parts = self.key()
        self.expect("]]" if double else "]")
        path: Path = ()
        for part in parts[:-1]:
            path = self.inside((*path, part))
        path = (*path, parts[-1])
        end, self.at = self.at, start
        self.note(path)
        if double:
            self.tables[path] = self.tables.get(path, 0) + 1
        path = self.inside(path)
        self.note(path)
        self.at = end
        return path

    def inside(self, path: Path) -> Path:
        """Return the path of the last table where `path` is an array of tables; else `path`."""
        return (*path, self.tables[path] - 1) if path in self.tables else path

    def pair(self, table: Path, depth: int) -> None:
        start = self.at
        parts = self.key()
        end, self.at = self.at, start
        path = table
        for part in parts:
            path = (*path, part)
            self.note(path)
        self.at = end
        self.expect("=")
        self.blank()
        self.value(path, depth)

    def key(self) -> list[str]:
        """Return the parts of a dotted key; move past the blanks around them."""
        parts = []
        while True:
            self.blank()
            parts.append(self.key_part())
            self.blank()
            if len(parts) > _DEEPEST:
                raise TooDeepError(self.line())
            if self.peek() != ".":
                return parts
            self.at += 1

    def blank(self) -> None:
        while self.peek() in (" ", "\t"):
            self.at += 1

    def key_part(self) -> str:
        if self.peek() in ('"', "'"):
            return self.quoted()
        start = self.at
        while self.peek() in _BARE:
            self.at += 1
        if start == self.at:
            raise _StopError
        return self.text[start : self.at]

    def value(self, path: Path, depth: int) -> None:
        if depth > _DEEPEST:
            raise TooDeepError(self.line())
        char = self.peek()
        if self.text.startswith(('"""', "'''"), self.at):
            self.multi_line(char)
        elif char in ('"', "'"):
            self.quoted()
        elif char == "[":
            self.array(path, depth)
        elif char == "{":
            self.inline_table(path, depth)
        else:
            self.scalar()

    def scalar(self) -> None:
        start = self.at
        while self.peek() not in ("", ",", "]", "}", "#", "\n"):
            self.at += 1
        if start == self.at:
            raise _StopError

    def array(self, path: Path, depth: int) -> None:
        self.at += 1
        index = 0
        while self.skip(_BLANK):
            if self.peek() == "]":
                self.at += 1
                return
            self.note((*path, index))
            self.value((*path, index), depth + 1)
            index += 1
            self.skip(_BLANK)
            if self.peek() != "]":
                self.expect(",")
        raise _StopError

    def inline_table(self, path: Path, depth: int) -> None:
        self.at += 1
        while self.skip(_BLANK):
            if self.peek() == "}":
                self.at += 1
                return
            self.pair(path, depth + 1)
            self.skip(_BLANK)
            if self.peek() != "}":
                self.expect(",")
        raise _StopError

    def multi_line(self, quote: str) -> None:
        self.at += 3
        while True:
            end = self.text.find(quote * 3, self.at)
            if end < 0:
                raise _StopError
            escape = self.text.find("\\", self.at, end) if quote == '"' else -1
            if escape >= 0:
                self.at = escape + 2
                continue
            self.at = end + 3
            for _ in range(2):  # up to two quotes may come before the closing three
                self.at += self.peek() == quote
            return

    def quoted(self) -> str:
        quote = self.text[self.at]
        self.at += 1
        found = []
        while (char := self.peek()) != quote:
            if char in ("", "\n"):
                raise _StopError
            self.at += 1
            found.append(self.escape() if char == "\\" and quote == '"' else char)
        self.at += 1
        return "".join(found)

    def escape(self) -> str:
        char = self.peek()
        self.at += 1
        if char in _HEX_ESCAPES:
            digits = self.text[self.at : self.at + _HEX_ESCAPES[char]]
            self.at += len(digits)
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise _StopError from None
        if char not in _ESCAPES:
            raise _StopError
        return _ESCAPES[char]


LARGEST = 1 << 20
VERSION = 1
_TOP = ("version", "extends", "limits", "network", "mounts", "secrets", *POLICY_CHECKS)


def load(path: HostPath) -> Policy:
    """Return the policy in a file. Raises PolicyError with the first mistake and how many follow."""
    found, folder = read(path)
    return loads(found, folder)


def loads(toml: str, folder: str | None = None) -> Policy:
    """Return the policy in a text. Relative paths start at `folder`; without a folder they are mistakes."""
    policy, errors = _read(toml, folder)
    if policy is not None and not errors:
        return policy
    first = errors[0]
    if len(errors) > 1:
        more = f" (and {len(errors) - 1} more; `ringfence policy check` lists them all)"
        raise PolicyError(str(first) + more, key=first.key, line=first.line, fix=first.fix, code=first.code)
    raise first


def check(toml: str, folder: str | None = None) -> list[PolicyError]:
    """Return every mistake of a text, in the order of lines; [] for a policy."""
    return _read(toml, folder)[1]


def read(path: HostPath) -> tuple[str, str]:
    """Return the text of a policy file and the file's folder.

    Raises PolicyError for anything but a readable UTF-8 file of at most 1 MiB.
    """
    place = host_path(path, "policy")
    fix = "name a TOML file; `ringfence policy show` prints one"
    try:
        data = read_regular(place, LARGEST)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise PolicyError(f"cannot read policy {shorten(place)}: {reason}", key="policy", fix=fix) from None
    try:
        return data.decode("utf-8"), os.path.dirname(place)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"policy {shorten(place)} is not UTF-8 text (line {line})"
        raise PolicyError(message, key="policy", line=line, fix="save it as UTF-8") from None


def _read(toml: str, folder: str | None) -> tuple[Policy | None, list[PolicyError]]:
    try:
        data, lines = _parse(toml)
    except PolicyError as error:
        return None, [error]
    reader = _PolicyReader(lines, folder)
    policy = reader.policy(data)
    reader.errors.sort(key=lambda error: error.line or 0)
    return policy, reader.errors


def _parse(toml: object) -> tuple[dict[str, Any], dict[Path, int]]:
    if not isinstance(toml, str):
        raise PolicyError(f"a policy must be text, not {type(toml).__name__}", key="policy")
    if len(toml) > LARGEST:
        raise PolicyError(f"a policy has at most {LARGEST} characters", key="policy", fix="shorten it")
    import tomllib

    toml = toml.replace("\r\n", "\n").removeprefix("\ufeff")
    try:
        lines = find_lines(toml)
        return tomllib.loads(toml), lines
    except TooDeepError as error:
        raise PolicyError(f"a key or value is {error}", key="policy", line=error.line, fix="flatten it") from None
    except (ValueError, RecursionError) as error:
        message, line = _located(str(error), toml)
        raise PolicyError(f"not TOML: {message}", key="policy", line=line) from None


def _located(message: str, toml: str) -> tuple[str, int | None]:
    """Return the reason and the line of a message of tomllib.

    tomllib says "… (at line 3, column 5)" or "… (at end of document)".
    """
    reason, found, place = message.rpartition(" (at ")
    if not found:
        return shorten(message), None
    words = place.removeprefix("line ").partition(",")[0]
    line = int(words) if words.isdecimal() and len(words) < 8 else toml.rstrip("\n").count("\n") + 1
    return reason, line


class _PolicyReader:
    """Reads one document and keeps every mistake instead of stopping at the first."""

    def __init__(self, lines: dict[Path, int], folder: str | None) -> None:
        self.lines = lines
        self.folder = folder
        self.errors: list[PolicyError] = []

    def policy(self, data: dict[str, Any]) -> Policy | None:
        self.refuse_unknown(data, _TOP, ())
        self.version(data)
        base = preset("offline")
        if "extends" in data:
            found = self.attempt(("extends",), lambda: preset(choice(*NAMES)(data["extends"], "extends")))
            base = found if isinstance(found, Policy) else base
        parts = self.checked(data, POLICY_CHECKS, ())
        if "env" in data and "env" not in parts:
            self.each_variable(data["env"])
        for name, build in (("limits", self.limits), ("network", self.network)):
            if name in data:
                parts[name] = build(self.table(data[name], (name,)), base)
        for name, build_one in (("mounts", self.mount), ("secrets", self.secret)):
            if name in data:
                parts[name] = self.tables(data[name], (name,), build_one)
        if self.errors:
            return None
        policy = self.attempt((), lambda: replace(base, **parts))
        return policy if isinstance(policy, Policy) else None

    # one mistake

    def fail(self, error: PolicyError, path: Path) -> None:
        """Keep `error` with its full key and the nearest known line."""
        error.key = error.key if not path else _spell(path) + _index(error.key)
        found = _split(error.key or "") if not path else (*path, *_split(_index(error.key)))
        while found and found not in self.lines:
            found = found[:-1]
        error.line = self.lines.get(found, 1)
        self.errors.append(error)

    def attempt(self, path: Path, build: Callable[[], object]) -> object:
        """Return what `build` returns; None where it raises PolicyError, which is kept as a mistake."""
        try:
            return build()
        except PolicyError as error:
            self.fail(error, path)
            return None

    def refuse_unknown(self, data: dict[str, Any], known: tuple[str, ...], path: Path) -> None:
        for key in data:
            if key not in known:
                fix = suggestion(key, known) or f"keys here: {', '.join(known)}"
                self.fail(PolicyError(f"{_spell((*path, key))} is not a key of a policy", fix=fix), (*path, key))

    def checked(self, data: dict[str, Any], checks: dict[str, Check], path: Path) -> dict[str, Any]:
        """Return the values that pass their checks; keep the errors of all other values."""
        found: dict[str, Any] = {}
        for name, one in checks.items():
            if name in data:
                place = (*path, name)
                try:
                    found[name] = one(data[name], _spell(place))
                except PolicyError as error:
                    self.fail(error, place)
        return found

    def table(self, value: object, path: Path) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        fix = f"write it as [{_spell(path)}]"
        self.fail(PolicyError(f"{_spell(path)} must be a table, not {_kind(value)}", fix=fix), path)
        return {}

    def tables(self, value: object, path: Path, build: Callable[[dict[str, Any], Path], object]) -> list[object]:
        """Return what `build` makes of each table of an array of tables."""
        if not isinstance(value, list):
            fix = f"write each as [[{_spell(path)}]]"
            self.fail(PolicyError(f"{_spell(path)} must be a list of tables, not {_kind(value)}", fix=fix), path)
            return []
        found = []
        for index, item in enumerate(value):
            place = (*path, index)
            before = len(self.errors)
            data = self.table(item, place)
            if len(self.errors) == before:
                found.append(build(data, place))
        return [item for item in found if item is not None]

    # parts

    def version(self, data: dict[str, Any]) -> None:
        version = data.get("version")
        if "version" not in data:
            self.fail(PolicyError("version is missing", fix=f"start the file with version = {VERSION}"), ("version",))
        elif version is True or version != VERSION or not isinstance(version, int):
            message = f"version must be {VERSION}, not {shorten(version)}"
            self.fail(PolicyError(message, fix=f"write version = {VERSION}"), ("version",))

    def each_variable(self, data: object) -> None:
        """Keep an error for every wrong variable, not only for the first."""
        if not isinstance(data, dict):
            return
        self.errors = [error for error in self.errors if not (error.key or "").startswith("env")]
        for name, value in data.items():
            self.attempt(("env", name), lambda name=name, value=value: environment({name: value}, "env"))  # type: ignore[misc]  # bound now

    def limits(self, data: dict[str, Any], base: Policy) -> object:
        self.refuse_unknown(data, tuple(LIMIT_CHECKS), ("limits",))
        found = self.checked(data, LIMIT_CHECKS, ("limits",))
        limits: Limits = replace(base.limits, **found)
        return limits

    def network(self, data: dict[str, Any], base: Policy) -> object:
        self.refuse_unknown(data, (*NETWORK_CHECKS, "rules"), ("network",))
        before = len(self.errors)
        found = self.checked(data, NETWORK_CHECKS, ("network",))
        if "rules" in data:
            found["rules"] = self.tables(data["rules"], ("network", "rules"), self.rule)
        if len(self.errors) > before:
            return None

        def build() -> Network:
            return replace(base.network, **found)

        return self.attempt((), build)

    def rule(self, data: dict[str, Any], path: Path) -> object:
        found = self.part(data, RULE_CHECKS, path, required=("host",))
        return None if found is None else self.attempt(path, lambda: Rule(**found))

    def mount(self, data: dict[str, Any], path: Path) -> object:
        if "source" in data:
            source = self.attempt((*path, "source"), lambda: self.absolute(data["source"], "mounts.source"))
            if source is None:
                return None
            data = data | {"source": source}
        found = self.part(data, MOUNT_CHECKS, path, required=("source",))
        return None if found is None else self.attempt(path, lambda: Mount(**found))

    def secret(self, data: dict[str, Any], path: Path) -> object:
        if "value" in data:
            fix = "remove it; write from_env or from_file, so that the file holds no secret"
            self.fail(PolicyError("a policy file cannot hold the value of a secret", fix=fix), (*path, "value"))
            return None
        checks = {**SECRET_CHECKS, "from_env": variable, "from_file": self.absolute}
        found = self.part(data, checks, path, required=("name", "hosts"))
        if found is None:
            return None
        if ("from_env" in found) == ("from_file" in found):
            message = f"{_spell(path)} needs one of from_env and from_file"
            self.fail(PolicyError(message, fix='write from_env = "NAME" or from_file = "path"'), path)
            return None
        return self.attempt(path, lambda: deferred(**found))

    def part(
        self, data: dict[str, Any], checks: dict[str, Check], path: Path, required: tuple[str, ...]
    ) -> dict[str, Any] | None:
        """Return the checked values of one table of a list; None when there were mistakes."""
        before = len(self.errors)
        self.refuse_unknown(data, tuple(checks), path)
        for name in required:
            if name not in data:
                self.fail(PolicyError(f"{_spell(path)} has no {name}", fix=f"add {name} = …"), path)
        found = self.checked(data, checks, path)
        return found if len(self.errors) == before else None

    def absolute(self, value: object, key: str) -> str:
        """Return a path of a policy file as absolute: "~" is the home, a relative path starts at the file's folder."""
        path = plain_path(text(value, key), key)
        if path.startswith("~"):
            path = os.path.expanduser(path)
        elif not os.path.isabs(path):
            if self.folder is None:
                fix = "write an absolute path, or load the policy from a file"
                raise PolicyError(f"{key}: {shorten(path)} is relative, and a text has no folder", key=key, fix=fix)
            path = os.path.join(self.folder, path)
        return host_path(path, key)


def _kind(value: object) -> str:
    return {str: "a string", list: "a list", bool: "a boolean", dict: "a table"}.get(type(value), "a single value")


def _spell(path: Path) -> str:
    """Return a path as text: ("mounts", 0, "target") is mounts[0].target. An unusual key is escaped and cut."""
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            shown = part if part.replace("_", "").replace("-", "").isalnum() and len(part) < 60 else shorten(part)
            spelled += f".{shown}" if spelled else shown
    return spelled


def _index(key: str | None) -> str:
    """Return the list index that a check added to a key: "[2]" of "network.allow[2]"."""
    if not key or not key.endswith("]"):
        return ""
    index = key[key.rfind("[") :]
    return index if index[1:-1].isdecimal() else ""


def _split(key: str) -> Path:
    """Return the path of a key that `_spell` wrote."""
    path: list[str | int] = []
    for part in key.replace("[", ".[").split("."):
        if part.startswith("[") and part[1:-1].isdecimal() and len(part) < 10:
            path.append(int(part[1:-1]))
        elif part:
            path.append(part)
    return tuple(path)


# ── writing: a policy as TOML, every key written out; `loads(to_toml(policy)) == policy` ──────────

_SIZES = ("memory", "disk", "output", "upload", "download")


def to_toml(policy: Policy) -> str:
    """Return a policy as TOML.

    Raises PolicyError for a secret without `from_env` or `from_file`: a policy file holds no values.
    """
    lines = ["version = 1"]
    lines += [_pair(name, getattr(policy, name)) for name in ("isolation", "strict", "commands")]
    lines += ["", "[limits]", *_fields(policy.limits)]
    lines += ["", "[network]", *_fields(policy.network, leave_out=("rules",))]
    for rule in policy.network.rules:
        lines += ["", "[[network.rules]]", *_fields(rule)]
    for mount in policy.mounts:
        lines += ["", "[[mounts]]", *_fields(mount)]
    if policy.env:
        lines += ["", "[env]", *(_pair(name, policy.env[name]) for name in sorted(policy.env))]
    for secret in policy.secrets:
        lines += ["", "[[secrets]]", *_fields(secret), _origin(secret)]
    return "\n".join(lines) + "\n"


def _fields(value: Struct, leave_out: tuple[str, ...] = ()) -> list[str]:
    shown = [name for name in type(value).__fields__ if name not in leave_out]
    return [_pair(name, getattr(value, name)) for name in shown if getattr(value, name) is not None]


def _origin(secret: Secret) -> str:
    source = origin(secret)
    if source is None:
        key = "secrets.value"
        fix = f'make it with Secret.from_env("{secret.name}", …) or Secret.from_file(…)'
        raise PolicyError(f"secret {secret.name} holds its value itself, which no file may", key=key, fix=fix)
    return _pair(*source)


def _pair(name: str, value: object) -> str:
    key = name if _BARE.issuperset(name) else _quote(name)
    if name in _SIZES and isinstance(value, int):
        return f"{key} = {_quote(format_size(value))}"
    return f"{key} = {_value(value)}"


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case int():
            return str(value)
        case tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return _quote(str(value))


def _quote(text: str) -> str:
    """Return a basic string of TOML: quotes, backslashes and all that is not printable are escaped."""
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    return f"\\u{ord(char):04X}" if ord(char) < 0x10000 else f"\\U{ord(char):08X}"
