"""Adds up what the gateways of several sandboxes counted, host by host."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ringfence.events import HostSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

K = TypeVar("K")


def merged(summaries: Iterable[HostSummary]) -> tuple[HostSummary, ...]:
    """One for each host, sorted by name."""
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
