"""Request paths in one form, and every way a server may read one: a path rule holds for all of them (G23).

`%2e%2e`, `//`, `\\`, `%2f`, `%252f`, `..;` are how a path slips past a prefix. What has one meaning is put into its
canonical form, and that form is what is sent; what servers read in several ways must fit the rule in each, and may
climb (`..`) in none: where a part ends is what they agree on least.
Raises ValueError with the reason. Pure.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PLAIN = _UNRESERVED | frozenset(b"/!$&'()*+,;=:@")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_BROKEN = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(rb"%(?:[01][0-9A-Fa-f]|7[Ff])")
_SPELLINGS = [chr(value) if value in _PLAIN else f"%{value:02X}" for value in range(256)]
_SPELLINGS_AND_PERCENT = [*_SPELLINGS[:0x25], "%", *_SPELLINGS[0x26:]]
_MOST_DECODINGS = 8
# A character of ASCII in more bytes than it takes: no UTF-8, and read as that character all the same.
_OVERLONG = re.compile(rb"[\xc0\xc1](.)|\xe0\x80(.)|\xf0\x80\x80(.)", re.DOTALL)
_ENDS_OF_PARTS = re.compile(rb"[/\\;?#]")  # to some server or other
LONGEST = 16_384
LONGEST_JUDGED = 4096  # each reading costs, and the loop that reads is every sandbox's


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
    return _resolve(_normalise_escapes(path))


def readings(path: str) -> tuple[str, ...]:
    """The canonical form first, then what servers that decode again, or cut `;` parameters, would make of it."""
    canonical = canonical_path(path)
    return _readings(canonical, _decodings(canonical))


def permitted(path: str, prefixes: Iterable[str]) -> bool:
    """`fits`, of a path as it was asked for."""
    return fits(canonical_path(path), prefixes)


def fits(canonical: str, prefixes: Iterable[str]) -> bool:
    """Whether every reading of a canonical path starts with one of the policy's prefixes.

    Raises ValueError as above, and for a `..` that only some servers see: nginx takes `p\\q/../..` for one part and
    two steps up, others for two of each, so no list of readings is the whole list.
    """
    if len(canonical) > LONGEST_JUDGED:
        raise ValueError(f"it is longer than {LONGEST_JUDGED} characters")
    decodings = _decodings(canonical)
    if _climbs(decodings[-1]):  # what has become a `..` stays one when the rest is decoded
        raise ValueError("some servers would read a part of it as ..")
    known = set()
    for prefix in prefixes:
        known |= {prefix, _encode(_decode(prefix))}
    starts = tuple(known)
    return all(reading.startswith(starts) for reading in _readings(canonical, decodings))


def _climbs(data: bytes) -> bool:
    """Whether a part is `..`, also to servers that take overlong UTF-8, full-width letters or spaces around a name."""
    texts = [data]
    if not data.isascii():
        folded = unicodedata.normalize("NFKC", data.decode("utf-8", "replace"))
        texts += [_OVERLONG.sub(_shortened, data), folded.encode()]
    return any(part.strip(b" ") == b".." for text in texts for part in _ENDS_OF_PARTS.split(text))


def _shortened(found: re.Match[bytes]) -> bytes:
    upper = 0x40 if found[0][0] == 0xC1 else 0
    return bytes([upper | found[0][-1] & 0x3F])


def _decodings(canonical: str) -> list[bytes]:
    """What is there after one decoding, after two, and so on, until there is nothing left to decode."""
    found = [_decode(canonical)]
    while len(found) <= _MOST_DECODINGS:
        again = _decode(_encode(found[-1], keep_percent=True))
        if again == found[-1]:
            return found
        found.append(again)
    raise ValueError("the path is escaped too many times over")


def _readings(canonical: str, decodings: list[bytes]) -> tuple[str, ...]:
    found = [canonical]
    for data in decodings:
        for text in (data, _without_parameters(data.replace(b"\\", b"/"))):
            reading = _resolve(_encode(text.replace(b"\\", b"/")))
            if reading not in found:
                found.append(reading)
    return tuple(found)


def _normalise_escapes(path: str) -> str:
    """And escapes characters that may not stand in a path as they are; a percent sign is an escape here."""
    data = path.encode("ascii")
    if _CONTROL.search(data):
        raise ValueError("the path holds an escaped control character")
    if _BROKEN.search(data):
        raise ValueError("a percent sign is not followed by two hex digits")
    return "".join(map(_SPELLINGS_AND_PERCENT.__getitem__, _ESCAPE.sub(_normal, data)))


def _normal(found: re.Match[bytes]) -> bytes:
    value = int(found[1], 16)
    return bytes([value]) if value in _UNRESERVED else b"%%%02X" % value


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
    if _CONTROL.search(data):
        raise ValueError("the path holds an escaped control character")
    return _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), data)


def _encode(data: bytes, *, keep_percent: bool = False) -> str:
    spellings = _SPELLINGS_AND_PERCENT if keep_percent else _SPELLINGS
    return "".join(map(spellings.__getitem__, data))


def _without_parameters(data: bytes) -> bytes:
    """Tomcat reads `..;x` as `..`."""
    return b"/".join([segment.partition(b";")[0] for segment in data.split(b"/")])
