"""Frames sorted into inboxes: a sandbox that breaks the rules ends, and never holds more than it was granted."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.wire.frames import STDERR, STDOUT, message, pack
from ringfence.wire.inbox import PIECE, WINDOW, Inbox, Switchboard

EXIT = {"code": 0, "signal": None, "why": None, "report": "", "cpu_s": 0.0, "ended_at": 0.0}


def opened() -> tuple[Switchboard, Inbox]:
    switch = Switchboard()
    return switch, switch.open()


@given(st.lists(st.binary(max_size=600), max_size=10))
def test_any_bytes_leave_a_switchboard_that_runs_or_is_over(pieces: list[bytes]) -> None:
    switch, inbox = opened()
    for piece in pieces:
        switch.feed(piece)
    assert switch.over in (None, "lost", "protocol")
    assert (inbox.end is None) == (switch.over is None)


_known = st.sampled_from(
    [
        message(ev="exit", id=1, **EXIT),
        message(ev="exit", id=2, **EXIT),
        message(ev="took", id=1, bytes=5),
        message(ev="stdin-closed", id=2),
        message(ev="refused", id=1, errno=11, error=""),
        message(ev="ready", init=1),
        message(ev="end", why="idle"),
        message(ev="crashed", error="KeyError: 5"),
        pack(STDOUT, 1, b"one"),
        pack(STDERR, 2, b"two"),
        pack(STDOUT, 3, b"nobody"),
    ]
)


@given(st.lists(_known, max_size=12))
def test_known_frames_in_any_order_end_each_thing_once_or_all_of_them(sent: list[bytes]) -> None:
    switch = Switchboard()
    inboxes = [switch.open(), switch.open()]
    ended: dict[int, object] = {}
    for frame in sent:
        switch.feed(frame)
        for inbox in inboxes:
            if inbox.end is not None:
                assert ended.setdefault(inbox.id, inbox.end) is inbox.end
    assert switch.over is None or all(inbox.end is not None for inbox in inboxes)


def test_a_monitor_that_crashed_ends_everything_with_its_last_words_made_harmless() -> None:
    switch, inbox = opened()
    switch.feed(message(ev="crashed", error="KeyError: \x1b[2J\n" + "x" * 9000))
    assert switch.over == "its monitor crashed: KeyError: \\x1b[2J\\n" + "x" * 181
    assert inbox.end == {"ev": "over", "why": switch.over}


def test_output_and_end_reach_their_inbox() -> None:
    switch, inbox = opened()
    switch.feed(pack(STDOUT, 1, b"out") + pack(STDERR, 1, b"err") + message(ev="exit", id=1, **EXIT))
    assert [inbox.take(), inbox.take(), inbox.take()] == [(STDOUT, b"out"), (STDERR, b"err"), None]
    assert inbox.end == {"ev": "exit", "id": 1, **EXIT}
    assert switch.over is None


@pytest.mark.parametrize(
    "data",
    [
        pack(STDOUT, 9, b"x"),
        message(ev="exit", id=9, **EXIT),
        message(ev="exit", id=1, **EXIT) * 2,
        message(ev="exit", id=1, **EXIT) + pack(STDOUT, 1, b"late"),
        message(ev="ready", init=1),
        b"\xff" * 9,
    ],
    ids=["output of nobody", "end of nobody", "two ends", "output after the end", "a second start", "rubbish"],
)
def test_what_breaks_the_rules_ends_everything(data: bytes) -> None:
    switch, inbox = opened()
    other = switch.open()
    switch.feed(data)
    assert switch.over == "protocol"
    assert other.end == {"ev": "over", "why": "protocol"}
    assert inbox.end is not None


def test_nothing_is_sorted_after_the_rules_were_broken() -> None:
    switch, inbox = opened()
    switch.feed(b"\xff" * 9)
    switch.feed(pack(STDOUT, 1, b"more") + message(ev="end", why="idle"))
    switch.feed(b"")
    assert (switch.over, inbox.take()) == ("protocol", None)


def test_a_flood_after_the_rules_were_broken_is_not_kept() -> None:
    switch, _ = opened()
    switch.feed(b"\xff" * 9)
    tracemalloc.start()
    try:
        for _ in range(200):
            switch.feed(bytes(1 << 17))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20


def test_output_up_to_what_was_granted_is_kept() -> None:
    switch, inbox = opened()
    switch.feed(pack(STDOUT, 1, bytes(WINDOW)))
    assert switch.over is None
    assert inbox.take() == (STDOUT, bytes(WINDOW))


def test_output_beyond_what_was_granted_breaks_the_rules() -> None:
    switch, _ = opened()
    switch.feed(pack(STDOUT, 1, bytes(WINDOW)) + pack(STDERR, 1, b"x"))
    assert switch.over == "protocol"


def test_what_was_taken_is_granted_again_once() -> None:
    switch, inbox = opened()
    for _ in range(20):
        switch.feed(pack(STDOUT, 1, bytes(WINDOW // 2)))
        inbox.take()
        assert inbox.credit() == WINDOW // 2 + PIECE
        assert inbox.credit() == 0
    assert switch.over is None


def test_a_byte_in_a_frame_of_its_own_is_not_free() -> None:
    """1 MiB of credit as single bytes would be a million objects (F16)."""
    switch, inbox = opened()
    one = pack(STDOUT, 1, b"x") + pack(STDERR, 1, b"y")
    while switch.over is None:
        switch.feed(one * 100)
    assert len(inbox.items) <= WINDOW // PIECE


def test_an_end_of_file_is_a_loss() -> None:
    switch, inbox = opened()
    switch.feed(b"")
    assert (switch.over, inbox.end) == ("lost", {"ev": "over", "why": "lost"})


def test_what_is_opened_after_the_end_has_ended() -> None:
    """The caller checked just before the end: else no event would ever report the end."""
    switch, _ = opened()
    switch.feed(b"")
    assert switch.open().end == {"ev": "over", "why": "lost"}
