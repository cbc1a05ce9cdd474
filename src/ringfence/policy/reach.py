"""Computes what a network lets the guest reach, to compare two policies, or a policy with its secrets."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.hosts import HostPattern, parse_pattern
from ringfence.policy.model import allow_patterns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Network, Policy


def ports_of(pattern: HostPattern, network: Network) -> frozenset[int]:
    """Return the ports that a pattern means in its network."""
    return frozenset(network.ports if pattern.port is None else (pattern.port,))


def permitted_and_denied(network: Network) -> tuple[str, ...]:
    """Return the entries of `allow` and hosts of rules that `deny` closes completely. Deny wins; people should know."""
    named = [*allow_patterns(network), *(parse_pattern(rule.host) for rule in network.rules)]
    denied = [parse_pattern(text) for text in network.deny]
    return tuple(str(one) for one in named if any(no.covers(one) and no.port in (None, one.port) for no in denied))


PROXY_PORT = 3128
RESOLVER_PORT = 53
MOST_PORTS = 200  # each port is a listener in every sandbox


def listening_ports(network: Network) -> tuple[int, ...]:
    """Return every port on which some host may be reachable, sorted."""
    patterns = [*allow_patterns(network), *(parse_pattern(rule.host) for rule in network.rules)]
    found = set(network.ports) if network.allow == "public" else set()
    return tuple(sorted(found.union(*(ports_of(pattern, network) for pattern in patterns))))


def proxy_port(network: Network) -> int:
    """Return the port on which the proxy listens inside, which is no port of any host."""
    taken = listening_ports(network)
    return next(port for port in range(PROXY_PORT, 65536) if port not in taken)


_MOST_STREAMS = 1024  # each stream may hold a window of bytes on both sides
_SPARE_STREAMS = 32  # for the resolver, and for connections that are refused with a reason


def relayed_streams(network: Network) -> int:
    """Return how many connections guestd relays at once; further connections wait inside."""
    return min(network.connections + _SPARE_STREAMS, _MOST_STREAMS)


def check_secrets(policy: Policy) -> None:
    """Check that each secret is named once, is no variable of `env` too, and goes only to hosts reached by TLS.

    Raises PolicyError.
    """
    seen = set()
    for index, secret in enumerate(policy.secrets):
        key = f"secrets[{index}].name"
        if secret.name in seen:
            raise PolicyError(f"{key}: {secret.name} is named twice", key=key, fix="remove one of them")
        if secret.name in policy.env:
            fix = "remove it from env: the placeholder takes that name"
            raise PolicyError(f"{key}: {secret.name} is also in env", key=key, fix=fix)
        seen.add(secret.name)
        for host in secret.hosts:
            _check_host(policy.network, parse_pattern(host), f"secrets[{index}].hosts")


def _check_host(network: Network, wanted: HostPattern, key: str) -> None:
    for entry in network.deny:
        denied = parse_pattern(entry)
        if denied.covers(wanted) and denied.port in (None, wanted.port):
            raise PolicyError(f"{key}: {wanted} is denied by network.deny", key=key, fix=f"remove {entry} from it")
    if network.allow == "public" or any(_reaches(network, entry, wanted) for entry in allow_patterns(network)):
        return
    protocols = {rule.protocol for rule in network.rules if _reaches(network, parse_pattern(rule.host), wanted)}
    if "tls" in protocols:
        return
    if protocols:
        fix = 'write protocol = "tls" in its rule'
        raise PolicyError(f"{key}: {wanted} is only reachable without TLS", key=key, fix=fix)
    fix = f'add "{wanted}" to network.allow'
    raise PolicyError(f"{key}: {wanted} is not reachable under network", key=key, fix=fix)


def _reaches(network: Network, entry: HostPattern, wanted: HostPattern) -> bool:
    return entry.covers(wanted) and (wanted.port is None or wanted.port in ports_of(entry, network))
