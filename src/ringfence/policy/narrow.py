"""Whether one policy fits inside another. Every part that does not is named; nothing is cut to fit.

Paths are compared as text. That a source is not a link out of the ceiling's is for those who open it.
Variables (`env`) are the caller's words to its own guest and widen nothing.
"""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.hosts import HostPattern, parse_pattern
from ringfence.policy.model import allow_patterns
from ringfence.policy.paths import within
from ringfence.policy.reach import ports_of
from ringfence.policy.secrets import origin
from ringfence.policy.sizes import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.policy.model import Limits, Mount, Network, Policy, Rule
    from ringfence.policy.secrets import Secret
    from ringfence.values import Struct

_ISOLATION = ("runtime", "kernel", "own-kernel")
_MODES = ("ro", "copy", "rw")
_SIZES = ("memory", "disk", "output", "upload", "download")


def narrow(ceiling: Policy, request: Policy) -> Policy:
    """`request` itself when all of it fits; else PolicyError whose message names each part that does not."""
    if type(request) is not type(ceiling):
        raise PolicyError(f"narrow takes a Policy, not {type(request).__name__}", key="policy")
    found = list(widenings(ceiling, request))
    if not found:
        return request
    parts = "; ".join(f"{key}: {reason}" for key, reason in found)
    fix = f"ask for no more than the policy allows in {', '.join(dict.fromkeys(key for key, _ in found))}"
    raise PolicyError(f"the policy does not allow {parts}", key=found[0][0], fix=fix, code="policy-widened")


def widenings(ceiling: Policy, request: Policy) -> Iterator[tuple[str, str]]:
    """The key of each part of `request` that goes beyond `ceiling`, and how."""
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
    extra = _extra_ports(ceiling, request)
    if extra:
        yield "network.ports", f"{', '.join(map(str, sorted(extra)))} not permitted"
    if request.allow == "public" and ceiling.allow != "public":
        yield "network.allow", '"public" is more than the listed hosts'
    for index, wanted in enumerate(allow_patterns(request)):
        if not _allowed(ceiling, wanted, ports_of(wanted, request) - extra):
            yield f"network.allow[{index}]", f"{wanted} is not permitted"
    for index, rule in enumerate(request.rules):
        if not _rule_fits(ceiling, rule, ports_of(parse_pattern(rule.host), request) - extra):
            yield f"network.rules[{index}]", f"{rule.host} is not permitted for all of it"
    yield from _unruled(ceiling, request)
    for entry in ceiling.deny:
        if not _stays_denied(request, parse_pattern(entry)):
            yield "network.deny", f"{entry} must stay denied"
    yield from _private(ceiling, request)


def _targets(network: Network) -> list[HostPattern]:
    return [*allow_patterns(network), *(parse_pattern(rule.host) for rule in network.rules)]


def _extra_ports(ceiling: Network, request: Network) -> frozenset[int]:
    """Ports of `request.ports` that the ceiling has nowhere, where something is reachable on them."""
    used = request.allow == "public" or any(target.port is None for target in _targets(request))
    named = {target.port for target in _targets(ceiling)}
    return frozenset(request.ports) - frozenset(ceiling.ports) - named if used else frozenset()


def _allowed(ceiling: Network, wanted: HostPattern, ports: frozenset[int]) -> bool:
    """Whether the ceiling permits `wanted` on `ports` for any request."""
    permitted = set(ceiling.ports) if ceiling.allow == "public" else set()
    covered = ceiling.allow == "public"
    for entry in allow_patterns(ceiling):
        if entry.covers(wanted):
            covered = True
            permitted |= ports_of(entry, ceiling)
    return covered and ports <= permitted


def _rule_fits(ceiling: Network, rule: Rule, ports: frozenset[int]) -> bool:
    wanted = parse_pattern(rule.host)
    held = [other for other in ceiling.rules if parse_pattern(other.host).covers(wanted)]
    if any(_rule_within(rule, other) and ports <= ports_of(parse_pattern(other.host), ceiling) for other in held):
        return True
    # An opaque stream is more than `allow` gives, where host names are checked inside TLS and HTTP.
    return not held and rule.protocol != "tcp" and _allowed(ceiling, wanted, ports)


def _rule_within(rule: Rule, other: Rule) -> bool:
    """Whether every request that `rule` permits is permitted by `other`, hosts aside. Empty lists mean any."""
    methods = not other.methods or (rule.methods and set(rule.methods) <= set(other.methods))
    paths = not other.paths or (rule.paths and all(path.startswith(tuple(other.paths)) for path in rule.paths))
    return bool(rule.protocol == other.protocol and methods and paths)


def _unruled(ceiling: Network, request: Network) -> Iterator[tuple[str, str]]:
    """A host that the ceiling permits for some requests only must not be permitted for all by a wider entry."""
    kept = [parse_pattern(rule.host) for rule in request.rules] + [parse_pattern(entry) for entry in request.deny]
    for rule in ceiling.rules:
        host = parse_pattern(rule.host)
        reached = request.allow == "public" or any(entry.overlaps(host) for entry in allow_patterns(request))
        if reached and not any(_denies(pattern, host) for pattern in kept):
            yield "network.allow", f"{rule.host} is permitted by rule only"


def _stays_denied(request: Network, denied: HostPattern) -> bool:
    if any(_denies(parse_pattern(entry), denied) for entry in request.deny):
        return True
    return request.allow != "public" and not any(target.overlaps(denied) for target in _targets(request))


def _denies(entry: HostPattern, denied: HostPattern) -> bool:
    """Whether `entry` speaks for all of `denied`, its ports included."""
    return entry.covers(denied) and entry.port in (None, denied.port)


def _private(ceiling: Network, request: Network) -> Iterator[tuple[str, str]]:
    if not request.private:
        return
    from ringfence.policy.requests import cidr_within

    for index, wanted in enumerate(request.private):
        if not any(cidr_within(wanted, permitted) for permitted in ceiling.private):
            yield f"network.private[{index}]", f"{wanted} is not permitted"


# mounts


def _mount(ceiling: tuple[Mount, ...], wanted: Mount, key: str) -> Iterator[tuple[str, str]]:
    """Nothing when one mount of the ceiling permits all of it; else what the nearest one does not."""
    source = str(wanted.source)
    holders = [mount for mount in ceiling if within(source, str(mount.source))]
    if not holders:
        yield f"{key}.source", f"{_shown(source)} is not shown by the policy"
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
        if not any(within(path, cover) for cover in hidden):
            yield f"{key}.hide", f"{_shown(path)} must stay hidden"
    if wanted.mode != "rw":
        return
    kept = hidden + [f"{source}/{path}" for path in wanted.protect]
    for path in _inside(ceiling, ceiling.protect, source):
        if not any(within(path, cover) for cover in kept):
            yield f"{key}.protect", f"{_shown(path)} must stay read-only"


def _inside(ceiling: Mount, paths: list[str] | tuple[str, ...], source: str) -> list[str]:
    """Those of the ceiling's `paths` that the wanted source shows, or lies in."""
    whole = [f"{ceiling.source}/{path}" for path in paths]
    return [path for path in whole if within(path, source) or within(source, path)]


# commands and secrets


def _commands(ceiling: tuple[str, ...] | str, request: tuple[str, ...] | str) -> Iterator[tuple[str, str]]:
    if ceiling == "any":
        return
    if request == "any":
        yield "commands", '"any" is more than the listed programs'
        return
    for index, name in enumerate(request):
        if name not in ceiling:
            yield f"commands[{index}]", f"{_shown(name)} is not permitted"


def _secret(ceiling: tuple[Secret, ...], wanted: Secret, key: str) -> Iterator[tuple[str, str]]:
    held = next((secret for secret in ceiling if secret.name == wanted.name), None)
    if held is None:
        yield f"{key}.name", f"{wanted.name} is not a secret of the policy"
        return
    if origin(wanted) != origin(held):
        # Else a request could name another variable or file of the host and have it sent out.
        yield key, f"{wanted.name} is not read from where the policy reads it"
    permitted = [parse_pattern(host) for host in held.hosts]
    for index, host in enumerate(wanted.hosts):
        pattern = parse_pattern(host)
        if not any(entry.covers(pattern) and entry.port in (None, pattern.port) for entry in permitted):
            yield f"{key}.hosts[{index}]", f"{host} does not get it"
    for index, place in enumerate(wanted.inject):
        if place not in held.inject:
            yield f"{key}.inject[{index}]", f"{place} is not permitted"


def _shown(text: str) -> str:
    return text if text.isprintable() else ascii(text)
