"""Events are read once, again from a cursor, and with a gap where the reader came too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import PolicyError
from ringfence.core.transcript import EventLog
from ringfence.events import Gap, Prompt, Stdout
from ringfence.wire.frames import LINE, STDERR, STDOUT


def read(log: EventLog) -> list[object]:
    return list(iter(log.next, None))


def test_events_come_once_and_again_from_a_cursor() -> None:
    log = EventLog(1 << 20)
    log.add(STDOUT, b"abc")
    log.add(LINE, "name?")
    log.add(STDOUT, b"def")
    events = [Stdout(b"abc", "abc", 3), Prompt("name?", 8), Stdout(b"def", "def", 11)]
    assert (read(log), read(log)) == (events, [])
    log.seek(3)
    assert read(log) == events[1:]
    log.seek(1)
    assert read(log)[0] == Stdout(b"bc", "bc", 3)
    with pytest.raises(PolicyError, match="no event has the cursor 12"):
        log.seek(12)


def test_a_late_reader_sees_a_gap() -> None:
    log = EventLog(1000)
    for _ in range(50):
        log.add(STDOUT, b"x" * 100)
    gap, *rest = read(log)
    assert isinstance(gap, Gap)
    assert all(isinstance(event, Stdout) for event in rest)
    assert gap.lost_bytes + sum(len(event.data) for event in rest if isinstance(event, Stdout)) == 5000


def test_no_character_is_made_across_a_gap() -> None:
    """The bytes on both sides of a gap were not next to each other in the guest's output."""
    log = EventLog(200)
    log.add(STDOUT, b"\xe2\x82")
    assert read(log) == [Stdout(b"\xe2\x82", "", 2)]
    log.add(STDOUT, b"x" * 150)
    log.add(STDOUT, b"\xac")
    assert read(log) == [Gap(150, 152), Stdout(b"\xac", "\N{REPLACEMENT CHARACTER}", 153)]


@pytest.mark.parametrize("cursor", [True, 1.0, "1", None])
def test_a_cursor_is_a_whole_number(cursor: object) -> None:
    log = EventLog(200)
    log.add(STDOUT, b"xy")
    with pytest.raises(PolicyError, match="no event has the cursor"):
        log.seek(cursor)  # type: ignore[arg-type]  # the point of it


@given(
    st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(min_size=1, max_size=300))), st.integers(1, 2000)
)
def test_nothing_is_lost_unsaid_and_memory_stays_at_the_cap(pieces: list[tuple[int, bytes]], cap: int) -> None:
    log = EventLog(cap)
    for kind, data in pieces:
        log.add(kind, data)
    lost = sum(event.lost_bytes for event in read(log) if isinstance(event, Gap))
    log.seek(0)
    kept = sum(len(event.data) for event in read(log) if hasattr(event, "data"))
    assert lost + kept == sum(len(data) for _, data in pieces)
    assert log._bytes <= cap or len(log._kept) == 1
