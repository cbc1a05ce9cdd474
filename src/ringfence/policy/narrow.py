"""Decides whether a policy, the request, fits inside another, the ceiling; names every part that does not fit.

Nothing is cut to fit. Paths are compared as text: whether a source is a link out of the ceiling's source is checked
where the source is opened. Variables (`env`) go from the caller to its own guest and widen nothing.
"""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.checks import format_size
from ringfence.policy.hosts import HostPattern, is_address, parse_pattern
from ringfence.policy.model import allow_patterns
from ringfence.policy.reach import listening_ports, ports_of
from ringfence.policy.secrets import origin
from ringfence.shared.paths import is_within
from ringfence.text import bare_or_in_quotes
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ringfence.policy.model import Limits, Mount, Network, Policy, Rule
    from ringfence.policy.secrets import Secret

    Index = dict[tuple[str, bool], list[tuple[int, HostPattern]]]


# ── networks ──────────────────────────────────────────────────────────────────────────────────────

# Whether one network permits nothing that another does not. The answer is exact, though only one host of each kind is
# checked: two hosts are of the same kind when no pattern of either network tells them apart. It is therefore enough to
# compare what both networks permit for each name in either network, one unknown name below each, one unknown name and
# one unknown address.

_ANY_NAME = "*"
_ANY_ADDRESS = "[*]"


@final
class _Permit(Struct):
    """The entry that permits a host on a port. `rule` None: TLS and HTTP, any request."""

    key: str
    rule: Rule | None = None


def widened(ceiling: Network, request: Network) -> Iterator[tuple[str, str]]:
    """Yield the key of each entry of `request` that permits more than `ceiling`, and the reason."""
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
    """Return the ports of `request.ports` that the ceiling does not have, where a host is reachable on them."""
    used = request.allow == "public" or any(target.port is None for target in _targets(request))
    return frozenset(request.ports).difference(ceiling.ports, listening_ports(ceiling)) if used else frozenset()


def _targets(network: Network) -> list[HostPattern]:
    return [*allow_patterns(network), *(parse_pattern(rule.host) for rule in network.rules)]


def _kinds(*networks: Network) -> Iterable[str]:
    """Return a host of each kind. The text `*.a.com` itself is the host below a.com that no other pattern mentions."""
    patterns = [
        pattern for one in networks for pattern in (*_targets(one), *(parse_pattern(entry) for entry in one.deny))
    ]
    names = dict.fromkeys(pattern.name for pattern in patterns)
    below = dict.fromkeys(f"*.{name}" for name in names if not is_address(name))
    return {**names, **below, _ANY_NAME: None, _ANY_ADDRESS: None}


class _Reach:
    """The gateway's decisions under a network, the same as in gateway/rules.py; a property test compares both."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._deny = _index(network.deny)
        self._rules = _index(rule.host for rule in network.rules)
        self._allow = _index(() if network.allow == "public" else network.allow)

    def permits(self, name: str) -> dict[int, _Permit]:
        """Return what permits the host `name`, by port. Deny wins; then the most exact rule; then `allow`."""
        found: dict[int, _Permit] = {}
        for index, pattern in _matching(self._rules, name):
            for port in ports_of(pattern, self.network):
                found.setdefault(port, _Permit(f"network.rules[{index}]", self.network.rules[index]))
        for index, pattern in _matching(self._allow, name):
            for port in ports_of(pattern, self.network):
                found.setdefault(port, _Permit(f"network.allow[{index}]"))
        if self.network.allow == "public" and not self.closed_to(name):
            for port in self.network.ports:
                found.setdefault(port, _Permit("network.allow"))
        return {port: permit for port, permit in found.items() if self.denial(name, port) is None}

    def denial(self, name: str, port: int) -> str | None:
        """Return the entry of `deny` that closes the host; None without such an entry."""
        return next((str(one) for _, one in _matching(self._deny, name) if one.port in (None, port)), None)

    def closed_to(self, name: str) -> bool:
        """Return whether "public" leaves out the host `name`: an address would be a way around a denied name."""
        return is_address(name) and bool(self.network.deny)


def _index(entries: Iterable[str]) -> Index:
    found: Index = {}
    for index, entry in enumerate(entries):
        pattern = parse_pattern(entry)
        found.setdefault((pattern.name, pattern.wildcard), []).append((index, pattern))
    return found


def _matching(index: Index, name: str) -> Iterator[tuple[int, HostPattern]]:
    """Yield the patterns that mean `name`: the exact name, then the longest wildcard; first those with a port."""
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
    """Return whether `other` permits every request that `rule` permits, hosts aside. Empty lists mean any."""
    methods = not other.methods or (rule.methods and set(rule.methods) <= set(other.methods))
    paths = not other.paths or (rule.paths and all(path.startswith(tuple(other.paths)) for path in rule.paths))
    return bool(rule.protocol == other.protocol and methods and paths)


def _fault(most: _Reach, name: str, port: int, wanted: _Permit, held: _Permit | None) -> tuple[str, str]:
    """Return the key of the entry that permits too much, and the reason."""
    if held is not None and held.rule is not None:
        return wanted.key, f"{name}:{port} is permitted by the rule for {held.rule.host} only"
    denied = most.denial(name, port)
    if denied is not None:
        return "network.deny", f"{denied} must stay denied"
    public = wanted.key == "network.allow"
    if most.network.allow == "public" and most.closed_to(name):
        # Under "public" the missing `deny` opens addresses.
        return ("network.deny", "addresses must stay closed") if public else (wanted.key, f"{name} is an address")
    if public and most.network.allow != "public":
        return wanted.key, '"public" is more than the listed hosts'
    if held is not None:
        return wanted.key, f"{name}:{port} is not permitted for an opaque stream"
    return wanted.key, f'"public" is not permitted on port {port}' if public else f"{name}:{port} is not permitted"


_ISOLATION = ("runtime", "shared-kernel", "own-kernel")
_MODES = ("ro", "copy", "rw")
_SIZES = ("memory", "disk", "output", "upload", "download")


def must_allow(ceiling: Policy, request: Policy) -> Policy:
    """Return `request` itself when every part fits. Raises PolicyError that names each part that does not fit."""
    if type(request) is not type(ceiling):
        raise PolicyError(f"must_allow takes a Policy, not {type(request).__name__}", key="policy")
    found = list(widenings(ceiling, request))
    if not found:
        return request
    parts = "; ".join(f"{key}: {reason}" for key, reason in found)
    fix = f"ask for no more than the policy allows in {', '.join(dict.fromkeys(key for key, _ in found))}"
    raise PolicyError(f"the policy does not allow {parts}", key=found[0][0], fix=fix, code="policy-widened")


def widenings(ceiling: Policy, request: Policy) -> Iterator[tuple[str, str]]:
    """Yield the key of each part of `request` that goes beyond `ceiling`, and the reason."""
    yield from _limits(ceiling.limits, request.limits)
    yield from _network(ceiling.network, request.network)
    for index, mount in enumerate(request.mounts):
        yield from _mount(ceiling.mounts, mount, f"mounts[{index}]")
    yield from _commands(ceiling.commands, request.commands)
    for index, secret in enumerate(request.secrets):
        yield from _secret(ceiling.secrets, secret, f"secrets[{index}]")
    if _ISOLATION.index(request.isolation) < _ISOLATION.index(ceiling.isolation):
        yield "isolation", f"{request.isolation} is weaker than {ceiling.isolation}"
    if ceiling.strict and not request.strict:
        yield "strict", "false, where true is required"


def _limits(ceiling: Limits, request: Limits) -> Iterator[tuple[str, str]]:
    names = [name for name in type(ceiling).__fields__ if name != "on_idle"]
    yield from _numbers(ceiling, request, names, "limits")
    if ceiling.on_idle == "close" and request.on_idle == "pause":
        yield "limits.on_idle", "pause keeps what close would free"


def _numbers(ceiling: Struct, request: Struct, names: list[str], table: str) -> Iterator[tuple[str, str]]:
    for name in names:
        most, wanted = getattr(ceiling, name), getattr(request, name)
        if wanted > most:
            show = format_size if name in _SIZES else "{:.15g}".format
            yield f"{table}.{name}", f"{show(wanted)} is more than {show(most)}"


# network


def _network(ceiling: Network, request: Network) -> Iterator[tuple[str, str]]:
    yield from _numbers(ceiling, request, ["connections", "upload", "download"], "network")
    yield from widened(ceiling, request)
    yield from _private(ceiling, request)


def _private(ceiling: Network, request: Network) -> Iterator[tuple[str, str]]:
    if not request.private:
        return
    from ringfence.policy.http import cidr_within

    for index, wanted in enumerate(request.private):
        if not any(cidr_within(wanted, permitted) for permitted in ceiling.private):
            yield f"network.private[{index}]", f"{wanted} is not permitted"


# mounts


def _mount(ceiling: tuple[Mount, ...], wanted: Mount, key: str) -> Iterator[tuple[str, str]]:
    """Yield what the nearest mount of the ceiling does not permit; nothing when a mount permits all of `wanted`."""
    source = str(wanted.source)
    holders = [mount for mount in ceiling if is_within(source, str(mount.source))]
    if not holders:
        yield f"{key}.source", f"{bare_or_in_quotes(source)} is not shown by the policy"
        return
    faults = [list(_mount_faults(mount, wanted, key)) for mount in holders]
    if all(faults):
        yield from min(faults, key=len)


def _mount_faults(ceiling: Mount, wanted: Mount, key: str) -> Iterator[tuple[str, str]]:
    source = str(wanted.source)
    if _MODES.index(wanted.mode) > _MODES.index(ceiling.mode):
        yield f"{key}.mode", f"{wanted.mode} is more than {ceiling.mode}"
    if wanted.credentials and not ceiling.credentials:
        yield f"{key}.credentials", "sources with credentials are not permitted"
    hidden = [f"{source}/{path}" for path in wanted.hide]
    for path in _inside(ceiling, ceiling.hide, source):
        if not any(is_within(path, cover) for cover in hidden):
            yield f"{key}.hide", f"{bare_or_in_quotes(path)} must stay hidden"
    if wanted.mode != "rw":
        return
    kept = hidden + [f"{source}/{path}" for path in wanted.protect]
    for path in _inside(ceiling, ceiling.protect, source):
        if not any(is_within(path, cover) for cover in kept):
            yield f"{key}.protect", f"{bare_or_in_quotes(path)} must stay read-only"


def _inside(ceiling: Mount, paths: list[str] | tuple[str, ...], source: str) -> list[str]:
    """Return the `paths` of a ceiling's mount that `source` contains or lies in."""
    whole = [f"{ceiling.source}/{path}" for path in paths]
    return [path for path in whole if is_within(path, source) or is_within(source, path)]


# commands and secrets


def _commands(ceiling: tuple[str, ...] | str, request: tuple[str, ...] | str) -> Iterator[tuple[str, str]]:
    if ceiling == "any":
        return
    if request == "any":
        yield "commands", '"any" is more than the listed programs'
        return
    for index, name in enumerate(request):
        if name not in ceiling:
            yield f"commands[{index}]", f"{bare_or_in_quotes(name)} is not permitted"


def _secret(ceiling: tuple[Secret, ...], wanted: Secret, key: str) -> Iterator[tuple[str, str]]:
    held = next((secret for secret in ceiling if secret.name == wanted.name), None)
    if held is None:
        yield f"{key}.name", f"{wanted.name} is not a secret of the policy"
        return
    if origin(wanted) != origin(held):
        # A request could otherwise name another variable or file of the host and have the content sent out.
        yield key, f"{wanted.name} is not read from where the policy reads it"
    permitted = [parse_pattern(host) for host in held.hosts]
    for index, host in enumerate(wanted.hosts):
        pattern = parse_pattern(host)
        if not any(entry.covers(pattern) and entry.port in (None, pattern.port) for entry in permitted):
            yield f"{key}.hosts[{index}]", f"{host} does not get the secret"
    for index, place in enumerate(wanted.inject):
        if place not in held.inject:
            yield f"{key}.inject[{index}]", f"{place} is not permitted"
