"""Filter a guest's bytes for a terminal: text, line ends, tabs and colours pass, nothing else does (J12).

A terminal obeys what it receives: it sets titles, writes the clipboard, answers queries into our standard input, and
moves the cursor over text that a person has just read. Therefore this is an allow-list: the only
escape sequence that passes is SGR (`CSI digits ; : m`). All other sequences, and all controls but `\\n`, `\\r\\n`
and `\\t`, are dropped; a lone `\\r` becomes a line end, because the text that it would overwrite must stay readable;
characters that reorder text are shown as `\\u202e`.
A terminal that does not read UTF-8 gets ASCII, because it would take the second byte of many letters for a control
(`ě` ends in CSI).
"""

from __future__ import annotations

import codecs
import os

_PLAIN = bytes([*range(0x20, 0x7F), 0x09, 0x0A])

# Characters that change the order in which a terminal shows text, so that a line reads as something else.
REORDER = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

# Sequences that run to a terminator and carry a payload: DCS, SOS, OSC, PM, APC; as ESC + letter and as C1 control.
_STRINGS = frozenset("PX]^_\x90\x98\x9d\x9e\x9f")

_MAX_SGR = 64

GROUND, _RETURN, _ESCAPE, INTERMEDIATE, _SEQUENCE, _STRING = range(6)

_RESET = "\x1b[0m"

_IUTF8 = 0o40000  # an input mode of a terminal; Python's termios has no name for it

# For ScreenFilter.
_CONTROLS = frozenset("\a\b\t\n\v\f\r\x0e\x0f")
_FINALS = frozenset("@ABCDEFGHIJKLMPSTXZ`abdefhlmrsu")
_LONE = frozenset("78DEM=>")
_CHARSETS = frozenset("0AB")
_MOST = 64
# Runs of text that pass as they are. Most of what a guest draws is such text, and need not be checked by character.
_DRAWN = f"[^\\x00-\\x06\\x0e-\\x1f\\x7f-\\x9f{''.join(sorted(REORDER))}]+"
# Private modes, and whether each is on in a fresh terminal.
_MODES = {
    **dict.fromkeys(("1", "6", "12", "47", "1047", "1048", "1049"), False),  # keys, origin, blinking, other screen
    **dict.fromkeys(("1000", "1002", "1003", "1004", "1005", "1006", "1015"), False),  # mouse and focus
    **dict.fromkeys(("2004", "2026"), False),  # marked pastes, drawing at once
    **dict.fromkeys(("7", "25"), True),  # wrapping, the cursor
}


def charset(fd: int) -> str:
    """Return what the terminal at `fd` reads: "utf-8", or "ascii" if locale and terminal mode say otherwise."""
    named = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG") or "utf-8"
    if "utf8" in named.lower().replace("-", ""):
        return "utf-8"
    import termios

    try:
        return "utf-8" if termios.tcgetattr(fd)[0] & _IUTF8 else "ascii"
    except termios.error:
        return "ascii"


class EscapeFilter:
    """Filter for one stream. `feed` and `finish` return the same bytes however the stream was cut into pieces."""

    __slots__ = ("_charset", "_coloured", "_decode", "_parameters", "_state")

    def __init__(self, charset: str = "utf-8") -> None:
        self._charset = charset
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._state = GROUND
        self._parameters: str | None = ""
        self._coloured = False

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that may be written to the terminal now."""
        if self._state == GROUND and not data.translate(None, _PLAIN):
            text = self._decode(data)  # the text may begin with half a character of the piece before
            if text.isascii():
                return text.encode()
        else:
            text = self._decode(data)
        return self._filter(text)

    def finish(self) -> bytes:
        """Return the rest at the end of the stream: half a character, a held line end, and colours switched off."""
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
        # A line end ends the string too: otherwise an unterminated OSC would hide what the guest prints later.
        if char == "\x1b":
            self._state = _ESCAPE
        elif char in "\n\r":
            self._abort(char, kept)
        elif char in "\x07\x18\x1a\x9c":
            self._state = GROUND


def for_terminal(data: bytes, charset: str = "utf-8") -> bytes:
    """Return a whole text as it may be written to a terminal."""
    strip = EscapeFilter(charset)
    return strip.feed(data) + strip.finish()


class ScreenFilter(EscapeFilter):
    """Filter for a guest that has the whole screen, as an editor does; `finish` undoes the guest's switches.

    More passes than in EscapeFilter, but this is still an allow-list: cursor movement, erasing, scrolling, colours,
    character sets, and the modes of _MODES. What acts beyond the screen or makes the terminal answer is dropped (J12):
    titles, clipboard, hyperlinks and every other OSC, DCS and APC; queries, whose answers would be typed into the guest
    or, after its end, into the caller's shell; keyboard protocols; tab stops, which nothing could put back; a full
    reset; the removal of the scroll-back.
    """

    __slots__ = ("_changed", "_drawn", "_prefix", "_switched", "_text")

    def __init__(self, charset: str = "utf-8") -> None:
        import re

        super().__init__(charset)
        self._drawn = re.compile(_DRAWN)
        self._prefix = ""  # "(" of a character set
        self._text = ""  # parameters and intermediates of the sequence so far
        self._switched: dict[str, None] = {}  # modes that the guest has switched, in order
        self._changed: set[str] = set()

    def finish(self) -> bytes:
        left = super().finish()
        undo = [f"\x1b[?{mode}{'h' if _MODES[mode] else 'l'}" for mode in reversed(self._switched)]
        for what, sequence in (
            ("insert", "\x1b[4l"),
            ("region", "\x1b7\x1b[r\x1b8"),
            ("keypad", "\x1b>"),
            ("charset", "\x1b(B\x0f"),
            ("shape", "\x1b[0 q"),
        ):
            if what in self._changed:
                undo.append(sequence)
        self._switched.clear()
        self._changed.clear()
        return left + "".join(undo).encode()

    def feed(self, data: bytes) -> bytes:
        text = self._decode(data)
        kept: list[str] = []
        at = 0
        while at < len(text):
            run = self._drawn.match(text, at) if self._state == GROUND else None
            if run is not None:
                kept.append(run[0])
                at = run.end()
            else:
                self._step(text[at], kept)
                at += 1
        return "".join(kept).encode(self._charset, "replace")

    def _ground(self, char: str, kept: list[str]) -> None:
        if char in _CONTROLS:
            kept.append(char)
            if char == "\x0e":
                self._changed.add("charset")
        elif char in REORDER:
            kept.append("\ufffd")  # one column, as the guest counts it
        else:
            super()._ground(char, kept)

    def _start_sequence(self) -> None:
        super()._start_sequence()
        self._text = ""

    def _escape(self, char: str, kept: list[str]) -> None:
        if char in _LONE:
            self._state = GROUND
            kept.append(f"\x1b{char}")
            if char == "=":
                self._changed.add("keypad")
        elif char in "()*+":
            self._state = INTERMEDIATE
            self._prefix = char
        else:
            self._prefix = ""
            super()._escape(char, kept)

    def _intermediate(self, char: str, kept: list[str]) -> None:
        if self._prefix and char in _CHARSETS:
            kept.append(f"\x1b{self._prefix}{char}")
            self._changed.add("charset")
        self._prefix = ""
        super()._intermediate(char, kept)

    def _sequence(self, char: str, kept: list[str]) -> None:
        if " " <= char <= "?":
            self._text = (self._text + char)[: _MOST + 1]
        elif "@" <= char <= "~":
            self._state = GROUND
            if len(self._text) <= _MOST:
                self._command(self._text, char, kept)
        elif char in "\b\t\n\v\f\r":
            kept.append(char)  # a terminal obeys these within a sequence too
        else:
            self._abort(char, kept)

    def _command(self, text: str, final: str, kept: list[str]) -> None:
        if text.startswith("?"):
            self._private(text[1:], final, kept)
        elif text.endswith(" ") and final == "q" and text[:-1].isdigit():
            self._changed.add("shape")
            kept.append(f"\x1b[{text}q")
        elif final in _FINALS and all("0" <= char <= ";" for char in text) and not _is_refused(text, final):
            self._note(text, final)
            kept.append(f"\x1b[{text}{final}")

    def _private(self, text: str, final: str, kept: list[str]) -> None:
        if final in "JK" and text in ("", "0", "1", "2"):
            kept.append(f"\x1b[?{text}{final}")
        if final not in "hl":
            return
        for mode in text.split(";"):
            if mode in _MODES:
                kept.append(f"\x1b[?{mode}{final}")
                if (final == "h") != _MODES[mode]:
                    self._switched[mode] = None
                else:
                    self._switched.pop(mode, None)

    def _note(self, text: str, final: str) -> None:
        if final == "m":
            self._coloured = text.strip("0;") != ""
        elif final == "r":
            self._changed.add("region")
        elif final == "h":
            self._changed.add("insert")


def _is_refused(text: str, final: str) -> bool:
    """Return whether a sequence is refused: `J 3` (clears the scroll-back), public modes but inserting, a large REP."""
    if final == "J":
        return "3" in text.split(";")
    if final in "hl":
        return text != "4"
    return final == "b" and len(text) > 4
