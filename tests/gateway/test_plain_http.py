"""Plain HTTP through real sandboxes, by name and by proxy: what is answered, what is refused, and how it ends (G12)."""

from __future__ import annotations

import json
import socket
import time

import pytest

from gateway.servers import Answer, Seen
from gateway.test_gateway import until
from gateway.world import World, listening
from programs import read_program
from ringfence.results import Result
from ringfence.values import replace

ASK = read_program("gateway/plain_http_ask.py")
PROXY = ("127.0.0.1", 3128)
PATHS = ("/whole?a=b", "/pieces", "/large", "/empty", "/closing", "/chunked")
SLOW_S = 1.5  # longer than the gateway waits between two looks at its client


def _handler(seen: Seen) -> Answer:
    path = seen.target.partition("?")[0]
    body = json.dumps([seen.method, seen.target, [[n.decode().lower(), v.decode()] for n, v in seen.headers]]).encode()
    if path == "/whole":
        return Answer(headers=[(b"Content-Length", str(len(body)).encode()), (b"alt-svc", b"h3")], parts=[body])
    if path == "/pieces":
        return Answer(headers=[(b"Content-Length", b"6")], parts=[b"abc", b"def"], pause_s=0.05)
    if path == "/large":
        return Answer(headers=[(b"Content-Length", b"300000")], parts=[b"x" * 300_000])
    if path == "/empty":
        return Answer(204)
    if path == "/closing":
        return Answer(headers=[(b"Content-Length", b"2"), (b"Connection", b"close")], parts=[b"ok"])
    return Answer(404, headers=[], parts=[body])


EVIL = "HEAD {start}/closing HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
REFUSED = {
    "another host": (("Host: web", "Host: evil"), "403", "net.other-host"),
    "a method that is never permitted": (("HEAD", "TRACE"), "403", "net.method"),
    "two hosts, one with a space": (("Host", "Host : x\r\nHost"), "400", "net.malformed"),
    "two hosts": (("Host", "Host: web.test\r\nHost"), "400", "net.malformed"),
    "a fragment": (("/closing", "/a#b"), "400", "net.malformed"),
    "a length said twice": (("Host", "Content-Length: 0\r\nContent-Length: 0\r\nHost"), "400", "net.malformed"),
    "a length with a sign": (("Host", "Content-Length: +2\r\nHost"), "400", "net.malformed"),
    "a folded header": (("Host", "X-A: b\r\n c\r\nHost"), "400", "net.malformed"),
    "a line that ends in LF": (("Host", "X-A: b\nHost"), "400", "net.malformed"),
    "too many headers": (("Host", "X-A: b\r\n" * 201 + "Host"), "400", "net.malformed"),
}


@pytest.mark.parametrize("way", ["direct", "proxy"])
def test_plain_requests_are_answered_and_each_kind_of_evil_one_is_refused(internet: World, way: str) -> None:
    with internet.http("web.test", handler=_handler) as server:
        host = f"web.test:{server.port}"
        at, start = (("web.test", server.port), "") if way == "direct" else (PROXY, f"http://{host}")
        good = [f"GET {start}{path} HTTP/1.1\r\nHost: {host}\r\nX-A: b\r\n\r\n" for path in PATHS]
        good = [whole.replace("X-A", "Connection: close\r\nX-A") for whole in good]
        evil = [EVIL.format(start=start, host=host).replace(*change, 1) for change, _, _ in REFUSED.values()]
        asked = json.dumps([(at, data) for data in [*good, *evil]]) + "\n"
        with internet.sandbox(internet.policy(host)) as box:
            answers = json.loads(box.exec(["python3", "-c", ASK], stdin=asked).check().stdout)
        statuses = [answer[9:12] for answer in answers]
        assert statuses[: len(good)] == ["200", "200", "200", "204", "200", "404"]
        assert dict(zip(REFUSED, statuses[len(good) :], strict=True)) == {k: v[1] for k, v in REFUSED.items()}
        assert sorted(code for line in box.network.log() if (code := line.code) != "net.allowed") == sorted(
            code for _, _, code in REFUSED.values()
        )
        assert len(server.seen) == len(good)


@pytest.mark.parametrize("way", ["direct", "proxy"])
def test_requests_one_behind_the_other_are_each_answered_and_written_anew(internet: World, way: str) -> None:
    with internet.http("web.test", handler=_handler) as server:
        host = f"web.test:{server.port}"
        at, start = (("web.test", server.port), "") if way == "direct" else (PROXY, f"http://{host}")
        kept = f"GET {start}/whole HTTP/1.1\r\nHost: {host}\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\n\r\n"
        last = f"GET {start}/closing HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        with internet.sandbox(internet.policy(host)) as box:
            asked = json.dumps([(at, kept + last)]) + "\n"
            (answer,) = json.loads(box.exec(["python3", "-c", ASK], stdin=asked).check().stdout)
        assert answer.count("HTTP/1.1 200") == 2
        assert "alt-svc" not in answer.lower()
        assert [(seen.method, seen.target, list(seen.headers)) for seen in server.seen] == [
            ("GET", "/whole", [(b"host", host.encode())]),
            ("GET", "/closing", [(b"host", host.encode())]),
        ]


def test_what_the_proxy_cannot_reach_or_is_not_allowed_to_is_said(internet: World) -> None:
    urls = {"http://other.test/": "403", "/whole": "400", "http://gone.test/": "502"}
    urls |= {"http://127.0.0.1:9/": "502", "http://10.0.0.1/": "403"}
    asked = []
    for url in urls:
        host = url.removeprefix("http://").partition("/")[0] or "web.test"
        asked.append((PROXY, f"GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    with internet.sandbox(internet.policy("gone.test", "127.0.0.1:9", "10.0.0.1")) as box:
        result = box.exec(["python3", "-c", ASK], stdin=json.dumps(asked) + "\n").check()
    assert dict(zip(urls, [answer[9:12] for answer in json.loads(result.stdout)], strict=True)) == urls


def _inside(internet: World, port: int, data: str, **budgets: int) -> tuple[Result, list[str]]:
    policy = internet.policy(f"web.test:{port}")
    policy = replace(policy, network=replace(policy.network, **budgets))
    with internet.sandbox(policy) as box:
        asked = json.dumps([[("web.test", port), data]]) + "\n"
        result = box.exec(["python3", "-c", ASK], stdin=asked).check()
        until(box.network.log)
        return result, [line.code for line in box.network.log()]


GET = "GET / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n"


def test_a_server_that_takes_long_is_waited_for(internet: World) -> None:
    def slow(seen: Seen) -> Answer:
        del seen
        time.sleep(SLOW_S)
        return Answer(headers=[(b"Content-Length", b"4")], parts=[b"late"])

    with internet.http("web.test", handler=slow) as server:
        result, codes = _inside(internet, server.port, GET)
    assert json.loads(result.stdout)[0].endswith("\r\n\r\nlate")
    assert codes == ["net.allowed"]


def test_a_client_that_says_nothing_for_long_is_still_heard(internet: World) -> None:
    code = f"""
import socket, time
sock = socket.create_connection(("web.test", port)); sock.settimeout(20)
time.sleep({SLOW_S})
for piece in ("GET / HT", "TP/1.1\\r\\nHost: web.test\\r\\nConnection: close\\r\\n", "\\r\\n"):
    sock.sendall(piece.encode()); time.sleep(0.1)
print(sock.recv(100)[9:12].decode())
"""
    with internet.http("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        assert box.run(code.replace("port)", f"{server.port})")).stdout == "200\n"


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"SSH-2.0-x\r\n"])
def test_a_server_that_breaks_off_or_speaks_something_else_is_told_as_502(internet: World, words: bytes) -> None:
    def break_off(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(words)

    internet.names["web.test"] = ["127.0.0.1"]
    with listening(break_off) as port:
        result, codes = _inside(internet, port, GET)
    assert json.loads(result.stdout)[0].startswith("HTTP/1.1 502 ")
    assert codes == ["net.broken"]


@pytest.mark.parametrize("budget", ["upload", "download"])
def test_a_budget_that_is_used_up_is_told_as_429(internet: World, budget: str) -> None:
    with internet.http("web.test", handler=_handler) as server:
        data = GET.replace("GET /", "GET /whole")
        result, codes = _inside(internet, server.port, data, **{budget: 20})
    assert json.loads(result.stdout)[0].startswith("HTTP/1.1 429 ")
    assert codes == [f"net.{budget}"]


def test_what_new_rules_forbid_is_cut_while_it_waits_for_its_answer(internet: World) -> None:
    """G25."""
    waiting: list[bytes] = []

    def hold(connection: socket.socket) -> None:
        waiting.append(connection.recv(65536))
        connection.recv(1)

    internet.names["web.test"] = ["127.0.0.1"]
    with listening(hold) as port, internet.sandbox(internet.policy(f"web.test:{port}")) as box:
        with box.spawn(["python3", "-c", ASK]) as process:
            process.write(json.dumps([[("web.test", port), GET]]) + "\n")
            until(lambda: waiting)
            box.network.set(internet.policy(f"other.test:{port}").network)
            assert json.loads(process.wait(timeout_s=20).stdout) == ["ConnectionResetError"]
        assert [line.code for line in box.network.log()] == ["net.not-allowed"]
