"""An interpreter's line: any bytes are messages or a WireError, compared with a reference reader (J02, J07)."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.wire import line
from ringfence.wire.frames import WireError

GOOD: list[tuple[dict[str, object], bytes]] = [
    ({"m": "display", "value": True, "mimes": [["text/plain", 2], ["image/png", 1]]}, b"hi\x00"),
    ({"m": "prompt"}, b"name? "),
    ({"m": "prompt"}, b""),
    ({"m": "call", "id": 1, "name": "lookup"}, b"{}"),
    ({"m": "failed", "stage": "exec", "errno": 2}, b""),
    ({"m": "done", "n": 3, "exit": None, "exception": None}, b""),
    ({"m": "done", "n": 3, "exit": 1, "exception": {"name": "E"}}, b""),
]

scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)
names = st.sampled_from(["m", "value", "mimes", "id", "name", "stage", "errno", "n", "exit", "exception", "x"])
kinds = st.sampled_from(["display", "prompt", "call", "failed", "done", "cell", "input", "answer", ""])
mimes = st.lists(st.tuples(st.text(max_size=4) | st.just("text/plain"), st.integers(-1, 9)).map(list), max_size=3)
messages = st.dictionaries(names, values | kinds | mimes, max_size=6) | st.sampled_from([m for m, _ in GOOD])


def packed(message: object, data: bytes) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("<II", len(text), len(data)) + text + data


def heard(*pieces: bytes) -> list[tuple[object, bytes]] | None:
    """Return what was read; None for a WireError, the only exception permitted."""
    reader = line.LineReader()
    try:
        return [(dict(said.fields), said.data) for piece in pieces for said in reader.feed(piece)]
    except WireError:
        return None


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(is_finite(one) for one in value)
        case dict():
            return all(is_finite(one) for one in value.values())
        case _:
            return True


def reference(message: object, data: bytes) -> bool:
    """Return whether Ringfence's own interpreter could have sent the message: a second, independent statement."""
    match message:
        case {"m": "display", "value": bool(), "mimes": list(sizes), **rest} if not rest:
            return 1 <= len(sizes) <= 32 and _sizes_fit(sizes, len(data))
        case {"m": "prompt", **rest} if not rest:
            return True
        case {"m": "call", "id": number, "name": str(), **rest} if not rest:
            return is_int(number)
        case {"m": "failed", "stage": str(), "errno": number, **rest} if not rest:
            return is_int(number) and 0 < number < 4096 and not data
        case {"m": "done", "n": number, "exit": code, "exception": told, **rest} if not rest:
            return is_int(number) and (code is None or is_int(code)) and isinstance(told, dict | None) and not data
    return False


def _sizes_fit(sizes: list[object], count: int) -> bool:
    for entry in sizes:
        match entry:
            case [str(mime), int(size)] if is_int(size) and size >= 0:
                if not 0 < len(mime) <= 100 or not all(" " <= char <= "~" for char in mime):
                    return False
            case _:
                return False
    return bool(sum(entry[1] for entry in sizes if isinstance(entry, list)) == count)


@pytest.mark.parametrize(("message", "data"), GOOD)
def test_what_our_own_code_says_is_heard(message: dict[str, object], data: bytes) -> None:
    assert heard(line.pack(message, data)) == [(message, data)]
    assert reference(message, data)


@given(st.binary(max_size=600))
def test_any_bytes_are_messages_or_a_wire_error(data: bytes) -> None:
    heard(data)


@given(messages, st.binary(max_size=9))
def test_nothing_is_heard_that_a_reference_refuses_nor_the_other_way(message: dict[str, object], data: bytes) -> None:
    found = heard(packed(message, data))
    if is_finite(message) and reference(message, data):
        assert found == [(message, data)]
    else:
        assert found is None


@pytest.mark.parametrize("number", [0, -1, 4096, 1 << 62])
def test_a_number_that_no_kernel_gives_is_refused(number: int) -> None:
    with pytest.raises(WireError):
        line.LineReader().feed(line.pack({"m": "failed", "stage": "cwd", "errno": number}))


@given(st.lists(st.sampled_from(GOOD), max_size=5), st.lists(st.integers(0, 400), max_size=6))
def test_how_it_is_cut_does_not_matter(said: list[tuple[dict[str, object], bytes]], cuts: list[int]) -> None:
    data = b"".join(line.pack(message, blob) for message, blob in said)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert heard(*pieces) == said


@pytest.mark.parametrize("lengths", [(line.MAX_JSON + 1, 0), (2, line.MAX_BYTES + 1), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_a_length_beyond_the_cap_is_refused_before_anything_is_kept(lengths: tuple[int, int]) -> None:
    assert heard(struct.pack("<II", *lengths)) is None


@pytest.mark.parametrize(
    "mimes",
    [
        [],
        [["text/plain", 2]] * 33,
        [["", 2]],
        [["t" * 101, 2]],
        [["text/pl\u00e9in", 2]],
        [["text/plain\n", 2]],
        [["text/plain\x1b[2J", 2]],
        [["text/plain", 3]],
        [["text/plain", 1]],
        [["a", 3], ["b", -1]],
        [["text/plain", True], ["b", 1]],
        [["text/plain", 2, 0]],
        ["text/plain"],
    ],
)
def test_a_display_whose_representations_are_not_right_is_refused(mimes: list[object]) -> None:
    assert heard(packed({"m": "display", "value": True, "mimes": mimes}, b"hi")) is None
    most: list[object] = [[f"{number:0100}", 0] for number in range(31)]
    message: dict[str, object] = {"m": "display", "value": True, "mimes": [*most, ["text/plain", 2]]}
    assert heard(packed(message, b"hi")) == [(message, b"hi")]
