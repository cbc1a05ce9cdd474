"""The filter for terminals lets text and colours pass, and no other sequence that a terminal obeys (J12)."""

from __future__ import annotations

import itertools
import os
import pty
import re
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli.terminal_filter import EscapeFilter, charset, for_terminal

SGR = re.compile(rb"\x1b\[[0-9;:]*m")


def filtered(*pieces: bytes) -> bytes:
    strip = EscapeFilter()
    return b"".join([*(strip.feed(piece) for piece in pieces), strip.finish()])


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"hello\n",
        b"a\tb\r\nc\n",
        "grün 日本 👩‍🚀\n".encode(),
        b"\x1b[1;31mred\x1b[0m\n",
        b"\x1b[38:2::1:2:3mx\x1b[m",
    ],
)
def test_text_line_ends_tabs_and_colours_pass(plain: bytes) -> None:
    assert filtered(plain) == plain


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        (b"a\x1b]52;c;ZXZpbA==\x07b", b"ab"),  # clipboard
        (b"a\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\b", b"alinkb"),  # link
        (b"a\x1b]0;title\x07b", b"ab"),
        (b"a\x1b[21tb", b"ab"),  # title report, typed into our standard input
        (b"a\x1bP$qm\x1b\\b", b"ab"),  # DECRQSS
        (b"a\x1b[6nb\x1b[cb\x1b[>0cb", b"abbb"),  # queries
        (b"a\x1b[2J\x1b[Hb\x1b[1Ab", b"abb"),  # cursor and screen
        (b"a\x1b[>4;2mb", b"ab"),  # modifyOtherKeys ends in m and is no colour
        (b"a\x1b[?1049hb", b"ab"),
        (b"a\x1b[1 qb", b"ab"),
        (b"a\x1b[1!mb", b"ab"),
        (b"a\x1b(0b\x1bcb\x1b=b", b"abbb"),
        (b"a\x1b_Gf=24;AAAA\x1b\\b", b"ab"),  # kitty graphics
        (b"a\x1bX sos \x1b\\b\x1b^pm\x1b\\b", b"abb"),
        ("a\x9b2Jb\x9d0;t\x9cb\x85b\x90q\x9cb".encode(), b"abbbb"),  # the same as C1 controls
        (b"a\x9b2Jb", "a\ufffd2Jb".encode()),  # a raw C1 byte is not UTF-8
        (b"a\x00\x07\x08\x0b\x0c\x0e\x7fb", b"ab"),
        (b"password: \rharmless", b"password: \nharmless"),
        (b"x\r", b"x\n"),
        (b"x\r\r\n", b"x\n\r\n"),
        ("a\u202eb\u2066c".encode(), b"a\\u202eb\\u2066c"),
        (b"a\x1b]0;no end\nnext line", b"a\nnext line"),  # cannot hide what follows
        (b"a\x1b[3\n1mb", b"a\n1mb"),
        (b"a\x1b[" + b"1;" * 200 + b"mb", b"ab"),
        (b"a\x1b\x1b[31mb", b"a\x1b[31mb\x1b[0m"),
        (b"\x1b[31mleft on", b"\x1b[31mleft on\x1b[0m"),
        (b"cut\x1b[3", b"cut"),
        (b"cut\xe2\x82", "cut\ufffd".encode()),
    ],
)
def test_every_other_escape_is_dropped(hostile: bytes, shown: bytes) -> None:
    assert filtered(hostile) == shown


pieces_of_terminal_talk = st.sampled_from(
    b"\x1b,[,],31,m,;,?,>, ,\x07,\\,\n,\r,\xc2,\x9b,\x9c,\xe2\x80\xae,P,text,\x18,\x1b[0m,\x1b[1m,\t,\xff".split(b",")
)
streams = st.one_of(st.binary(max_size=60), st.lists(pieces_of_terminal_talk, max_size=25).map(b"".join))


@given(streams, st.data())
def test_where_the_stream_is_cut_does_not_matter(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    edges = [0, *cuts, len(stream)]
    assert filtered(*(stream[a:b] for a, b in itertools.pairwise(edges))) == filtered(stream)


@given(streams)
def test_filtering_twice_is_filtering_once(stream: bytes) -> None:
    assert filtered(filtered(stream)) == filtered(stream)


@given(streams)
def test_nothing_but_colours_and_text_comes_out(stream: bytes) -> None:
    text = SGR.sub(b"", filtered(stream)).decode().replace("\r\n", "\n")
    assert not [char for char in text if char not in "\n\t" and (char < " " or "\x7f" <= char <= "\x9f")]
    assert not set(text) & set("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@pytest.mark.parametrize(
    ("locale", "mode", "expected"),
    [
        ({}, 0, "utf-8"),
        ({"LANG": "de_DE.UTF-8"}, 0, "utf-8"),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": "C"}, 0, "ascii"),
        ({"LANG": "de_DE.ISO-8859-1"}, 0, "ascii"),
        ({"LANG": "C"}, 0o40000, "utf-8"),
    ],
)
def test_utf8_is_for_a_terminal_that_reads_it(
    locale: dict[str, str], mode: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in locale.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    try:
        modes = termios.tcgetattr(theirs)
        modes[0] = modes[0] & ~0o40000 | mode
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        assert charset(theirs) == expected
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_letter_is_no_control_of_a_terminal_with_another_charset() -> None:
    # In UTF-8 this letter is c4 9b, and 9b alone is CSI.
    assert for_terminal("\u011b31m é".encode(), "ascii") == b"?31m ?"
