"""The history of an agent: the runs, cut to lines, and the sums of usage and requests of all sandboxes."""

from __future__ import annotations

from typing import Any

import pytest

import ringfence
from ringfence import PolicyError
from ringfence.manager.history import MOST, History, add_usage, cut
from ringfence.manager.quota import merged
from ringfence.types import HostSummary, Usage
from ringfence.values import replace


@pytest.fixture(scope="module")
def result() -> ringfence.Result:
    return ringfence.run("print('one\\ntwo')\nimport sys\nprint('x' * 500, file=sys.stderr)\n[1] * 300")


def test_a_result_is_cut_to_a_line_of_each(result: ringfence.Result) -> None:
    short = cut(result)
    assert (short.stdout, short.stderr, short.truncated) == ("one\n", "x" * 200, True)
    assert short.value == repr([1] * 300)[:200]
    assert (short.id, short.status, short.usage) == (result.id, result.status, result.usage)


def test_what_is_a_line_stays_whole(result: ringfence.Result) -> None:
    line = replace(result, stdout_bytes=b"only\n", stderr_bytes=b"", outputs=())
    assert cut(line) == line


def test_the_newest_come_first_and_old_ones_go(result: ringfence.Result) -> None:
    history = History()
    for number in range(MOST + 5):
        history.add(replace(result, id=f"p-{number}"))
    assert [found.id for found in history.newest(2)] == ["p-1004", "p-1003"]
    assert len(history.newest(10**6)) == MOST
    assert history.newest(0) == ()
    assert history.output_bytes == (MOST + 5) * result.usage.output_bytes


@pytest.mark.parametrize("limit", [-1, True, "5", None, 1.5])
def test_a_wrong_limit_is_refused(limit: Any) -> None:
    with pytest.raises(PolicyError, match="limit is"):
        History().newest(limit)


def test_usage_adds_up_and_peaks_do_not() -> None:
    one = Usage(cpu_s=1, memory_peak_bytes=5, processes_peak=None, output_bytes=1, sent_bytes=2)
    other = Usage(cpu_s=None, memory_peak_bytes=3, processes_peak=7, output_bytes=10, sent_bytes=20)
    assert add_usage(one, other) == Usage(1, 5, 7, None, None, 11, 22, 0, 0)


def test_requests_to_one_host_are_one_row() -> None:
    def row(host: str, number: int) -> HostSummary:
        return HostSummary(host, number, 1, 0, {"GET": number}, {200: number}, 10, 20)

    assert merged([row("b.com", 1), row("a.com", 2), row("b.com", 3)]) == (
        HostSummary("a.com", 2, 1, 0, {"GET": 2}, {200: 2}, 10, 20),
        HostSummary("b.com", 4, 2, 0, {"GET": 4}, {200: 4}, 20, 40),
    )
