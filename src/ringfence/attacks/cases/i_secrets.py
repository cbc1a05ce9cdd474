"""I: secrets. This version injects none, so what is tried is that those of the host's user cannot be reached."""

from __future__ import annotations

from ringfence.attacks.case import BARE, LEAK, Seen, attack, cases, not_applicable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.attacks.arena import Arm


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
    told = arm.python(code, address=listener.address)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} connections; {told.words()}")


_LATER = "secrets are not in this version"
ELSEWHERE = [
    not_applicable(
        "I01", "a secret is not in a child's environment", LEAK, f"{_LATER}; the supervisor's own: H01, H12"
    ),
    not_applicable("I02", "a secret is not in anybody's arguments", LEAK, f"{_LATER}; the supervisor's own: H12"),
    not_applicable("I03", "a secret is in no log", LEAK, _LATER),
    not_applicable("I04", "a secret is in no snapshot", LEAK, _LATER),
    not_applicable("I05", "a secret goes to its own host alone", LEAK, _LATER),
    not_applicable("I06", "a guest that has a secret can tell it", LEAK, "cannot be stopped: documented"),
]

CASES = cases(globals())
