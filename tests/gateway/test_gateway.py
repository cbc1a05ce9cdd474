"""The gateway with real sandboxes: what is permitted works without set-up, everything else is refused and explained."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time

import pytest

import ringfence
from gateway import hellos
from gateway.world import World, codes, curl, listening
from programs import read_program
from ringfence import Network, Policy, PolicyError, Rule, Sandbox, UnsupportedError
from ringfence.events import Denied
from ringfence.gateway.service import service
from ringfence.records import HostSummary

DIRECT = ("--noproxy", "*")


def test_a_permitted_name_works_by_resolver_proxy_and_socks(internet: World) -> None:
    with internet.https("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        url = f"https://web.test:{server.port}/body"
        for options in (DIRECT, (), ("-x", "socks5h://127.0.0.1:3128"), ("-x", "socks5h://127.0.0.1:3128", "-4")):
            result = curl(box, url, "-d", "hello", *options)
            assert (result.stdout, result.stderr, result.denials) == ("hello\n200", "", ()), options
        assert internet.lookups == ["web.test"] * 4
        until(lambda: [request.verdict for request in box.network.log()] == ["allowed"] * 4)
        usage = box.usage()
        assert usage.connections == 4
        assert usage.sent_bytes > 1000
        assert usage.received_bytes > 1000


def test_plain_http_is_read_and_logged_by_request(internet: World) -> None:
    with internet.http("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        url = f"http://web.test:{server.port}"
        result = curl(box, f"{url}/body", "-d", "x" * 100_000, *DIRECT)
        assert result.stdout == "x" * 100_000 + "\n200"
        assert curl(box, f"{url}/gone", "-I").stdout.endswith("200")
        until(lambda: len(box.network.log()) == 2)
        told = [(r.method, r.path, r.status, r.rule) for r in box.network.log()]
        assert told == [
            ("POST", "/body", 200, f"web.test:{server.port}"),
            ("HEAD", "/gone", 200, f"web.test:{server.port}"),
        ]
        (summary,) = box.network.summary()
        assert summary == HostSummary(
            "web.test", 2, 0, 0, {"POST": 1, "HEAD": 1}, {200: 2}, summary.sent_bytes, summary.received_bytes
        )
        assert summary.sent_bytes > 100_000


def test_a_refused_client_is_told_why_and_the_result_says_it(internet: World) -> None:
    with internet.sandbox(internet.policy("web.test")) as box:
        result = curl(box, "http://other.test/")
        body, status = result.stdout.rsplit("\n", 1)
        assert status == "403"
        assert json.loads(body) == {
            "error": "denied by the sandbox's gateway",
            "code": "net.not-allowed",
            "message": "other.test:80 is not among the hosts of the policy's network",
            "allow": 'network.allow = [..., "other.test:80"]',
        }
        assert codes(result) == [("other.test:80", "net.not-allowed")]
        result = curl(box, "https://other.test/")
        assert (result.exit_code in (7, 56), codes(result)) == (True, [("other.test:443", "net.not-allowed")])
        result = curl(box, "https://other.test/", *DIRECT)
        assert (result.exit_code, codes(result)) == (6, [("other.test", "net.not-allowed")])
        assert internet.lookups == []
        assert {denial.target for denial in box.denials()} == {"other.test", "other.test:80", "other.test:443"}
        assert all(denial.kind == "network" for denial in box.denials())


def test_denials_of_a_run_are_its_own(internet: World) -> None:
    with internet.sandbox(internet.policy("web.test")) as box:
        curl(box, "http://one.test/")
        assert codes(curl(box, "http://two.test/")) == [("two.test:80", "net.not-allowed")]
        with box.spawn(["curl", "-s", "http://three.test/"]) as process:
            seen = [event.denial.target for event in process if isinstance(event, Denied)]
        assert seen == ["three.test:80"]
    code = "import urllib.request as u\ntry: u.urlopen('http://four.test/')\nexcept OSError as e: print(e.code)"
    result = ringfence.run(code, policy=internet.policy("web.test"))
    assert (result.stdout, codes(result)) == ("403\n", [("four.test:80", "net.not-allowed")])


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("10.0.0.1", "net.private-address"),
        ("192.168.1.1", "net.private-address"),
        ("169.254.169.254", "net.metadata-address"),
        ("fd00:ec2::254", "net.metadata-address"),
        ("::ffff:127.0.0.1", "net.bad-address"),
        ("64:ff9b::a9fe:a9fe", "net.bad-address"),
        ("0.0.0.0", "net.bad-address"),
    ],
)
def test_a_name_that_leads_to_a_refused_address_is_not_dialled(internet: World, address: str, code: str) -> None:
    """G07, G08: a single bad answer among good answers refuses the name."""
    internet.names["web.test"] = ["127.0.0.1", address]
    with internet.sandbox(internet.policy("web.test")) as box:
        result = curl(box, "http://web.test/")
        assert result.stdout.endswith("403")
        assert address not in result.stdout
        assert codes(result) == [("web.test:80", code)]
        assert address in result.denials[0].message


def test_a_name_is_looked_up_once_for_each_connection_and_dialled_by_that_answer(internet: World) -> None:
    """G08: the second answer of a rebinding name is refused, and never used for the first connection."""
    with internet.http("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        url = f"http://web.test:{server.port}/"
        assert curl(box, url).stdout.endswith("200")
        internet.names["web.test"] = ["10.0.0.1"]
        assert curl(box, url).stdout.endswith("403")
        assert (internet.lookups, len(server.seen)) == (["web.test"] * 2, 1)


@pytest.mark.parametrize("proxy", [False, True])
def test_the_hello_must_name_the_host(internet: World, proxy: bool) -> None:
    """G10: a hello with another server name or with none, and bytes that are no hello, reach no server."""
    with internet.https("web.test", "other.test") as server:
        place = f"web.test:{server.port}"
        with internet.sandbox(internet.policy(place)) as box:
            by = ["-proxy", "127.0.0.1:3128"] if proxy else []
            for option, code in ((["-servername", "other.test"], "net.sni"), (["-noservername"], "net.no-sni")):
                argv = ["openssl", "s_client", *by, "-connect", place, *option]
                result = box.exec(argv, stdin="GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
                assert "unrecognized name" in result.stderr.lower(), result.stderr
                assert codes(result) == [(place, code)]
            argv = ["openssl", "s_client", *by, "-connect", place, "-servername", "web.test", "-CAfile", "roots.pem"]
            result = box.exec(argv, stdin="GET /body HTTP/1.1\r\nHost: web.test\r\nConnection: close\r\n\r\n")
            assert "Verify return code: 0 (ok)" in result.stdout
        assert [seen.header("host") for seen in server.seen] in ([], ["web.test"])  # s_client may leave before it asks


def test_a_hello_without_a_name_passes_where_a_rule_says_that_nobody_looks(internet: World) -> None:
    with internet.https("web.test") as server:
        place = f"web.test:{server.port}"
        argv = ["openssl", "s_client", "-connect", place, "-noservername", "-CAfile", "roots.pem"]
        with internet.sandbox(internet.policy(place)) as box:
            (denial,) = box.exec(argv).denials
            assert denial.allow == f'network.rules = [..., {{host = "{place}", protocol = "tcp"}}]'
        with internet.sandbox(internet.policy(rules=(Rule(place, protocol="tcp"),))) as box:
            assert "Verify return code: 0 (ok)" in box.exec(argv).stdout


ENCRYPTED = hellos.made(hellos.server_name(b"web.test"), b"\xfe\x0d" + hellos.vector(2, b"x"))


@pytest.mark.parametrize(
    ("rule", "sent", "code"),
    [
        (Rule("web.test:443"), ENCRYPTED, "net.ech"),
        (Rule("web.test:443", protocol="tls"), b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n", "net.protocol"),
        (Rule("web.test:443", protocol="http"), hellos.real("web.test"), "net.protocol"),
    ],
    ids=["an encrypted hello", "HTTP where TLS is permitted", "TLS where HTTP is permitted"],
)
def test_what_a_rule_does_not_permit_reaches_no_server(internet: World, rule: Rule, sent: bytes, code: str) -> None:
    """G10: a client that hides the name of its server, or speaks another protocol, is refused by its first bytes."""
    program = f"""
import socket
with socket.create_connection(("web.test", 443), timeout=15) as sock:
    sock.sendall({sent!r})
    sock.recv(100)
"""
    with internet.sandbox(internet.policy(rules=(rule,))) as box:
        assert codes(box.run(program, timeout_s=20)) == [("web.test:443", code)]


def test_what_is_neither_tls_nor_http_needs_a_rule(internet: World) -> None:
    code = """
import socket
for data in (b"\\0\\1\\2", b""):
    sock = socket.create_connection(("web.test", 443)); sock.settimeout(15)
    if data: sock.send(data)
    try: print(sock.recv(10))
    except OSError as error: print(error.__class__.__name__)
"""
    with internet.sandbox(internet.policy("web.test")) as box:
        result = box.run(code, timeout_s=20)
        assert result.stdout == "ConnectionResetError\n" * 2
        assert codes(result) == [("web.test:443", "net.protocol"), ("web.test:443", "net.silent")]
        assert result.denials[0].allow == 'network.rules = [..., {host = "web.test:443", protocol = "tcp"}]'


def test_a_tcp_rule_pins_the_name_and_passes_bytes_unseen(internet: World) -> None:
    """A server that speaks first, as ssh and smtp do."""

    def greet(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-test\r\n")
        connection.sendall(connection.recv(100).upper())

    code = """
import socket
sock = socket.create_connection(("git.test", port))
print(sock.recv(100)); sock.send(b"hello"); print(sock.recv(100), sock.recv(100))
sock.close()
"""
    internet.names["git.test"] = ["127.0.0.1"]
    with listening(greet) as port:
        policy = internet.policy("web.test", rules=(Rule(f"git.test:{port}", protocol="tcp"),))
        with internet.sandbox(policy) as box:
            result = box.run(code.replace("port)", f"{port})"))
            assert result.stdout == "b'SSH-2.0-test\\r\\n'\nb'HELLO' b''\n"
            until(lambda: [line.rule for line in box.network.log()] == [f"rules: git.test:{port}"])


def test_host_must_be_the_target_for_each_request_of_a_kept_connection(internet: World) -> None:
    """G11, G12: by name and by proxy; what has two readings is answered 400 and the connection ends."""
    code = read_program("gateway/gateway_kept_connection.py")
    with internet.http("web.test", "evil.test") as server:
        with internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
            result = box.run(code.replace("port)", f"{server.port})").replace("% port", f"% {server.port}"))
            told = [line.strip() for line in result.stdout.splitlines()]
            assert told == ["200 200 403", "200 403", "403", "403", "400", "400", *["400"] * 7], result.stderr
            told_by_us = {denial.code for denial in result.denials}
            assert told_by_us == {"net.other-host", "net.not-allowed", "net.malformed"}
        assert {seen.header("host") for seen in server.seen} == {f"web.test:{server.port}"}
        assert len(server.seen) >= 3


def test_a_request_that_met_a_closing_server_is_repeated_when_it_may_be(internet: World) -> None:
    """A server may close a kept connection while the next request is on its way."""
    code = """
import socket
sock = socket.create_connection(("web.test", port)); sock.settimeout(10)
for method in ("HEAD", "HEAD", "GET", "POST"):
    sock.sendall(b"%s /%s HTTP/1.1\\r\\nHost: web.test\\r\\nContent-Length: 0\\r\\n\\r\\n" % ((method.encode(),) * 2))
    try: print(sock.recv(65536)[9:12].decode() or "closed", end=" ")
    except ConnectionResetError: print("closed", end=" ")
"""
    seen: list[tuple[int, str]] = []

    def answer_one(connection: socket.socket) -> None:
        """Promise to keep the connection, and close it after reading the next request."""
        number = len({one for one, _ in seen})
        for turn in range(2):
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := connection.recv(65536)):
                    return
                data += more
            seen.append((number, data.split(b" ")[0].decode()))
            if turn == 0:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    internet.names["web.test"] = ["127.0.0.1"]
    with listening(answer_one) as port, internet.sandbox(internet.policy(f"web.test:{port}")) as box:
        result = box.run(code.replace("port)", f"{port})"))
        assert result.stdout.split() == ["200", "200", "200", "closed"], result.stderr
        until(lambda: len(box.network.log()) == 4)
        assert [line.code for line in box.network.log()] == ["net.allowed"] * 3 + ["net.broken"]
    # POST is sent once: only the client can decide whether the server acted on it.
    assert seen == [(0, "HEAD"), (0, "HEAD"), (1, "HEAD"), (1, "GET"), (2, "GET"), (2, "POST")]


def test_a_redirect_to_a_refused_host_is_judged_anew(internet: World) -> None:
    """G13."""
    with internet.http("web.test", "evil.test") as server:
        with internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
            url = f"http://web.test:{server.port}/redirect?to=http://evil.test:{server.port}/stolen"
            assert curl(box, url, "-L").stdout.endswith("403")
        assert [seen.target.partition("?")[0] for seen in server.seen] == ["/redirect"]


def test_odd_spellings_of_addresses_lead_nowhere(internet: World) -> None:
    """G04, G14, G15: by CONNECT, SOCKS and the resolver."""
    code = read_program("gateway/gateway_odd_addresses.py")
    with listening(lambda connection: connection.sendall(b"reached")) as port:
        with internet.sandbox(internet.policy(f"web.test:{port}")) as box:
            result = box.run(f"port = {port}\n{code}")
            assert [set(part.split()) - {"400", "403", "02"} for part in result.stdout.split(";")] == [set()] * 14
        assert internet.lookups == []


def test_nothing_but_the_resolver_answers_dns_and_no_query_leaves(internet: World) -> None:
    """G09: data in labels, other types, TCP; the gateway looks nothing up for them."""
    code = read_program("gateway/gateway_dns.py")
    with internet.sandbox(internet.policy("web.test")) as box:
        result = box.run(code)
        assert result.stdout.splitlines() == [
            "[(0, 1), (0, 1), (0, 0), (0, 0), (0, 0)]",
            "[(3, 0), (3, 0), (3, 0)]",
            "(3, 0)",
            "unreachable",
            "111",
            "127.77.",
        ], result.stderr
        assert internet.lookups == []
        assert len(result.denials) == 4


def test_an_address_that_has_no_name_is_not_a_way_out(internet: World) -> None:
    with internet.sandbox(internet.policy("web.test")) as box:
        for address in ("127.0.0.1", "127.77.0.9", "198.18.0.1"):
            result = curl(box, f"http://{address}/", *DIRECT)
            assert result.exit_code in (7, 55, 56)  # a reset comes while it connects, writes or reads
            assert codes(result) == [(f"{address}:80", "net.no-name")]


def test_many_bytes_come_through_whole(internet: World) -> None:
    data = os.urandom(1 << 20) * 24

    def give(connection: socket.socket) -> None:
        size = int.from_bytes(connection.recv(4), "big")
        connection.sendall(data[:size])
        connection.shutdown(socket.SHUT_WR)
        whole = hashlib.sha256()
        while piece := connection.recv(65536):
            whole.update(piece)
        digests.append(whole.hexdigest())

    digests: list[str] = []
    code = """
import socket, hashlib
sock = socket.create_connection(("big.test", port))
sock.sendall((24 << 20).to_bytes(4, "big"))
got = b"".join(iter(lambda: sock.recv(1 << 20), b""))
print(hashlib.sha256(got).hexdigest())
sock.sendall(got)
sock.shutdown(socket.SHUT_WR); sock.recv(1)
"""
    internet.names["big.test"] = ["127.0.0.1"]
    with listening(give) as port:
        with internet.sandbox(internet.policy(rules=(Rule(f"big.test:{port}", protocol="tcp"),))) as box:
            expected = hashlib.sha256(data).hexdigest()
            assert box.run(code.replace("port)", f"{port})")).stdout == f"{expected}\n"
            until(lambda: digests == [expected])
            assert (box.usage().sent_bytes, box.usage().received_bytes) == (len(data) + 4, len(data))


def until(ready: object, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not ready():  # type: ignore[operator]  # a lambda
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_budgets_cut_what_goes_beyond_them(internet: World) -> None:
    """G26."""
    begun: list[int] = []
    received: list[int] = []

    def swallow(connection: socket.socket) -> None:
        begun.append(1)
        count = 0
        try:
            while piece := connection.recv(65536):
                count += len(piece)
        finally:
            received.append(count)

    code = """
import socket
socks = [socket.create_connection(("up.test", port)) for _ in range(2)]
try: socket.create_connection(("up.test", port)).recv(1)
except OSError: pass  # a reset may come while it connects, or when it reads
try:
    while True: socks[0].sendall(b"x" * 65536)
except OSError as error: print(error.__class__.__name__)
"""
    internet.names["up.test"] = ["127.0.0.1"]
    with listening(swallow) as port:
        policy = internet.policy(rules=(Rule(f"up.test:{port}", protocol="tcp"),), upload=1_000_000, connections=2)
        with internet.sandbox(policy) as box:
            result = box.run(code.replace("port)", f"{port})"))
            assert result.stdout.strip() in ("ConnectionResetError", "BrokenPipeError")
            assert {denial.code for denial in result.denials} == {"net.upload", "net.connections"}
            assert box.usage().sent_bytes <= 1_000_000
        until(lambda: begun and len(received) == len(begun))  # the second may have ended before it was dialled
        assert 0 < sum(received) <= 1_000_000


def test_rules_change_on_a_live_sandbox_and_what_they_forbid_is_cut(internet: World) -> None:
    """G25."""
    code = """
import socket, sys
sock = socket.create_connection(("live.test", port)); sock.send(b"x"); print(sock.recv(1), flush=True)
try: print(sock.recv(1))
except OSError as error: print(error.__class__.__name__)
try: socket.create_connection(("live.test", port))
except OSError as error: print(error.__class__.__name__)
"""

    def hold(connection: socket.socket) -> None:
        connection.sendall(connection.recv(1))
        connection.recv(1)

    internet.names["live.test"] = ["127.0.0.1"]
    with listening(hold) as port:
        rule = Rule(f"live.test:{port}", protocol="tcp")
        policy = internet.policy("web.test", rules=(rule,))
        with (
            internet.sandbox(policy) as box,
            box.spawn(["python3", "-c", code.replace("port)", f"{port})")]) as process,
        ):
            for event in process:
                if b"x" in getattr(event, "data", b""):
                    break
            box.network.set(internet.policy("web.test").network)
            assert process.wait(timeout_s=10).stdout.split() == ["b'x'", "ConnectionResetError", "gaierror"]
            box.network.set(policy.network)
            with pytest.raises(PolicyError, match="without a listener for port 9999"):
                box.network.set(Network(allow=["web.test:9999"]))
            with pytest.raises(TypeError):
                box.network.set("web.test")  # type: ignore[arg-type]  # a wrong one is the point


def test_nothing_passes_while_the_gateway_is_down_and_new_connections_work_after(internet: World) -> None:
    """G25, with 200 connections open."""
    code = read_program("gateway/gateway_down.py")
    came: list[bytes] = []

    def echo_one(connection: socket.socket) -> None:
        while data := connection.recv(1):
            came.append(data)
            connection.sendall(data)

    internet.names["many.test"] = ["127.0.0.1"]
    with listening(echo_one) as port:
        policy = internet.policy(rules=(Rule(f"many.test:{port}", protocol="tcp"),), connections=300)
        with (
            internet.sandbox(policy) as box,
            box.spawn(["python3", "-c", code.replace("port)", f"{port})").replace("port),", f"{port}),")]) as process,
        ):
            output = ""
            for event in process:
                output += getattr(event, "text", "")
                if output == "200\n":
                    service().stop()
                    process.write("go\n")
                elif output == "200\n200\nwaiting\n":
                    assert sorted(set(came)) == [b"x"]
                    service().start()
            assert process.wait().stdout == "200\n200\nwaiting\nb'z'\n"


def test_a_sandbox_without_a_network_is_as_it_was() -> None:
    with Sandbox() as box:
        code = "import os\nprint([n for n in os.environ if 'proxy' in n.lower()])\n"
        code += "print(open('/proc/net/fib_trie').read().count('198.18'))"
        assert box.run(code).stdout == "[]\n0\n"
        assert box.enforcement.network.mechanism == "empty network namespace"
        assert (box.network.log(), box.network.summary()) == ((), ())
        with pytest.raises(UnsupportedError, match="started without a network"):
            box.network.set(Network(allow=["a.test"]))


def test_ports_that_cannot_be_are_said_before_anything_starts() -> None:
    for network in (Network(allow=["a.test:53"]), Network(allow=["a.test"], ports=list(range(1000, 1300)))):
        with pytest.raises(PolicyError):
            Sandbox(policy=Policy(network=network))


def test_the_proxy_moves_when_its_port_is_a_hosts(internet: World) -> None:
    with internet.sandbox(internet.policy("web.test:3128")) as box:
        assert box.exec(["printenv", "https_proxy"]).stdout == "http://127.0.0.1:3129\n"


def test_a_fork_of_the_caller_leaves_the_gateway_with_the_parent(internet: World) -> None:
    with internet.http("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if box.state == "closed" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert curl(box, f"http://web.test:{server.port}/").stdout.endswith("200")


def test_a_fork_of_the_caller_keeps_no_connection_from_ending(internet: World) -> None:
    """A pool of workers, say: guest and server waited for an end until the last of them had ended."""
    code = """
import socket, sys
with socket.create_connection(("web.test", int(sys.argv[1]))) as sock:
    sock.sendall(b"GET / HTTP/1.0\\r\\nHost: web.test\\r\\n\\r\\n")
    sock.settimeout(5)
    while data := sock.recv(4096):
        last = data
print(last[-5:])
"""
    ended = threading.Event()
    children: list[int] = []

    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        children.append(_sleeper())
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        connection.recv(1)
        ended.set()

    try:
        with listening(answer) as port:
            internet.names["web.test"] = ["127.0.0.1"]
            with internet.sandbox(internet.policy(f"web.test:{port}")) as box:
                result = box.exec(["python3", "-c", code, str(port)])
                assert (result.stdout, ended.wait(5)) == ("b'hello'\n", True), result.stderr
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _sleeper() -> int:
    """Return the pid of a fork that does nothing for a while."""
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    return pid


def test_without_the_parser_nothing_passes_and_it_is_told_why(internet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("ringfence.gateway.http.", "h11"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "h11", None)
    with internet.http("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        for options in ((), DIRECT):
            body, _, status = curl(box, f"http://web.test:{server.port}/", *options).stdout.rpartition("\n")
            assert "pip install 'ringfence-sandbox[network]'" in json.loads(body)["message"]
            assert status == "502"
        until(
            lambda: (
                [(line.host, line.code) for line in box.network.log()]
                == [("(proxy)", "net.unsupported"), ("web.test", "net.unsupported")]
            )
        )
        assert server.seen == []


def test_without_the_parser_tls_connect_and_socks_pass(internet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowing twin: traffic that is not read needs no package."""
    for name in [name for name in sys.modules if name.startswith(("ringfence.gateway.http.", "h11"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "h11", None)
    with internet.https("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        for options in ((), DIRECT, ("-x", "socks5h://127.0.0.1:3128")):
            assert curl(box, f"https://web.test:{server.port}/body", "-d", "hello", *options).stdout == "hello\n200"


def test_the_proxy_is_named_in_both_cases(internet: World) -> None:
    with internet.sandbox(internet.policy("web.test")) as box:
        code = "import os\nfor name in ('HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY', 'NO_PROXY'):\n"
        code += "    print(os.environ[name] == os.environ[name.lower()], os.environ[name])"
        proxy = "True http://127.0.0.1:3128\n"
        *proxies, around = box.run(code).stdout.splitlines(keepends=True)
        assert (proxies[:2], proxies[2].startswith("True "), "127.0.0.1" in around) == ([proxy] * 2, True, True)


def test_a_guests_server_finds_a_permitted_port_taken_and_others_free(internet: World) -> None:
    """docs/network.md says so."""
    code = """
import errno, socket
for port in (8443, 3128, 8080):
    sock = socket.socket()
    try: sock.bind(("127.0.0.1", port)); sock.listen(); print(port, "free")
    except OSError as error: print(port, errno.errorcode[error.errno])
"""
    with internet.sandbox(internet.policy("web.test:8443")) as box:
        assert box.run(code).stdout == "8443 EADDRINUSE\n3128 EADDRINUSE\n8080 free\n"
