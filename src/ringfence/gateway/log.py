"""The gateway's record of a sandbox: log, summary by host, denials. Bounded, and safe from several threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ringfence.gateway.types import LogEntry
from ringfence.records import HostSummary, Request
from ringfence.results import Denial

if TYPE_CHECKING:
    from ringfence.gateway.types import Refusal

MOST_ENTRIES = 10_000
MOST_HOSTS = 1_000
MOST_DENIALS = 10_000  # of different denials
_MOST_PARTS = 16
OTHERS = "(others)"  # hosts and denials beyond the most, counted together


class Logbook:
    """The log of a sandbox, with sums by host, denials and counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Request] = deque(maxlen=MOST_ENTRIES)
        self._count = 0  # of all entries so far
        self._hosts: dict[str, _Sum] = {}
        self._denials: dict[tuple[str, str], _Same] = {}
        self._denied = self._marked = 0
        self.sent = self.received = self.connections = 0

    def begin(self, host: str, port: int) -> LogEntry:
        entry = LogEntry(0, host, port)
        entry.began = time.monotonic()
        entry.at = time.time()
        return entry

    def finish(self, entry: LogEntry, refusal: Refusal | None) -> None:
        """End an entry and add it to the log. Idempotent for each entry."""
        if entry.duration_s is not None:
            return
        entry.duration_s = time.monotonic() - entry.began
        if refusal is not None:
            entry.verdict = refusal.verdict
            entry.code = refusal.code
        with self._lock:
            self._count += 1
            entry.number = self._count
            self._entries.append(_request(entry))
            self._sum(entry).add(entry)
            if refusal is not None and refusal.verdict == "denied":
                self._deny(_denial(entry, refusal))

    def _deny(self, denial: Denial) -> None:
        """List a denial, or only count it when the list is full: else a guest could push earlier denials out."""
        if (denial.target, denial.code) not in self._denials and len(self._denials) >= MOST_DENIALS:
            words = f"{MOST_DENIALS} others are listed, and these are only counted; box.network.log() has the last ones"
            denial = Denial(denial.kind, OTHERS, denial.code, words, None, first_at=denial.first_at)
        self._denied += 1
        self._denials.setdefault((denial.target, denial.code), _Same()).add(self._denied, denial, self._marked)

    def _sum(self, entry: LogEntry) -> _Sum:
        host = entry.host if entry.host in self._hosts or len(self._hosts) < MOST_HOSTS else OTHERS
        return self._hosts.setdefault(host, _Sum(host))

    def log(self, after: int) -> tuple[Request, ...]:
        """Return the log without its first `after` entries; the oldest of the rest may be gone."""
        with self._lock:
            gone = self._count - len(self._entries)
            return tuple(self._entries)[max(0, after - gone) :]

    def summary(self) -> tuple[HostSummary, ...]:
        with self._lock:
            return tuple(found.shown() for _, found in sorted(self._hosts.items()))

    def mark(self) -> int:
        with self._lock:
            self._marked = self._denied
            return self._denied

    def denials(self, after: int) -> tuple[Denial, ...]:
        """Return the denials since the mark `after`, in order; equal denials are merged, with a count."""
        with self._lock:
            parts = [same.since(after) for same in self._denials.values()]
        found = sorted((part for part in parts if part is not None), key=lambda part: part[0])
        return tuple(denial for _, denial in found)


class _Same:
    """Equal denials, in parts: a new part begins with the first denial after a mark."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, Denial]] = []  # number of the first denial, how many, the first

    def add(self, number: int, denial: Denial, marked: int) -> None:
        parts = self._parts
        if parts and parts[-1][0] > marked:
            first, count, denial = parts.pop()
            parts.append((first, count + 1, denial))
            return
        parts.append((number, 1, denial))
        if len(parts) > _MOST_PARTS:
            (_, count, denial), (first, more, _) = parts[:2]
            parts[:2] = [(first, count + more, denial)]

    def since(self, after: int) -> tuple[int, Denial] | None:
        parts = [part for part in self._parts if part[0] > after]
        if not parts:
            return None
        number, _, d = parts[0]
        count = sum(count for _, count, _ in parts)
        return number, Denial(d.kind, d.target, d.code, d.message, d.allow, count, d.first_at)


class _Sum:
    """The counters of a host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._verdicts = {"allowed": 0, "denied": 0, "failed": 0}
        self._methods: dict[str, int] = {}
        self._statuses: dict[int, int] = {}
        self._sent = self._received = 0

    def add(self, entry: LogEntry) -> None:
        self._verdicts[entry.verdict] += 1
        if entry.method is not None and (entry.method in self._methods or len(self._methods) < 32):
            self._methods[entry.method] = self._methods.get(entry.method, 0) + 1
        if entry.status is not None:
            self._statuses[entry.status] = self._statuses.get(entry.status, 0) + 1
        self._sent += entry.sent
        self._received += entry.received

    def shown(self) -> HostSummary:
        verdicts = self._verdicts
        return HostSummary(
            self._host,
            verdicts["allowed"],
            verdicts["denied"],
            verdicts["failed"],
            dict(self._methods),
            dict(self._statuses),
            self._sent,
            self._received,
        )


def _request(entry: LogEntry) -> Request:
    return Request(
        at=datetime.fromtimestamp(entry.at, UTC),
        host=entry.host,
        port=entry.port,
        verdict=entry.verdict,
        code=entry.code,
        rule=entry.rule,
        method=entry.method,
        path=entry.path,
        status=entry.status,
        sent_bytes=entry.sent,
        received_bytes=entry.received,
        duration_s=round(entry.duration_s or 0.0, 6),
    )


def _denial(entry: LogEntry, refusal: Refusal) -> Denial:
    target = f"{entry.host}:{entry.port}" if entry.port else entry.host
    at = datetime.fromtimestamp(entry.at, UTC)
    return Denial(refusal.kind, target, refusal.code, refusal.host_message, refusal.host_allow, first_at=at)
