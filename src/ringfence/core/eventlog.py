"""The events of one process, kept within a cap: a reader may stop, come back and take them up from a cursor."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.events import Denied, Display, Gap, Prompt, Stderr, Stdout
from ringfence.results import Denial, Output
from ringfence.wire import frames
from ringfence.wire.inbox import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import codecs
    from collections import deque
    from typing import TypeAlias

    from ringfence.events import Event

    Piece: TypeAlias = bytes | str | Output | Denial  # of a stream; a prompt; an object; a refusal
else:
    from _collections import deque  # the same without its module: 2 ms of a command's start


class EventLog:
    """A cursor counts bytes of output; other events count as what they hold, and one at least."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._kept: deque[tuple[int, int, Piece]] = deque()  # where it ends, kind, what
        self._bytes = 0
        self._dropped = 0  # where the oldest that is kept begins
        self._end = 0
        self._read = 0  # how many of `_kept` the reader has passed
        self.cursor = 0
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def add(self, kind: int, piece: Piece) -> None:
        size = _size(piece)
        self._end += size
        self._kept.append((self._end, kind, piece))
        self._bytes += size + PIECE
        while self._bytes > self._cap and len(self._kept) > 1:
            self._dropped, _, oldest = self._kept.popleft()
            self._bytes -= _size(oldest) + PIECE
            self._read = max(0, self._read - 1)

    def seek(self, cursor: int) -> None:
        """Read on from there. Raises PolicyError for a place that no event has reached."""
        if type(cursor) is not int or not 0 <= cursor <= self._end:
            raise PolicyError(
                f"no event has the cursor {cursor!r}", key="after", fix=f"0 to {self._end}: the cursor of an event"
            )
        self.cursor = cursor
        self._decoders.clear()
        self._read = sum(end <= cursor for end, _, _ in self._kept)

    @property
    def has_more(self) -> bool:
        """For the reader."""
        return self.cursor < self._dropped or self._read < len(self._kept)

    def next(self) -> Event | None:
        """The next event for the reader, None when it has read all there is."""
        if self.cursor < self._dropped:
            lost, self.cursor = self._dropped - self.cursor, self._dropped
            self._decoders.clear()  # half a character before a gap and half of another behind it make none
            return Gap(lost, self.cursor)
        if self._read >= len(self._kept):
            return None
        end, kind, piece = self._kept[self._read]
        self._read += 1
        before, self.cursor = self.cursor, end
        if isinstance(piece, Output):
            return Display(piece, end)
        if isinstance(piece, Denial):
            return Denied(piece, end)
        if isinstance(piece, str):
            return Prompt(piece, end)
        data = piece[len(piece) - (end - before) :]
        text = self._decode(kind, data)
        return Stdout(data, text, end) if kind == frames.STDOUT else Stderr(data, text, end)

    def _decode(self, kind: int, data: bytes) -> str:
        """Across chunks: a character cut in two is held back until the rest comes."""
        import codecs

        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(data)

    def last(self) -> Event | None:
        """A stream that ended within a character: texts joined are Result.stdout, which shows a replacement there."""
        while self._decoders:
            kind, decoder = self._decoders.popitem()
            text = decoder.decode(b"", final=True)
            if text:
                return Stdout(b"", text, self.cursor) if kind == frames.STDOUT else Stderr(b"", text, self.cursor)
        return None


def _size(piece: Piece) -> int:
    if isinstance(piece, Output):
        return max(1, sum(len(content) for content in piece.data.values()))
    return 1 if isinstance(piece, Denial) else max(1, len(piece))
