"""Which addresses the gateway never dials, whatever name led to them (G04, G06, G07, G08).

Every way that an IPv6 address can carry an IPv4 one is refused as a whole, so that no second reading exists.
An address of this machine is private whatever its number is: a service behind the host's firewall answers there.
"""

from __future__ import annotations

import errno
import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from ringfence.policy.requests import METADATA, NEVER

# All of IPv6 that is handed out. Outside it, what is not private is never a peer.
_GLOBAL_IPV6 = IPv6Network("2000::/3")
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
    *(("net.metadata-address", within) for within in _ranges(METADATA)),
    *(("net.bad-address", within) for within in _ranges(NEVER)),
)
_OPENABLE = _ranges(_PRIVATE)


def fault(address: str, private: tuple[str, ...]) -> str | None:
    """A reason code when `address` must not be dialled; `private` are ranges that the policy opens."""
    code = _by_number(address, private)
    if code is None and not _opened(address, private) and _is_own(address):
        return "net.private-address"
    return code


@lru_cache(maxsize=1024)
def _by_number(address: str, private: tuple[str, ...]) -> str | None:
    if "%" in address:
        return "net.bad-address"  # a zone: link-local by nature
    try:
        found = ip_address(address)
    except ValueError:
        return "net.bad-address"
    for code, within in _CLOSED:
        if _holds(within, found):
            return code
    if any(_holds(within, found) for within in _OPENABLE):
        return None if _opens(private, found) else "net.private-address"
    if found.version == 6 and found not in _GLOBAL_IPV6:
        return "net.bad-address"
    # Whatever else the standard library knows not to be routed.
    return None if found.is_global or _opens(private, found) else "net.private-address"


@lru_cache(maxsize=1024)
def _opened(address: str, private: tuple[str, ...]) -> bool:
    return _opens(private, ip_address(address))


def _opens(private: tuple[str, ...], found: _Address) -> bool:
    return any(_holds(ip_network(text), found) for text in private)


def _is_own(address: str) -> bool:
    """Whether this machine has it now: what is sent to an own address is sent from it. Nothing is sent here."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((address, 9))
            return ip_address(probe.getsockname()[0]) == ip_address(address)
    except OSError as error:
        # Without descriptors nobody can tell; else there is no way to it, and dialling it fails too.
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _holds(within: _Range, found: _Address) -> bool:
    return found.version == within.version and found in within
