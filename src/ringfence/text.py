"""Make text that a guest wrote, or named a file with, safe to show (J12, J13).

Every message, log entry and table of the host that quotes text of a guest goes through this module. Without it a guest
could end our line and write a line of its own, or send a terminal sequences that the terminal obeys. Text that is shown
unchanged, a guest's output on a terminal, goes through `ringfence.cli.terminal_filter` instead.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def printable(text: str, limit: int | None = None) -> str:
    """Return `text` as one line of printable characters, at most `limit` characters.

    All other characters are spelled as Python does: controls, line ends, characters that reorder a line, spaces that
    are not U+0020, and the bytes of a file name that are not UTF-8 (`\\xff`).
    """
    cut = text if limit is None else text[:limit]
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else _spelled(char) for char in cut)[:limit]


def in_quotes(text: str, limit: int | None = None) -> str:
    """Return `text` as a printable line in quotes; all after the first `limit` characters becomes an ellipsis."""
    return repr(text if limit is None or len(text) <= limit else text[:limit] + "…")


def bare_or_in_quotes(text: str) -> str:
    """Return `text` unchanged when that is one printable line, else in quotes: for lists of names and for headers."""
    return text if text.isprintable() else in_quotes(text)


def plain_ascii(text: str, limit: int) -> str:
    """Return `printable(text, limit)` with all that is not ASCII spelled as well."""
    return printable(text, limit).encode("ascii", "backslashreplace").decode("ascii")[:limit]


def encodable(text: str) -> str:
    """Return `text` with lone surrogates replaced by `?`: no stream of the host can encode one (J08)."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _spelled(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # how `os.fsdecode` keeps a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


# ── suggestions for a mistyped name ──────────────────────────────────────────────────────────────


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the name of `known` that `word` most likely stands for. Return None when no name is near.

    That is the only name that begins with `word`; else the nearest, where at most a third of its letters differ; else
    the longest name of more than three letters that `word` begins with.
    """
    names = sorted(name for name in known if len(name) <= 64)
    if len(word) > 2:
        begun = [name for name in names if name.startswith(word)]
        if len(begun) == 1:
            return begun[0]
    if not names or len(word) > 64:
        return None
    away, best = min((distance(word.lower(), name.lower()), name) for name in names)
    letters = len(best.lstrip("-"))
    if away <= max(1, letters // 3) and letters > 1:
        return best
    return max((name for name in names if len(name) > 3 and word.startswith(name)), key=len, default=None)


def distance(left: str, right: str) -> int:
    """Count the letters to add, drop, change or swap with their neighbour to get from `left` to `right`."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        older, before, row = before, row, [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]
