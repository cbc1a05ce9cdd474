"""The quota of an agent: what the live sandboxes have reserved, and how often the agent ran something in the last
minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from ringfence.errors import QuotaError
from ringfence.policy.checks import format_size
from ringfence.records import HostSummary
from ringfence.values import Struct, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ringfence.policy.model import Policy, Quota


_MINUTE_S = 60.0
_AGAIN_S = 1.0  # a guess: a sandbox may end at any time
_SIZES = ("memory", "disk", "upload")


@final
class Share(Struct):
    """What a sandbox may use at most, which is reserved for as long as the sandbox lives."""

    sandboxes: int
    cpus: float
    memory: int
    disk: int
    upload: int


def share_of(policy: Policy) -> Share:
    limits = policy.limits
    network = policy.network
    reaches_out = bool(network.allow or network.rules)
    return Share(1, limits.cpus, limits.memory, limits.disk, network.upload if reaches_out else 0)


class Ledger:
    """The reservations and the calls of one agent. Safe from several threads."""

    def __init__(self, agent: str, quota: Quota) -> None:
        self.agent = agent
        self.quota = quota
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Share, Callable[[], bool]]] = {}
        self._sent = 0  # by sandboxes that have ended
        self._runs: deque[float] = deque()

    def admit(self, number: str, policy: Policy, lives: Callable[[], bool]) -> None:
        """Reserve for one more sandbox. Raise QuotaError.

        `lives` is called later, to see whether the sandbox still lives.
        """
        wanted = share_of(policy)
        with self._lock:
            live = [share for share, is_there in self._live.values() if is_there()]
            reserved = [share for share, _ in self._live.values()]
            for name in Share.__fields__:
                # What a sandbox sent is not known yet when it ended by itself, so its reservation still counts.
                used = sum(getattr(share, name) for share in (reserved if name == "upload" else live))
                used += self._sent if name == "upload" else 0
                # Shares of CPUs are fractions, and 0.1 + 0.2 is more than 0.3.
                if getattr(wanted, name) and round(used + getattr(wanted, name), 6) > getattr(self.quota, name):
                    raise self._refusal(name, used, getattr(wanted, name))
            self._live[number] = (wanted, lives)

    def release(self, number: str, *, sent_bytes: int = 0) -> None:
        """Drop the reservation of a sandbox that has ended. Idempotent."""
        with self._lock:
            if self._live.pop(number, None) is not None:
                self._sent += sent_bytes

    def count_run(self) -> None:
        """Count another run or exec. Raise QuotaError when the quota of the last minute is used up."""
        with self._lock:
            now = time.monotonic()
            while self._runs and now - self._runs[0] >= _MINUTE_S:
                self._runs.popleft()
            most = self.quota.runs_per_minute
            if len(self._runs) >= most:
                wait = _MINUTE_S - (now - self._runs[0])
                raise QuotaError(
                    f"agent {self.agent!r} is at its quota.runs_per_minute: {len(self._runs)} of {most} are used"
                    " and 1 more is wanted",
                    code="quota-runs_per_minute",
                    retry_after_s=wait,
                    fix=f"wait {wait:.0f} s, or raise Quota(runs_per_minute=…)",
                )
            self._runs.append(now)

    def _refusal(self, name: str, used: float, wanted: float) -> QuotaError:
        most = getattr(self.quota, name)
        used_text, most_text, wanted_text = (_shown(name, value) for value in (used, most, wanted))
        return QuotaError(
            f"agent {self.agent!r} is at its quota.{name}: {used_text} of {most_text} are used"
            f" and {wanted_text} more is wanted",
            code=f"quota-{name}",
            retry_after_s=_AGAIN_S,
            fix=f"close a sandbox of this agent, or raise Quota({name}=…)",
        )


def _shown(name: str, value: float) -> str:
    return format_size(int(value)) if name in _SIZES else f"{value:g}"


# ── what the gateways of several sandboxes counted, added up host by host ─────────────────────────

K = TypeVar("K")


def merged(summaries: Iterable[HostSummary]) -> tuple[HostSummary, ...]:
    """Return one summary for each host, sorted by name."""
    found: dict[str, HostSummary] = {}
    for one in summaries:
        known = found.get(one.host)
        found[one.host] = one if known is None else _both(known, one)
    return tuple(found[host] for host in sorted(found))


def _both(one: HostSummary, other: HostSummary) -> HostSummary:
    return HostSummary(
        host=one.host,
        allowed=one.allowed + other.allowed,
        denied=one.denied + other.denied,
        failed=one.failed + other.failed,
        methods=_counts(one.methods, other.methods),
        statuses=_counts(one.statuses, other.statuses),
        sent_bytes=one.sent_bytes + other.sent_bytes,
        received_bytes=one.received_bytes + other.received_bytes,
    )


def _counts(one: Mapping[K, int], other: Mapping[K, int]) -> dict[K, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}
