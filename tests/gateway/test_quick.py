"""The short way of a plain request and the long one: nobody can tell them apart but by the time they take."""

from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime

import pytest

from gateway.servers import Answer, Seen
from gateway.test_gateway import until
from gateway.world import World, listening
from ringfence.gateway import quick, simple
from ringfence.results import Result
from ringfence.values import replace

ASK = """
import socket, sys, json
from concurrent.futures import ThreadPoolExecutor
def ask(asked):
    at, data = asked
    sock = socket.create_connection(tuple(at)); sock.settimeout(20)
    sock.sendall(data.encode())
    answer = b""
    try:
        while more := sock.recv(65536): answer += more
    except OSError as error: answer += error.__class__.__name__.encode()
    return answer.decode()
print(json.dumps(list(ThreadPoolExecutor(12).map(ask, json.loads(sys.stdin.readline())))))
"""
PROXY = ("127.0.0.1", 3128)


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


def _requests(port: int) -> list[tuple[tuple[str, int], str]]:
    host = f"Host: web.test:{port}\r\n"
    made: list[tuple[tuple[str, int], str]] = []
    for at, start in ((("web.test", port), ""), (PROXY, f"http://web.test:{port}")):
        for path in ("/whole?a=b", "/pieces", "/large", "/empty", "/closing", "/chunked"):
            whole = f"GET {start}{path} HTTP/1.1\r\n{host}X-A: b\r\nConnection: close\r\n\r\n"
            made += [(at, whole), (at, whole.replace("GET", "HEAD"))]
        kept = f"GET {start}/whole HTTP/1.1\r\n{host}\r\n"
        last = f"HEAD {start}/closing HTTP/1.1\r\n{host}Connection: close\r\n\r\n"
        made.append((at, kept + last))  # one behind the other
        evil = last.replace("Host: web", "Host: evil")
        made += [(at, evil), (at, last.replace("HTTP/1.1", "HTTP/1.0")), (at, last.replace("HEAD", "TRACE"))]
        made += [(at, last.replace("Host", "Host : x\r\nHost")), (at, last.replace("/closing", "/a#b"))]
    made.append((PROXY, "GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\nConnection: close\r\n\r\n"))
    made.append((PROXY, "GET /whole HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n"))
    made.append((PROXY, "GET http://gone.test/ HTTP/1.1\r\nHost: gone.test\r\nConnection: close\r\n\r\n"))
    made.append((PROXY, "GET http://127.0.0.1:9/ HTTP/1.1\r\nHost: 127.0.0.1:9\r\nConnection: close\r\n\r\n"))
    made.append((PROXY, "GET http://10.0.0.1/ HTTP/1.1\r\nHost: 10.0.0.1\r\nConnection: close\r\n\r\n"))
    return made


def test_both_ways_give_the_same_answers_the_same_requests_and_the_same_log(
    internet: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bytes] = []
    read = simple.request

    def noting(data: bytes) -> simple.Request | None:
        found = read(data)
        if found is not None:
            taken.append(data)
        return found

    def nothing(_data: bytes) -> None:
        return None

    arms = []
    with internet.http("web.test", handler=_handler) as server:
        asked = _requests(server.port)
        allow = (f"web.test:{server.port}", "gone.test", "127.0.0.1:9", "10.0.0.1")
        for way in (noting, nothing):
            monkeypatch.setattr(simple, "request", way)
            server.seen.clear()
            with internet.sandbox(internet.policy(*allow)) as box:
                result = box.exec(["python3", "-c", ASK], stdin=json.dumps(asked) + "\n").check()
                lines = box.network.log()
                used = box.usage()
            answers = [_parsed(text) for text in json.loads(result.stdout)]
            seen = sorted((one.method, one.target, sorted(one.headers), one.body) for one in server.seen)
            log = sorted(repr(replace(line, at=datetime.fromtimestamp(0, UTC), duration_s=0.0)) for line in lines)
            denied = sorted((denial.target, denial.code, denial.count) for denial in result.denials)
            arms.append((answers, seen, log, denied, used.connections, used.sent_bytes, used.received_bytes))
    assert len(taken) > 20
    for quickly, slowly in zip(*arms, strict=True):
        assert quickly == slowly


def _parsed(answer: str) -> tuple[str, list[str], str]:
    """Headers of one answer may come in another order."""
    head, _, body = answer.partition("\r\n\r\n")
    first, *headers = head.split("\r\n")
    return first, sorted(line.lower() for line in headers), body


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
        time.sleep(quick.PATIENCE_S + 0.5)
        return Answer(headers=[(b"Content-Length", b"4")], parts=[b"late"])

    with internet.http("web.test", handler=slow) as server:
        result, codes = _inside(internet, server.port, GET)
    assert json.loads(result.stdout)[0].endswith("\r\n\r\nlate")
    assert codes == ["net.allowed"]


def test_a_client_that_says_nothing_for_long_is_still_heard(internet: World) -> None:
    code = f"""
import socket, time
sock = socket.create_connection(("web.test", port)); sock.settimeout(20)
time.sleep({quick.PATIENCE_S + 0.5})
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


def test_what_new_rules_forbid_is_cut_while_it_waits_for_its_answer(
    internet: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G25."""
    monkeypatch.setattr(quick, "PATIENCE_S", 60.0)
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
