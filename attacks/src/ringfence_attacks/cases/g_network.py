"""G: the network with no host allowed: nothing reaches a listener of the host, whatever the address looks like.

Every target is a listener that the case starts on this machine. No arm sends a packet that leaves the machine.
"""

from __future__ import annotations

import os
import socket

from ringfence_attacks.case import ESCAPE, LEAK, Seen, attack, cases, not_applicable
from ringfence_attacks.tracer import host_pid, reported_pid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm
    from ringfence_attacks.witnesses import Listener

_CONNECT = """
import socket
def reach(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(1)
        sock.connect(address)
        sock.send(b"here")
for family, address in targets:
    attempt(str(address), reach, family, tuple(address) if isinstance(address, list) else address)
"""


def _connects(arm: Arm, targets: list[tuple[int, str]], *, ipv6: bool = False) -> Seen:
    listener = arm.listen_tcp(ipv6=ipv6)
    given = [(int(family), [host, listener.port]) for family, host in targets]
    report = arm.python(_CONNECT, targets=given)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} connections; {report.words()}")


@attack("G01", "no connection reaches the host", ESCAPE, off="net-namespace")
def tcp(arm: Arm) -> Seen:
    return _connects(arm, [(socket.AF_INET, "127.0.0.1")])


@attack("G01-udp", "no datagram reaches the host", ESCAPE, off="net-namespace")
def udp(arm: Arm) -> Seen:
    listener = arm.listen_udp()
    code = """
    import socket
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    attempt("udp", sock.sendto, b"here", ("127.0.0.1", port))
    """
    report = arm.python(code, port=listener.port)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} datagrams; {report.words()}")


_NO_PROXY = """
for name in list(os.environ):
    if "proxy" in name.lower(): del os.environ[name]
import socket
def reach():
    with socket.create_connection((host, port), timeout=1) as sock: sock.send(b"here")
attempt("raw", reach)
"""


@attack("G02", "a program that ignores the proxy variables has no other way out", ESCAPE, off="net-namespace")
def without_proxy(arm: Arm) -> Seen:
    listener = arm.listen_tcp()
    report = arm.python(_NO_PROXY, host="localhost", port=listener.port)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} connections; {report.words()}")


@attack("G03", "IPv6 reaches no more than IPv4", ESCAPE, off="net-namespace")
def ipv6(arm: Arm) -> Seen:
    return _connects(arm, [(socket.AF_INET6, "::1")], ipv6=True)


_FORMS = ("127.0.0.1", "0.0", "0", "127.1", "0x7f.1", "2130706433", "017700000001", "127.255.255.254")


@attack("G04", "no spelling of an address reaches the host", ESCAPE, off="net-namespace")
def spellings(arm: Arm) -> Seen:
    targets: list[tuple[int, str]] = [(socket.AF_INET, form) for form in _FORMS]
    return _connects(arm, [*targets, (socket.AF_INET6, "::ffff:127.0.0.1"), (socket.AF_INET6, "::")])


@attack("G05", "services on the host's loopback are out of reach, whatever their port", ESCAPE, off="net-namespace")
def loopback_services(arm: Arm) -> Seen:
    listeners = [arm.listen_tcp() for _ in range(3)]
    code = _CONNECT.replace(
        "for family, address in targets:", "for family, address in [(2, ('127.0.0.1', p)) for p in ports]:"
    )
    report = arm.python(code, ports=[listener.port for listener in listeners])
    came = sum(len(listener.received()) for listener in listeners)
    return Seen(came > 0, f"{came} of 3 services reached; {report.words()}")


def _cards(arm: Arm) -> Seen:
    """Judge by the network devices and routes of the guest's namespace, as the host reads them. Nothing is sent."""
    box = arm.sandbox()
    pid = host_pid(box, reported_pid(arm.spawn("tell(pid=os.getpid())\ntime.sleep(8)", box=box))[0])
    with open(f"/proc/{pid}/net/dev", encoding="ascii") as file:
        names = [line.partition(":")[0].strip() for line in file if ":" in line]
    with open(f"/proc/{pid}/net/route", encoding="ascii") as file:
        routes = len(file.readlines()) - 1
    same = os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return Seen(
        same or names != ["lo"] or routes > 0, f"devices {', '.join(names)}; {routes} routes; the host's: {same}"
    )


@attack("G06", "no device and no route leads to the host's own networks", ESCAPE, off="net-namespace")
def host_networks(arm: Arm) -> Seen:
    return _cards(arm)


@attack("G07", "no route leads to a metadata service", LEAK, off="net-namespace")
def metadata(arm: Arm) -> Seen:
    return _cards(arm)


@attack("G16", "QUIC, NTP, mDNS and similar protocols find no device to leave by", ESCAPE, off="net-namespace")
def other_protocols(arm: Arm) -> Seen:
    listener = arm.listen_udp()
    code = """
    import socket
    for host in ("127.0.0.1", "0.0.0.0", "127.0.0.53"):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        attempt(host, sock.sendto, b"here", (host, port))
    """
    report = arm.python(code, port=listener.port)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} datagrams; {report.words()}")


_UNIX = """
import socket
def reach(address):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(1)
    sock.connect(address)
    sock.send(b"here")
for address in addresses:
    attempt(repr(address), reach, address)
"""


def _reaches_unix(arm: Arm, listener: Listener, *addresses: str) -> Seen:
    report = arm.python(_UNIX, addresses=addresses)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} connections; {report.words()}")


@attack(
    "G18",
    "the host's abstract sockets are not in the sandbox's namespace",
    ESCAPE,
    off="net-namespace",
    behind="landlock-scopes",
)
def abstract_by_namespace(arm: Arm) -> Seen:
    listener = arm.listen_abstract()
    return _reaches_unix(arm, listener, "\0" + listener.address)


@attack(
    "G18-scope",
    "Landlock refuses the host's abstract sockets even in a shared network namespace",
    ESCAPE,
    off="landlock-scopes",
    behind="net-namespace",
    needs="landlock",
)
def abstract_by_scope(arm: Arm) -> Seen:
    listener = arm.listen_abstract()
    return _reaches_unix(arm, listener, "\0" + listener.address)


@attack("G18-path", "sockets with a path on the host are not shown", ESCAPE, off="view")
def path_socket(arm: Arm) -> Seen:
    listener = arm.listen_path()
    return _reaches_unix(arm, listener, listener.address, "/mnt" + listener.address)


_SERVER = """
import socket
server = socket.socket()
server.bind(("0.0.0.0", 0))
server.listen()
tell(port=server.getsockname()[1])
tell(pid=os.getpid())
server.settimeout(3)
connection = attempt("accept", server.accept)
if connection:
    loot(connection[0].recv(64))
"""


def _port(said: str) -> int:
    return int(said.partition('"port": ')[2].split("}")[0])


@attack("G20", "one sandbox does not reach another", ESCAPE, off="net-namespace")
def sandbox_to_sandbox(arm: Arm) -> Seen:
    """A server in the first sandbox prints all data that comes; the second sandbox tries to send the canary there."""
    server = arm.spawn(_SERVER, box=arm.sandbox())
    port = _port(reported_pid(server)[1])
    report = arm.python(
        """
        import socket
        with socket.socket() as client:
            client.settimeout(2)
            if attempt("connect", client.connect, ("127.0.0.1", port)) is None:
                attempt("send", client.sendall, canary.encode())
        """,
        port=port,
        canary=arm.canary,
    )
    process_ends = arm.off or report.met.get("connect") == "ok"
    if not process_ends:
        server.kill()  # no client has connected, and none will
    heard = "".join(getattr(event, "text", "") for event in server)
    return Seen(arm.canary in heard, f"the second: {report.words()}")


@attack("G21", "a listening guest is not reached from the host's loopback", ESCAPE, off="net-namespace")
def reached_from_outside(arm: Arm) -> Seen:
    server = arm.spawn(_SERVER, box=arm.sandbox())
    port = _port(reported_pid(server)[1])
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return Seen(succeeded=True, what=f"connected to port {port} of the guest")
    except OSError as error:
        return Seen(succeeded=False, what=f"port {port}: {error.strerror}")


ELSEWHERE = [
    not_applicable(
        "G17", "no raw socket, route or tunnel", ESCAPE, "tried as E18 (families), E01 (namespaces), A18 (devices)"
    ),
    not_applicable("G19", "no vsock to the host", ESCAPE, "tried as E18"),
    not_applicable("G22", "covert channels", LEAK, "out of scope: the threat model says so"),
]

CASES = cases(globals())
