"""Turns a permitted name into a connection: looks it up once, checks every answer, dials that very address (G08).

Look-ups run in daemon threads of our own: a resolver that hangs must hold up neither the loop nor the caller's exit.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import socket
import threading
from typing import TYPE_CHECKING

from ringfence.network.addresses import fault
from ringfence.network.budgets import Counted
from ringfence.network.targets import Refusal
from ringfence.policy.hosts import is_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.network.targets import Target

RESOLVE_S = 10.0
CONNECT_S = 10.0
_MOST_THREADS = 16
_MOST_ANSWERS = 16
_LONGEST_FILE = 1 << 20


def system_lookup(name: str, port: int) -> list[str]:
    """The host's own resolver: every address of a name, in the order to try them. Raises OSError."""
    named = listed(name)
    if named:
        return named
    # The dot ends the name: no search domain of the host's is tried. A name of the hosts file is not found with it.
    found = socket.getaddrinfo(f"{name}.", port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def listed(name: str, path: str = "/etc/hosts") -> list[str]:
    """What the host's own file says about a canonical name."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST_FILE)
    except OSError:
        return []
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return list(dict.fromkeys(words[0] for words in lines if name in [word.lower() for word in words[1:]]))


class Resolver:
    """Looks names up in a few threads. `lookup` is the host's own; tests put theirs in its place."""

    def __init__(self) -> None:
        self.lookup: Callable[[str, int], list[str]] = system_lookup
        self._work: queue.SimpleQueue[tuple[str, int, asyncio.Future[list[str]]]] = queue.SimpleQueue()
        self._threads = 0
        self._waiting = 0

    async def addresses(self, name: str, port: int) -> list[str]:
        """Raises Refusal when there are none in time."""
        if is_address(name):
            return [name.strip("[]")]
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting += 1
        if self._waiting > self._threads and self._threads < _MOST_THREADS:
            self._threads += 1
            threading.Thread(target=self._run, name="ringfence-resolver", daemon=True).start()
        self._work.put((name, port, answer))
        try:
            async with asyncio.timeout(RESOLVE_S):
                return (await answer)[:_MOST_ANSWERS]
        except TimeoutError:
            raise Refusal("net.unresolved", f"{name} could not be looked up in time", verdict="failed") from None
        except OSError:
            raise Refusal("net.unresolved", f"{name} has no address", verdict="failed") from None
        finally:
            self._waiting -= 1

    def _run(self) -> None:
        while True:
            name, port, answer = self._work.get()
            loop = answer.get_loop()
            found: list[str] | OSError
            try:
                found = self.lookup(name, port)
            except OSError as error:
                found = error
            except UnicodeError:
                found = OSError(errno.EINVAL, "not a host name")
            try:
                loop.call_soon_threadsafe(_tell, answer, found)
            except RuntimeError:
                continue  # the gateway was stopped meanwhile: that loop is closed


def _tell(answer: asyncio.Future[list[str]], found: list[str] | OSError) -> None:
    if answer.done():
        return
    if isinstance(found, OSError):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def dial(resolver: Resolver, target: Target, private: tuple[str, ...]) -> Counted:
    """A connected, non-blocking socket. Raises Refusal. One refused answer refuses the name: it may be the next."""
    addresses = await resolver.addresses(target.name, target.port)
    if not addresses:
        raise Refusal("net.unresolved", f"{target.name} has no address", verdict="failed")
    for address in addresses:
        code = fault(address, private)
        if code is not None:
            raise _refused_address(code, target, address)
    try:
        async with asyncio.timeout(CONNECT_S):
            return await _first_of(addresses, target.port)
    except TimeoutError:
        raise Refusal("net.unreachable", f"{target} did not answer in time", verdict="failed") from None
    except OSError as error:
        why = "refused the connection" if error.errno == errno.ECONNREFUSED else "cannot be reached"
        raise Refusal("net.unreachable", f"{target} {why}", verdict="failed") from None


def _refused_address(code: str, target: Target, address: str) -> Refusal:
    """What it resolves to is told to the host alone: a guest could map the host's network by it."""
    if code == "net.private-address":
        refusal = Refusal(code, f"{target.name} resolves to a private address", allow="network.private = [...]")
        width = 128 if ":" in address else 32
        refusal.for_host(
            f"{target.name} resolves to {address}, a private address", f'network.private = ["{address}/{width}"]'
        )
        return refusal
    refusal = Refusal(code, f"{target.name} resolves to an address that no policy permits")
    refusal.for_host(f"{target.name} resolves to {address}, which no policy permits", None)
    return refusal


async def _first_of(addresses: list[str], port: int) -> Counted:
    """In order; with several, one that does not answer is given up sooner."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for index, address in enumerate(addresses):
        sock = Counted(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
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
