"""DNS messages from a guest: parsed strictly, answered from a table, never forwarded (G09).

A permitted name has one A record, an address of the sandbox's own loopback that stands for the name. Queries for other
types of the name get an empty answer, because NXDOMAIN for AAAA makes musl give up the whole name, and HTTPS or SVCB
would bring encrypted hellos. Other names do not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import TYPE_CHECKING

from ringfence.gateway.types import Refusal
from ringfence.policy.hosts import canonical_host
from ringfence.text import printable
from ringfence.values import Struct, final

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ringfence.gateway.interfaces import Directory


A, OPT, IN = 1, 41, 1
NOERROR, FORMERR, NXDOMAIN, NOTIMP = 0, 1, 3, 4
LONGEST = 4096  # the longest query that is read
_TTL_S = 60
_OUR_SIZE = 1232
_RD, _QR, _RA, _OPCODE = 0x0100, 0x8000, 0x0080, 0x7800


@final
class Query(Struct):
    """A DNS question. `name` is as sent, without the last dot; None for bytes that are no ASCII."""

    number: int
    flags: int
    question: bytes  # as it came, for the answer
    name: str | None
    kind: int
    klass: int
    edns: bool


class Malformed(Exception):  # noqa: N818  # what a guest sent, not our error
    """A message that is not a query. `answer` is the DNS message to reply with, or None for no reply."""

    def __init__(self, answer: bytes | None) -> None:
        super().__init__("not a DNS query")
        self.answer = answer


def parse(data: bytes) -> Query:
    """Return the question of a message. Raises Malformed for all but one plain question with at most an OPT record."""
    if len(data) < 12 or len(data) > LONGEST:
        raise Malformed(None)
    number, flags, questions, answers, authorities, additional = struct.unpack_from("!6H", data)
    if flags & _QR:
        raise Malformed(None)  # an answer without a question: two resolvers would answer each other for ever
    if flags & _OPCODE:
        raise Malformed(_header(number, flags, NOTIMP, 0, 0, 0))
    bad = Malformed(_header(number, flags, FORMERR, 0, 0, 0))
    if (questions, answers, authorities) != (1, 0, 0) or additional > 1:
        raise bad
    labels, end = _labels(data, 12, bad)
    if len(data) < end + 4:
        raise bad
    kind, klass = struct.unpack_from("!2H", data, end)
    end += 4
    if not (additional == 0 and end == len(data)) and not (additional == 1 and _is_opt(data, end)):
        raise bad
    try:
        name = ".".join(label.decode("ascii") for label in labels) if b"." not in b"".join(labels) else None
    except UnicodeDecodeError:
        name = None
    return Query(number, flags, data[12:end], name, kind, klass, additional == 1)


def _labels(data: bytes, at: int, bad: Malformed) -> tuple[list[bytes], int]:
    """Return the labels at `at` and where they end. Refuse pointers, which a question has no use for."""
    labels: list[bytes] = []
    start = at
    while True:
        if at >= len(data) or data[at] > 63 or at - start > 254:
            raise bad
        size = data[at]
        at += 1
        if size == 0:
            return labels, at
        if at + size > len(data):
            raise bad
        labels.append(data[at : at + size])
        at += size


def _is_opt(data: bytes, at: int) -> bool:
    """Return whether the rest of a message, to its last byte, is an OPT record of the root."""
    if len(data) < at + 11 or data[at] != 0 or struct.unpack_from("!H", data, at + 1)[0] != OPT:
        return False
    size: int = struct.unpack_from("!H", data, at + 9)[0]
    return at + 11 + size == len(data)


def answer(query: Query, lookup: Callable[[str], str | None]) -> bytes:
    """Return the reply to a query. `lookup`, called once, gives the address of a permitted name, else None."""
    address = lookup(query.name) if query.name and query.klass == IN else None
    if address is None:
        return _reply(query, NXDOMAIN, b"")
    if query.kind != A:
        return _reply(query, NOERROR, b"")
    number = bytes(int(part) for part in address.split("."))
    return _reply(query, NOERROR, struct.pack("!3HIH", 0xC00C, A, IN, _TTL_S, 4) + number)


def _reply(query: Query, code: int, record: bytes) -> bytes:
    opt = struct.pack("!BHHIH", 0, OPT, _OUR_SIZE, 0, 0) if query.edns else b""
    head = _header(query.number, query.flags, code, 1, int(bool(record)), int(query.edns))
    return head + query.question + record + opt


def _header(number: int, flags: int, code: int, questions: int, answers: int, additional: int) -> bytes:
    return struct.pack("!6H", number, _QR | flags & (_RD | _OPCODE) | _RA | code, questions, answers, 0, additional)


# names inside

MOST_NAMES = 4096  # a pattern such as *.a.com lets a guest make up names without end
_FIRST = 127 << 24 | 77 << 16  # 127.77.0.1 and on: no program's server or resolver is there
MOST_SKIPPED = (1 << 16) - MOST_NAMES - 2


class Names:
    """The addresses in 127.0.0.0/8 that stand for permitted names in a sandbox, for as long as it lives.

    `policy.hosts` decides how names are spelled; this table only hands out addresses, each when a guest asks for it.
    Not safe from two threads at once: the gateway's loop owns the table.
    """

    def __init__(self, skipped: int = 0) -> None:
        """Leave the first `skipped` addresses out: an address of one sandbox must mean no other host in another.

        A snapshot of memory may hold an address, and a connection by a rule for tcp names no host.
        """
        self._skipped = skipped
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def address_of(self, name: str) -> str | None:
        """Return the address of a canonical, permitted name, a new one where needed; None when there are too many."""
        found = self._addresses.get(name)
        if found is None and len(self._addresses) < MOST_NAMES:
            number = _FIRST + self._skipped + len(self._addresses) + 1
            found = ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
            self._addresses[name] = found
            self._names[found] = name
        return found

    def name_of(self, address: str) -> str | None:
        """Return the name that an address stands for; None when there is none."""
        return self._names.get(address)

    def copy(self) -> Names:
        """Return a copy for a live copy of the sandbox, whose memory holds addresses that the original got."""
        made = Names(self._skipped)
        made._addresses = dict(self._addresses)
        made._names = dict(self._names)
        return made


# answers for one sandbox, by UDP, by TCP and by a relay: no query of a guest goes anywhere (G09)

_AT_ONCE = 64  # datagrams before other connections have their turn
_STREAM_S = 10.0
_STREAM_QUERIES = 100
_LONGEST_SHOWN = 255
NUMBER_BYTES = 4  # the number before a message that a relay passes on


def on_datagrams(directory: Directory, sock: socket.socket) -> None:
    """Answer the datagrams that have come. Called by the loop."""
    for _ in range(_AT_ONCE):
        try:
            data, peer = sock.recvfrom(LONGEST + 1)
        except OSError:  # mostly BlockingIOError: there are no more
            return
        reply = reply_to(directory, data)
        if reply is not None:
            with contextlib.suppress(OSError):  # the guest does not wait for the answer any more
                sock.sendto(reply, peer)


def on_relayed(directory: Directory, sock: socket.socket) -> None:
    """Answer messages that a relay has numbered; an answer has the number of its query. Called by the loop."""
    for _ in range(_AT_ONCE):
        try:
            data = sock.recv(NUMBER_BYTES + LONGEST + 1)
        except OSError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(sock.fileno())  # the sandbox has ended
            return
        reply = reply_to(directory, data[NUMBER_BYTES:])
        if reply is not None:
            with contextlib.suppress(OSError):
                sock.send(data[:NUMBER_BYTES] + reply)


def reply_to(directory: Directory, data: bytes) -> bytes | None:
    """Return the answer to a message; None if no answer is due or the guest sends too many queries."""
    if not directory.may_look_up():
        return None
    try:
        query = parse(data)
    except Malformed as error:
        return error.answer
    if query.name is None:
        _deny(directory, "(bytes that are no name)", Refusal("net.name", "what was looked up is not a host name"))
    return answer(query, lambda name: lookup(directory, name))


def lookup(directory: Directory, asked: str) -> str | None:
    """Return the address inside of a permitted name; else log the denial and return None."""
    try:
        name = canonical_host(asked)
    except ValueError:
        if not _is_about_service(directory, asked):
            shown = printable(asked, _LONGEST_SHOWN)
            _deny(directory, shown, Refusal("net.name", f"{shown} is not a host name"))
        return None
    if not directory.resolves(name):
        _deny(directory, name, directory.decide(name, 0).refusal)
        return None
    address = directory.address_of(name)
    if address is None:
        message = f"the sandbox has looked up {MOST_NAMES} names, the most it may"
        _deny(directory, name, Refusal("net.names", message))
    return address


def _is_about_service(directory: Directory, asked: str) -> bool:
    """Return whether a name like `_http._tcp.a.com` belongs to a permitted host: such queries are not logged."""
    labels = asked.split(".")
    while labels and labels[0].startswith("_"):
        labels = labels[1:]
    try:
        return directory.resolves(canonical_host(".".join(labels)))
    except ValueError:
        return False


def _deny(directory: Directory, name: str, refusal: Refusal | None) -> None:
    assert refusal is not None
    directory.deny(name, 0, refusal)


async def serve_stream(directory: Directory, sock: socket.socket) -> None:
    """Serve DNS over TCP: a few queries on a connection, each after its length."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_STREAM_S):
            for _ in range(_STREAM_QUERIES):
                size = int.from_bytes(await _exactly(sock, 2), "big")
                reply = reply_to(directory, await _exactly(sock, size)) if size <= LONGEST else None
                if reply is None:
                    return
                await loop.sock_sendall(sock, len(reply).to_bytes(2, "big") + reply)
    except (OSError, TimeoutError, EOFError):
        return
    finally:
        sock.close()


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(sock, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
