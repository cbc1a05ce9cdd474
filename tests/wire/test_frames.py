"""The parser of a sandbox's bytes: frames or WireError, whatever comes, in bounded memory (J07, J08, F20)."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.wire import frames
from ringfence.wire.frames import (
    JSON,
    MAX_PAYLOAD,
    STDERR,
    STDOUT,
    Frame,
    FrameReader,
    WireError,
    event,
    pack,
    strict_json,
)

EXIT = {"ev": "exit", "id": 1, "code": 0, "signal": None, "why": None, "report": "", "cpu_s": 0.5, "ended_at": 1.5}
EVENTS = [
    {"ev": "ready", "init": 1},
    {"ev": "failed", "error": "no", "errno": None},
    {"ev": "refused", "id": 1, "errno": 11, "error": "no"},
    {"ev": "took", "id": 1, "bytes": 3},
    {"ev": "stdin-closed", "id": 1},
    {"ev": "end", "why": "idle"},
    {"ev": "crashed", "error": "KeyError: 5"},
    EXIT,
]

good_frames = st.lists(
    st.builds(
        Frame, st.sampled_from([STDOUT, STDERR]), st.integers(0, (1 << 32) - 1), st.binary(min_size=1, max_size=200)
    ),
    max_size=8,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(data: bytes) -> list[Frame] | None:
    """Return what was read; None for a WireError, the only exception permitted."""
    try:
        return FrameReader().feed(data)
    except WireError:
        return None


@given(st.binary(max_size=4000))
def test_any_bytes_are_frames_or_a_wire_error(data: bytes) -> None:
    read(data)


@given(st.integers(0, (1 << 32) - 1), st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.binary(max_size=300))
def test_any_header_is_a_frame_or_a_wire_error(length: int, kind: int, stream: int, body: bytes) -> None:
    found = read(struct.pack("<IBI", length, kind, stream) + body)
    if found:
        assert kind in (JSON, STDOUT, STDERR)
        assert len(found[0].payload) == length <= len(body)


@given(good_frames, st.data())
def test_frames_come_out_the_same_however_the_stream_was_cut(sent: list[Frame], data: st.DataObject) -> None:
    whole = b"".join(pack(frame.kind, frame.stream, frame.payload) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    reader = FrameReader()
    got = [
        frame
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        for frame in reader.feed(whole[start:end])
    ]
    assert got == sent


@pytest.mark.parametrize("length", [MAX_PAYLOAD + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_beyond_the_cap_is_refused_before_its_bytes_come(length: int) -> None:
    with pytest.raises(WireError, match=f"a frame of {length} bytes"):
        FrameReader().feed(struct.pack("<IBI", length, STDOUT, 1))


@pytest.mark.parametrize(
    "data",
    [pack(1, 1, b"x"), pack(5, 1, b"x"), pack(255, 0, b"x"), pack(STDOUT, 1, b""), pack(JSON, 7, b"{}")],
    ids=["input", "unknown", "last", "empty", "control message on a stream"],
)
def test_a_frame_that_guestd_never_sends_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader().feed(data)


def test_a_reader_holds_at_most_one_frame_that_is_not_complete() -> None:
    reader = FrameReader()
    tracemalloc.start()
    try:
        for _ in range(64):
            reader.feed(pack(STDOUT, 1, bytes(1 << 16)))
        reader.feed(struct.pack("<IBI", MAX_PAYLOAD, STDOUT, 1) + bytes(MAX_PAYLOAD - 1))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * MAX_PAYLOAD


@pytest.mark.parametrize("given_event", EVENTS, ids=lambda e: e["ev"])
def test_an_event_with_its_fields_is_taken(given_event: dict[str, object]) -> None:
    assert event(json.dumps(given_event).encode()) == given_event


@pytest.mark.parametrize("given_event", EVENTS, ids=lambda e: e["ev"])
@given(name=st.text(min_size=1), value=values)
def test_an_event_with_a_field_more_is_refused(given_event: dict[str, object], name: str, value: object) -> None:
    if name in given_event:
        return
    with pytest.raises(WireError):
        event(json.dumps({**given_event, name: value}).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("given_event", EVENTS, ids=lambda e: e["ev"])
def test_an_event_with_a_field_less_is_refused(given_event: dict[str, object]) -> None:
    for name in given_event:
        with pytest.raises(WireError):
            event(json.dumps({key: value for key, value in given_event.items() if key != name}).encode())


@given(st.sampled_from(sorted(EXIT)), values)
def test_an_event_is_taken_with_values_of_its_types_alone(name: str, value: object) -> None:
    changed = {**EXIT, name: value}
    try:
        taken = event(json.dumps(changed).encode())
    except WireError:
        return
    types: dict[str, tuple[type, ...]] = {
        "code": (int, type(None)),
        "signal": (int, type(None)),
        "why": (str, type(None)),
        "id": (int,),
        "cpu_s": (float, int),
        "ended_at": (float, int),
    }
    assert isinstance(taken[name], types.get(name, (str,)))
    assert not isinstance(taken[name], bool)


@pytest.mark.parametrize(
    ("name", "value"),
    [("id", True), ("id", -1), ("code", 256), ("code", -1), ("code", "0"), ("code", 1.0), ("signal", 65),
     ("cpu_s", -0.5), ("cpu_s", "0"), ("report", None), ("why", 3)],
)  # fmt: skip
def test_a_number_that_no_kernel_gives_is_refused(name: str, value: object) -> None:
    with pytest.raises(WireError):
        event(json.dumps({**EXIT, name: value}).encode())


def test_an_end_for_a_reason_of_its_own_is_refused() -> None:
    with pytest.raises(WireError, match="unknown reason"):
        event(b'{"ev": "end", "why": "closed"}')


@given(st.binary(max_size=500))
def test_any_bytes_are_json_or_a_wire_error(data: bytes) -> None:
    try:
        strict_json(data)
    except WireError:
        return


@given(values)
def test_json_that_python_makes_comes_back_or_is_refused(value: object) -> None:
    text = json.dumps(value)
    try:
        taken = strict_json(text.encode())
    except WireError:
        assert _has_what_is_refused(value)
        return
    assert json.dumps(taken) == text


def _has_what_is_refused(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_what_is_refused(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_what_is_refused(item) for item in value)
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"9" * 5000,
        b"-" + b"9" * 30,
        b"18446744073709551616",
        b"1e999",
        b"-1e999",
        b"NaN",
        b"Infinity",
        b'{"a": 1, "a": 2}',
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"1 2",
        b"",
        b"'a'",
        b'"\x01"',
    ],
    ids=["deep list", "deep object", "5000 digits", "long negative", "beyond 64 bits", "infinite", "minus infinite",
         "NaN", "Infinity", "repeated key", "not UTF-8", "encoded surrogate", "two values", "nothing", "other quotes",
         "control"],
)  # fmt: skip
def test_a_bomb_for_parsers_is_a_wire_error(text: bytes) -> None:
    with pytest.raises(WireError):
        strict_json(text)


def test_a_payload_of_the_largest_size_costs_bounded_memory() -> None:
    densest = b"[" + b"[]," * ((MAX_PAYLOAD - 4) // 3) + b"1]"
    tracemalloc.start()
    try:
        strict_json(densest)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_what_the_host_sends_is_what_guestd_reads() -> None:
    from ringfence.shared.framing import FrameCutter as GuestReader

    assert list(GuestReader().feed(frames.message(op="eof", id=3))) == [(JSON, 0, b'{"op":"eof","id":3}')]


@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_reader_has_a_depth_of_its_own(opened: bytes, closed: bytes) -> None:
    """The parser's is another one in each version of Python."""
    most = 400
    value = strict_json(opened * most + b"1" + closed * most)
    for _ in range(most):
        value = value["a"] if isinstance(value, dict) else value[0]  # type: ignore[index]  # a list, then
    assert value == 1
    with pytest.raises(WireError, match="nested lists and objects"):
        strict_json(opened * (most + 1) + b"1" + closed * (most + 1))
    strict_json(b"[" + b"[[]]," * 5000 + b"[]]")  # many of them are not deep


_WITHOUT_JSON = """
import sys
from ringfence.wire.frames import WireError, strict_json
print("json" in sys.modules)
for text in (b'"open', b"{", b'{"a" 1}', b"[1,", b'"\\x01"', b'"\\\\u12"', b"nul", b'{"a": 1,}', b"\\xff", b""):
    try:
        strict_json(text)
    except WireError:
        continue
    print("taken", text)
"""


def test_rubbish_is_a_wire_error_where_the_json_module_is_not_loaded() -> None:
    """The scanner's own exception lives in json.decoder; without it the scanner once gave a SystemError."""
    import subprocess
    import sys
    from pathlib import Path

    source = str(Path(frames.__file__).parents[2])
    argv = [sys.executable, "-c", _WITHOUT_JSON]
    done = subprocess.run(argv, env={"PYTHONPATH": source}, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
