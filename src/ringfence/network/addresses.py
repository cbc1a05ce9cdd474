"""Which addresses the gateway never dials, whatever name led to them (G04, G06, G07, G08).

Every way that an IPv6 address can carry an IPv4 one is refused as a whole, so that no second reading exists.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

# Where clouds hand out credentials. No policy reaches them; link-local is among them as a whole.
_METADATA = (
    "169.254.0.0/16",  # link-local, the metadata address of most clouds among it
    "100.100.100.200/32",
    "168.63.129.16/32",  # the wire server of one cloud: public by number, the host's by nature
    "192.0.0.192/32",
    "fd00:ec2::254/128",
    "fd20:ce::254/128",
    "fe80::/10",
)
# Never a peer of a connection, or another spelling of an address that is.
_NEVER = (
    "0.0.0.0/8",
    "192.88.99.0/24",  # 6to4 relays
    "224.0.0.0/4",
    "240.0.0.0/4",  # with broadcast
    "::ffff:0:0/96",  # IPv4-mapped
    "::/96",  # IPv4-compatible, unspecified and, as ::1, loopback: a policy opens 127.0.0.0/8 alone
    "64:ff9b::/96",  # NAT64
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/23",  # Teredo and other protocol assignments
    "2002::/16",  # 6to4
    "fec0::/10",
    "ff00::/8",
)
# Open only to a range in network.private.
_PRIVATE = (
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "2001:db8::/32",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
)

_Range = IPv4Network | IPv6Network
_Address = IPv4Address | IPv6Address


def _ranges(texts: tuple[str, ...]) -> tuple[_Range, ...]:
    return tuple(ip_network(text) for text in texts)


_CLOSED = (
    *(("net.metadata-address", within) for within in _ranges(_METADATA)),
    *(("net.bad-address", within) for within in _ranges(_NEVER)),
)
_OPENABLE = _ranges(_PRIVATE)


@lru_cache(maxsize=1024)
def fault(address: str, private: tuple[str, ...]) -> str | None:
    """A reason code when `address` must not be dialled; `private` are ranges that the policy opens."""
    if "%" in address:
        return "net.bad-address"  # a zone: link-local by nature
    try:
        found = ip_address(address)
    except ValueError:
        return "net.bad-address"
    for code, within in _CLOSED:
        if _holds(within, found):
            return code
    if not _is_private(found):
        return None
    opened = any(_holds(ip_network(text), found) for text in private)
    return None if opened else "net.private-address"


def _is_private(found: _Address) -> bool:
    """Our own list, and whatever else the standard library knows not to be routed."""
    return any(_holds(within, found) for within in _OPENABLE) or not found.is_global


def _holds(within: _Range, found: _Address) -> bool:
    return found.version == within.version and found in within
