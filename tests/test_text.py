"""Text that a guest wrote ends no line of Ringfence, moves no cursor and is not longer than permitted (J12, J13)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli.terminal_filter import REORDER
from ringfence.text import encodable, in_quotes, plain_ascii, printable

SOURCE = Path(__file__).resolve().parents[1] / "src" / "ringfence"

any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
limits = st.integers(0, 40)


@given(any_text)
def test_a_guests_word_in_our_message_is_one_printable_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    assert not set(shown) & REORDER
    assert shown.encode().decode() == shown  # no lone surrogate


@given(any_text, limits)
def test_what_is_shown_is_not_longer_than_the_limit(text: str, limit: int) -> None:
    assert len(printable(text, limit)) <= limit
    assert len(plain_ascii(text, limit)) <= limit
    assert printable(text).startswith(printable(text, limit))


@given(any_text, limits)
def test_quoted_text_cannot_end_its_quotes(text: str, limit: int) -> None:
    shown = in_quotes(text, limit)
    assert shown.isprintable()
    assert ast.literal_eval(shown) == (text if len(text) <= limit else text[:limit] + "…")


@given(any_text, limits)
def test_plain_ascii_is_printable_and_ascii(text: str, limit: int) -> None:
    shown = plain_ascii(text, limit)
    assert shown.isascii()
    assert shown.isprintable()


@given(any_text)
def test_encodable_text_keeps_every_line_and_loses_lone_surrogates(text: str) -> None:
    shown = encodable(text)
    assert shown.encode().decode() == shown
    assert [b for a, b in zip(text, shown, strict=True) if a != b] == ["?" for c in text if "\ud800" <= c <= "\udfff"]


def test_a_forged_message_stays_on_its_line() -> None:
    assert printable("x\nringfence: all is well\x1b[2K") == "x\\nringfence: all is well\\x1b[2K"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, žluť", "plain words, žluť"),
        ("a\r\x85\u2028b", "a\\r\\x85\\u2028b"),
        ("\x9b31m", "\\x9b31m"),
        ("\udcff\udc80", "\\xff\\x80"),
        ("\ud800", "\\ud800"),
        ("txt.\u202eexe", "txt.\\u202eexe"),
        ("\U000e0041", "\\U000e0041"),
        ("no\xa0break", "no\\xa0break"),
    ],
)
def test_what_is_not_printable_is_spelled(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_cut_never_leaves_a_character_that_is_obeyed() -> None:
    assert [printable("\x1b[2J", limit) for limit in range(6)] == ["", "\\", "\\x", "\\x1", "\\x1b", "\\x1b["]


def test_no_other_module_spells_characters_of_its_own() -> None:
    """Ten modules used to, each in its own way. The guest's side is left out: it writes for the guest."""
    allowed = {SOURCE / "text.py"}
    sanitisers = [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*.py")
        if path not in allowed and ("unicode_escape" in (text := path.read_text()) or "if c.isprintable() else" in text)
    ]
    assert sanitisers == []
