"""Takes secret values out of what a server sends back: the value, and its common encodings, over chunk borders (G24).

Every hit is overwritten by as many asterisks, so that lengths in headers, frames and websockets stay true.
A server that sends the value back in another shape (reversed, encrypted, one character at a time) cannot be
stopped here (I06).
"""

from __future__ import annotations

import base64
import html
import json
import re
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHORTEST = 6  # of an encoded form; shorter ones would hit text that has nothing to do with the secret


class Forms:
    """The byte strings that must not reach the guest, ready to be searched for. Never shown."""

    def __init__(self, values: Iterable[str]) -> None:
        found: set[bytes] = set()
        for value in values:
            found |= _forms(value)
        # Longest first: a form that holds another one is overwritten as a whole.
        self._forms = sorted(found, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(form) for form in self._forms)) if found else None
        self.longest = max(map(len, found), default=0)

    def __bool__(self) -> bool:
        return self._pattern is not None

    def __repr__(self) -> str:
        return "Forms(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("forms of secrets stay in their process")

    def mask(self, data: bytes) -> bytes:
        """A whole text without the values, of the same length."""
        if self._pattern is None:
            return data
        return self._pattern.sub(_asterisks, data)

    def unfinished(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a value."""
        if not data:
            return 0
        most = 0
        for form in self._forms:
            most = max(most, _overlap(data, form))
        return most

    def stream(self) -> Scrubber:
        return Scrubber(self)


class Scrubber:
    """One stream of bytes. Holds back only what may be the beginning of a value."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may pass now; the rest comes with the next bytes or with `end`."""
        if not self._forms:
            return data
        masked = self._forms.mask(self._held + data)
        held = self._forms.unfinished(masked)
        self._held = masked[len(masked) - held :]
        return masked[: len(masked) - held]

    def end(self) -> bytes:
        """What was held back: the stream ended before it became a value."""
        rest, self._held = self._held, b""
        return rest


def _asterisks(match: re.Match[bytes]) -> bytes:
    return b"*" * len(match.group())


def _overlap(data: bytes, form: bytes) -> int:
    """The length of the longest end of `data` that is a proper beginning of `form`."""
    start = max(0, len(data) - len(form) + 1)
    while (start := data.find(form[:1], start)) >= 0:
        if form.startswith(data[start:]):
            return len(data) - start
        start += 1
    return 0


def _forms(value: str) -> set[bytes]:
    plain = value.encode("ascii")
    texts = {
        quote(value, safe=""),
        quote(value),
        quote_plus(value),
        quote(value, safe="").lower(),
        json.dumps(value)[1:-1],
        json.dumps(value)[1:-1].replace("/", "\\/"),
        html.escape(value),
        html.escape(value, quote=False),
        plain.hex(),
        plain.hex().upper(),
    }
    encoded = _base64_forms(plain) | {text.encode("ascii") for text in texts}
    return {plain} | {form for form in encoded if len(form) >= _SHORTEST}


def _base64_forms(value: bytes) -> set[bytes]:
    """The characters that stand for the value wherever it begins in a base64 text, without those it shares."""
    found: set[bytes] = set()
    for shift in range(3):
        text = base64.b64encode(bytes(shift) + value).rstrip(b"=")
        first = (shift * 8 + 5) // 6  # the first character that holds bits of the value alone
        whole = (shift + len(value)) * 8 // 6
        inner = text[first:whole]
        found |= {inner, inner.replace(b"+", b"-").replace(b"/", b"_")}
    return found
