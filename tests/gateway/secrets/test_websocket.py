"""Values in the messages of a websocket: found over the borders of frames, and every other byte stays in its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.servers import frame
from ringfence.gateway.secrets.scrub import Forms, WebsocketFrames

VALUE = b"tokenABCDEF12345"
FORMS = Forms([VALUE.decode()])
TEXT, CONTINUES, PING, LAST = 1, 0, 9, 0x80


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


def _message(parts: list[bytes], between: bytes = b"") -> bytes:
    made = [(TEXT if not number else CONTINUES, part) for number, part in enumerate(parts)]
    frames = [frame(kind | (LAST if number == len(made) - 1 else 0), part) for number, (kind, part) in enumerate(made)]
    return between.join(frames)


@given(
    st.lists(st.integers(0, 20), max_size=6),
    st.lists(st.integers(1, 30), max_size=8),
    st.sampled_from([b"", frame(PING | LAST, b"are you there"), frame(PING | LAST, b"")]),
    st.sampled_from([b"", b"tok", b"x" * 130, b"x" * 70_000]),
)
def test_a_value_is_taken_out_of_a_message_however_it_is_cut(
    sizes: list[int], reads: list[int], between: bytes, before: bytes
) -> None:
    text = before + VALUE + b"|tokenAB"
    masked = before + b"*" * len(VALUE) + b"|tokenAB"
    cuts = [len(before), *sizes]
    sent, expected = _message(_cut(text, cuts), between), _message(_cut(masked, cuts), between)
    frames = WebsocketFrames(FORMS)
    assert b"".join(frames.feed(part) for part in _cut(sent, reads)) == expected, "whole, when the message is"
    assert frames.end() == b""


def test_a_value_in_a_control_frame_is_taken_out() -> None:
    assert WebsocketFrames(FORMS).feed(frame(PING | LAST, VALUE)) == frame(PING | LAST, b"*" * len(VALUE))


def test_what_may_be_the_beginning_of_a_value_is_held_to_the_end_of_its_message_only() -> None:
    frames, first = WebsocketFrames(FORMS), frame(TEXT, b"my\ntoken")
    assert frames.feed(first) == first[:-5]
    last = frame(CONTINUES | LAST, b"s")
    assert frames.feed(last) == b"token" + last
    whole = frame(TEXT | LAST, b"my token")
    assert frames.feed(whole) == whole


def test_a_message_that_breaks_off_passes_as_far_as_it_came() -> None:
    frames, first = WebsocketFrames(FORMS), frame(TEXT, b"my token")
    assert frames.feed(first) + frames.end() == first


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1\x01x",  # compressed, without an agreement on compression
        b"\x81\x81abcdx",  # masked, as only clients do
        b"\x83\x01x",
        b"\x89\x7e\x00\x7ex",
        b"\x09\x01x",
        frame(TEXT, b"token") + frame(CONTINUES, b"") * 2000,
        VALUE,
    ],
)
def test_what_is_no_websocket_does_not_pass(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"frame|cut"):
        WebsocketFrames(FORMS).feed(data)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_pass_as_frames_or_not_at_all(parts: list[bytes]) -> None:
    frames, got = WebsocketFrames(FORMS), b""
    try:
        for part in parts:
            got += frames.feed(part)
    except ValueError:
        return
    got += frames.end()
    assert b"".join(parts).startswith(got)
