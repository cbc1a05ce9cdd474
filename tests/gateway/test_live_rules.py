"""Rules that change under open connections: what they no longer permit is cut, and nothing else."""

from __future__ import annotations

import socket
import threading

import pytest

from gateway.world import World, listening
from ringfence import Network, Rule, Sandbox, SandboxClosedError
from ringfence.gateway.service import service


def test_a_connection_to_an_address_that_is_private_again_is_cut_and_others_stay(internet: World) -> None:
    """G25: the rule for its name is the same as before."""
    code = """
import socket, sys
one, two = (socket.create_connection((name, int(port))) for name, port in zip(("one.test", "two.test"), sys.argv[1:]))
for sock in (one, two): sock.send(b"x"); sock.recv(1)
print("ready", flush=True)
sys.stdin.readline()
for sock in (one, two):
    try: sock.send(b"y"); print(sock.recv(1))
    except OSError as error: print(error.__class__.__name__)
"""

    def hold(connection: socket.socket) -> None:
        while data := connection.recv(1):
            connection.sendall(data)

    internet.names.update({"one.test": ["127.0.0.1"], "two.test": ["127.0.0.2"]})
    with listening(hold) as one, listening(hold, "127.0.0.2") as two:
        rules = [Rule(f"one.test:{one}", protocol="tcp"), Rule(f"two.test:{two}", protocol="tcp")]
        command = ["python3", "-c", code, str(one), str(two)]
        with internet.sandbox(internet.policy(rules=tuple(rules))) as box, box.spawn(command) as process:
            for event in process:
                if b"ready" in getattr(event, "data", b""):
                    break
            box.network.set(Network(rules=rules, private=["127.0.0.2/32"]))
            process.write("go\n")
            assert process.wait(timeout_s=10).stdout.split() == ["ready", "ConnectionResetError", "b'y'"]
            assert [(denial.target, denial.code) for denial in box.denials()] == [
                (f"one.test:{one}", "net.rules-changed")
            ]


def test_a_name_whose_address_becomes_private_while_it_is_dialled_is_refused(internet: World) -> None:
    held, asked = threading.Event(), threading.Event()

    def lookup(name: str, port: int) -> list[str]:
        del name, port
        asked.set()
        held.wait(10)
        return ["127.0.0.1"]

    begun: list[int] = []
    with listening(lambda _: begun.append(1)) as port:
        rule = Rule(f"one.test:{port}", protocol="tcp")
        code = f"import socket; print(socket.create_connection(('one.test', {port})).recv(1))"
        before, service().resolver.lookup = service().resolver.lookup, lookup
        try:
            with internet.sandbox(internet.policy(rules=(rule,))) as box, box.spawn(["python3", "-c", code]) as process:
                assert asked.wait(10)
                box.network.set(Network(rules=[rule]))
                held.set()
                assert "ConnectionResetError" in process.wait(timeout_s=10).stderr
                assert [denial.code for denial in box.denials()] == ["net.private-address"]
        finally:
            service().resolver.lookup = before


def test_a_sandbox_that_has_ended_takes_no_rules(internet: World) -> None:
    policy = internet.policy("a.test")
    with internet.sandbox(policy) as box:
        box.network.set(policy.network)
    with pytest.raises(SandboxClosedError):
        box.network.set(policy.network)


_KEPT = """
import socket
one, two = (socket.gethostbyname(name) for name in ("one.test", "two.test"))
"""
_OTHER_ORDER = """
socket.gethostbyname("two.test")
try:
    print(socket.create_connection((one, PORT), 5).recv(9))
except OSError:
    print("no way")
"""


def test_an_address_in_copied_memory_never_means_another_host(internet: World) -> None:
    """With a rule for tcp no name is sent again: data for the first host went to the second."""
    with listening(lambda connection: connection.sendall(b"welcome")) as port:
        internet.names.update({name: ["127.0.0.1"] for name in ("one.test", "two.test")})
        rules = tuple(Rule(f"{name}.test:{port}", protocol="tcp") for name in ("one", "two"))
        ask = _OTHER_ORDER.replace("PORT", str(port))
        with internet.sandbox(internet.policy(rules=rules)) as box:
            box.run(_KEPT).check()
            with box.fork() as twin:
                assert twin.run(ask).stdout == "b'welcome'\n"
            assert internet.lookups == ["one.test"]
            kept = box.snapshot(memory=True)
            with Sandbox(policy=box.policy, backend=internet.backend, snapshot=kept) as later:
                assert later.run(ask).stdout == "b'welcome'\n"
            kept.delete()
    assert internet.lookups == ["one.test"] * 2
