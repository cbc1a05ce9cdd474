"""Whether one network permits nothing that another does not. Exact: it looks at one host of every kind.

Two hosts are of one kind when no pattern of either network tells them apart. So it is enough to compare what both
networks say about each name they mention, one unknown name below each, one unknown name and one unknown address.
"""

from __future__ import annotations

from ringfence.policy.hosts import HostPattern, is_address, parse_pattern
from ringfence.policy.model import allow_patterns
from ringfence.policy.reach import listening_ports, ports_of
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ringfence.policy.model import Network, Rule

    Index = dict[tuple[str, bool], list[tuple[int, HostPattern]]]

# No host can be called so, which makes them names that no pattern mentions.
_ANY_NAME = "*"
_ANY_ADDRESS = "[*]"


@final
class _Permit(Struct):
    """The entry by which a host is permitted on a port. `rule` None: TLS and HTTP, any request."""

    key: str
    rule: Rule | None = None


def widened(ceiling: Network, request: Network) -> Iterator[tuple[str, str]]:
    """The key of each entry of `request` that permits more than `ceiling`, and how."""
    extra = _extra_ports(ceiling, request)
    if extra:
        yield "network.ports", f"{', '.join(map(str, sorted(extra)))} not permitted"
    most, wanted = _Reach(ceiling), _Reach(request)
    found: dict[str, str] = {}
    for name in _kinds(request, ceiling):
        permits = wanted.permits(name)
        held = most.permits(name) if permits else {}
        for port in sorted(permits.keys() - extra):
            if not _fits(permits[port], held.get(port)):
                key, reason = _fault(most, name, port, permits[port], held.get(port))
                found.setdefault(key, reason)
    yield from found.items()


def _extra_ports(ceiling: Network, request: Network) -> frozenset[int]:
    """Ports of `request.ports` that the ceiling has nowhere, where something is reachable on them."""
    used = request.allow == "public" or any(target.port is None for target in _targets(request))
    return frozenset(request.ports).difference(ceiling.ports, listening_ports(ceiling)) if used else frozenset()


def _targets(network: Network) -> list[HostPattern]:
    return [*allow_patterns(network), *(parse_pattern(rule.host) for rule in network.rules)]


def _kinds(*networks: Network) -> Iterable[str]:
    """One host of each kind. Of `*.a.com` that is the text itself: a name below a.com that nothing else mentions."""
    patterns = [
        pattern for one in networks for pattern in (*_targets(one), *(parse_pattern(entry) for entry in one.deny))
    ]
    names = dict.fromkeys(pattern.name for pattern in patterns)
    below = dict.fromkeys(f"*.{name}" for name in names if not is_address(name))
    return {**names, **below, _ANY_NAME: None, _ANY_ADDRESS: None}


class _Reach:
    """What the gateway does with a host under a network (network/rules.py); a property test compares the two."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._deny = _index(network.deny)
        self._rules = _index(rule.host for rule in network.rules)
        self._allow = _index(() if network.allow == "public" else network.allow)

    def permits(self, name: str) -> dict[int, _Permit]:
        """By port. Deny wins; then a rule, the most telling first; then `allow`."""
        found: dict[int, _Permit] = {}
        for index, pattern in _about(self._rules, name):
            for port in ports_of(pattern, self.network):
                found.setdefault(port, _Permit(f"network.rules[{index}]", self.network.rules[index]))
        for index, pattern in _about(self._allow, name):
            for port in ports_of(pattern, self.network):
                found.setdefault(port, _Permit(f"network.allow[{index}]"))
        if self.network.allow == "public" and not self.closed_to(name):
            for port in self.network.ports:
                found.setdefault(port, _Permit("network.allow"))
        return {port: permit for port, permit in found.items() if self.denial(name, port) is None}

    def denial(self, name: str, port: int) -> str | None:
        """The entry of `deny` that takes the host back."""
        return next((str(one) for _, one in _about(self._deny, name) if one.port in (None, port)), None)

    def closed_to(self, name: str) -> bool:
        """Whether "public" leaves it out: an address would be a way around a name that is denied."""
        return is_address(name) and bool(self.network.deny)


def _index(entries: Iterable[str]) -> Index:
    found: Index = {}
    for index, entry in enumerate(entries):
        pattern = parse_pattern(entry)
        found.setdefault((pattern.name, pattern.wildcard), []).append((index, pattern))
    return found


def _about(index: Index, name: str) -> Iterator[tuple[int, HostPattern]]:
    """The patterns that mean `name`: an exact one first, then the longest wildcard, of the same those with a port."""
    labels = name.split(".")
    for key in ((name, False), *((".".join(labels[start:]), True) for start in range(1, len(labels)))):
        yield from sorted(index.get(key, ()), key=lambda pair: pair[1].port is None)


def _fits(wanted: _Permit, held: _Permit | None) -> bool:
    if held is None:
        return False
    if held.rule is None:
        # An opaque stream is more than `allow` gives, where host names are checked inside TLS and HTTP.
        return wanted.rule is None or wanted.rule.protocol != "tcp"
    return wanted.rule is not None and _rule_within(wanted.rule, held.rule)


def _rule_within(rule: Rule, other: Rule) -> bool:
    """Whether every request that `rule` permits is permitted by `other`, hosts aside. Empty lists mean any."""
    methods = not other.methods or (rule.methods and set(rule.methods) <= set(other.methods))
    paths = not other.paths or (rule.paths and all(path.startswith(tuple(other.paths)) for path in rule.paths))
    return bool(rule.protocol == other.protocol and methods and paths)


def _fault(most: _Reach, name: str, port: int, wanted: _Permit, held: _Permit | None) -> tuple[str, str]:
    """The key that names the part, and the reason."""
    if held is not None and held.rule is not None:
        return wanted.key, f"{name}:{port} is permitted by the rule for {held.rule.host} only"
    denied = most.denial(name, port)
    if denied is not None:
        return "network.deny", f"{denied} must stay denied"
    public = wanted.key == "network.allow"
    if most.network.allow == "public" and most.closed_to(name):
        # Under "public" it is the missing `deny` that opens addresses.
        return ("network.deny", "addresses must stay closed") if public else (wanted.key, f"{name} is an address")
    if public and most.network.allow != "public":
        return wanted.key, '"public" is more than the listed hosts'
    if held is not None:
        return wanted.key, f"{name}:{port} is not permitted for an opaque stream"
    return wanted.key, f'"public" is not permitted on port {port}' if public else f"{name}:{port} is not permitted"
