"""Owns what of a guest's bytes may reach a terminal that the guest has for itself: what editors and pagers draw with.

More than `escapes` lets through, and still an allow-list: cursor movement, erasing, scrolling, colours, character sets,
and the modes below. Dropped is what acts beyond the screen or makes the terminal speak (J12): titles, clipboard,
hyperlinks and every other OSC, DCS and APC; queries, whose answers would be typed into the guest or, after its end,
into the caller's shell; keyboard protocols; tab stops, which nothing could put back; a full reset; the scroll-back's
removal.
"""

from __future__ import annotations

import re

from ringfence.cli.escapes import GROUND, INTERMEDIATE, REORDER, EscapeFilter

_CONTROLS = frozenset("\a\b\t\n\v\f\r\x0e\x0f")
_FINALS = frozenset("@ABCDEFGHIJKLMPSTXZ`abdefhlmrsu")
_LONE = frozenset("78DEM=>")
_CHARSETS = frozenset("0AB")
_MOST = 64
# Text that needs no look at each character, because most of what a guest draws is that.
_PLAIN = re.compile(f"[^\\x00-\\x06\\x0e-\\x1f\\x7f-\\x9f{''.join(sorted(REORDER))}]+")
# Private modes, and whether a terminal has them on by itself.
_MODES = {
    **dict.fromkeys(("1", "6", "12", "47", "1047", "1048", "1049"), False),  # keys, origin, blinking, other screen
    **dict.fromkeys(("1000", "1002", "1003", "1004", "1005", "1006", "1015"), False),  # mouse and focus
    **dict.fromkeys(("2004", "2026"), False),  # marked pastes, drawing at once
    **dict.fromkeys(("7", "25"), True),  # wrapping, the cursor
}


class ScreenFilter(EscapeFilter):
    """Filters one stream. `finish` undoes what the guest left switched."""

    __slots__ = ("_changed", "_prefix", "_switched", "_text")

    def __init__(self, charset: str = "utf-8") -> None:
        super().__init__(charset)
        self._prefix = ""  # "(" of a character set
        self._text = ""  # parameters and intermediates of the sequence so far
        self._switched: dict[str, None] = {}  # modes that are not as they were, in order
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
            run = _PLAIN.match(text, at) if self._state == GROUND else None
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
            self._state, self._prefix = INTERMEDIATE, char
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
    """`J 3` removes what was there before us; of the public modes only inserting is drawn with; REP is bounded."""
    if final == "J":
        return "3" in text.split(";")
    if final in "hl":
        return text != "4"
    return final == "b" and len(text) > 4
