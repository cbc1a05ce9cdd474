"""Interception with a real server and real clients. The witness of what goes out is the server's own log."""

from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.desk import HOST, Desk, open_desk, trusting, wait_until
from gateway.servers import Answer, Loop, Roots, Seen, Server, serving
from ringfence.gateway.http import http1
from ringfence.policy.model import Rule
from ringfence.policy.secrets import Secret

VALUE = "sk-test/9f+3a=Zq7-canary"
TOKEN = Secret("TOKEN", VALUE, hosts=[HOST])
ANYWHERE = Secret("TOKEN", VALUE, hosts=[HOST], inject=("header", "query", "basic"))


@pytest.fixture
def server(loop: Loop, roots: Roots) -> Iterator[Server]:
    with serving(loop, roots.server(HOST)) as made, trusting(roots.path):
        yield made


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tmp_path / "bundle.pem"


class Curl:
    """curl through a desk, with the sandbox's certificate as its only root."""

    def __init__(self, desk: Desk, bundle: Path, *options: str) -> None:
        bundle.write_bytes(desk.authority.certificate)
        self.base = ["curl", "-sS", "-m", "10", "--cacert", str(bundle), "--noproxy", "*", *options]
        self.base += ["--connect-to", f"::127.0.0.1:{desk.port}"]
        self.placeholder = desk.vault.environment.get("TOKEN", "")

    def __call__(self, path: str, *options: str) -> subprocess.CompletedProcess[bytes]:
        url = path if "://" in path else f"https://{HOST}{path}"
        return subprocess.run([*self.base, *options, url], capture_output=True, timeout=20, check=False)

    def status(self, path: str, *options: str) -> int:
        done = self(path, "-o", "/dev/null", "-w", "%{http_code}", *options)
        return int(done.stdout)


@pytest.fixture(params=["--http1.1", "--http2"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_placeholder_in_a_header_reaches_the_secrets_host_as_the_value(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/things?q=1", "-H", f"Authorization: Bearer {curl.placeholder}")
    (seen,) = server.seen
    assert (seen.protocol, seen.method, seen.target) == (
        "h2" if protocol == "--http2" else "http/1.1",
        "GET",
        "/things?q=1",
    )
    assert seen.header("authorization") == f"Bearer {VALUE}"
    assert seen.header("accept-encoding") == "identity"
    assert VALUE.encode() not in done.stdout + done.stderr
    assert ["authorization", "Bearer " + "*" * len(VALUE)] in json.loads(done.stdout)
    assert desk.said == [("GET", "/things", 200, None)]


def test_the_value_goes_into_query_and_basic_authentication_only_where_asked(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    for secret in (ANYWHERE, TOKEN):
        with open_desk(loop, Desk(server, secret)) as desk:
            curl = Curl(desk, bundle, protocol)
            curl(f"/a?key={curl.placeholder}", "-u", f"me:{curl.placeholder}").check_returncode()
    asked, not_asked = server.seen
    assert asked.target == "/a?key=sk-test%2F9f%2B3a%3DZq7-canary"
    assert asked.header("authorization") == "Basic " + base64.b64encode(f"me:{VALUE}".encode()).decode()
    assert "rf-secret-TOKEN-" in not_asked.target
    assert VALUE.encode() not in base64.b64decode((not_asked.header("authorization") or "").split()[1])


def test_the_value_never_goes_into_path_body_or_headers_that_servers_show(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    with open_desk(loop, Desk(server, ANYWHERE)) as desk:
        curl = Curl(desk, bundle, protocol)
        token = curl.placeholder
        options = ["-d", f"body={token}", "-A", token, "-e", f"https://x/{token}", "-H", f"Content-Language: {token}"]
        curl(f"/{token}", *options, "-H", f"X-Api-Key: {token}").check_returncode()
    (seen,) = server.seen
    assert seen.target == f"/{token}"
    assert seen.body == f"body={token}".encode()
    assert [seen.header(name) for name in ("user-agent", "referer", "content-language")] == [
        token,
        f"https://x/{token}",
        token,
    ]
    assert seen.header("x-api-key") == VALUE


@pytest.mark.parametrize("path", ["/in-header", "/in-pieces", "/in-trailer", "/echo"])
def test_a_response_that_echoes_the_value_is_scrubbed(
    loop: Loop, server: Server, bundle: Path, protocol: str, path: str
) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl(path, "-i", "-H", f"Authorization: {curl.placeholder}")
    assert server.seen[0].header("authorization") == VALUE
    assert VALUE.encode() not in done.stdout
    assert b"*" * len(VALUE) in done.stdout


def test_a_value_that_comes_back_as_the_name_of_a_header_is_scrubbed(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    with open_desk(loop, Desk(server, Secret("TOKEN", "sk+Canary-0123456789", hosts=[HOST]))) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/in-name", "-i", "-H", f"Authorization: {curl.placeholder}")
    assert server.seen[0].header("authorization") == "sk+Canary-0123456789"
    assert b"x-" + b"*" * 20 + b": 1" in done.stdout.lower()


def test_the_base64_of_a_value_is_scrubbed_too(loop: Loop, server: Server, bundle: Path, protocol: str) -> None:
    with open_desk(loop, Desk(server, ANYWHERE)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/in-pieces", "-u", f"me:{curl.placeholder}")
    sent = base64.b64encode(f"me:{VALUE}".encode())
    assert server.seen[0].header("authorization") == f"Basic {sent.decode()}"
    assert len(done.stdout) == len(sent) + len("Basic ")
    left = bytes(a for a, b in zip(done.stdout.removeprefix(b"Basic "), sent, strict=True) if a == b)
    assert len(left) <= 6


def test_a_compressed_response_of_a_secrets_host_is_refused(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/gzip", "-H", f"Authorization: {curl.placeholder}", "-w", "%{http_code}")
    said, status = json.loads(done.stdout[:-3]), int(done.stdout[-3:])
    assert (status, said["code"]) == (502, "secret.encoded-response")
    assert desk.said == [("GET", "/gzip", 502, "secret.encoded-response")]


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        ("A-IM", "im"),
        ("grpc-accept-encoding", "grpc-encoding"),
        ("connect-accept-encoding", "connect-content-encoding"),
    ],
)
def test_no_other_encoding_of_a_response_is_asked_for_or_taken(
    loop: Loop, server: Server, bundle: Path, protocol: str, asks: str, answers: str
) -> None:
    server.handler = lambda _: Answer(headers=[(answers.encode(), b"gzip")], parts=[b"packed"])
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        done = Curl(desk, bundle, protocol)("/", "-H", f"{asks}: gzip")
    assert server.seen[0].header(asks.lower()) is None
    assert json.loads(done.stdout)["code"] == "secret.encoded-response"


def test_messages_of_grpc_arrive_as_they_are_sent(loop: Loop, server: Server, bundle: Path) -> None:
    parts = [b"\0\0\0\0\x09message %d" % number for number in range(3)]
    server.handler = lambda _: Answer(headers=[(b"content-type", b"application/grpc")], parts=parts, pause_s=0.3)
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, "--http2", "-N")
        with subprocess.Popen([*curl.base, f"https://{HOST}/"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            first = process.stdout.read(14)
            assert process.poll() is None
            assert [first, process.stdout.read()] == [parts[0], parts[1] + parts[2]]


def test_a_placeholder_sent_to_another_host_is_refused_and_told(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    elsewhere = Secret("TOKEN", VALUE, hosts=["other.example.com"])
    rule = Rule(HOST, methods=["GET"])
    with open_desk(loop, Desk(server, elsewhere, rule=rule)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/a", "-H", f"Authorization: {curl.placeholder}")
        basic = curl("/a", "-u", f"me:{curl.placeholder}")
    assert server.seen == []
    assert json.loads(done.stdout) == {
        "error": "denied by the sandbox's gateway",
        "code": "secret.other-host",
        "message": f"the secret TOKEN is not for {HOST}:443: its placeholder was in a request to it",
        "allow": f'hosts = [..., "{HOST}"] in the secret TOKEN',
    }
    assert json.loads(basic.stdout)["code"] == "secret.other-host"
    assert [refusal.kind for _, _, refusal in desk.lines if refusal] == ["secret", "secret"]


def test_another_sandboxs_placeholder_means_nothing(loop: Loop, server: Server, bundle: Path, protocol: str) -> None:
    other = Desk(server, TOKEN).vault.environment["TOKEN"]
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        Curl(desk, bundle, protocol)("/a", "-H", f"Authorization: {other}").check_returncode()
    assert server.seen[0].header("authorization") == other


def test_a_secret_does_not_go_out_in_plain_http(loop: Loop, bundle: Path) -> None:
    with serving(loop, None) as server, open_desk(loop, Desk(server, TOKEN, port=80), tls=False) as desk:
        curl = Curl(desk, bundle)
        done = curl(f"http://{HOST}/a", "-H", f"Authorization: {curl.placeholder}")
        other = curl.status(f"http://{HOST}/b")
    assert json.loads(done.stdout)["code"] == "secret.not-tls"
    assert other == 200
    assert [seen.target for seen in server.seen] == ["/b"]


@pytest.mark.parametrize("wrong", ["other-name", "expired", "unknown-root"])
def test_a_server_that_does_not_verify_gets_no_request(
    loop: Loop, roots: Roots, bundle: Path, tmp_path: Path, wrong: str, protocol: str
) -> None:
    context = roots.server("other.example.com") if wrong == "other-name" else roots.server(HOST, days=-1)
    if wrong == "unknown-root":
        context = Roots(tmp_path).server(HOST)
    with serving(loop, context) as server, trusting(roots.path), open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/a", "-H", f"Authorization: {curl.placeholder}", "-w", "%{http_code}")
    assert server.seen == []
    assert json.loads(done.stdout[:-3])["code"] == "net.tls-unverified"
    assert done.stdout[-3:] == b"502"


def test_rules_hold_for_each_request_of_one_connection(loop: Loop, server: Server, bundle: Path, protocol: str) -> None:
    rule = Rule(HOST, methods=["GET", "POST"], paths=["/v1/public/"])
    with open_desk(loop, Desk(server, rule=rule)) as desk:
        curl = Curl(desk, bundle, protocol, "--path-as-is")
        paths = [
            "/v1/public/a",
            "/v1/public/../admin",
            "/v1/public/%2e%2e/admin",
            "/v1/public/..%2fadmin",
            "/v1/public/%252e%252e/admin",
            "/v1/public/..;/admin",
            "/v1//public/b",
            "/admin",
            "/v1/public/c?x=/../admin",
        ]
        urls = [f"https://{HOST}{path}" for path in paths]
        done = curl(urls[0], *urls[1:], *["-o", "/dev/null"] * len(urls), "-w", "%{http_code} %{num_connects}\n")
        posted = curl.status("/v1/public/d", "-X", "DELETE", "-d", "body"), curl.status("/v1/public/d", "-d", "body")
    statuses, connects = zip(*[line.split() for line in done.stdout.decode().splitlines()], strict=True)
    assert sorted(statuses) == ["200"] * 3 + ["403"] * 6
    assert sum(map(int, connects)) == 1, "a refused request leaves the connection usable"
    assert posted == (403, 200)
    assert sorted(seen.target for seen in server.seen) == [
        "/v1/public/a",
        "/v1/public/b",
        "/v1/public/c?x=/../admin",
        "/v1/public/d",
    ]
    assert {code for _, _, status, code in desk.said if status == 403} == {"net.path", "net.method"}


@pytest.mark.parametrize(
    "options",
    [
        ("-X", "TRACE"),
        ("-H", "X-HTTP-Method-Override: DELETE"),
        ("-X", "GET", "-d", "a body"),
        ("-H", "Host: other.example.com"),
    ],
)
def test_what_would_get_around_a_method_rule_is_refused(
    loop: Loop, server: Server, bundle: Path, protocol: str, options: tuple[str, ...]
) -> None:
    with open_desk(loop, Desk(server, rule=Rule(HOST, methods=["GET"]))) as desk:
        curl = Curl(desk, bundle, protocol)
        assert curl.status("/a", *options) == 403
        assert curl.status("/a") == 200
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "header",
    ["X-Original-URL", "x_forwarded_uri", "X-ENVOY-ORIGINAL-PATH", "X-Forwarded-Prefix", "Destination", "Script_Name"],
)
def test_what_would_get_around_a_path_rule_is_refused_and_named(
    loop: Loop, server: Server, bundle: Path, protocol: str, header: str
) -> None:
    with open_desk(loop, Desk(server, rule=Rule(HOST, paths=["/a"]))) as desk:
        curl = Curl(desk, bundle, protocol)
        refused = json.loads(curl("/a", "-H", f"{header}: /admin").stdout)
        assert curl.status("/a", "-H", "X-Forwarded-For: 192.0.2.1") == 200
    assert refused["code"] == "net.path"
    assert header.lower() in refused["message"].lower()
    assert [seen.header("x-forwarded-for") for seen in server.seen] == ["192.0.2.1"]


def test_large_bodies_stream_both_ways(loop: Loop, server: Server, bundle: Path, protocol: str, tmp_path: Path) -> None:
    file = tmp_path / "upload"
    file.write_bytes(bytes(range(256)) * 8192)
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol)
        back = curl("/body", "-T", str(file), "-H", "Expect: 100-continue")
        big = curl("/big")
    assert back.stdout == file.read_bytes()
    assert big.stdout == b"x" * 65_536 * 64
    assert [entry.sent > 2 << 20 for entry, _, _ in desk.lines] == [True, False]
    assert [entry.received > 2 << 20 for entry, _, _ in desk.lines] == [True, True]


def test_an_upload_beyond_the_budget_is_cut(
    loop: Loop, server: Server, bundle: Path, protocol: str, tmp_path: Path
) -> None:
    file = tmp_path / "upload"
    file.write_bytes(b"x" * (2 << 20))
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        desk.upload = 300_000
        Curl(desk, bundle, protocol)("/body", "-T", str(file))
    assert server.seen == []
    assert [code for _, _, _, code in desk.said] == ["net.upload"]


def test_a_client_that_does_not_trust_the_sandboxs_certificate_is_told_of_in_the_log(
    loop: Loop, server: Server, roots: Roots
) -> None:
    """Only a client that sends an alert is logged: the newest curl checks the certificate late and just disconnects."""
    context = ssl.create_default_context(cafile=str(roots.path))
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        with socket.create_connection(("127.0.0.1", desk.port), timeout=5) as plain:
            with pytest.raises(ssl.SSLCertVerificationError):
                context.wrap_socket(plain, server_hostname=HOST)
        wait_until(lambda: desk.said)
    assert desk.said == [(None, None, None, "net.tls-distrusted")]


def test_http2_streams_are_independent(loop: Loop, server: Server, bundle: Path) -> None:
    def slow(seen: Seen) -> Answer:
        return Answer(parts=[b"a", b"b"], pause_s=0.2 if "slow" in seen.target else 0)

    server.handler = slow
    rule = Rule(HOST, paths=["/ok"])
    with open_desk(loop, Desk(server, rule=rule)) as desk:
        curl = Curl(desk, bundle, "--http2", "--parallel", "--parallel-immediate")
        urls = [f"https://{HOST}/{'ok-slow' if n % 3 == 0 else 'ok' if n % 3 == 1 else 'no'}{n}" for n in range(30)]
        done = curl(urls[0], *urls[1:], *["-o", "/dev/null"] * 30, "-w", "%{http_code}\n")
    assert sorted(done.stdout.split()) == [b"200"] * 20 + [b"403"] * 10
    assert len(server.seen) == 20


def test_a_stream_of_events_arrives_as_it_is_sent(loop: Loop, server: Server, bundle: Path, protocol: str) -> None:
    server.handler = lambda _: Answer(
        headers=[(b"content-type", b"text/event-stream")], parts=[b"data\n"] * 3, pause_s=0.3
    )
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol, "-N")
        with subprocess.Popen([*curl.base, f"https://{HOST}/"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            times = [time.monotonic() for _ in process.stdout]
    assert len(times) == 3
    assert times[2] - times[0] > 0.4


def test_a_client_that_gives_up_ends_the_servers_work_too(
    loop: Loop, server: Server, bundle: Path, protocol: str
) -> None:
    server.handler = lambda _: Answer(parts=[b"x"] * 100, pause_s=5)
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        Curl(desk, bundle, protocol)("/", "-m", "0.5")
        wait_until(lambda: desk.said)
    [(method, _, _, code)] = desk.said
    assert (method, code) in (("GET", "net.broken"), ("GET", "net.cancelled"))  # the newest curl says so first


def test_a_head_that_drips_is_cut(loop: Loop, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "HEAD_S", 0.3)
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        context = ssl.create_default_context(cadata=desk.authority.certificate.decode())
        with socket.create_connection(("127.0.0.1", desk.port), timeout=5) as plain:
            with context.wrap_socket(plain, server_hostname=HOST) as sock:
                started = time.monotonic()
                try:
                    while time.monotonic() - started < 4:
                        sock.sendall(b"G")
                        time.sleep(0.05)
                except OSError:
                    pass  # it was cut
                assert time.monotonic() - started < 3
    assert server.seen == []


def test_a_fault_of_the_gateways_own_is_a_line_of_the_log_and_not_a_traceback(
    loop: Loop, server: Server, bundle: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise ValueError(VALUE)

    with open_desk(loop, Desk(server, TOKEN)) as desk:
        monkeypatch.setattr(desk.vault, "swap", breaks)
        Curl(desk, bundle, "--http1.1")("/a")
        Curl(desk, bundle, "--http2")("/a")
        wait_until(lambda: len(desk.said) >= 2)
    assert {code for _, _, _, code in desk.said} >= {"net.internal"}
    assert VALUE not in "".join(capfd.readouterr()) + str([refusal for _, _, refusal in desk.lines])


def test_a_debug_log_of_the_hosts_program_never_holds_the_value(
    loop: Loop, server: Server, bundle: Path, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """hpack, by which HTTP/2 is written, tells every header. What this test's server reads and writes is its own."""
    caplog.set_level(logging.DEBUG)
    with open_desk(loop, Desk(server, TOKEN)) as desk:
        curl = Curl(desk, bundle, protocol)
        done = curl("/in-header", "-i", "-H", f"Authorization: {curl.placeholder}", "-H", f"X-Key: {curl.placeholder}")
        assert b"x-echo: *****" in done.stdout
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if text.startswith(("Adding b'x-key'", "Decoded (b'x-echo'")) and VALUE in text] == []
    servers = [text for text in told if text.startswith(("Adding b'x-echo'", "Decoded (b'x-key'")) and VALUE in text]
    assert bool(servers) == (protocol == "--http2")
