"""Heads of requests, thrown at the parser: what is accepted means the same to every reader."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.gateway.http.request import (
    RequestHead,
    check_authority,
    check_header_block,
    check_raw_head,
    check_request,
    refusal_body,
    status_of,
)
from ringfence.gateway.types import OverBudget, Refusal, Target
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


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("Host: a\r\nX-A: b\r\n Host: c", "folded"),
        ("Host: a\r\n\tX-A: b", "folded"),
        ("Host: a\r\nX-A", "no colon"),
        ("Host : a", "no colon"),
        ("Host: a\nX-A: b", "CR LF"),
        ("Host: a\rX-A: b", "CR LF"),
        ("Host: a\0", "CR LF"),
        ("Host: a\r\nhost: b", "more than one Host"),
        ("Host: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked", "more than once"),
        ("Host: a\r\nContent-Length: 3\r\ncontent-length: 3", "more than once"),
        ("Host: a\r\nContent-Length: +3", "not a number"),
    ],
)
def test_each_kind_of_head_that_readers_take_in_two_ways_is_refused_by_us_and_not_only_by_h11(
    lines: str, why: str
) -> None:
    with pytest.raises(Refusal, match=why) as caught:
        check_raw_head(f"GET / HTTP/1.1\r\n{lines}\r\n\r\n".encode())
    assert caught.value.code == "net.malformed"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([(b"x-a", b"b")] * 201, "more than 200"),
        ([(b"x a", b"b")], "name holds"),
        ([(b"", b"b")], "name holds"),
        ([(b"x-a", b"b\x0b")], "control"),
        ([(b"x-a", b"b\x7f")], "control"),
    ],
)
def test_headers_that_no_sound_client_sends_are_refused(headers: list[tuple[bytes, bytes]], why: str) -> None:
    with pytest.raises(Refusal, match=why):
        check_header_block(headers)
    check_header_block([(b"x-a", b"b\tc")] * 200)


@pytest.mark.parametrize(
    ("authority", "code"),
    [
        ("other.example.com", "net.other-host"),
        ("api.example.com:444", "net.other-host"),
        ("example.com", "net.other-host"),
        ("a@api.example.com", "net.malformed"),
    ],
)
def test_a_request_names_the_host_and_port_that_its_connection_is_for(authority: str, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_authority(TARGET, authority)
    assert caught.value.code == code
    check_authority(TARGET, "api.example.com")
    check_authority(TARGET, "API.example.com:443")


def _asked(method: str, *headers: tuple[bytes, bytes], has_body: bool = False) -> RequestHead:
    return RequestHead(method, "/v1/a", "api.example.com", headers, has_body=has_body)


ANOTHER_PATH = """
X-Copy-From X-Object-Manifest X-Symlink-Target
X-Original-URL x-rewrite-url X_Original_Url X-Original-URI X-ORIGINAL-PATH x-originalurl X.Original.Url
X-Forwarded-Uri X_Forwarded_Uri X-Forwarded-Url X-Forwarded-Path X-Forwarded-Prefix x-forwarded-basepath
X-Envoy-Original-Path X-Envoy-Original-Url X-Replaced-Path X-Ms-Original-Url X-Waws-Unencoded-Url
X-Vercel-Original-Url X-Nf-Original-Path X-Firebase-Hosting-Path X-Override-URL X-HTTP-DestinationURL X-Proxy-Url
Request-Uri X-Request-Uri X-Real-Uri Base-Url X-Invoke-Path X-Matched-Path X-Middleware-Rewrite X-Now-Route-Matches
X-Ingress-Path X-Rewrite-Path Script-Name X_SCRIPT_NAME Path-Info X-PathInfo X-Request-Target X-Accel-Mapping
X-Accel-Redirect X-Sendfile-Type Destination x-amz-copy-source x-goog-copy-source X-Ms-Copy-Source x-amz-rename-source
X-Oss-Copy-Source
"""
ANOTHER_METHOD = """
X-HTTP-Method-Override x-method-override X_HTTP_Method_Override x-http_method X-HTTP-Method X-HttpMethodOverride
X-Forwarded-Method X-Original-Method X-Request-Method X-HTTP-Verb X.Http.Method
"""
# What clients of every kind send: it must pass.
ORDINARY = """
Accept Authorization Cookie User-Agent Referer Origin Content-Type Content-Length Content-Location Content-Disposition
X-Requested-With X-Request-Id X-Forwarded-For X-Forwarded-Host X-Forwarded-Proto Forwarded X-Api-Key X-Csrf-Token
X-Amz-Security-Token X-Amz-Target X-Amz-Content-Sha256 X-Amz-Date X-Goog-Request-Params X-Goog-User-Project
Cf-R2-Jurisdiction X-Stainless-Lang Anthropic-Version OpenAI-Organization Git-Protocol Npm-Command
Docker-Content-Digest Traceparent Idempotency-Key If-None-Match Range Prefer X-GitHub-Api-Version X-Ms-Version
Sec-Fetch-Mode Upgrade-Insecure-Requests Security Verbose X-Verbose Curled X-Emphatic-Pathology Originals Routers
Access-Control-Request-Method Depth Overwrite X-Stainless-Helper-Method Mcp-Method Google-Cloud-Resource-Prefix
X-Goog-Spanner-Route-To-Leader
"""


@pytest.mark.parametrize("name", ANOTHER_PATH.split())
def test_a_rule_of_paths_is_not_passed_by_a_header_that_names_another_path(name: str) -> None:
    """G23-headers: proxies, servers and frameworks take it for the path."""
    asked = _asked("GET", (name.encode(), b"/admin"))
    with pytest.raises(Refusal, match="another path") as caught:
        check_request(Target("api.example.com", 443, Rule("api.example.com", paths=["/v1/"])), asked)
    assert caught.value.code == "net.path"
    check_request(TARGET, asked)


def test_headers_that_every_client_sends_pass_every_rule() -> None:
    rule = Rule("api.example.com", methods=["GET"], paths=["/v1/"])
    for name in ORDINARY.split():
        check_request(Target("api.example.com", 443, rule), _asked("GET", (name.encode(), b"x")))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (_asked("POST"), "not among the methods"),
        (_asked("get"), "not among the methods"),
        *((_asked("GET", (name.encode(), b"DELETE")), "would make another method") for name in ANOTHER_METHOD.split()),
        (_asked("GET", has_body=True), "with a body"),
        (_asked("TRACE"), "never permitted"),
        (_asked("CONNECT"), "never permitted"),
        (_asked("trace"), "never permitted"),
        (_asked("Connect"), "never permitted"),
    ],
)
def test_a_rule_of_methods_is_not_passed_by_another_name_of_the_method(asked: RequestHead, why: str) -> None:
    target = Target("api.example.com", 443, Rule("api.example.com", methods=["GET"], paths=["/v1/"]))
    with pytest.raises(Refusal, match=why) as caught:
        check_request(target, asked)
    assert caught.value.code == "net.method"
    assert check_request(target, _asked("GET")).target == "/v1/a"
    if asked.method.upper() in ("TRACE", "CONNECT"):  # even where a rule names no methods
        with pytest.raises(Refusal, match=why):
            check_request(TARGET, asked)


@pytest.mark.parametrize("method", ["", "GET /secret HTTP/1.1", "GET\t", "G\x1b[2J", "GÉT", "G\u0100T", "(GET)"])
def test_a_method_that_is_no_token_is_refused_and_not_shown(method: str) -> None:
    for rule in (None, Rule("api.example.com", paths=["/v1/"]), Rule("api.example.com", methods=["GET"])):
        with pytest.raises(Refusal, match=r"^the request is malformed: its method holds characters") as caught:
            check_request(Target("api.example.com", 443, rule), _asked(method))
        assert (caught.value.code, caught.value.allow) == ("net.malformed", None)
    check_request(TARGET, _asked("X-OWN!method"))


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_any_request_is_checked_without_a_crash(method: str, path: str, authority: str) -> None:
    target = Target("api.example.com", 443, Rule("api.example.com", methods=["GET"], paths=["/v1/"]))
    try:
        checked = check_request(target, RequestHead(method, path, authority, (), has_body=False))
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
