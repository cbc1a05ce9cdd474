"""Parses the messages of an interpreter that runs guest code. A guest can forge every byte (J02).

A message is a length of JSON, a length of bytes, the JSON, the bytes. Every field is checked against the message's
shape, and sizes are capped before anything is kept.
"""

from __future__ import annotations

import struct

from ringfence.shared import fast_stdlib
from ringfence.values import Struct, final
from ringfence.wire.frames import WireError, strict_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_HEADER = struct.Struct("<II")
MAX_JSON = 1 << 18
MAX_BYTES = 1 << 24
_MAX_REPRESENTATIONS = 32
_MAX_MIME = 100
_MOST_ERRNO = 4095
_NONE = type(None)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "display": {"value": (bool,), "mimes": (list,)},
    "prompt": {},
    "call": {"id": (int,), "name": (str,)},
    "failed": {"stage": (str,), "errno": (int,)},
    "done": {"n": (int,), "exit": (int, _NONE), "exception": (dict, _NONE)},
}


@final
class Said(Struct):
    """A message of the guest."""

    kind: str
    fields: Mapping[str, object]
    data: bytes


def pack(message: Mapping[str, object], data: bytes = b"") -> bytes:
    text = fast_stdlib.dumps(dict(message))
    return _HEADER.pack(len(text), len(data)) + text + data


class LineReader:
    """A reader that cuts the bytes of a line into messages. Keeps at most one incomplete message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Said]:
        """Return every message that is complete now. Raises WireError for anything that our own code never sends."""
        buffer = self._buffer
        buffer += data
        found = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            text, blob = _HEADER.unpack_from(buffer, start)
            if text > MAX_JSON or blob > MAX_BYTES:
                raise WireError(f"a message of {text + blob} bytes")
            body = start + _HEADER.size
            if len(buffer) < body + text + blob:
                break
            with memoryview(buffer) as view:  # 16 MiB are copied once, not twice
                found.append(_checked(bytes(view[body : body + text]), bytes(view[body + text : body + text + blob])))
            start = body + text + blob
        del buffer[:start]
        return found


def _checked(text: bytes, data: bytes) -> Said:
    message = strict_json(text)
    kind = message.get("m") if isinstance(message, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or not isinstance(message, dict) or set(message) != {"m", *fields}:
        raise WireError("a message that our code never sends")
    for name, types in fields.items():
        if type(message[name]) not in types:
            raise WireError(f"a {kind} message whose {name} has a wrong type")
    if kind == "failed" and not 0 < message["errno"] <= _MOST_ERRNO:
        raise WireError("a failed message with a number that no kernel gives")
    if kind == "display":
        _check_mimes(message["mimes"], len(data))
    elif kind != "prompt" and kind != "call" and data:
        raise WireError(f"a {kind} message with bytes")
    return Said(str(kind), message, data)


def _check_mimes(mimes: list[object], size: int) -> None:
    if not 1 <= len(mimes) <= _MAX_REPRESENTATIONS:
        raise WireError("too few or too many representations")
    for entry in mimes:
        if not isinstance(entry, list) or [type(part) for part in entry] != [str, int]:
            raise WireError("a representation that is not a type and a size")
        if not 0 < len(entry[0]) <= _MAX_MIME or not entry[0].isascii() or not entry[0].isprintable():
            raise WireError("a representation without a proper type")
        if not 0 <= entry[1] <= size:
            raise WireError("a representation of another size")
    if sum(entry[1] for entry in mimes if isinstance(entry, list)) != size:
        raise WireError("representations of another size than their bytes")


def representations(said: Said) -> dict[str, bytes]:
    """Return the representations of a display message, by MIME type."""
    found: dict[str, bytes] = {}
    start = 0
    mimes = said.fields["mimes"]
    assert isinstance(mimes, list)
    for mime, size in mimes:
        found[mime] = said.data[start : start + size]
        start += size
    return found
