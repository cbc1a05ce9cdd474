"""Budgets that sandboxes share: for all sandboxes of a process, and for a single target of all (G26)."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gateway.test_gateway import until
from gateway.test_plain_http import ASK
from gateway.world import World, listening
from ringfence import Rule, Sandbox
from ringfence.gateway import budget
from ringfence.gateway.budget import Bucket, CountedSocket, Totals
from ringfence.gateway.service import service
from ringfence.gateway.types import OverBudget, Refusal, Target

HOLD = """
import socket, sys
def one(name):
    try:
        sock = socket.create_connection((name, port)); sock.settimeout(20); sock.send(b"x")
        return sock if sock.recv(1) else None
    except OSError: return None
held = [one(name) for name in sys.argv[1:]]
print(*["held" if sock else "refused" for sock in held], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def totals() -> Totals:
    return service().totals


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(100):
        connection.sendall(data)


@pytest.fixture
def place(internet: World) -> Iterator[tuple[World, int]]:
    internet.names |= {"a.test": ["127.0.0.1"], "b.test": ["127.0.0.1"]}
    with listening(_echo) as port:
        yield internet, port


def _box(internet: World, port: int) -> Sandbox:
    rules = tuple(Rule(f"{name}.test:{port}", protocol="tcp") for name in "ab")
    return Sandbox(policy=internet.policy(rules=rules))


def _held(box: Sandbox, port: int, *names: str) -> str:
    return box.exec(["python3", "-c", HOLD.replace("port)", f"{port})"), *names], stdin="\n").check().stdout.strip()


def test_connections_of_all_sandboxes_together_have_a_most(
    place: tuple[World, int], totals: Totals, monkeypatch: pytest.MonkeyPatch
) -> None:
    internet, port = place
    until(lambda: totals.connections == 0)
    monkeypatch.setattr(totals, "most_connections", 2)
    with _box(internet, port) as one, _box(internet, port) as other:
        with one.spawn(["python3", "-c", HOLD.replace("port)", f"{port})"), "a.test", "b.test"]) as process:
            until(lambda: totals.connections == 2)
            assert _held(other, port, "a.test") == "refused"
            process.write("\n")
            assert process.wait(timeout_s=20).stdout == "held held\n"
        until(lambda: [line.code for line in other.network.log()] == ["net.host-connections"])
        until(lambda: totals.connections == 0)
        assert _held(other, port, "a.test") == "held"
    until(lambda: totals.connections == 0)


def test_connections_to_one_target_have_a_most(
    place: tuple[World, int], totals: Totals, monkeypatch: pytest.MonkeyPatch
) -> None:
    internet, port = place
    monkeypatch.setattr(totals, "most_to_one", 1)
    with _box(internet, port) as one, _box(internet, port) as other:
        with one.spawn(["python3", "-c", HOLD.replace("port)", f"{port})"), "a.test"]) as process:
            until(lambda: totals.open_to("a.test") == 1)
            assert _held(other, port, "a.test", "b.test") == "refused held"
            process.write("\n")
            assert process.wait(timeout_s=20).stdout == "held\n"
        codes = ["net.allowed", "net.host-connections"]
        until(lambda: sorted(line.code for line in other.network.log()) == codes)
        until(lambda: totals.open_to("a.test") == 0)
        assert _held(other, port, "a.test") == "held"
    until(lambda: totals.open_to("a.test") + totals.open_to("b.test") == 0)


MOVE = """
import socket, threading
sock = socket.create_connection(("a.test", port)); sock.settimeout(10)
threading.Thread(target=sock.sendall, args=(bytes(1 << 21),), daemon=True).start()
left = 1 << 21
while left: left -= len(sock.recv(65536))
print("all", flush=True); input()
"""


@pytest.mark.parametrize(("most", "pipes"), [(2, 0), (4, 1), (400, 2)])
def test_connections_that_move_much_get_pipes_while_there_is_room_for_connections(
    place: tuple[World, int], totals: Totals, monkeypatch: pytest.MonkeyPatch, most: int, pipes: int
) -> None:
    """F26: a few sandboxes together used up every descriptor of their caller's process, by pipes."""
    internet, port = place
    until(lambda: totals.connections == 0)
    monkeypatch.setattr(totals, "most_connections", most)
    with _box(internet, port) as box, box.spawn(["python3", "-c", MOVE.replace("port)", f"{port})")]) as moving:
        assert next(iter(moving)).data == b"all\n"  # type: ignore[union-attr]  # what it prints first
        assert totals.pipes == pipes
    until(lambda: totals.pipes == 0)


def test_bytes_of_all_sandboxes_together_have_a_most(
    internet: World, totals: Totals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with internet.http("web.test") as server:
        policy = internet.policy(f"web.test:{server.port}")
        asked = json.dumps(
            [[("web.test", server.port), "GET / HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n"]]
        )
        monkeypatch.setattr(totals, "upload", 0)
        for _ in range(2):
            with internet.sandbox(policy) as box:
                result = box.exec(["python3", "-c", ASK], stdin=asked + "\n").check()
                (answer,) = json.loads(result.stdout)
                assert answer.startswith("HTTP/1.1 429 ")
                assert json.loads(answer.partition("\r\n\r\n")[2])["code"] == "net.host-upload"
        assert server.seen == []


def test_a_target_whose_rate_is_used_up_is_waited_for(internet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "TARGET_RATE", 10.0)
    monkeypatch.setattr(budget, "TARGET_BURST", 1.0)
    with internet.http("rate.test") as server, internet.sandbox(internet.policy(f"rate.test:{server.port}")) as box:
        get = "GET / HTTP/1.1\r\nHost: rate.test\r\nConnection: close\r\n\r\n"
        began = time.monotonic()
        asked = json.dumps([[("rate.test", server.port), get]] * 6) + "\n"
        answers = json.loads(box.exec(["python3", "-c", ASK], stdin=asked).check().stdout)
        assert [answer[9:12] for answer in answers] == ["200"] * 6
        assert time.monotonic() - began > 0.45  # five of them waited a tenth of a second, one after the other


def test_a_day_later_bytes_count_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = Totals()
    totals.download = 10
    totals.count_down(10)
    with pytest.raises(OverBudget, match="10 bytes a day"):
        totals.count_down(1)
    later = time.monotonic() + 86_401
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: later))
    totals.count_down(10)


def test_a_closed_connection_counts_no_more_however_often_it_is_closed() -> None:
    totals, target = Totals(), Target("a.test", 443, None)
    totals.most_to_one = 1
    assert totals.may_dial(target)
    sock = CountedSocket()
    totals.opened(target, sock)
    with pytest.raises(Refusal, match=r"1 connections to a\.test"):
        totals.may_dial(target)
    sock.close()
    sock.close()
    assert (totals.open_to("a.test"), totals.may_dial(target)) == (0, True)


def test_a_bucket_gives_its_burst_then_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now))
    bucket = Bucket(10.0, 3.0)
    assert [bucket.take() for _ in range(5)] == [True, True, True, False, False]
    now += 0.25
    assert [bucket.take() for _ in range(4)] == [True, True, False, False]


def test_the_most_of_a_process_is_what_its_descriptors_allow() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert Totals().most_connections == max(64, min((soft - 256) // 2, 16_384))
