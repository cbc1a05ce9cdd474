"""A guest with a terminal can draw; it cannot make the terminal answer or reach past the screen (J12)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli.terminal_filter import ScreenFilter


def shown(*pieces: bytes) -> bytes:
    strip = ScreenFilter()
    return b"".join(strip.feed(piece) for piece in pieces)


@pytest.mark.parametrize(
    "drawn",
    [
        b"plain\r\n\ttext\b \x07",
        "grün 日本 👩‍🚀".encode(),
        b"\x1b[H\x1b[2J\x1b[3;4H\x1b[10A\x1b[K\x1b[1;31mred\x1b[0m",
        b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?1006;1000h".replace(b"1006;1000h", b"1006h"),
        b"\x1b[2;20r\x1b7\x1b8\x1bM\x1b=\x1b>\x1b(0lqk\x1b(B\x0e\x0f",
        b"\x1b[5 q\x1b[4h\x1b[4l\x1b[12P\x1b[3@\x1b[2L\x1b[2M\x1b[5X\x1b[3b",
        b"\x1b[38;2;1;2;3mx\x1b[38:5:7my",
    ],
)
def test_what_editors_draw_with_passes(drawn: bytes) -> None:
    assert shown(drawn) == drawn


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x1b]52;c;ZXZpbA==\x07",  # clipboard
        b"\x1b]0;title\x1b\\",
        b"\x1b]8;;http://x\x07",  # hyperlink
        b"\x1b]11;?\x07",  # a colour is asked for
        b"\x1bP$q\"p\x1b\\",  # DCS query
        b"\x1bPtmux;\x1b\x1b]52;c;eA==\x07\x1b\\",
        b"\x1b_Gf=24;AAAA\x1b\\",
        b"\x1b[6n",
        b"\x1b[5n",
        b"\x1b[c",
        b"\x1b[>c",
        b"\x1b[21t",
        b"\x1b[?1$p",
        b"\x1b[>q",
        b"\x1b[>4;2m",
        b"\x1b[>1u",
        b"\x1b[?u",
        b"\x1bc",
        b"\x1b[!p",
        b"\x1b[3J",
        b"\x1b[20h",
        b"\x1b[99999b",
        b"\x1bZ",
        b"\x05",
        b"\x1b[?3h", b"\x1b[3g", b"\x1bH",
        b"\x1b[" + b"1;" * 40 + b"m",
        b"\xc2\x9b6n",
        b"\xc2\x9d52;c;eA==\x07",
    ],
)  # fmt: skip
def test_what_acts_beyond_the_screen_or_makes_it_speak_is_dropped(hostile: bytes) -> None:
    assert shown(b"a" + hostile + b"b") == b"ab"


def test_of_several_modes_the_known_ones_pass() -> None:
    assert shown(b"\x1b[?25;9999;1049l") == b"\x1b[?25l\x1b[?1049l"


def test_a_letter_is_no_control_of_a_terminal_with_another_charset() -> None:
    assert ScreenFilter("ascii").feed("\u011b31m \u2500".encode()) == b"?31m ?"


def test_what_reorders_text_takes_one_column() -> None:
    assert shown("a\u202eb".encode()) == "a\ufffdb".encode()


def test_at_the_end_everything_is_switched_back() -> None:
    strip = ScreenFilter()
    strip.feed(b"\x1b[?1049h\x1b[?25l\x1b[?1000h\x1b[?1000l\x1b[31m\x1b[1;5r\x1b=\x1b(0\x1b[4h\x1b[2 q")
    undone = b"\x1b[0m\x1b[?25h\x1b[?1049l\x1b[4l\x1b7\x1b[r\x1b8\x1b>\x1b(B\x0f\x1b[0 q"
    assert strip.finish() == undone
    assert strip.finish() == b""


ALLOWED = re.compile(
    rb"\x1b(?:\[[0-9;:]*[@A-HIJKLMPSTXZ`abdefhlmrsu]|\[\?[0-9]*[hlJK]|\[[0-9]+ q|[78DEM=>]|[()*+][0AB])"
)


@given(
    st.lists(st.one_of(st.binary(max_size=12), st.sampled_from([b"\x1b", b"\x1b[", b"?", b"]", b"6n", b"P", b"\x07"])))
)
def test_nothing_else_ever_passes_and_cuts_do_not_matter(pieces: list[bytes]) -> None:
    out = shown(*pieces)
    assert out == shown(b"".join(pieces))
    left = ALLOWED.sub(b"", out)
    assert not re.search(rb"[\x00-\x06\x10-\x1f\x7f]", left)
    assert not re.search(r"[\x80-\x9f]", left.decode())
