"""Decides what a policy says about a name and a port. Pure; no other module decides that.

Deny wins. A rule comes before an entry of `allow`, because a rule demands more. A name in no line is refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ringfence.errors import PolicyError
from ringfence.gateway.types import Refusal, Target
from ringfence.policy.hosts import is_address, parse_pattern
from ringfence.policy.model import allow_patterns
from ringfence.policy.reach import MOST_PORTS, RESOLVER_PORT, listening_ports
from ringfence.values import Struct, final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

    from ringfence.gateway.secrets.vault import Vault
    from ringfence.policy.hosts import HostPattern
    from ringfence.policy.model import Network, Policy, Rule
    from ringfence.values import Protocol


@final
class Verdict(Struct):
    """What the rules say about a name on a port. `refusal` is None when the name may be reached."""

    refusal: Refusal | None
    target: Target
    entry: str | None = None  # the line of the policy that permits the name, for the log
    protocol: Protocol | Literal["any"] = "any"  # any: TLS or HTTP, whichever the client speaks; both are checked

    def same_way(self, other: Verdict) -> bool:
        """Return whether a connection made under the verdict `other` may stay under this verdict."""
        mine = (self.refusal is None, self.target.rule, self.protocol)
        return mine == (other.refusal is None, other.target.rule, other.protocol)


class NetworkRules:
    """The patterns of a network, parsed once."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._deny = [parse_pattern(text) for text in network.deny]
        self._rules = _exact_first([(parse_pattern(rule.host), rule) for rule in network.rules])
        self._allow = list(allow_patterns(network))
        self._public = network.allow == "public"
        self._last: tuple[tuple[str, int], Verdict] | None = None  # a connection is asked about more than once

    def decide(self, name: str, port: int) -> Verdict:
        """Return the verdict on a canonical name and a port."""
        last = self._last
        if last is not None and last[0] == (name, port):
            return last[1]
        found = self._decide(name, port)
        if found.refusal is None:  # a refusal is raised, and must be a new object each time
            self._last = ((name, port), found)
        return found

    def _decide(self, name: str, port: int) -> Verdict:
        plain = Target(name, port, None)
        if any(entry.matches(name) and entry.port in (None, port) for entry in self._deny):
            return Verdict(_denied(name, port), plain)
        for pattern, rule in self._rules:
            if pattern.matches(name) and port in self._ports(pattern):
                return Verdict(None, Target(name, port, rule), f"rules: {rule.host}", rule.protocol)
        for pattern in self._allow:
            if pattern.matches(name) and port in self._ports(pattern):
                return Verdict(None, plain, str(pattern))
        if self._public and port in self.network.ports and not (is_address(name) and self._deny):
            # An address would be a way around a denied name.
            return Verdict(None, plain, "public")
        return Verdict(self._not_allowed(name, port), plain)

    def resolves(self, name: str) -> bool:
        """Return whether some port of `name` is permitted, so that the name has an address inside."""
        if is_address(name):
            return False
        ports = {port for pattern in self._matching(name) for port in self._ports(pattern)}
        if self._public:
            ports.update(self.network.ports)
        return any(self.decide(name, port).refusal is None for port in ports)

    def _matching(self, name: str) -> list[HostPattern]:
        known = [*(pattern for pattern, _ in self._rules), *self._allow]
        return [pattern for pattern in known if pattern.matches(name)]

    def _ports(self, pattern: HostPattern) -> Iterable[int]:
        return self.network.ports if pattern.port is None else (pattern.port,)

    def _not_allowed(self, name: str, port: int) -> Refusal:
        line = f'network.allow = [..., "{name}:{port}"]' if port else f'network.allow = [..., "{name}"]'
        if self._public and is_address(name) and self._deny:
            return Refusal("net.address", f"{name} is an address, and with network.deny only names can be reached")
        if self._public or self._matching(name):
            what = f"{name} is not permitted on port {port}"
            if self._public:
                line = f"network.ports = [..., {port}]"
            return Refusal("net.port", what, allow=line)
        what = f"{name}:{port}" if port else name
        return Refusal("net.not-allowed", f"{what} is not among the hosts of the policy's network", allow=line)


def _exact_first(found: list[tuple[HostPattern, Rule]]) -> list[tuple[HostPattern, Rule]]:
    """Return the rules with the most telling pattern first: exact patterns, then the longest."""
    return sorted(found, key=lambda pair: (pair[0].wildcard, -len(pair[0].name), pair[0].port is None))


def _denied(name: str, port: int) -> Refusal:
    where = f"{name}:{port}" if port else name
    return Refusal("net.denied", f"{where} is denied by the policy", allow=f"remove {name} from network.deny")


@lru_cache(maxsize=64)
def compiled(network: Network) -> NetworkRules:
    """Return the rules of a network; an equal network is parsed once."""
    return NetworkRules(network)


def decide(network: Network, name: str, port: int) -> Verdict:
    """Return the verdict of `network` on a canonical name and a port. Pure."""
    return compiled(network).decide(name, port)


def intercepted(target: Target, vault: Vault) -> bool:
    """Return whether requests to a target must be read: for a rule's methods or paths, or for a secret."""
    rule = target.rule
    if rule is not None and rule.protocol != "tls":
        return False
    if rule is not None and (rule.methods or rule.paths):
        return True
    return vault.serves(target.name, target.port)


def check_network(policy: Policy) -> None:
    """Check a policy that asks for a network, before anything starts.

    Raises PolicyError, and UnsupportedError where a package is missing. Changes nothing in this process.
    """
    ports = listening_ports(policy.network)
    if RESOLVER_PORT in ports:
        raise PolicyError(
            f"port {RESOLVER_PORT} cannot be permitted: inside, the resolver has it",
            key="network.ports",
            fix="remove it; names are looked up without it",
        )
    if len(ports) > MOST_PORTS:
        raise PolicyError(f"the network names {len(ports)} ports; the most is {MOST_PORTS}", key="network.ports")
    if policy.secrets or policy.network.rules:
        from ringfence.gateway.secrets import trust

        if trust.is_needed(policy.network, policy.secrets):
            trust.check_packages()
    if policy.secrets:
        from ringfence.gateway.secrets.vault import Vault

        Vault(policy.secrets)  # raises for a value that is missing or cannot be kept, before anything starts
