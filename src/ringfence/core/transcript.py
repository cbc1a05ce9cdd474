"""What a call has produced so far, kept within caps: as a whole for its Result, and as events for a reader."""

from __future__ import annotations

import time

from ringfence.errors import PolicyError
from ringfence.events import Denied, Display, Gap, Prompt, Stderr, Stdout
from ringfence.results import Denial, Output
from ringfence.wire import frames
from ringfence.wire.inbox import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import codecs
    from collections import deque
    from collections.abc import Mapping
    from typing import TypeAlias

    from ringfence.events import Event
    from ringfence.policy.model import Limits
    from ringfence.results import Usage

    Piece: TypeAlias = bytes | str | Output | Denial  # a part of a stream; a prompt; a displayed object; a refusal
else:
    from _collections import deque  # without importing `collections`, which takes 2 ms of a command's start

_BESIDE = 256  # what a representation costs beyond its bytes: an empty one is not free (F16)
MAX_OUTPUTS = 1 << 24  # bytes of displayed objects that a result may hold, unless limits.output is more


class CappedStream:
    """The first and the last half of a stream, within a cap. Memory stays at the cap whatever arrives (F16)."""

    def __init__(self, cap: int) -> None:
        self._half = cap // 2
        self._cap = cap
        self._head = bytearray()
        self._tail = bytearray()
        self.count = 0

    def add(self, data: bytes) -> None:
        self.count += len(data)
        room = self._cap - self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._half + (1 << 16):
                del self._tail[: len(self._tail) - self._half]

    @property
    def cut(self) -> bool:
        return self.count > self._cap

    def bytes(self) -> bytes:
        if not self.cut:
            return b"".join((self._head, self._tail))
        mark = b"\n[... %d bytes cut ...]\n" % (self.count - self._cap)
        with memoryview(self._tail) as tail:
            return b"".join((self._head, mark, tail[len(tail) - self._half :] if self._half else b""))


class Transcript:
    """The output of a call so far, for the Result."""

    def __init__(self, limits: Limits, before: tuple[Usage, int], mark: int = 0) -> None:
        self.before = before  # the sandbox's usage at the start, and how often its memory limit had killed
        self.mark = mark  # the length of the gateway's list of denials at the start
        self.stdout = CappedStream(limits.output)
        self.stderr = CappedStream(limits.output)
        self.outputs: list[Output] = []
        self.outputs_cut = False
        self.exception: Mapping[str, object] | None = None
        self.started = time.monotonic()
        self.started_at = time.time()
        self._room = max(limits.output, MAX_OUTPUTS)

    def add(self, kind: int, data: bytes) -> None:
        (self.stdout if kind == frames.STDOUT else self.stderr).add(data)

    def show(self, data: Mapping[str, bytes], *, is_value: bool) -> Output | None:
        """Keep a displayed object and return it. Return None when the cap for all objects has no room."""
        self._room -= sum(len(content) + _BESIDE for content in data.values())
        if self._room < 0:
            self.outputs_cut = True
            return None
        self.outputs.append(Output(data, is_value=is_value))
        return self.outputs[-1]

    @property
    def cut(self) -> bool:
        return self.stdout.cut or self.stderr.cut or self.outputs_cut


class EventLog:
    """The events of one process, kept within a cap. A reader may stop and later read on from a cursor.

    A cursor counts bytes of output; another event counts as the bytes that it holds, and at least as one.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._kept: deque[tuple[int, int, Piece]] = deque()  # cursor at its end, kind, content
        self._bytes = 0
        self._dropped = 0  # the cursor at which the oldest kept event begins
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
        """Read on from a cursor. Raise PolicyError for a cursor that no event has reached."""
        if type(cursor) is not int or not 0 <= cursor <= self._end:
            raise PolicyError(
                f"no event has the cursor {cursor!r}", key="after", fix=f"0 to {self._end}: the cursor of an event"
            )
        self.cursor = cursor
        self._decoders.clear()
        self._read = sum(end <= cursor for end, _, _ in self._kept)

    @property
    def has_more(self) -> bool:
        """Return whether there is an event for the reader."""
        return self.cursor < self._dropped or self._read < len(self._kept)

    def next(self) -> Event | None:
        """Return the next event for the reader, or None when there is none."""
        if self.cursor < self._dropped:
            lost, self.cursor = self._dropped - self.cursor, self._dropped
            self._decoders.clear()  # half a character before the gap and half of another after it make no character
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
        """Decode across chunks: the first part of a character that was cut is held back until the rest arrives."""
        import codecs

        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(data)

    def last(self) -> Event | None:
        """Return an event for a stream that ended within a character, else None.

        All texts joined are Result.stdout, which shows a replacement character there.
        """
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
