"""Where each key of a TOML text stands. Finds lines only: tomllib decides what the text means.

It runs before tomllib and bounds nesting and dotted keys, because tomllib's time grows with their square.
On text that is not TOML it stops; tomllib then refuses the text at or before that place.
"""

from __future__ import annotations

from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Path: TypeAlias = tuple[str | int, ...]

_DEEPEST = 16
_SPACE = " \t"
_BLANK = " \t\n"
_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b", '"': '"', "\\": "\\"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class TooDeepError(ValueError):
    """A key or value is nested deeper than any policy is; `line` says where."""

    def __init__(self, line: int) -> None:
        super().__init__(f"nested deeper than {_DEEPEST}")
        self.line = line


class _StopError(Exception):
    """Not TOML from here on."""


def find_lines(text: str) -> dict[Path, int]:
    """The line of each key, table and list entry of `text`, whose line breaks are "\\n". Raises TooDeepError."""
    scanner = _Scanner(text)
    try:
        scanner.document()
    except _StopError:
        pass  # what is wrong there, the parser tells; the lines before it are right
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
        """Past blanks and comments; False at the end of the text."""
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
        """The last table of an array of tables, where `path` is one."""
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
        """Dotted parts, and the blanks around them."""
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
            for _ in range(2):  # up to two quotes may stand before the closing three
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
