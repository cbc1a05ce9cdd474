"""Heads of requests, thrown at the parser: what is accepted means the same to every reader."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.network.requests import Asked, check_header_block, check_raw_head, check_request, refusal_body, status_of
from ringfence.network.targets import OverBudget, Refusal, Target
from ringfence.policy.model import Rule

TARGET = Target("api.example.com", 443, None)
LINES = [
    *("Host: api.example.com", "Host: other.example.com", "host:api.example.com", "Host : api.example.com", "Host:"),
    *("Content-Length: 3", "content-length: 4", "Content-Length: +3", "Content-Length: 3, 3", "Content-Length:3"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: identity", "Transfer-Encoding:\tchunked", "X-A: b", "X-A"),
    *(" folded", "\tfolded: x", ": none", "X-\0: b", "X-A: \x0bb", "Connection: close, Host", ""),
]
ENDS = ["\r\n", "\r\n", "\r\n", "\n", "\r", "\r\r\n"]
STARTS = [
    "GET / HTTP/1.1",
    "POST /a?b HTTP/1.1",
    "GET / HTTP/1.0",
    "GET  / HTTP/1.1",
    "GET / HTTP/2.0",
    "get /",
    "GET /\tHTTP/1.1",
]
HEADS = st.tuples(
    st.sampled_from(STARTS), st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(ENDS)), max_size=6)
)


def _lenient(head: bytes) -> dict[str, list[str]]:
    """A server that takes any line ending, folds lines and trims names, as some do."""
    lines: list[str] = []
    for line in head.decode("latin-1").replace("\r\n", "\n").replace("\r", "\n").split("\n")[1:]:
        if line[:1] in (" ", "\t") and lines:
            lines[-1] += line
        elif line:
            lines.append(line)
    found: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip().lower(), []).append(value.strip())
    return found


@given(HEADS)
def test_an_accepted_head_says_the_same_to_a_lenient_server(made: tuple[str, list[tuple[str, str]]]) -> None:
    start, lines = made
    head = (start + "\r\n" + "".join(line + end for line, end in lines) + "\r\n\r\n").encode("latin-1")
    head = head[: head.find(b"\r\n\r\n") + 4]
    http = h11.Connection(h11.SERVER)
    try:
        check_raw_head(head)
        http.receive_data(head)
        event = http.next_event()
        assert isinstance(event, h11.Request)
        check_header_block(list(event.headers))
    except (Refusal, h11.RemoteProtocolError):
        return
    lenient, names = _lenient(head), ("host", "content-length", "transfer-encoding")
    ours = {name: [value.decode("latin-1") for key, value in event.headers if key.decode() == name] for name in names}
    assert {name: [value.lower() for value in lenient.get(name, [])] for name in names} == ours
    assert len(ours["content-length"] + ours["transfer-encoding"]) <= 1
    assert len(ours["host"]) <= 1


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_any_request_is_checked_without_a_crash(method: str, path: str, authority: str) -> None:
    target = Target("api.example.com", 443, Rule("api.example.com", methods=["GET"], paths=["/v1/"]))
    try:
        checked = check_request(target, Asked(method, path, authority, (), has_body=False))
    except Refusal:
        return
    assert (method, checked.target[:4]) == ("GET", "/v1/")


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Refusal("net.path", "x"), 403),
        (Refusal("net.malformed", "x"), 400),
        (Refusal("net.unreachable", "x", verdict="failed"), 502),
        (OverBudget("net.upload", "x"), 429),
    ],
)
def test_the_status_says_whose_fault_it_is(refusal: Refusal, status: int) -> None:
    assert status_of(refusal) == status
    assert refusal_body(refusal).endswith(b"\n")
