"""Peers that are slow, silent or half gone do not hold the gateway: each wait has an end."""

from __future__ import annotations

import json
import re
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

import weaker
from gateway.test_gateway import until
from gateway.world import World, codes, curl, listening
from ringfence import Rule
from ringfence.cli import main
from ringfence.gateway import dial, log, proxy, splice, tunnel
from ringfence.gateway.service import service

DRIP = """
import socket, time
def drip(address, data):
    sock = socket.create_connection(address); sock.settimeout(10); began = time.monotonic()
    try:
        for byte in data: sock.send(bytes([byte])); time.sleep(0.05)
        got = sock.recv(10)
    except OSError as error: got = error.__class__.__name__
    print(got if isinstance(got, str) else got[:1], time.monotonic() - began < 6)
"""


def test_a_hello_that_drips_is_given_up(internet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "HELLO_S", 0.5)
    monkeypatch.setattr(proxy, "_FIRST_S", 0.5)
    code = (
        DRIP
        + """
drip(("web.test", 443), b"\\x16\\x03\\x01\\x02\\x00" + b"\\x01" + bytes(200))
drip(("127.0.0.1", 3128), b"CONNECT web.test:443 HTTP/1.1\\r\\n" + b"A: b\\r\\n" * 50)
drip(("127.0.0.1", 3128), b"\\x05" + b"\\xff" * 200)
drip(("127.0.0.1", 3128), b"")
"""
    )
    with internet.sandbox(internet.policy("web.test")) as box:
        result = box.run(code)
        ends = {line.rpartition(" ")[0] for line in result.stdout.splitlines()}
        assert ends <= {"b'\\x15'", "ConnectionResetError", "BrokenPipeError"}, result.stdout + result.stderr
        assert [line.rpartition(" ")[2] for line in result.stdout.splitlines()] == ["True"] * 4, result.stderr


def test_a_connect_that_comes_byte_by_byte_is_one(internet: World) -> None:
    code = """
import socket, time
sock = socket.create_connection(("127.0.0.1", 3128)); sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for byte in b"CONNECT web.test:%d HTTP/1.1\\r\\n\\r\\n" % port: sock.send(bytes([byte])); time.sleep(0.005)
print(sock.recv(100))
"""
    with internet.https("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        result = box.run(f"port = {server.port}\n{code}")
        assert result.stdout == "b'HTTP/1.1 200 Connection established\\r\\n\\r\\n'\n"


def test_a_connection_without_a_byte_is_cut(internet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "IDLE_S", 0.6)
    monkeypatch.setattr(splice, "HALF_OPEN_S", 0.3)
    internet.names["idle.test"] = ["127.0.0.1"]
    code = """
import socket, time
for half in (False, True):
    sock = socket.create_connection(("idle.test", port)); sock.settimeout(8); began = time.monotonic()
    sock.send(b"x")
    if half: sock.shutdown(socket.SHUT_WR)
    try: print(sock.recv(1))
    except OSError as error: print(error.__class__.__name__)
"""

    def hold(connection: socket.socket) -> None:
        connection.recv(1)
        connection.settimeout(8)
        while connection.recv(1):
            pass
        connection.recv(1)
        stop.recv(1)

    stop, other = socket.socketpair()
    with listening(hold) as port, stop, other:
        with internet.sandbox(internet.policy(rules=(Rule(f"idle.test:{port}", protocol="tcp"),))) as box:
            result = box.run(code.replace("port)", f"{port})"))
            assert result.stdout.split() == ["ConnectionResetError"] * 2, result.stdout + result.stderr


def test_the_command_allows_denies_and_logs(
    internet: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with internet.http("web.test") as server:
        text = f'version = 1\nextends = "dev"\n[network]\nprivate = ["127.0.0.0/8"]\nports = [{server.port}]\n'
        Path("p.toml").write_text(text)
        shared = [
            "exec",
            "--policy",
            "p.toml",
            "--net-log",
            "n.jsonl",
            "--allow-net",
            "*.test",
            "--allow-net",
            "web.test",
        ]
        asks = f"curl -sS -d hi http://web.test:{server.port}/body; curl -s http://no.test:{server.port}/x >/dev/null"
        assert main([*shared, "--deny-net", "no.test", "--", "sh", "-c", asks]) == 0
    said = capfd.readouterr()
    assert said.out == "hi"
    help_ = "to allow it, in the policy: remove no.test from network.deny"
    assert weaker.without(said.err).splitlines() == [
        f"ringfence: denied: no.test:{server.port} is denied by the policy; {help_}"
    ]
    lines = [json.loads(line) for line in Path("n.jsonl").read_text().splitlines()]
    assert [(line["host"], line["method"], line["verdict"], line["code"], line["status"]) for line in lines] == [
        ("web.test", "POST", "allowed", "net.allowed", 200),
        ("no.test", "GET", "denied", "net.denied", 403),
    ]


def test_a_net_log_that_does_not_hold_everything_says_so(
    internet: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that looks names up without end would have its earlier connections forgotten unseen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "MOST_ENTRIES", 3)
    asks = "for n in 1 2 3 4 5; do getent ahostsv4 no$n.test; done; true"
    assert main(["exec", "-q", "--net-log", "n.jsonl", "--allow-net", "web.test", "--", "sh", "-c", asks]) == 0
    lines = Path("n.jsonl").read_text().splitlines()
    said = weaker.without(capfd.readouterr().err)
    assert len(lines) == 3
    assert re.fullmatch(r"ringfence: --net-log holds the last 3 connections of \d+\n", said), said


def test_a_policy_that_permits_and_denies_a_host_says_so(internet: World) -> None:
    policy = internet.policy("web.test")
    denied = policy.replace(network=type(policy.network)(allow=["web.test"], deny=["web.test"]))
    assert "web.test is permitted and denied: it cannot be reached." in denied.explain()
    with internet.sandbox(denied) as box:
        assert "web.test is permitted and denied" in box.plan().explain()
        assert codes(box.exec(["curl", "-s", "http://web.test/"])) == [("web.test:80", "net.denied")]


def test_a_resolver_that_hangs_holds_up_its_own_connection_alone(
    internet: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "RESOLVE_S", 0.3)
    ended = threading.Event()
    hung: SimpleQueue[str] = SimpleQueue()
    look = internet.lookup

    def hang(name: str, port: int) -> list[str]:
        if name == "slow.test":
            hung.put(name)
            ended.wait(30)
        return look(name, port)

    with internet.http("web.test") as server:
        monkeypatch.setattr(service().resolver, "lookup", hang)
        policy = internet.policy(f"slow.test:{server.port}", f"web.test:{server.port}")
        with internet.sandbox(policy) as box, internet.sandbox(policy) as other:
            slow, fine = f"http://slow.test:{server.port}/", f"http://web.test:{server.port}/"
            assert curl(box, slow).stdout.endswith("502")
            monkeypatch.setattr(dial, "RESOLVE_S", 10.0)
            assert curl(box, fine).stdout.endswith("200")
            assert [line.code for line in box.network.log()] == ["net.unresolved", "net.allowed"]
            monkeypatch.setattr(dial, "RESOLVE_S", 0.3)
            many = box.exec(["sh", "-c", f"for n in $(seq 12); do curl -s -o /dev/null {slow} & done; wait"])
            assert many.exit_code == 0
            monkeypatch.setattr(dial, "RESOLVE_S", 10.0)
            assert internet.lookups == ["web.test"]
            until(lambda: hung.qsize() == 8)  # of one sandbox, however many it asks for
            assert curl(other, fine).stdout.endswith("200")
            ended.set()
            assert curl(box, fine).stdout.endswith("200")


def test_a_server_that_never_answers_the_connection_is_given_up(
    internet: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener's queue is full, and therefore the kernel does not answer."""
    monkeypatch.setattr(dial, "CONNECT_S", 0.5)
    internet.names["full.test"] = ["127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        with internet.sandbox(internet.policy(f"full.test:{port}", f"127.0.0.1:{port}")) as box:
            for host in ("full.test", "127.0.0.1"):
                argv = [
                    "curl",
                    "-s",
                    "-o",
                    "/dev/null",
                    "-w",
                    "%{http_code}",
                    "--noproxy",
                    "",
                    f"http://{host}:{port}/",
                ]
                assert box.exec(argv).stdout == "502"
            assert [line.code for line in box.network.log()] == ["net.unreachable"] * 2
        for one in waiting:
            one.close()
