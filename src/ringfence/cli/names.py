"""Owns the guess at what a mistyped name was meant to be. Imported only when there is one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` most likely stands for: one that it begins, else one a third of its letters away."""
    names = sorted(name for name in known if len(name) <= 64)
    if len(word) > 2:
        begun = [name for name in names if name.startswith(word)]
        if len(begun) == 1:
            return begun[0]
    if not names or len(word) > 64:
        return None
    away, best = min((distance(word.lower(), name.lower()), name) for name in names)
    letters = len(best.lstrip("-"))
    return best if away <= max(1, letters // 3) and letters > 1 else None


def distance(left: str, right: str) -> int:
    """Letters to add, drop, change or swap with their neighbour to get from one word to the other."""
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
