"""Turns a permitted name into a connection: looks the name up once, checks every answer, dials a checked address (G08).

Some addresses are never dialled, whatever name led to them (G04, G06, G07, G08). Every way that an IPv6 address can
carry an IPv4 one is refused as a whole, so that no second reading exists. An address of this machine is private
whatever its number is: a service behind the host's firewall answers there.
Look-ups run in daemon threads of our own: a resolver that hangs must hold up neither the loop nor the caller's exit.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import socket
import threading
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

from ringfence.gateway.budget import CountedSocket
from ringfence.gateway.types import Refusal
from ringfence.policy.hosts import is_address
from ringfence.policy.http import METADATA, NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.gateway.types import Target


# All IPv6 addresses that are handed out. An address outside that is not private is never a peer.
_GLOBAL_IPV6 = IPv6Network("2000::/3")
# Dialled only if a range in network.private holds the address.
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
    """Return a reason code when `address` must not be dialled, else None. `private`: ranges that the policy opens."""
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
    # Other addresses that, as the standard library knows, are not routed.
    return None if found.is_global or _opens(private, found) else "net.private-address"


@lru_cache(maxsize=1024)
def _opened(address: str, private: tuple[str, ...]) -> bool:
    return _opens(private, ip_address(address))


def _opens(private: tuple[str, ...], found: _Address) -> bool:
    return any(_holds(ip_network(text), found) for text in private)


def _is_own(address: str) -> bool:
    """Return whether this machine has `address` now: packets to itself would have it as source. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((address, 9))
            return ip_address(probe.getsockname()[0]) == ip_address(address)
    except OSError as error:
        # Without descriptors the answer is unknown; with any other error there is no route, and dialling fails too.
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _holds(within: _Range, found: _Address) -> bool:
    return found.version == within.version and found in within


RESOLVE_S = 10.0
CONNECT_S = 10.0
_MOST_THREADS = 64
_MOST_EACH = 8  # look-ups of a sandbox without an answer yet: its slow server holds up no other sandbox
_TURN_S = 0.05
_MOST_ANSWERS = 16
_LONGEST_FILE = 1 << 20


def system_lookup(name: str, port: int) -> list[str]:
    """Return every address that the host's own resolver knows of a name, in the order to try them. Raises OSError."""
    named = listed(name)
    if named:
        return named
    # The dot ends the name, so that no search domain of the host is tried. Names of the hosts file are not found with
    # it.
    found = socket.getaddrinfo(f"{name}.", port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def listed(name: str, path: str = "/etc/hosts") -> list[str]:
    """Return the addresses of a canonical name in the host's own file of names."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST_FILE)
    except OSError:
        return []
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return list(dict.fromkeys(words[0] for words in lines if name in [word.lower() for word in words[1:]]))


class Resolver:
    """Looks names up in a few threads. `lookup` is the host's own; tests put another function in its place."""

    def __init__(self) -> None:
        self.lookup: Callable[[str, int], list[str]] = system_lookup
        self._work: queue.SimpleQueue[tuple[str, int, asyncio.Future[list[str]], object]] = queue.SimpleQueue()
        self._threads = 0
        self._lock = threading.Lock()
        self._unanswered: dict[object, int] = {}  # by sandbox; also look-ups that were given up

    async def addresses(self, name: str, port: int, who: object = None) -> list[str]:
        """Return the addresses of a name. `who`: the sandbox that asks. Raises Refusal when there are none in time."""
        if is_address(name):
            return [name.strip("[]")]
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(RESOLVE_S):
                while not self._asked(who):  # noqa: ASYNC110  # threads answer, and an Event is not theirs to set
                    await asyncio.sleep(_TURN_S)
                self._work.put((name, port, answer, who))
                return (await answer)[:_MOST_ANSWERS]
        except TimeoutError:
            raise Refusal("net.unresolved", f"{name} could not be looked up in time", verdict="failed") from None
        except OSError:
            raise Refusal("net.unresolved", f"{name} has no address", verdict="failed") from None

    def _asked(self, who: object) -> bool:
        """Count a look-up and start a thread if needed. Return False while the sandbox has too many unanswered."""
        with self._lock:
            if self._unanswered.get(who, 0) >= _MOST_EACH:
                return False
            self._unanswered[who] = self._unanswered.get(who, 0) + 1
            more = sum(self._unanswered.values()) > self._threads and self._threads < _MOST_THREADS
            self._threads += more
        if more:
            threading.Thread(target=self._run, name="ringfence-resolver", daemon=True).start()
        return True

    def _answered(self, who: object) -> None:
        with self._lock:
            self._unanswered[who] -= 1
            if not self._unanswered[who]:
                del self._unanswered[who]

    def _run(self) -> None:
        while True:
            name, port, answer, who = self._work.get()
            loop = answer.get_loop()
            found: list[str] | OSError
            try:
                found = self.lookup(name, port)
            except OSError as error:
                found = error
            except UnicodeError:
                found = OSError(errno.EINVAL, "not a host name")
            finally:
                self._answered(who)
            try:
                loop.call_soon_threadsafe(_set_answer, answer, found)
            except RuntimeError:
                continue  # the gateway was stopped meanwhile: that loop is closed


def _set_answer(answer: asyncio.Future[list[str]], found: list[str] | OSError) -> None:
    if answer.done():
        return
    if isinstance(found, OSError):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def dial(resolver: Resolver, target: Target, private: tuple[str, ...], who: object = None) -> CountedSocket:
    """Return a connected, non-blocking socket. One refused address refuses the name. Raises Refusal."""
    addresses = await resolver.addresses(target.name, target.port, who)
    if not addresses:
        raise Refusal("net.unresolved", f"{target.name} has no address", verdict="failed")
    for address in addresses:
        code = fault(address, private)
        if code is not None:
            raise refused_address(code, target, address)
    try:
        async with asyncio.timeout(CONNECT_S):
            return await _first_of(addresses, target.port)
    except TimeoutError:
        raise Refusal("net.unreachable", f"{target} did not answer in time", verdict="failed") from None
    except OSError as error:
        why = "refused the connection" if error.errno == errno.ECONNREFUSED else "cannot be reached"
        raise Refusal("net.unreachable", f"{target} {why}", verdict="failed") from None


def refused_address(code: str, target: Target, address: str) -> Refusal:
    """Return the refusal of an address. Only the host sees the address: a guest could map the host's network by it."""
    if code == "net.private-address":
        refusal = Refusal(code, f"{target.name} resolves to a private address", allow="network.private = [...]")
        width = 128 if ":" in address else 32
        refusal.for_host(
            f"{target.name} resolves to {address}, a private address or one of this machine",
            f'network.private = ["{address}/{width}"]',
        )
        return refusal
    refusal = Refusal(code, f"{target.name} resolves to an address that no policy permits")
    refusal.for_host(f"{target.name} resolves to {address}, which no policy permits", None)
    return refusal


async def _first_of(addresses: list[str], port: int) -> CountedSocket:
    """Dial the addresses in order and return the first socket; with more addresses to follow, each gets less time."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for index, address in enumerate(addresses):
        sock = CountedSocket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        sock.address = address
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            more = index + 1 < len(addresses)
            async with asyncio.timeout(CONNECT_S / 4 if more else None):
                await loop.sock_connect(sock, (address, port))
        except OSError as error:  # TimeoutError among them
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise last
