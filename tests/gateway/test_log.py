"""The log, the summary and the denials of one sandbox stay bounded and say what happened once."""

from __future__ import annotations

import pytest

from ringfence.gateway import log
from ringfence.gateway.dns import MOST_NAMES, Names
from ringfence.gateway.log import Logbook
from ringfence.gateway.types import Refusal
from ringfence.records import HostSummary


def deny(book: Logbook, host: str, code: str = "net.not-allowed") -> None:
    book.finish(book.begin(host, 443), Refusal(code, f"{host} is not permitted", allow="a line"))


def test_equal_denials_are_one_with_a_count_since_a_mark() -> None:
    book = Logbook()
    deny(book, "a.test")
    mark = book.mark()
    for host in ("b.test", "a.test", "b.test"):
        deny(book, host)
    told = [(d.kind, d.target, d.code, d.message, d.allow, d.count) for d in book.denials(mark)]
    assert told == [
        ("network", "b.test:443", "net.not-allowed", "b.test is not permitted", "a line", 2),
        ("network", "a.test:443", "net.not-allowed", "a.test is not permitted", "a line", 1),
    ]
    assert [d.count for d in book.denials(0)] == [2, 2]


def test_an_entry_is_written_once_and_summed_by_host() -> None:
    book = Logbook()
    entry = book.begin("a.test", 80)
    entry.method, entry.status, entry.sent, entry.received = "GET", 200, 10, 20
    book.finish(entry, None)
    book.finish(entry, Refusal("net.late", "too late"))
    deny(book, "a.test")
    assert book.summary() == (HostSummary("a.test", 1, 1, 0, {"GET": 1}, {200: 1}, 10, 20),)
    assert [line.verdict for line in book.log(0)] == ["allowed", "denied"]
    assert [line.verdict for line in book.log(1)] == ["denied"]
    assert book.log(9) == ()


def test_a_guest_cannot_fill_the_summary_with_methods_that_it_makes_up() -> None:
    book = Logbook()
    for number in range(40):
        for _ in range(2):
            entry = book.begin("a.test", 80)
            entry.method = f"M{number}"
            book.finish(entry, None)
    (found,) = book.summary()
    assert (found.allowed, found.methods) == (80, {f"M{number}": 2 for number in range(32)})


def test_a_guest_cannot_fill_the_host_with_names() -> None:
    book = Logbook()
    for number in range(log.MOST_ENTRIES + 50):
        deny(book, f"h{number}.test")
    assert len(book.log(0)) == log.MOST_ENTRIES
    assert len(book.summary()) == log.MOST_HOSTS + 1
    assert len(book.log(log.MOST_ENTRIES + 40)) == 10
    names = Names()
    given = [names.address_of(f"h{number}.test") for number in range(MOST_NAMES + 1)]
    assert (given[0], given[255], given[-1]) == ("127.77.0.1", "127.77.1.0", None)
    assert names.address_of("h0.test") == "127.77.0.1"
    assert names.name_of("127.77.1.0") == "h255.test"
    assert names.name_of("127.0.0.1") is None


def test_a_flood_of_denials_pushes_no_other_one_out_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest would hide a denied target with a flood: 10,000 look-ups take five seconds."""
    monkeypatch.setattr(log, "MOST_DENIALS", 3)
    book, refusal = Logbook(), Refusal("net.not-allowed", "no")

    def deny(*hosts: str) -> list[tuple[str, int]]:
        mark = book.mark()
        for number, host in enumerate(hosts):
            book.finish(book.begin(host, 0), refusal)
            if number % 7 == 0:
                book.mark()  # each reader of a process's events takes marks of its own
        return [(denial.target, denial.count) for denial in book.denials(mark)]

    assert deny("evil.test", *["x.test"] * 12_000) == [("evil.test", 1), ("x.test", 12_000)]
    assert deny(*(f"x{number}.test" for number in range(1000))) == [("x0.test", 1), ("(others)", 999)]
    assert deny("y.test", "evil.test") == [("(others)", 1), ("evil.test", 1)]
    every = [("evil.test", 2), ("x.test", 12_000), ("x0.test", 1), ("(others)", 1000)]
    assert [(denial.target, denial.count) for denial in book.denials(0)] == every
