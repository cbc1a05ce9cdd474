"""DNS from a guest: a strict form, answered from a table; no bytes of a guest make the parser fail or forward."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence.gateway import dns

A, AAAA, TXT, SVCB, HTTPS, ANY = 1, 28, 16, 64, 65, 255


def question(name: str, kind: int = A, *, klass: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode("latin-1") for label in name.split(".") if label)
    return labels + b"\0" + struct.pack("!2H", kind, klass)


def query(name: str, kind: int = A, *, flags: int = 0x0100, opt: bytes = b"", klass: int = 1) -> bytes:
    return struct.pack("!6H", 7, flags, 1, 0, 0, int(bool(opt))) + question(name, kind, klass=klass) + opt


OPT = struct.pack("!BHHIH", 0, 41, 4096, 0, 0)


def lookup(name: str) -> str | None:
    return {"a.test": "127.77.0.1"}.get(name.lower())


def reply(data: bytes) -> tuple[int, int, bytes]:
    """Return code, number of answers, and everything after the question."""
    made = dns.answer(dns.parse(data), lookup)
    number, flags, questions, answers, authorities, _ = struct.unpack_from("!6H", made)
    assert (number, questions, authorities, flags & 0x8000) == (7, 1, 0, 0x8000)
    asked = dns.parse(data).question
    assert made[12 : 12 + len(asked)] == asked
    return flags & 15, answers, made[12 + len(asked) :]


def test_a_permitted_name_has_its_own_address() -> None:
    record = struct.pack("!3HIH", 0xC00C, 1, 1, 60, 4) + bytes([127, 77, 0, 1])
    assert reply(query("A.Test")) == (dns.NOERROR, 1, record)


@pytest.mark.parametrize("kind", [AAAA, TXT, SVCB, HTTPS, ANY])
def test_other_types_of_a_permitted_name_exist_and_are_empty(kind: int) -> None:
    assert reply(query("a.test", kind)) == (dns.NOERROR, 0, b"")


@pytest.mark.parametrize("data", [query("b.test"), query("x.a.test"), query(""), query("a.test", klass=3)])
def test_everything_else_does_not_exist(data: bytes) -> None:
    assert reply(data) == (dns.NXDOMAIN, 0, b"")


def test_edns_is_answered_with_edns() -> None:
    assert reply(query("b.test", opt=OPT)) == (dns.NXDOMAIN, 0, struct.pack("!BHHIH", 0, 41, 1232, 0, 0))


def test_a_query_longer_than_one_can_be_is_not_read_however_sound_it_is() -> None:
    def padded(size: int) -> bytes:
        return query("a.test", opt=struct.pack("!BHHIH", 0, 41, 4096, 0, size) + bytes(size))

    room = dns.LONGEST - len(padded(0))
    assert reply(padded(room))[:2] == (dns.NOERROR, 1)
    with pytest.raises(dns.Malformed) as caught:
        dns.parse(padded(room + 1))
    assert caught.value.answer is None


def test_a_dot_within_a_label_is_no_name() -> None:
    data = struct.pack("!6H", 7, 0, 1, 0, 0, 0) + b"\x06a.test\0" + struct.pack("!2H", A, 1)
    assert dns.parse(data).name is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 11,
        query("a.test") + b"\0",  # something follows
        query("a.test")[:-1],
        query("a.test", opt=b"\0" + OPT[1:] + b"x"),
        query("a.test", flags=0x8100),  # an answer
        query("a.test", flags=0x2900),  # an update
        struct.pack("!6H", 7, 0, 2, 0, 0, 0) + question("a.test") * 2,
        struct.pack("!6H", 7, 0, 1, 1, 0, 0) + question("a.test"),
        struct.pack("!6H", 7, 0, 1, 0, 0, 0) + b"\xc0\x0c" + struct.pack("!2H", A, 1),  # a pointer to itself
        struct.pack("!6H", 7, 0, 1, 0, 0, 0) + b"\x3fa" * 2,
        struct.pack("!6H", 7, 0, 1, 0, 0, 0) + (b"\x01a" * 128) + b"\0" + struct.pack("!2H", A, 1),
        b"x" * 5000,
    ],
)
def test_what_is_not_one_plain_question_is_malformed(data: bytes) -> None:
    with pytest.raises(dns.Malformed) as caught:
        dns.parse(data)
    answer = caught.value.answer
    assert answer is None or (len(answer) == 12 and answer[2] & 0x80)


@given(st.binary(max_size=600))
@example(query("a.test", opt=OPT))
def test_any_bytes_are_a_query_or_malformed_and_an_answer_is_no_longer_than_a_record_more(data: bytes) -> None:
    try:
        found = dns.parse(data)
    except dns.Malformed:
        return
    assert len(dns.answer(found, lambda _: "127.77.0.1")) <= len(data) + 27
    assert reference_accepts(data)


def reference_accepts(data: bytes) -> bool:
    """Judge a query independently of the parser: a single question, labels within bounds, then nothing or an OPT."""
    at = 12
    while data[at]:
        at += data[at] + 1
    rest = data[at + 5 :]
    return data[4:10] == b"\0\1\0\0\0\0" and (rest == b"" or rest[:3] == b"\0\0\x29") and at - 12 <= 255
