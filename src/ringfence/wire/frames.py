"""Parses the frames that come from a sandbox, strictly: every byte is taken as hostile (J07, J08, F20).

A frame is a length, a type, a stream and a payload. A control payload is a JSON object of a known event, a data payload
is raw. Anything else is a WireError, after which the channel is not read again.
"""

from __future__ import annotations

import struct

from ringfence.shared import fast_stdlib
from ringfence.values import Struct, final, put

HEADER = struct.Struct("<IBI")
JSON, STDIN, STDOUT, STDERR, LINE = 0, 1, 2, 3, 4
# A report of 256 KiB of control characters is six times as long once it is a JSON string in an exit event (J02).
MAX_PAYLOAD = 1 << 21


class WireError(Exception):
    """The other side broke the format."""


@final
class Frame(Struct):
    kind: int
    stream: int
    payload: bytes

    def __init__(self, kind: int, stream: int, payload: bytes) -> None:
        """Set the fields without the loop of `Struct`, for speed: every message is a frame."""
        put(self, "kind", kind)
        put(self, "stream", stream)
        put(self, "payload", payload)


def pack(kind: int, stream: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind, stream) + payload


def message(**data: object) -> bytes:
    return pack(JSON, 0, fast_stdlib.dumps(data))


class FrameReader:
    """A reader that cuts a byte stream into frames. Keeps at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return every frame that is complete now. Raises WireError for a header that our guestd never sends."""
        held = self._buffer
        held += data
        frames = []
        start = 0
        with memoryview(held) as buffer:  # a payload is copied once, not twice
            while len(buffer) - start >= HEADER.size:
                length, kind, stream = HEADER.unpack_from(buffer, start)
                _check_header(length, kind, stream)
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                frames.append(Frame(kind, stream, bytes(buffer[start + HEADER.size : end])))
                start = end
        del held[:start]
        return frames


def _check_header(length: int, kind: int, stream: int) -> None:
    if length > MAX_PAYLOAD:
        raise WireError(f"a frame of {length} bytes: the most is {MAX_PAYLOAD}")
    if kind not in (JSON, STDOUT, STDERR, LINE):
        raise WireError(f"a frame of unknown type {kind}")
    if not length or (kind == JSON and stream):
        raise WireError("an empty frame, or a control message on a stream")


# By event: the fields and their types. A field may be None only where NoneType is among the types.
_NONE = type(None)
_EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "ready": {"init": (int,)},
    "failed": {"error": (str,), "errno": (int, _NONE)},
    "refused": {"id": (int,), "errno": (int,), "error": (str,)},
    "took": {"id": (int,), "bytes": (int,)},
    "stdin-closed": {"id": (int,)},
    "started": {"id": (int,), "pid": (int,)},
    "interrupted": {"id": (int,), "why": (str,)},
    "paused": {},
    "resumed": {},
    "end": {"why": (str,)},
    "crashed": {"error": (str,)},
    "exit": {
        "id": (int,),
        "code": (int, _NONE),
        "signal": (int, _NONE),
        "why": (str, _NONE),
        "report": (str,),
        "cpu_s": (float, int),
        "ended_at": (float, int),
    },
}
# The most that each whole number may be; the least is 0.
_MOST = {
    "init": 1 << 22,
    "pid": 1 << 22,
    "errno": 4095,
    "id": 1 << 53,
    "bytes": 1 << 32,
    "code": 255,
    "signal": 64,
    "cpu_s": 1 << 53,
    "ended_at": 1 << 53,
}
_INTERRUPTS = ("timeout", "cpu")
_ENDS = ("lifetime", "idle", "init-lost", "tree-stuck")


def event(payload: bytes) -> dict[str, object]:
    """Return a control message with exactly the fields of its event. Raises WireError for any other message."""
    data = strict_json(payload)
    if not isinstance(data, dict) or not isinstance(data.get("ev"), str):
        raise WireError("a control message that is no event")
    fields = _EVENTS.get(data["ev"])
    if fields is None:
        raise WireError("an unknown event")
    if set(data) != {"ev", *fields}:
        raise WireError(f"a {data['ev']} event with wrong fields")
    for name, types in fields.items():
        if type(data[name]) not in types:
            raise WireError(f"a {data['ev']} event whose {name} has a wrong type")
        if name in _MOST and data[name] is not None and not 0 <= data[name] <= _MOST[name]:
            raise WireError(f"a {data['ev']} event whose {name} no kernel gives")
    if data["ev"] == "end" and data["why"] not in _ENDS:
        raise WireError("an end for an unknown reason")
    if data["ev"] == "interrupted" and data["why"] not in _INTERRUPTS:
        raise WireError("an interrupt for an unknown reason")
    return data


_DEPTH = 400


def strict_json(payload: bytes) -> object:
    """Return parsed JSON. Refuses text that is not UTF-8, repeated keys, NaN, numbers beyond 64 bits and great depth.

    Strings may hold lone surrogates, as file names do: a caller that shows them to people replaces the surrogates.
    Raises WireError.
    """
    try:
        data = _parse(payload.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if payload.count(b"[") + payload.count(b"{") > _DEPTH and _is_too_deep(data):
        raise WireError(f"more than {_DEPTH} nested lists and objects")
    return data


def _is_too_deep(data: object) -> bool:
    """Return whether lists and objects are nested deeper than `_DEPTH`.

    The parser's own limit was close to ours until Python 3.13; since then the thread's stack is the limit.
    """
    level = [data] if isinstance(data, (dict, list)) else []
    for _ in range(_DEPTH):
        values = (value for one in level for value in (one.values() if isinstance(one, dict) else one))
        level = [value for value in values if isinstance(value, (dict, list))]
    return bool(level)


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError("a repeated key")
    return found


def _no_constants(name: str) -> object:
    raise WireError(f"{name} is not JSON")


def _small_int(text: str) -> int:
    if len(text) > 20:
        raise WireError("a number beyond 64 bits")
    number = int(text)
    if not -(1 << 63) <= number < 1 << 64:
        raise WireError("a number beyond 64 bits")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:  # 1e999 is infinite, and infinite minus infinite is not a number
        raise WireError("a number beyond 64 bits")
    return number


class _Strict(fast_stdlib.Context):
    object_pairs_hook = staticmethod(_no_repeats)
    parse_constant = staticmethod(_no_constants)
    parse_int = staticmethod(_small_int)
    parse_float = staticmethod(_finite)


_parse = fast_stdlib.scanner(_Strict())
