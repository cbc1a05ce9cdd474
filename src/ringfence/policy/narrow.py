"""Whether one policy fits inside another. Every part that does not is named; nothing is cut to fit.

Paths are compared as text. That a source is not a link out of the ceiling's is for those who open it.
Variables (`env`) are the caller's words to its own guest and widen nothing.
"""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.hosts import parse_pattern
from ringfence.policy.narrow_network import widened
from ringfence.policy.paths import within
from ringfence.policy.secrets import origin
from ringfence.policy.sizes import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.policy.model import Limits, Mount, Network, Policy
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
    yield from widened(ceiling, request)
    yield from _private(ceiling, request)


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
