"""What is read at one look, h11 and our rules take, and read in the same way (G12)."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence.gateway import simple
from ringfence.gateway.http import request

HOST = b"Host: a.test\r\n"
NAMES = [
    b"Host",
    b"Connection",
    b"Accept",
    b"X-A",
    b"Content-Length",
    b"Transfer-Encoding",
    b"Keep-Alive",
    b"TE",
    b"x y",
]
VALUES = [
    b"a.test",
    b"close",
    b"keep-alive",
    b"2",
    b"+2",
    b"chunked",
    b"a b",
    b"",
    b" a",
    b"a ",
    b"\x80",
    b"a\x00",
    b"a\tb",
]
BREAKS = [b"\r\n"] * 8 + [b"\n", b"\r", b"\r\n ", b"\r\n\r\n"]


def _lines() -> st.SearchStrategy[bytes]:
    """Header lines that are right for the most part."""
    line = st.tuples(
        st.sampled_from(NAMES) | st.binary(max_size=4),
        st.sampled_from([b": "] * 6 + [b":", b" : ", b":\t"]),
        st.sampled_from(VALUES) | st.binary(max_size=6),
        st.sampled_from(BREAKS),
    )
    return st.lists(line.map(b"".join), max_size=5).map(b"".join)


def _request() -> st.SearchStrategy[bytes]:
    first = st.sampled_from(
        [b"GET / HTTP/1.1\r\n", b"HEAD /a?b HTTP/1.1\r\n", b"GET http://a.test/ HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n"]
    ) | st.binary(max_size=30)
    return st.tuples(
        first, st.sampled_from([HOST, HOST, b""]), _lines(), st.sampled_from([b"\r\n", b"\n", b"", b"\r\n\r\n"])
    ).map(b"".join)


def _by_h11(data: bytes) -> tuple[h11.Request, h11.Connection]:
    """As http1 reads a head. Raises what refuses it."""
    assert data.endswith(b"\r\n\r\n")
    request.check_raw_head(data)
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    found = http.next_event()
    assert type(found) is h11.Request
    request.check_header_block(list(found.headers.raw_items()))
    assert type(http.next_event()) is h11.EndOfMessage
    assert http.trailing_data[0] == b""
    return found, http


@given(_request())
@example(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: close\r\nAccept: */*\r\n\r\n")
@example(b"GET / HTTP/1.1\r\n" + HOST + b"X-A: b \r\n\r\n")
@example(b"GET / HTTP/1.1\r\n" + HOST + b"\r\nGET /")
def test_what_is_taken_here_h11_takes_and_reads_alike(data: bytes) -> None:
    asked = simple.request(data)
    if asked is None:
        return
    found, http = _by_h11(data)
    assert (asked.method, asked.target) == (found.method.decode(), found.target.decode())
    headers = list(found.headers.raw_items())
    assert [value.decode() for name, value in headers if name.lower() == b"host"] == [asked.host]
    assert asked.closes is (http.their_state is h11.MUST_CLOSE)
    sent, _ = _by_h11(simple.written(asked, "/x"))
    assert next(iter(sent.headers.raw_items())) == (b"Host", asked.host.encode())
    kept = [pair for pair in request.end_to_end(headers) if pair[0].lower() != b"host"]
    assert list(sent.headers.raw_items())[1:] == kept


@pytest.mark.parametrize(
    "extra",
    [
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
        b"Connection: close, x-a\r\n",
        b"Connection: close\r\nConnection: close\r\n",
        b"TE: trailers\r\n",
        b"Proxy-Authorization: Basic eA==\r\n",
        b"X-A:b\r\n",
        b"X-A: \r\n",
        b"X-A: b\r\n c\r\n",
        b"X-A: b\nX-B: c\r\n",
        b"X-A : b\r\n",
        b"X-A: \xe4\r\n",
        HOST,
        b"X-A: b\r\n" * 200,
        b"X-A: " + b"b" * simple.LONGEST + b"\r\n",
    ],
)
def test_what_says_more_than_the_plainest_is_left_to_h11(extra: bytes) -> None:
    assert simple.request(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") is not None
    assert simple.request(b"GET / HTTP/1.1\r\n" + HOST + extra + b"\r\n") is None


def _response() -> st.SearchStrategy[bytes]:
    first = st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 404 Not Found\r\n",
            b"HTTP/1.1 204 \r\n",
            b"HTTP/1.1 100 \r\n",
            b"HTTP/1.0 200 OK\r\n",
        ]
    )
    length = st.sampled_from([b"Content-Length: 2\r\n", b"Content-Length: 2\r\n", b"content-length: 0\r\n", b""])
    return st.tuples(first, length, _lines(), st.just(b"\r\n"), st.sampled_from([b"", b"ok", b"ok!"])).map(b"".join)


def _answer_by_h11(data: bytes, method: str) -> tuple[h11.Response, bytes, h11.Connection]:
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method=method, target="/", headers=[("Host", "a.test")]))
    http.send(h11.EndOfMessage())
    http.receive_data(data)
    head = http.next_event()
    assert type(head) is h11.Response
    body = b""
    while type(event := http.next_event()) is h11.Data:
        body += bytes(event.data)
    assert type(event) is h11.EndOfMessage
    assert http.trailing_data[0] == b""
    return head, body, http


@given(_response(), st.sampled_from(["GET", "HEAD"]), st.booleans())
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nAlt-Svc: h3\r\nConnection: close\r\n\r\nok", "GET", False)
def test_a_response_that_is_taken_here_h11_reads_alike(data: bytes, method: str, closes: bool) -> None:
    found = simple.response(data, simple.Request(method, "/", "a.test", b"", closes))
    if found is None:
        return
    head, body, http = _answer_by_h11(data, method)
    assert found.status == head.status_code
    assert found.keeps is (http.their_state is h11.DONE)
    told, same, after = _answer_by_h11(found.words, method)
    assert (told.status_code, told.reason, same) == (head.status_code, head.reason, body)
    assert (after.their_state is h11.DONE) is not closes
    headers = [pair for pair in told.headers.raw_items() if pair[0] != b"Connection"]
    assert headers == request.response_headers(list(head.headers.raw_items()))
