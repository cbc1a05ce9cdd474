"""The gateway where the wall is an engine's: listeners that a container hands over, and the relay of guestd."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

import weaker
from backends_declared import DECLARED, missing
from gateway.desk import trusting, wait_until
from gateway.world import LIMITS, World, codes, curl, listening
from programs import read_program
from ringfence import Network, Policy, Rule, Sandbox, Secret
from ringfence.backends.container import channel
from ringfence.events import Denied
from ringfence.values import replace

WAYS = ("gvisor", "container", "relayed container", "podman")
DIRECT = ("--noproxy", "*")
SOCKS = ("-x", "socks5h://127.0.0.1:3128")


@pytest.fixture(scope="module", autouse=True)
def _engines() -> None:
    """Start the engines and use each once, before a test counts what exists."""
    for name in ("gvisor", "container", "podman"):
        if missing(name) is None:
            with Sandbox(backend=DECLARED[name].backend()):
                pass


@pytest.fixture(params=WAYS)
def walled(internet: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return the small internet with sandboxes of an engine; skip with the reason where the engine is missing."""
    name = str(request.param).rpartition(" ")[2]
    reason = missing(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    internet.backend = DECLARED[name].backend()
    if request.param == "relayed container":
        # As in a container whose runtime has another kernel than the host's.
        monkeypatch.setattr(channel, "leads_into", lambda _: False)
    return internet


def test_what_is_permitted_works_in_every_way_and_all_else_is_refused_and_explained(walled: World) -> None:
    with walled.https("web.test") as server, walled.sandbox(walled.policy(f"web.test:{server.port}")) as box:
        url = f"https://web.test:{server.port}/body"
        for options in (DIRECT, (), SOCKS):
            result = curl(box, url, "-d", "hello", *options)
            assert (result.stdout, result.stderr, result.denials) == ("hello\n200", "", ()), options
        code = f"import requests; print(requests.post({url!r}, data='hi', verify='/workspace/roots.pem').text)"
        assert box.exec(["python3", "-c", code]).stdout == "hi\n"
        assert walled.lookups == ["web.test"] * 4
        result = curl(box, "http://other.test/")
        body, status = result.stdout.rsplit("\n", 1)
        assert (status, json.loads(body)["code"]) == ("403", "net.not-allowed")
        assert codes(result) == [("other.test:80", "net.not-allowed")]
        result = curl(box, "https://other.test/", *DIRECT)
        assert (result.exit_code, codes(result)) == (6, [("other.test", "net.not-allowed")])
        with box.spawn(["curl", "-s", "http://three.test/"]) as process:
            assert [event.denial.target for event in process if isinstance(event, Denied)] == ["three.test:80"]
        assert walled.lookups == ["web.test"] * 4  # nothing that was refused was looked up
        assert box.usage().connections == 4 + 2
        assert box.enforcement.network.mechanism.endswith("+ gateway by name")
        wait_until(lambda: [line.verdict for line in box.network.log()].count("allowed") == 4)


MANY = """
import socket, threading
stalled = socket.create_connection(("give.test", PORT)); stalled.sendall(b"g")
socks = [socket.create_connection(("give.test", PORT)) for _ in range(200)]
for sock in socks: sock.sendall(b"e")
print(b"".join(sock.recv(1) for sock in socks) == b"e" * 200)
fast = socket.create_connection(("give.test", PORT)); fast.sendall(b"g")
got = 0
while got < 16 << 20: got += len(fast.recv(1 << 20))
print(got >= 16 << 20)
"""


def test_a_stream_that_stands_still_holds_up_no_other_and_there_may_be_hundreds(walled: World) -> None:
    def give(connection: socket.socket) -> None:
        if connection.recv(1) == b"g":
            while True:
                connection.sendall(bytes(1 << 16))
        connection.sendall(b"e")
        connection.recv(1)

    walled.names["give.test"] = ["127.0.0.1"]
    with listening(give) as port:
        policy = walled.policy(rules=(Rule(f"give.test:{port}", protocol="tcp"),), connections=250)
        with walled.sandbox(policy) as box:
            result = box.run(MANY.replace("PORT", str(port)))
            assert (result.stdout, result.stderr) == ("True\nTrue\n", "")
            assert box.usage().connections == 202


COUNT = """
import socket
sock = socket.create_connection(("drip.test", PORT)); sock.sendall(b"g")
got = 0
while piece := sock.recv(1 << 16): got += len(piece)
print(got)
"""


@weaker.needs_cgroup
def test_thousands_of_small_pieces_that_waited_arrive_at_once(walled: World) -> None:
    asked, paused = threading.Event(), threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1)
        asked.set()
        paused.wait(20)
        for _ in range(3000):
            connection.sendall(b"x")
            time.sleep(0.0002)
        dripped.set()

    dripped = threading.Event()
    walled.names["drip.test"] = ["127.0.0.1"]
    with listening(drip) as port:
        policy = walled.policy(rules=(Rule(f"drip.test:{port}", protocol="tcp"),))
        with walled.sandbox(policy) as box, box.spawn(["python3", "-c", COUNT.replace("PORT", str(port))]) as process:
            assert asked.wait(20)
            box.pause()
            paused.set()
            assert dripped.wait(20)
            box.resume()
            assert process.wait().stdout == "3000\n"


ENDS = """
import socket
sock = socket.create_connection(("ends.test", PORT)); sock.sendall(b"reset")
try: print(sock.recv(10))
except OSError as error: print(error.__class__.__name__)
sock = socket.create_connection(("ends.test", PORT)); sock.sendall(b"end"); print(sock.recv(10), sock.recv(10))
sock.sendall(b"more" * 100000); sock.shutdown(socket.SHUT_WR)
sock = socket.create_connection(("ends.test", PORT)); sock.sendall(b"break")
sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0"); sock.recv(2); sock.close()
"""


def test_an_end_is_an_end_and_a_reset_a_reset_in_both_directions(walled: World) -> None:
    seen: dict[str, object] = {}

    def serve(connection: socket.socket) -> None:
        said = connection.recv(10).decode()
        if said == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return
        connection.sendall(b"ok")
        if said == "end":
            connection.shutdown(socket.SHUT_WR)
        try:
            count = 0
            while piece := connection.recv(1 << 16):
                count += len(piece)
            seen[said] = count
        except ConnectionResetError:
            seen[said] = "reset"

    walled.names["ends.test"] = ["127.0.0.1"]
    with listening(serve) as port:
        with walled.sandbox(walled.policy(rules=(Rule(f"ends.test:{port}", protocol="tcp"),))) as box:
            result = box.run(ENDS.replace("PORT", str(port)))
            assert (result.stdout, result.stderr) == ("ConnectionResetError\nb'ok' b''\n", "")
            wait_until(lambda: seen == {"end": 400_000, "break": "reset"})


def test_bytes_move_while_no_call_waits_and_closing_the_sandbox_ends_them(walled: World) -> None:
    counts = [0]
    ended = threading.Event()

    def swallow(connection: socket.socket) -> None:
        try:
            while piece := connection.recv(1 << 16):
                counts[0] += len(piece)
        finally:
            ended.set()

    code = f'import socket\nsock = socket.create_connection(("up.test", PORT))\nwhile 1: sock.sendall(bytes({1 << 16}))'
    walled.names["up.test"] = ["127.0.0.1"]
    with listening(swallow) as port:
        policy = walled.policy(rules=(Rule(f"up.test:{port}", protocol="tcp"),))
        policy = replace(policy, network=replace(policy.network, upload="10G"))
        with walled.sandbox(policy) as box:
            box.spawn(["python3", "-c", code.replace("PORT", str(port))])
            wait_until(lambda: counts[0] > 4 << 20, 20)  # no call reads from the sandbox
        assert ended.wait(10)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "ringfence-relay"])


def test_rules_change_on_a_live_sandbox(walled: World) -> None:
    with walled.http("web.test") as server:
        policy = walled.policy(f"web.test:{server.port}")
        with walled.sandbox(policy) as box:
            url = f"http://web.test:{server.port}/"
            assert curl(box, url).stdout.endswith("200")
            box.network.set(replace(policy.network, deny=["web.test"]))
            result = curl(box, url)
            assert (result.stdout.endswith("403"), codes(result)) == (True, [(f"web.test:{server.port}", "net.denied")])
            box.network.set(policy.network)
            assert curl(box, url).stdout.endswith("200")


def test_a_secret_is_swapped_outside_and_its_certificate_trusted_inside(walled: World) -> None:
    with walled.https("api.test") as server, trusting(walled.roots.path):
        network = Network(allow=[f"api.test:{server.port}"], private=["127.0.0.0/8"])
        secrets = (Secret("TOKEN", "the-real-value", hosts=["api.test"]),)
        with Sandbox(policy=Policy(limits=LIMITS, network=network, secrets=secrets), backend=walled.backend) as box:
            argv = ["sh", "-c", 'echo $TOKEN; curl -sS -o /dev/null -w "%{http_code}" -H "X-Key: $TOKEN" "$0"']
            result = box.exec([*argv, f"https://api.test:{server.port}/"])
            placeholder, status = result.stdout.split()
            assert (status, result.stderr) == ("200", "")
            assert "the-real-value" not in placeholder
        assert [seen.header("x-key") for seen in server.seen] == ["the-real-value"]


INSIDE = read_program("gateway/on_engines_inside.py")


def test_a_guest_has_no_right_that_guestd_had_and_cannot_take_its_ports(walled: World) -> None:
    none = ["0000000000000000"] * 2
    with walled.sandbox(walled.policy("web.test")) as box:
        result = box.run(INSIDE)
        assert result.stdout.splitlines() == [str(none), str(none), "True", "127.77.", *["98"] * 3], result.stderr


def test_without_a_network_nothing_of_it_is_there(walled: World) -> None:
    code = """
import os, socket
print([name for name in os.environ if "proxy" in name.lower()], os.path.exists("/.ringfence-door/door"))
for port in (53, 443, 3128):
    try: socket.create_connection(("127.0.0.1", port))
    except OSError as error: print(error.errno)
"""
    with walled.sandbox(Policy(limits=LIMITS)) as box:
        assert box.run(code).stdout == "[] False\n111\n111\n111\n"
        assert (box.network.log(), box.network.summary()) == ((), ())
