"""The stamps kept between two scans, whatever changed, and that the stamps are whole after the way to the worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringfence.shared.stamps import SIZE, UNKNOWN, Memory, StampsMessage, cut, pack

names = st.sampled_from(["a", "b", "\udcff", "é", "\U0001f600", "\ue000", *(f"n{number}" for number in range(70))])
stamps = st.binary(min_size=16, max_size=16)
changes = st.dictionaries(names, st.none() | stamps)


def shown(memory: Memory) -> dict[str, dict[str, bytes | None]]:
    return {path: group.of_all() for path, group in memory.groups.items()}


@given(st.lists(changes, max_size=4), st.booleans())
def test_names_that_come_change_and_go_leave_what_a_dictionary_would_hold(
    turns: list[dict[str, bytes | None]], below: bool
) -> None:
    memory = Memory()
    prefix = "d/" if below else ""
    memory.follow({"d": (True, UNKNOWN)} if below else {}, ())
    model: dict[str, bytes] = {}
    for turn in turns:
        told = {name: stamp for name, stamp in turn.items() if stamp is not None}
        gone = [name for name, stamp in turn.items() if stamp is None and name in model]
        memory.follow({prefix + name: (False, stamp) for name, stamp in told.items()}, [prefix + name for name in gone])
        model = {name: stamp for name, stamp in (model | told).items() if name not in gone}
    expected = {"": {"d": UNKNOWN}, "d": model} if below else {"": model}
    assert shown(memory) == expected
    sent = pack(memory, ["ab" * 32], links=below, top=UNKNOWN)
    assert SIZE.unpack_from(sent)[0] == len(sent) - SIZE.size
    known = StampsMessage(sent[SIZE.size :])
    assert (shown(known.memory), known.links, known.top) == (expected, below, UNKNOWN)
    assert (known.holds("ab" * 32), known.holds("cd" * 32)) == (True, False)


def test_a_directory_that_went_is_forgotten_with_all_that_was_in_it() -> None:
    memory = Memory()
    memory.follow({"d": (True, UNKNOWN), "d/e": (True, UNKNOWN), "d/e/f": (False, UNKNOWN), "g": (True, UNKNOWN)}, ())
    assert memory.directories() == {"": ["d", "g"], "d": ["e"], "d/e": [], "g": []}
    memory.follow({"g": (False, UNKNOWN)}, ["d", "d/e", "d/e/f"])
    assert shown(memory) == {"": {"g": UNKNOWN}}


def test_stamps_are_cut_where_they_begin() -> None:
    assert cut(b"a" * 16 + b"b" * 16) == [b"a" * 16, b"b" * 16]
