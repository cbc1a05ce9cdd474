"""What changed from one tree to another, with unified diffs of text. Both sides are guest-made: all work is capped."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ringfence.records import Change
from ringfence.text import bare_or_in_quotes, in_quotes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.snapshots.content import Store
    from ringfence.snapshots.manifest import Entry, Manifest

_MAX_TEXT = 1 << 18  # bytes of one side
_MAX_LINES = 20_000
_MAX_EDITS = 400  # beyond, what lies between the first and the last difference is shown as replaced
_MAX_DIFFS = 8 << 20  # characters over all changes; later ones have none
_MAX_STEPS = 5_000_000  # over all changes, some seconds; beyond, the same
_CONTEXT = 3


class Tree(NamedTuple):
    manifest: Manifest
    store: Store


def changes(before: Tree, after: Tree) -> tuple[Change, ...]:
    """Sorted by path. A time alone is no change. Diffs end when they come to 8 Mi characters together."""
    found: list[Change] = []
    room, work = _MAX_DIFFS, Work()
    for path in sorted({*before.manifest.by_path, *after.manifest.by_path}):
        old, new = before.manifest.by_path.get(path), after.manifest.by_path.get(path)
        if old is not None and new is not None and _content(old, before) == _content(new, after):
            continue
        text = _diff(path, (old, before), (new, after), work) if room > 0 else None
        room -= len(text or "")
        kind: Literal["added", "changed", "removed"] = (
            "added" if old is None else "removed" if new is None else "changed"
        )
        found.append(Change(path, kind, _size(old, before), _size(new, after), text))
    return tuple(found)


def _first(made: Entry, tree: Tree) -> Entry:
    """A further name of a file has that file's content."""
    return tree.manifest.by_path[made.text] if made.kind == "h" else made


def _content(made: Entry, tree: Tree) -> tuple[str, int, str]:
    first = _first(made, tree)
    return first.kind, 0 if first.kind == "l" else first.mode, first.text


def _size(made: Entry | None, tree: Tree) -> int | None:
    return None if made is None else _first(made, tree).size


def _diff(path: str, old: tuple[Entry | None, Tree], new: tuple[Entry | None, Tree], work: Work) -> str | None:
    """Modes where they differ, then the text; None when there is nothing to show as text."""
    lines = _modes(old, new)
    sides = _lines(*old), _lines(*new)
    if sides[0] is None or sides[1] is None:
        return "".join(lines) or None
    if sides[0] != sides[1]:
        lines.append(f"--- {bare_or_in_quotes(f'a/{path}') if old[0] else '/dev/null'}\n")
        lines.append(f"+++ {bare_or_in_quotes(f'b/{path}') if new[0] else '/dev/null'}\n")
        lines += unified(sides[0], sides[1], work)
    return "".join(lines) or None


def _modes(old: tuple[Entry | None, Tree], new: tuple[Entry | None, Tree]) -> list[str]:
    if old[0] is None or new[0] is None:
        return []
    was, now = _content(old[0], old[1]), _content(new[0], new[1])
    return [] if was[:2] == now[:2] else [f"old mode {_mode(was)}\n", f"new mode {_mode(now)}\n"]


def _mode(content: tuple[str, int, str]) -> str:
    """As git shows it: kind and rights."""
    return f"{ {'f': 0o100000, 'd': 0o040000, 'l': 0o120000}[content[0]] | content[1]:06o}"


def _lines(made: Entry | None, tree: Tree) -> list[str] | None:
    """None when it is no text, or too much."""
    if made is None:
        return []
    first = _first(made, tree)
    if first.kind == "d":
        return []
    if first.kind == "l":
        return [in_quotes(first.text)[1:-1]]
    if first.size > _MAX_TEXT:
        return None
    data = b"".join(tree.store.read(first.text, first.size))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    lines = _split(text)
    return lines if "\0" not in text and len(lines) <= _MAX_LINES else None


def _split(text: str) -> list[str]:
    """By newlines alone: splitlines() also cuts at characters that are no line ends to anybody else."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


# ── unified diffs ────────────────────────────────────────────────────────────────────────────────

Edit = tuple[str, str]  # " ", "-" or "+", and the line


class Work:
    """What may still be done to find short diffs: a guest chooses how many files there are, and how hard each is."""

    def __init__(self) -> None:
        self.left = _MAX_STEPS


def unified(old: list[str], new: list[str], work: Work) -> list[str]:
    """Hunks with three lines around each change. The cost is lines by edits, and edits are capped."""
    edits = _edits(old, new, work)
    out: list[str] = []
    at, before = 0, {"-": 0, "+": 0}  # lines of either side before that place
    for start, end in _ranges(edits):
        for mark, _ in edits[at:start]:
            before["-"] += mark != "+"
            before["+"] += mark != "-"
        at = start
        out += _hunk(edits[start:end], before)
    return out


def _ranges(edits: list[Edit]) -> Iterator[tuple[int, int]]:
    """Where hunks begin and end: changes with what is around them; those that would touch are one."""
    start = end = -1
    for number, (mark, _) in enumerate(edits):
        if mark == " ":
            continue
        if end < 0 or number - _CONTEXT > end:
            if end >= 0:
                yield start, end
            start = max(0, number - _CONTEXT)
        end = min(number + _CONTEXT + 1, len(edits))
    if end >= 0:
        yield start, end


def _hunk(inside: list[Edit], before: dict[str, int]) -> list[str]:
    ranges = []
    for side, absent in ("-+", "+-"):
        count = sum(mark != absent for mark, _ in inside)
        ranges.append(f"{before[side] + (count > 0)}" + (f",{count}" if count != 1 else ""))
    lines = [f"@@ -{ranges[0]} +{ranges[1]} @@\n"]
    for mark, line in inside:
        lines.append(f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n")
    return lines


def _edits(old: list[str], new: list[str], work: Work) -> list[Edit]:
    """The same lines at both ends are set aside; between them the shortest way, or all old then all new."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    middle = _shortest(a, b, work)
    if middle is None:
        middle = [("-", line) for line in a] + [("+", line) for line in b]
    same = [(" ", line) for line in old]
    return [*same[:head], *middle, *same[len(old) - tail :]]


def _shortest(a: list[str], b: list[str], work: Work) -> list[Edit] | None:
    """Myers' greedy way, forward, with the furthest point of each diagonal kept for the way back. None: too far."""
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    for distance in range(min(len(a) + len(b), _MAX_EDITS) + 1):
        if work.left <= 0:
            return None
        trace.append(dict(reach))
        for diagonal in range(-distance, distance + 1, 2):
            down = diagonal == -distance or (diagonal != distance and reach[diagonal - 1] < reach[diagonal + 1])
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y, first = x - diagonal, x
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            work.left -= 1 + x - first
            reach[diagonal] = x
            if x >= len(a) and y >= len(b):
                return _way_back(a, b, trace)
    return None


def _way_back(a: list[str], b: list[str], trace: list[dict[int, int]]) -> list[Edit]:
    x, y = len(a), len(b)
    edits: list[Edit] = []
    for distance in range(len(trace) - 1, -1, -1):
        reach, diagonal = trace[distance], x - y
        down = diagonal == -distance or (diagonal != distance and reach[diagonal - 1] < reach[diagonal + 1])
        from_x = reach[diagonal + 1] if down else reach[diagonal - 1]
        from_y = from_x - (diagonal + 1 if down else diagonal - 1)
        while x > max(from_x, 0) and y > max(from_y, 0) and (x, y) != (from_x + (not down), from_y + down):
            x, y = x - 1, y - 1
            edits.append((" ", a[x]))
        if distance:
            edits.append(("+", b[y - 1]) if down else ("-", a[x - 1]))
            x, y = from_x, from_y
    return edits[::-1]
