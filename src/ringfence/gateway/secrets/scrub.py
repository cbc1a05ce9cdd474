"""Takes secret values, and their common encodings, out of what a server sends back, over chunk borders (G24).

Every hit is overwritten by as many asterisks, so that lengths in headers, frames and websockets stay true.
The table of docs/secrets.md says which forms are found, and a test compares the two. A server that sends the
value back in another shape (encrypted, in another alphabet, one character at a time) cannot be stopped here (I06).
"""

from __future__ import annotations

import base64
import functools
import html.entities
import json
import re
from collections import deque
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHORTEST = 6  # of an encoded form; a shorter form would hit text that has nothing to do with the secret
# Letters and digits, which no encoder of text changes, and runs of another character, which an encoder treats alike. A
# run is one part: a long run of backslashes, taken character by character, has more readings than a pattern can try.
_PARTS = re.compile(r"[A-Za-z0-9]+|(.)\1*", re.DOTALL)
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
# Every spelling is printable ASCII; a line's end, say, is in none.
_AFTER_THE_LAST = re.compile(rb"[^ -~]([ -~]*)\Z")
_MESSAGE_HEAD = 5
_LONGEST_REPEATED = 1 << 15  # of a pattern: reading a 2 KB key in JSON held the loop of all sandboxes for 9 s
# What an encoder that escapes every character puts before and after its digits, hexadecimal, decimal or octal: in a
# URL, in strings of programs, in HTML, in a quoted-printable text.
_WHOLLY = (
    *((b"%", "{:x}", b""), (rb"\x", "{:x}", b""), (rb"\u00", "{:x}", b""), (b"\\", "{:03o}", b""), (b"=", "{:x}", b"")),
    *((b"&#", "{}", b";"), (b"&#", "{:03}", b";"), (b"&#x", "{:x}", b";")),
)
_BETWEEN = (b":", b" ")  # what separates the bytes of a hexadecimal text


class Forms:
    """The byte strings that must not reach the guest, ready to be searched for. Never shown."""

    def __init__(self, values: Iterable[str]) -> None:
        found: set[str] = set()
        exact: dict[bytes, int] = {}
        for value in values:
            found |= _forms(value)
            exact |= _exact_forms(value)
        # Longest first: a form that holds another one is overwritten as a whole.
        forms = sorted(map(_Form, found), key=lambda form: form.longest, reverse=True)
        self._source = b"|".join([*_by_first_byte(exact), *(form.source for form in forms)])
        self._pattern = re.compile(self._source) if found else None
        self._pattern_of_names: re.Pattern[bytes] | None = None  # made when needed: it may take long
        self._shortest = min(map(len, found), default=0)
        self.longest = max((*exact.values(), *(form.longest for form in forms)), default=0)

    def __bool__(self) -> bool:
        return self._pattern is not None

    def __repr__(self) -> str:
        return "Forms(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("forms of secrets stay in their process")

    def mask(self, data: bytes) -> bytes:
        """Return a whole text with every value overwritten; the length stays."""
        if self._pattern is None:
            return data
        return self._pattern.sub(_asterisks, data)

    def mask_name(self, name: bytes) -> bytes:
        """Return a header's name with every value overwritten, in any case: HTTP/2 has names in lower case."""
        if self._pattern is None or len(name) < self._shortest:
            return name
        if self._pattern_of_names is None:
            self._pattern_of_names = re.compile(self._source, re.IGNORECASE)
        return self._pattern_of_names.sub(_asterisks, name)

    def unfinished(self, data: bytes) -> int:
        """Return how many of the last bytes may begin a value: all printable bytes at the end.

        That holds for any text, not just for the beginning of a value. Otherwise a guest whose own words a server
        sends back could try which words are held back, and so read a value character by character.
        """
        tail = data[-(self.longest - 1) :]
        found = _AFTER_THE_LAST.search(tail)
        return len(tail) if found is None else len(found[1])

    def stream(self) -> Scrubber:
        return Scrubber(self)

    def messages(self) -> Scrubber:
        return Messages(self)


class Scrubber:
    """A stream of bytes that is scrubbed. Holds back what may be the beginning of a value."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what may pass now; the rest comes with the next bytes or with `end`."""
        if not self._forms:
            return data
        masked = self._forms.mask(self._held + data)
        held = self._forms.unfinished(masked)
        self._held = masked[len(masked) - held :]
        return masked[: len(masked) - held]

    def end(self) -> bytes:
        """Return what was held back, as the stream ended before that became a value."""
        rest, self._held = self._held, b""
        return rest


class Messages(Scrubber):
    """A stream of gRPC messages, each after a mark and its length: nothing is held back over the end of a message.

    The two sides talk in turns, and a side that waits for the rest of a message says nothing. Bytes of
    another form are taken for a plain stream.
    """

    def __init__(self, forms: Forms) -> None:
        super().__init__(forms)
        self._head = b""
        self._left = 0
        self._is_framed = True

    def feed(self, data: bytes) -> bytes:
        passed = b""
        while data and self._is_framed:
            if not self._left:
                part = data[: _MESSAGE_HEAD - len(self._head)]
                self._is_framed = (self._head or part)[:1] == b"\0"
                if self._is_framed:
                    passed += part
                    data = data[len(part) :]
                    self._begin(self._head + part)
            else:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                passed += super().feed(part)
                if not self._left:
                    passed += self.end()
        return passed + super().feed(data) if data else passed

    def _begin(self, head: bytes) -> None:
        is_whole = len(head) == _MESSAGE_HEAD
        self._head = b"" if is_whole else head
        self._left = int.from_bytes(head[1:], "big") if is_whole else 0


# websockets

_CONTINUES, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_KINDS = frozenset((_CONTINUES, _TEXT, _BINARY, _CLOSE, _PING, _PONG))
_LAST, _EXTENSIONS, _MASKED = 0x80, 0x70, 0x80
_LONGEST_CONTROL = 125
_LONGER = {126: 2, 127: 8}  # bytes in which the length follows
_MOST_QUEUED = 1024  # frames that wait for the end of what may be a value


class WebsocketFrames:
    """The frames that a server sends on a websocket. Used as a Scrubber is.

    Values are looked for in whole messages, however frames cut them. A hit is overwritten in place, so that frames keep
    their lengths. Control frames, which may come between the frames of a message, are searched by themselves.
    """

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._scrubber = forms.stream()
        self._head = bytearray()  # the head of a frame, while it is not whole
        self._left = 0  # of a frame, after its head
        self._is_control = self._is_last = False
        self._control = b""
        self._queue: deque[bytes | int] = deque()  # what goes out: heads, and so many bytes of messages, in order
        self._ready = bytearray()  # bytes of messages that may pass

    def feed(self, data: bytes) -> bytes:
        """Return what may pass now. Raises ValueError for bytes that are no websocket, or one with extensions."""
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                self._take(part)
            else:
                part = data[at : at + self._head_size() - len(self._head)]
                self._head += part
                self._begin_frame()
            at += len(part)
        passed = self._passed()
        if len(self._queue) > _MOST_QUEUED:
            raise ValueError("its messages are cut too small")
        return passed

    def end(self) -> bytes:
        """Return what was held back."""
        self._ready += self._scrubber.end()
        return self._passed()

    def _head_size(self) -> int:
        return 2 if len(self._head) < 2 else 2 + _LONGER.get(self._head[1], 0)

    def _begin_frame(self) -> None:
        head = self._head
        if len(head) < 2:
            return
        kind = head[0] & 0x0F
        if head[0] & _EXTENSIONS or head[1] & _MASKED or kind not in _KINDS:
            raise ValueError("it is not a frame of a server's")
        if len(head) < self._head_size():
            return
        self._left = int.from_bytes(head[2:], "big") if head[1] in _LONGER else head[1]
        self._is_control = kind >= _CLOSE
        self._is_last = bool(head[0] & _LAST)
        if self._is_control and (self._left > _LONGEST_CONTROL or not self._is_last):
            raise ValueError("a control frame is too long")
        self._queue.append(bytes(head))
        head.clear()
        if not self._left:
            self._take(b"")

    def _take(self, part: bytes) -> None:
        if self._is_control:
            self._control += part
            if not self._left:
                self._queue.append(self._forms.mask(self._control))
                self._control = b""
            return
        self._queue.append(len(part))
        self._ready += self._scrubber.feed(part)
        if self._is_last and not self._left:
            self._ready += self._scrubber.end()

    def _passed(self) -> bytes:
        out = bytearray()
        while self._queue:
            item = self._queue[0]
            if isinstance(item, bytes):
                out += item
            else:
                out += self._ready[:item]
                missing = item - len(self._ready)
                del self._ready[:item]
                if missing > 0:
                    self._queue[0] = missing
                    break
            self._queue.popleft()
        return bytes(out)


# forms of a value


def _asterisks(match: re.Match[bytes]) -> bytes:
    return b"*" * len(match.group())


class _Form:
    """A text in which every character that an encoder may touch can be spelled in several ways.

    Encoders differ in what they escape and how: `+` is `%2B`, `%2b`, `\\u002B` or `&#43;` to one, and `+` to the next.
    """

    def __init__(self, text: str) -> None:
        parts = [_spellings(match.group()) for match in _PARTS.finditer(text)]
        self.longest = sum(len(spellings[0]) for spellings in parts)
        rest = b"".join(b"(?:" + b"|".join(map(re.escape, spellings)) + b")" for spellings in parts[1:])
        firsts = list(map(re.escape, parts[0]))
        if len(firsts) * len(rest) <= _LONGEST_REPEATED:
            # Each alternative begins with a plain character: for those, `re` skips what cannot be a beginning.
            self.source = b"|".join(first + rest for first in firsts)
        else:
            self.source = b"(?:" + b"|".join(firsts) + b")" + rest


def _exact_forms(value: str) -> dict[bytes, int]:
    """Return patterns, and lengths, of texts that an encoder left alone, or in which it escaped every character."""
    plain = value.encode("ascii")
    texts = (value.lower(), value.upper(), value[::-1])
    found = {re.escape(text.encode("ascii")): len(text) for text in texts}
    for start, number, end in _WHOLLY:
        digits = [number.format(code) for code in plain]
        source = b"".join(re.escape(start) + _in_any_case(each) + end for each in digits)
        found[source] = sum(len(start + each.encode() + end) for each in digits)
    for between in _BETWEEN:
        found[re.escape(between).join(_in_any_case(f"{code:x}") for code in plain)] = 3 * len(plain) - 1
    return found


def _in_any_case(digits: str) -> bytes:
    """Return a pattern of digits, in which a hexadecimal letter may be of either case."""
    return "".join(digit if digit.isdigit() else f"[{digit}{digit.upper()}]" for digit in digits).encode("ascii")


def _by_first_byte(patterns: dict[bytes, int]) -> list[bytes]:
    """Return a few alternatives, grouped by first byte. Each is tried wherever its first byte occurs."""
    groups: dict[bytes, list[bytes]] = {}
    for pattern in sorted(patterns, key=lambda pattern: patterns[pattern], reverse=True):
        first = pattern[: 2 if pattern[:1] == b"\\" else 1]
        groups.setdefault(first, []).append(pattern[len(first) :])
    return [first + b"(?:" + b"|".join(rests) + b")" for first, rests in groups.items()]


def _spellings(part: str) -> list[bytes]:
    """Return the spellings of `part` in a URL, a form, JSON, a script or HTML, the longest first."""
    if _PLAIN.issuperset(part):
        return [part.encode("ascii")]
    char = part[0]
    code = ord(part[0])
    found = {char, "\\" + char, json.dumps(char)[1:-1], f"&#{code};", f"&#{code:03};"}
    for number in (f"{code:02x}", f"{code:02X}"):
        found |= {f"%{number}", f"\\x{number}", f"\\u00{number}", f"&#x{number};"}
    found |= _names_in_html(char)
    if char == " ":
        found.add("+")
    elif char == "=":
        found.add("=3D")  # quoted-printable
    elif char in "\"'\\":
        found.add(f"\\{code:03o}")
    return sorted((one.encode("ascii") * len(part) for one in found), key=len, reverse=True)


@functools.cache
def _names_in_html(char: str) -> frozenset[str]:
    return frozenset(f"&{name}" for name, meant in html.entities.html5.items() if meant == char and name[-1] == ";")


def _forms(value: str) -> set[str]:
    plain = value.encode("ascii")
    encoded = {text.decode("ascii") for text in _base64_forms(plain)} | {plain.hex(), plain.hex().upper()}
    return {value} | {form for form in encoded if len(form) >= _SHORTEST}


def _base64_forms(value: bytes) -> set[bytes]:
    """Return the characters that stand for the value alone, for each place where it may begin in a base64 text."""
    found: set[bytes] = set()
    for shift in range(3):
        text = base64.b64encode(bytes(shift) + value).rstrip(b"=")
        first = (shift * 8 + 5) // 6  # the first character that holds bits of the value alone
        whole = (shift + len(value)) * 8 // 6
        inner = text[first:whole]
        found |= {inner, inner.replace(b"+", b"-").replace(b"/", b"_")}
    return found
