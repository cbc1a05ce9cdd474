"""What one call has produced so far, kept within caps: streams by their ends, displayed objects by their number."""

from __future__ import annotations

import time

from ringfence.results import Output
from ringfence.wire import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.policy.model import Limits
    from ringfence.results import Usage

_BESIDE = 256  # what a representation is charged beyond its bytes: one without any is not free (F16)
MAX_OUTPUTS = 1 << 24  # bytes of displayed objects that a result holds, where the policy's output is not more


class Kept:
    """The first and last half of a stream, within a cap. Memory stays at the cap whatever comes (F16)."""

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
    """What one call has produced so far, for its Result."""

    def __init__(self, limits: Limits, before: tuple[Usage, int], mark: int = 0) -> None:
        self.before = before  # what the sandbox had used at the start, and how often its memory limit had killed
        self.mark = mark  # where the gateway's list of denials stood then
        self.stdout = Kept(limits.output)
        self.stderr = Kept(limits.output)
        self.outputs: list[Output] = []
        self.outputs_cut = False
        self.exception: Mapping[str, object] | None = None
        self.started = time.monotonic()
        self.started_at = time.time()
        self._room = max(limits.output, MAX_OUTPUTS)

    def add(self, kind: int, data: bytes) -> None:
        (self.stdout if kind == frames.STDOUT else self.stderr).add(data)

    def show(self, data: Mapping[str, bytes], *, is_value: bool) -> Output | None:
        """Keep a displayed object, within the cap for all of them. None when there is no room for it."""
        self._room -= sum(len(content) + _BESIDE for content in data.values())
        if self._room < 0:
            self.outputs_cut = True
            return None
        self.outputs.append(Output(data, is_value=is_value))
        return self.outputs[-1]

    @property
    def cut(self) -> bool:
        return self.stdout.cut or self.stderr.cut or self.outputs_cut
