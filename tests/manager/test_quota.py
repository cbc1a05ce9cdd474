"""Quotas: sums over live sandboxes, and runs of the last minute. An error names the limit, what is used and wanted."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ringfence import Limits, Network, Policy, Quota, QuotaError
from ringfence.manager.quota import Ledger, Share, share_of

POLICY = Policy(limits=Limits(cpus=2, memory="1G", disk="100M"))


def ledger(**quota: Any) -> Ledger:
    return Ledger("a", Quota(**quota))


def alive() -> bool:
    return True


def test_a_sandbox_reserves_what_its_policy_allows() -> None:
    assert share_of(POLICY) == Share(1, 2, 1 << 30, 100 << 20, 0)
    assert share_of(POLICY.replace(network=Network(allow=["a.com"], upload="5M"))).upload == 5 << 20


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        ({"sandboxes": 2}, "agent 'a' is at its quota.sandboxes: 2 of 2 are used and 1 more is wanted"),
        ({"cpus": 5}, "agent 'a' is at its quota.cpus: 4 of 5 are used and 2 more is wanted"),
        ({"memory": "2500M"}, "agent 'a' is at its quota.memory: 2G of 2500M are used and 1G more is wanted"),
        ({"disk": "250M"}, "agent 'a' is at its quota.disk: 200M of 250M are used and 100M more is wanted"),
    ],
)
def test_the_third_sandbox_is_one_too_many(quota: dict[str, Any], message: str) -> None:
    book = ledger(**{"cpus": 64, "memory": "64G", **quota})
    book.admit("s-1", POLICY, alive)
    book.admit("s-2", POLICY, alive)
    with pytest.raises(QuotaError) as caught:
        book.admit("s-3", POLICY, alive)
    (name,) = quota
    assert (str(caught.value), caught.value.code, caught.value.retryable) == (message, f"quota-{name}", True)
    book.release("s-1")
    book.admit("s-3", POLICY, alive)


def test_one_that_has_died_counts_no_more() -> None:
    book = ledger(sandboxes=1)
    lives = [True]
    book.admit("s-1", POLICY, lambda: lives[0])
    lives[0] = False
    book.admit("s-2", POLICY, alive)
    with pytest.raises(QuotaError):
        book.admit("s-3", POLICY, alive)


def test_what_one_that_has_died_may_have_sent_is_held_until_it_is_known() -> None:
    policy = POLICY.replace(network=Network(allow=["a.com"], upload="1M"))
    book = ledger(sandboxes=1, upload="1M")
    book.admit("s-1", policy, lambda: False)
    with pytest.raises(QuotaError, match="upload"):
        book.admit("s-2", policy, alive)
    book.release("s-1", sent_bytes=0)
    book.admit("s-2", policy, alive)


def test_what_was_sent_stays_sent() -> None:
    policy = Policy(network=Network(allow=["a.com"], upload="60M"))
    book = ledger(upload="100M")
    book.admit("s-1", policy, alive)
    with pytest.raises(QuotaError, match=r"quota.upload: 60M of 100M are used and 60M more"):
        book.admit("s-2", policy, alive)
    book.release("s-1", sent_bytes=50 << 20)
    book.release("s-1", sent_bytes=50 << 20)
    with pytest.raises(QuotaError, match=r"quota.upload: 50M of 100M are used and 60M more"):
        book.admit("s-2", policy, alive)
    book.admit("s-3", Policy(), alive)


def test_runs_are_counted_over_a_sliding_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    book = ledger(runs_per_minute=2)
    book.count_run()
    now[0] += 20
    book.count_run()
    with pytest.raises(QuotaError) as caught:
        book.count_run()
    assert (caught.value.retry_after_s, caught.value.code) == (40, "quota-runs_per_minute")
    assert str(caught.value) == "agent 'a' is at its quota.runs_per_minute: 2 of 2 are used and 1 more is wanted"
    now[0] += 40
    book.count_run()


def test_fractions_of_cpus_add_up_to_exactly_their_quota() -> None:
    book = ledger(cpus=0.3)
    for number in range(3):
        book.admit(f"s-{number}", Policy(limits=Limits(cpus=0.1)), alive)
    with pytest.raises(QuotaError, match=r"quota.cpus: 0.3 of 0.3 are used and 0.1 more"):
        book.admit("s-3", Policy(limits=Limits(cpus=0.1)), alive)
