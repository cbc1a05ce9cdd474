"""Owns what of a guest's bytes may reach a terminal: text, line ends, tabs and colours. Nothing else ever does (J12).

A terminal obeys what it is sent: it sets titles, writes the clipboard, answers queries into our standard input, and
moves the cursor over what a person has just read. So this is an allow-list: the one escape sequence that passes is SGR
(`CSI digits ; : m`). All others, and every control but `\\n`, `\\r\\n` and `\\t`, are dropped; a lone `\\r` becomes a
line end, because what it would overwrite must stay readable; characters that reorder text are shown as `\\u202e`.
A terminal that does not read UTF-8 gets ASCII: to it the second byte of many a letter is a control (`ě` ends in CSI).
"""

from __future__ import annotations

import codecs
import os

_PLAIN = bytes([*range(0x20, 0x7F), 0x09, 0x0A])

# Characters that change the order in which a terminal shows others, so that a line reads as what it is not.
REORDER = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

# Sequences that run to a terminator and carry a payload: DCS, SOS, OSC, PM, APC; as ESC + letter and as C1 control.
_STRINGS = frozenset("PX]^_\x90\x98\x9d\x9e\x9f")

_MAX_SGR = 64

GROUND, _RETURN, _ESCAPE, INTERMEDIATE, _SEQUENCE, _STRING = range(6)

_RESET = "\x1b[0m"

_IUTF8 = 0o40000  # of a terminal's input modes; Python's termios does not name it


def charset(fd: int) -> str:
    """What the terminal at `fd` may be sent: "utf-8", or "ascii" where the locale names another and its mode agrees."""
    named = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG") or "utf-8"
    if "utf8" in named.lower().replace("-", ""):
        return "utf-8"
    import termios

    try:
        return "utf-8" if termios.tcgetattr(fd)[0] & _IUTF8 else "ascii"
    except termios.error:
        return "ascii"


class EscapeFilter:
    """Filters one stream. `feed` and `finish` give the same bytes however the stream was cut into pieces."""

    __slots__ = ("_charset", "_coloured", "_decode", "_parameters", "_state")

    def __init__(self, charset: str = "utf-8") -> None:
        self._charset = charset
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._state = GROUND
        self._parameters: str | None = ""
        self._coloured = False

    def feed(self, data: bytes) -> bytes:
        """What of `data`, after all that came before, may be written to the terminal now."""
        if self._state == GROUND and not data.translate(None, _PLAIN):
            text = self._decode(data)  # it may hold half a character from the piece before
            if text.isascii():
                return text.encode()
        else:
            text = self._decode(data)
        return self._filter(text)

    def finish(self) -> bytes:
        """What is left at the end of the stream: half a character, a held line end, and colours switched off."""
        left = self._filter(self._decode(b"", final=True))
        if self._state == _RETURN:
            left += b"\n"
        self._state = GROUND
        if self._coloured:
            self._coloured = False
            left += _RESET.encode()
        return left

    def _filter(self, text: str) -> bytes:
        kept: list[str] = []
        for char in text:
            self._step(char, kept)
        return "".join(kept).encode(self._charset, "replace")

    def _step(self, char: str, kept: list[str]) -> None:
        state = self._state
        if state == GROUND:
            self._ground(char, kept)
        elif state == _RETURN:
            self._state = GROUND
            if char == "\n":
                kept.append("\r\n")
            else:
                kept.append("\n")
                self._ground(char, kept)
        elif state == _ESCAPE:
            self._escape(char, kept)
        elif state == _SEQUENCE:
            self._sequence(char, kept)
        elif state == INTERMEDIATE:
            self._intermediate(char, kept)
        else:
            self._string(char, kept)

    def _ground(self, char: str, kept: list[str]) -> None:
        if " " <= char <= "~" or char == "\n" or char == "\t":
            kept.append(char)
        elif char == "\x1b":
            self._state = _ESCAPE
        elif char == "\r":
            self._state = _RETURN
        elif char == "\x9b":
            self._start_sequence()
        elif char in _STRINGS:
            self._state = _STRING
        elif char in REORDER:
            kept.append(f"\\u{ord(char):04x}")
        elif char > "\x9f":
            kept.append(char)

    def _start_sequence(self) -> None:
        self._state = _SEQUENCE
        self._parameters = ""

    def _abort(self, char: str, kept: list[str]) -> None:
        # No byte of the sequence was sent, so the terminal is in its ground state and the rest is plain text to it.
        self._state = GROUND
        self._ground(char, kept)

    def _escape(self, char: str, kept: list[str]) -> None:
        if char == "[":
            self._start_sequence()
        elif char in _STRINGS and char < "\x7f":
            self._state = _STRING
        elif " " <= char <= "/":
            self._state = INTERMEDIATE
        elif "0" <= char <= "~":
            self._state = GROUND
        else:
            self._abort(char, kept)

    def _intermediate(self, char: str, kept: list[str]) -> None:
        if "0" <= char <= "~":
            self._state = GROUND
        elif not " " <= char <= "/":
            self._abort(char, kept)

    def _sequence(self, char: str, kept: list[str]) -> None:
        if "0" <= char <= ";":
            if self._parameters is not None:
                self._parameters = self._parameters + char if len(self._parameters) < _MAX_SGR else None
        elif " " <= char <= "?":
            self._parameters = None  # private or with intermediates: `CSI > 4 m` sets the keyboard, not a colour
        elif "@" <= char <= "~":
            self._state = GROUND
            if char == "m" and self._parameters is not None:
                self._coloured = self._parameters.strip("0;") != ""
                kept.append(f"\x1b[{self._parameters}m")
        else:
            self._abort(char, kept)

    def _string(self, char: str, kept: list[str]) -> None:
        # A line end ends it too: one unterminated OSC would else hide everything the guest prints after it.
        if char == "\x1b":
            self._state = _ESCAPE
        elif char in "\n\r":
            self._abort(char, kept)
        elif char in "\x07\x18\x1a\x9c":
            self._state = GROUND


def for_terminal(data: bytes, charset: str = "utf-8") -> bytes:
    """A whole text, filtered."""
    strip = EscapeFilter(charset)
    return strip.feed(data) + strip.finish()
