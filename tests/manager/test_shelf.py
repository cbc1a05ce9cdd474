"""Sandboxes that wait: each is given out once."""

from __future__ import annotations

from ringfence.manager.owner import Shelf


def test_one_that_is_taken_while_others_are_looked_at_does_not_come_back() -> None:
    shelf: Shelf[str] = Shelf()
    for one in ("a", "b", "c"):
        shelf.put(one)
    taken = []

    def is_over(one: str) -> bool:
        if one == "a":
            taken.append(shelf.take())
        return one in ("b", "c")

    shelf.drop(is_over)
    assert (taken, list(shelf), len(shelf)) == (["c"], ["a"], 1)
    assert (shelf.take(), shelf.take()) == ("a", None)
