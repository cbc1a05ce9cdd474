"""Request paths in one form, and every way a server may read one: a path rule holds for all of them (G23).

`%2e%2e`, `//`, `\\`, `%2f`, `%252f`, `..;` are how a path slips past a prefix. What has one meaning is put into its
canonical form, and that form is what is sent; what servers read in several ways must fit the rule in each.
Raises ValueError with the reason. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PLAIN = _UNRESERVED | frozenset(b"/!$&'()*+,;=:@")
_HEX = frozenset("0123456789abcdefABCDEF")
_MOST_DECODINGS = 8
LONGEST = 16_384


def split_target(target: str) -> tuple[str, str]:
    """Path and query (with its "?", or empty) of a request target in origin form."""
    if not target.startswith("/") or len(target) > LONGEST:
        raise ValueError(f"the path does not start with a slash, or is longer than {LONGEST} characters")
    if not target.isascii() or not target.isprintable() or " " in target or "#" in target:
        raise ValueError("the path holds characters that a request cannot")
    path, mark, query = target.partition("?")
    return path, mark + query


def canonical_path(path: str) -> str:
    """Escapes in upper case and only where needed, no `.`, `..` or empty segments.

    Idempotent. Raises ValueError for broken escapes and control characters.
    """
    return _resolve(_encode_raw(_normalise_escapes(path)))


def readings(path: str) -> tuple[str, ...]:
    """The canonical form first, then what servers that decode again, or cut `;` parameters, would make of it."""
    canonical = canonical_path(path)
    found = [canonical]
    data = _decode(canonical)
    for _ in range(_MOST_DECODINGS):
        for text in (data, _without_parameters(data.replace(b"\\", b"/"))):
            reading = _resolve(_encode(text.replace(b"\\", b"/")))
            if reading not in found:
                found.append(reading)
        again = _decode(_encode(data, keep_percent=True))
        if again == data:
            return tuple(found)
        data = again
    raise ValueError("the path is escaped too many times over")


def permitted(path: str, prefixes: Iterable[str]) -> bool:
    """Whether every reading of `path` starts with one of the policy's prefixes. Raises ValueError as above."""
    known = set()
    for prefix in prefixes:
        known |= {prefix, _encode(_decode(prefix))}
    starts = tuple(known)
    return all(reading.startswith(starts) for reading in readings(path))


def _normalise_escapes(path: str) -> str:
    head, *rest = path.split("%")
    made = [head]
    for part in rest:
        if len(part) < 2 or not _HEX.issuperset(part[:2]):
            raise ValueError("a percent sign is not followed by two hex digits")
        value = int(part[:2], 16)
        if value < 0x20 or value == 0x7F:
            raise ValueError("the path holds an escaped control character")
        made.append((chr(value) if value in _UNRESERVED else f"%{value:02X}") + part[2:])
    return "".join(made)


def _encode_raw(path: str) -> str:
    """Characters that stand in a path unescaped though they may not; a percent sign is an escape here."""
    return "".join([char if char == "%" or ord(char) in _PLAIN else f"%{ord(char):02X}" for char in path])


def _resolve(path: str) -> str:
    """Without `.`, `..` and empty segments; a directory keeps its last slash."""
    made: list[str] = []
    segments = path.split("/")
    for segment in segments:
        if segment == "..":
            del made[-1:]
        elif segment not in ("", "."):
            made.append(segment)
    ends = segments[-1] in ("", ".", "..") and bool(made)
    return "/" + "/".join(made) + ("/" if ends else "")


def _decode(path: str) -> bytes:
    """Every escape, once; broken ones stay as they are."""
    data = path.encode("ascii")
    head, *rest = data.split(b"%")
    made = [head]
    for part in rest:
        digits = part[:2].decode("latin-1")
        if len(digits) == 2 and _HEX.issuperset(digits):
            value = int(digits, 16)
            if value < 0x20 or value == 0x7F:
                raise ValueError("the path holds an escaped control character")
            made.append(bytes([value]) + part[2:])
        else:
            made.append(b"%" + part)
    return b"".join(made)


def _encode(data: bytes, *, keep_percent: bool = False) -> str:
    plain = _PLAIN | {0x25} if keep_percent else _PLAIN
    return "".join([chr(value) if value in plain else f"%{value:02X}" for value in data])


def _without_parameters(data: bytes) -> bytes:
    """Tomcat reads `..;x` as `..`."""
    return b"/".join([segment.partition(b";")[0] for segment in data.split(b"/")])
