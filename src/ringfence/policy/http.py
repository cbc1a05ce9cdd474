"""Checks HTTP methods, path prefixes and address ranges of a policy: canonical or refused (G23)."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.checks import shorten, text
from ringfence.policy.hosts import HostPattern, parse_pattern

_UPPER = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PATH = _UNRESERVED | frozenset("/!$&'()*+,;=:@%")
_HEX = frozenset("0123456789ABCDEF")
# CONNECT would open a tunnel past the rule; TRACE sends the request back, an injected secret included (G24).
_REFUSED_METHODS = ("CONNECT", "TRACE")
# Addresses where clouds hand out credentials, and all link-local addresses. No policy can open these.
METADATA = (
    "169.254.0.0/16",  # link-local, with the metadata address of most clouds
    "100.100.100.200/32",
    "168.63.129.16/32",  # the wire server of one cloud: a public address, but the host's in fact
    "192.0.0.192/32",
    "fd00:ec2::/32",  # one cloud's own services: at ::23 an agent hands out the rights of a pod
    "fd20:ce::254/128",
    "fd00:c1::a9fe:a9fe/128",
    "fd00:42::42/128",
    "fd00:a9fe:a9fe::1/128",
    "fd00:100::100:200/128",
    "fe80::/10",
)
# Addresses that are never the peer of a connection, or another spelling of an address. No policy can open these either.
NEVER = (
    "0.0.0.0/8",
    "192.88.99.0/24",  # 6to4 relays
    "224.0.0.0/4",
    "240.0.0.0/4",  # with broadcast
    "::/3",  # mapped, compatible and translated IPv4, NAT64, and loopback as ::1: a policy can open 127.0.0.0/8 alone
    "2001::/23",  # Teredo and other protocol assignments
    "2002::/16",  # 6to4
    "fec0::/10",
    "ff00::/8",
)


def host(value: object, key: str) -> str:
    """Return a host pattern in canonical spelling."""
    return str(pattern(value, key))


def reachable_host(value: object, key: str) -> str:
    """Return a host pattern that can be permitted. localhost is refused: inside, localhost is the sandbox."""
    found = pattern(value, key)
    if found.name == "localhost" or found.name.endswith(".localhost"):
        fix = "remove it; inside, localhost is the sandbox's own and always works"
        raise PolicyError(f"{key}: {shorten(value)} cannot be permitted", key=key, fix=fix)
    return str(found)


def pattern(value: object, key: str) -> HostPattern:
    """Return a host pattern. Raises PolicyError with the reason."""
    found = text(value, key)
    try:
        return parse_pattern(found)
    except ValueError as error:
        fix = 'write a host as "a.com", "a.com:8443" or "*.a.com"'
        raise PolicyError(f"{key}: {shorten(found)} is not a host: {error}", key=key, fix=fix) from None


def method(value: object, key: str) -> str:
    """Return an HTTP method in upper case, as on the wire, where case counts."""
    found = text(value, key)
    if found in _REFUSED_METHODS:
        raise PolicyError(f"{key}: {found} cannot be permitted", key=key, fix="remove it")
    if not found or len(found) > 32 or not _UPPER.issuperset(found.replace("-", "")) or found.strip("-") != found:
        fix = f'write "{found.upper()}"' if found.isascii() and found.isalpha() else 'write it as "GET"'
        raise PolicyError(f"{key}: {shorten(found)} is not an HTTP method", key=key, fix=fix)
    return found


def path_prefix(value: object, key: str) -> str:
    """Return a prefix of canonical request paths. A prefix that no canonical path can have is refused."""
    found = text(value, key)
    reason = _path_fault(found)
    if reason:
        fix = 'write a prefix such as "/v1/public/"'
        raise PolicyError(f"{key}: {shorten(found)} is not a path prefix: {reason}", key=key, fix=fix)
    return found


def _path_fault(path: str) -> str | None:
    if not path.startswith("/"):
        return 'it does not start with "/"'
    if "?" in path or "#" in path:
        return "queries and fragments are not part of a path"
    if not _PATH.issuperset(path):
        return "it holds characters that a URL path cannot"
    parts = path.split("/")
    if "" in parts[1:-1] or "." in parts or ".." in parts:
        return "it has empty, . or .. parts"
    for escape in path.split("%")[1:]:
        if len(escape) < 2 or not _HEX.issuperset(escape[:2]):
            return "a percent sign is followed by two upper-case hex digits"
        char = chr(int(escape[:2], 16))
        if char in _UNRESERVED or char in "/\\%" or char < " ":
            return f"%{escape[:2]} has another canonical form or is never forwarded"
    return None


def cidr(value: object, key: str) -> str:
    """Return an address range such as 10.0.0.0/8, in canonical spelling."""
    from ipaddress import ip_network

    found = text(value, key)
    fix = 'write a range as "10.0.0.0/8" or "fd12:3456::/32"'
    try:
        if "%" in found:  # a zone, which ipaddress would keep and no comparison would see
            raise ValueError
        network = ip_network(found, strict=True)
    except ValueError:
        raise PolicyError(f"{key}: {shorten(found)} is not a range of addresses", key=key, fix=fix) from None
    if str(network) != found:
        raise PolicyError(f"{key}: {shorten(found)} has another spelling", key=key, fix=f'write "{network}"')
    if any(cidr_within(found, refused) for refused in METADATA):
        fix = "remove it; metadata addresses are never reachable"
        raise PolicyError(f"{key}: {found} holds link-local or metadata addresses only", key=key, fix=fix)
    if any(cidr_within(found, refused) for refused in NEVER):
        fix = "remove it; for loopback, write 127.0.0.0/8"
        raise PolicyError(f"{key}: no address of {found} is ever reachable", key=key, fix=fix)
    return found


def cidr_within(inner: str, outer: str) -> bool:
    """Return whether every address of the canonical range `inner` is in `outer`."""
    from ipaddress import IPv4Network, IPv6Network, ip_network

    one, other = ip_network(inner), ip_network(outer)
    if isinstance(one, IPv4Network) and isinstance(other, IPv4Network):
        return one.subnet_of(other)
    return isinstance(one, IPv6Network) and isinstance(other, IPv6Network) and one.subnet_of(other)
