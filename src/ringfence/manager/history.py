"""The history of one agent: the newest results, each output cut to a line, and the sum of all output."""

from __future__ import annotations

import threading
from collections import deque

from ringfence.errors import PolicyError
from ringfence.results import GuestException, Output, Result, Usage
from ringfence.values import replace

MOST = 1000
_LINE = 200


class History:
    """The newest thousand results. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: deque[Result] = deque(maxlen=MOST)
        self._output_bytes = 0

    def add(self, result: Result) -> None:
        with self._lock:
            self._results.appendleft(cut(result))
            self._output_bytes += result.usage.output_bytes

    @property
    def output_bytes(self) -> int:
        """Return the bytes of output of everything that ran, kept or not."""
        return self._output_bytes

    def newest(self, limit: object) -> tuple[Result, ...]:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise PolicyError(f"limit is {limit!r}; it is a whole number from 0", key="limit", fix=f"at most {MOST}")
        with self._lock:
            return tuple(self._results)[:limit]


def cut(result: Result) -> Result:
    """Return the result with a line of each output, and `truncated` set when there was more."""
    stdout, stderr = _line(result.stdout_bytes), _line(result.stderr_bytes)
    shorter = (stdout, stderr) != (result.stdout_bytes, result.stderr_bytes)
    return replace(
        result,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        truncated=result.truncated or shorter,
        outputs=tuple(_first(output) for output in result.outputs if output.is_value),
        exception=_short(result.exception),
    )


def _line(data: bytes) -> bytes:
    return data[: _LINE + 1].partition(b"\n")[0][:_LINE] + (b"\n" if 0 <= data.find(b"\n") <= _LINE else b"")


def _first(output: Output) -> Output:
    return Output({"text/plain": _line(output.data.get("text/plain", b""))}, is_value=True)


def _short(exception: GuestException | None) -> GuestException | None:
    if exception is None:
        return None
    return GuestException(exception.name[:_LINE], exception.message.partition("\n")[0][:_LINE], "")


def add_usage(one: Usage, other: Usage) -> Usage:
    """Return the usage of both together: sums, and the higher of two peaks. None where neither was measured."""
    times = [found for found in (one.cpu_s, other.cpu_s) if found is not None]
    return Usage(
        cpu_s=sum(times) if times else None,
        memory_peak_bytes=_higher(one.memory_peak_bytes, other.memory_peak_bytes),
        processes_peak=_higher(one.processes_peak, other.processes_peak),
        output_bytes=one.output_bytes + other.output_bytes,
        sent_bytes=one.sent_bytes + other.sent_bytes,
        received_bytes=one.received_bytes + other.received_bytes,
        connections=one.connections + other.connections,
    )


def _higher(one: int | None, other: int | None) -> int | None:
    return max((found for found in (one, other) if found is not None), default=None)
