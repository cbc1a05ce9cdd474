"""The host's half of the relay against a guestd that lies: it never crashes, and opens only what is permitted."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.desk import wait_until
from ringfence.gateway.relay import mux
from ringfence.gateway.relay.mux import Relay
from ringfence.gateway.service import GatewayService
from ringfence.policy.model import Network, Rule
from ringfence.shared import credit
from ringfence.shared import framing as guest_frames
from ringfence.wire import frames, relay_frames

PROXY = 3128
NETWORK = Network(allow=["web.test"], rules=[Rule("db.test:5432", protocol="tcp")], connections=4)

OPENED = frames.pack(relay_frames.OPEN, 1, socket.inet_aton("127.0.0.1") + struct.pack(">H", PROXY))


class Guestd:
    """The other end of the channel."""

    def __init__(
        self, service: GatewayService, channel: socket.socket, link: socket.socket, broken: threading.Event
    ) -> None:
        self.service = service
        self.channel = channel
        self.link = link
        self.broken = broken
        self.reader = guest_frames.FrameCutter()

    def send(self, kind: int, number: int, payload: bytes) -> None:
        self.channel.sendall(frames.pack(kind, number, payload))

    def open(self, number: int, address: str, port: int) -> None:
        self.send(relay_frames.OPEN, number, socket.inet_aton(address) + struct.pack(">H", port))

    def hear(self, count: int) -> list[tuple[int, int, bytes]]:
        """Return the next frames; DATA may be in pieces."""
        found: list[tuple[int, int, bytes]] = []
        while len(found) < count:
            data = self.channel.recv(1 << 16)
            assert data, "the host closed the channel"
            found += [(kind, number, bytes(payload)) for kind, number, payload in self.reader.feed(data)]
        return found

    def is_over(self) -> bool:
        """Return whether the host has ended the channel, within a moment."""
        self.channel.settimeout(5)
        while _received(self.channel):
            pass
        return self.broken.is_set()


@contextmanager
def relaying(lookup: Callable[[str, int], list[str]] | None = None) -> Iterator[Guestd]:
    service = GatewayService()
    service.resolver.lookup = lookup or _nothing
    channel, theirs = socket.socketpair()
    broken = threading.Event()
    registration, link = service.register_relayed(NETWORK, (), channel, broken.set)
    guestd = Guestd(service, theirs, link, broken)
    theirs.settimeout(5)
    try:
        yield guestd
    finally:
        link.close()
        theirs.close()
        registration.close()
        assert registration.wait_ended(5)
        service.stop()
        wait_until(lambda: not [one for one in threading.enumerate() if one.name == "ringfence-relay"])


def _nothing(name: str, port: int) -> list[str]:
    raise OSError(f"{name}:{port}")


def _query(name: str) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, 256, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", 1, 1)


def test_dns_messages_are_answered_by_number_and_a_name_means_an_address_of_this_sandbox() -> None:
    looked_up: list[str] = []

    def lookup(name: str, port: int) -> list[str]:
        looked_up.append(f"{name}:{port}")
        raise OSError

    with relaying(lookup) as guestd:
        guestd.send(relay_frames.PACKET, 9, _query("evil.test"))
        guestd.send(relay_frames.PACKET, 8, _query("db.test"))
        answers = {number: payload for kind, number, payload in guestd.hear(2) if kind == relay_frames.PACKET}
        assert (answers[9][3] & 15, answers[8][3] & 15, answers[8][-4:-2]) == (3, 0, bytes([127, 77]))
        own, other = (".".join(map(str, [*answers[8][-4:-1], answers[8][-1] ^ bit])) for bit in (0, 1))
        guestd.open(1, own, 5432)
        assert guestd.hear(1) == [(relay_frames.END, 1, relay_frames.BROKEN)]
        assert looked_up == ["db.test:5432"]
        for number, (address, port) in enumerate(
            [(other, 5432), ("127.0.0.1", 5432), ("10.0.0.1", 443), (own, 22), (own, 0)], 2
        ):
            guestd.open(number, address, port)
            ((kind, stream, word),) = guestd.hear(1)
            assert (kind, stream) == (relay_frames.END, number)
            assert word in (relay_frames.BROKEN, relay_frames.GONE)
        assert looked_up == ["db.test:5432"]


def test_what_is_not_the_relays_goes_to_the_library_as_it_came_whatever_its_pieces() -> None:
    with relaying() as guestd:
        words = frames.message(ev="ready", init=1) + frames.pack(frames.STDOUT, 3, os.urandom(300_000))
        mixed = words + frames.pack(relay_frames.PACKET, 1, _query("web.test")) + words
        threading.Thread(target=guestd.channel.sendall, args=(mixed,), daemon=True).start()
        got = b""
        guestd.link.settimeout(5)
        while len(got) < 2 * len(words):
            got += guestd.link.recv(1 << 16)
        assert got == words * 2
        asked = frames.message(op="clear") + frames.pack(frames.STDIN, 3, b"x" * 100_000)
        for byte in range(0, len(asked), 777):
            guestd.link.sendall(asked[byte : byte + 777])
        told = guestd.hear(3)
        assert min(told) == (frames.JSON, 0, b'{"op":"clear"}')
        assert (frames.STDIN, 3, b"x" * 100_000) in told


def test_a_fork_of_the_caller_keeps_no_relayed_connection_from_ending() -> None:
    """A pool of workers, say: the gateway did not hear that the guest had gone, until the last of them had ended."""
    with relaying() as guestd:
        guestd.send(relay_frames.OPEN, 1, OPENED[-6:])
        guestd.send(relay_frames.DATA, 1, b"CONNECT web")
        totals = guestd.service.totals
        wait_until(lambda: totals.connections == 2)
        pid = os.fork()
        if pid == 0:
            guestd.service.after_fork()
            signal.pause()
        try:
            guestd.send(relay_frames.END, 1, relay_frames.BROKEN)
            wait_until(lambda: totals.connections == 0)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_more_streams_than_permitted_are_refused_and_the_rest_goes_on() -> None:
    with relaying() as guestd:
        for number in range(1, 60):
            guestd.open(number, "127.0.0.1", PROXY)
        refused = {number for kind, number, _ in guestd.hear(55) if kind == relay_frames.END}
        assert len(refused) == 55
        assert refused.isdisjoint({1, 2, 3, 4})
        guestd.send(relay_frames.DATA, 1, b"CONNECT evil.test:443 HTTP/1.1\r\n\r\n")
        said = b"".join(payload for kind, number, payload in guestd.hear(2) if (kind, number) == (relay_frames.DATA, 1))
        assert b" 403 " in said


def test_a_guestd_that_asks_and_reads_no_answer_is_not_read_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream too many is refused in words that wait for it in our memory."""
    relays: list[Relay] = []
    start = Relay.start

    def noted(relay: Relay) -> None:
        relays.append(relay)
        start(relay)

    monkeypatch.setattr(mux, "_MOST_UNREAD", 1 << 16)
    monkeypatch.setattr(Relay, "start", noted)
    with relaying() as guestd:
        place = socket.inet_aton("127.0.0.1") + struct.pack(">H", PROXY)
        asked = b"".join(frames.pack(relay_frames.OPEN, number, place) for number in range(1, 200_001))
        sent = _sent_until_nobody_reads(guestd.channel, asked)
        assert sent < len(asked)
        assert len(relays[0]._out) < (1 << 16) + mux._READ
        threading.Thread(target=guestd.channel.sendall, args=(asked[sent:],), daemon=True).start()
        refused = {number for kind, number, _ in guestd.hear(199_996) if kind == relay_frames.END}
        assert len(refused) >= 199_960


@pytest.mark.parametrize(
    "lie",
    [
        frames.pack(relay_frames.DATA, 1, b"x"),  # never opened
        frames.pack(relay_frames.OPEN, 0, bytes(6)),
        frames.pack(relay_frames.OPEN, 1, bytes(5)),
        frames.pack(relay_frames.OPEN, 1, bytes(6)) * 2,
        frames.pack(relay_frames.PACKET, 1, bytes(4097)),
        frames.pack(21, 1, b"x"),
        frames.pack(255, 1, b"x"),
        frames.HEADER.pack(relay_frames.MOST_DATA + 1, relay_frames.DATA, 1),
        frames.HEADER.pack((1 << 21) + 1, frames.STDOUT, 1),
        OPENED + frames.pack(relay_frames.CREDIT, 1, b"\xff\xff\xff\xff"),
        OPENED + frames.pack(relay_frames.CREDIT, 1, bytes(4)),
        OPENED + frames.pack(relay_frames.CREDIT, 1, struct.pack("<I", credit.MOST)),
        OPENED + frames.pack(relay_frames.END, 1, b"\0") * 2,
        OPENED + frames.pack(relay_frames.END, 1, b"\2"),
        OPENED + frames.pack(relay_frames.END, 1, b"\0") + frames.pack(relay_frames.DATA, 1, b"x"),
    ],
)
def test_a_lie_ends_the_sandbox(lie: bytes) -> None:
    """J07: bytes that broke the format are not read again, and the sandbox does not run on."""
    with relaying() as guestd:
        threading.Thread(target=_send, args=(guestd.channel, lie), daemon=True).start()
        assert guestd.is_over()


def test_more_bytes_than_there_is_credit_for_end_the_sandbox() -> None:
    """F16: a gateway that reads nothing holds a window of them, no more."""
    with relaying() as guestd:
        guestd.service.stop()
        _send(guestd.channel, OPENED + frames.pack(relay_frames.DATA, 1, bytes(1 << 16)) * 100)
        assert guestd.is_over()


def _sent_until_nobody_reads(sock: socket.socket, data: bytes) -> int:
    sent = 0
    sock.settimeout(1)
    try:
        while sent < len(data):
            sent += sock.send(data[sent : sent + 4096])
    except TimeoutError:
        pass  # what is asked for
    sock.settimeout(5)
    return sent


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return


ADDRESSES = st.sampled_from(["127.77.0.1", "127.77.0.2", "127.0.0.1", "10.0.0.1", "0.0.0.0", "255.255.255.255"])
PORTS = st.sampled_from([53, 80, 443, 5432, PROXY, 0, 22, 65535])
NUMBERS = st.integers(0, 12)
SAID = st.sampled_from(
    [
        b"\x16\x03\x01\x00\x05hello",
        b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"CONNECT evil.test:443 HTTP/1.1\r\n\r\n",
        b"\5\1\0\5\1\0\3\x09evil.test\x01\xbb",
        b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"\0\x1d" + _query("evil.test"),
        bytes(5000),
    ]
)
FRAMES = st.one_of(
    st.builds(
        lambda number, address, port: frames.pack(
            relay_frames.OPEN, number, socket.inet_aton(address) + struct.pack(">H", port)
        ),
        NUMBERS,
        ADDRESSES,
        PORTS,
    ),
    st.builds(lambda number, data: frames.pack(relay_frames.DATA, number, data), NUMBERS, SAID),
    st.builds(
        lambda number, count: frames.pack(relay_frames.CREDIT, number, struct.pack("<I", count)),
        NUMBERS,
        st.integers(0, 1 << 22),
    ),
    st.builds(lambda number, word: frames.pack(relay_frames.END, number, bytes([word])), NUMBERS, st.integers(0, 3)),
    st.builds(
        lambda number, name: frames.pack(relay_frames.PACKET, number, _query(name)),
        NUMBERS,
        st.sampled_from(["web.test", "db.test", "evil.test", "a.web.test"]),
    ),
    st.builds(frames.pack, st.integers(0, 255), NUMBERS, st.binary()),
    st.binary(max_size=40),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(FRAMES, max_size=25))
def test_whatever_comes_from_inside_nothing_crashes_and_no_other_name_is_looked_up(said: list[bytes]) -> None:
    """A thread that ends by an exception fails the test; so does one that does not end when the sandbox does."""
    looked_up: set[str] = set()

    def lookup(name: str, port: int) -> list[str]:
        del port
        looked_up.add(name)
        raise OSError

    with relaying(lookup) as guestd:
        _send(guestd.channel, b"".join(said))
        guestd.channel.shutdown(socket.SHUT_WR)
        guestd.link.settimeout(5)
        while _received(guestd.link):
            pass
    assert looked_up <= {"web.test", "db.test"}


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_a_stream_is_cut_in_the_same_frames_whatever_its_pieces(payloads: list[bytes], sizes: list[int]) -> None:
    kinds = [relay_frames.DATA, frames.STDOUT, relay_frames.PACKET, frames.JSON]
    whole = b"".join(frames.pack(kinds[n % 4], n % 4 + 1, payload) for n, payload in enumerate(payloads))
    sorter, reader, cutter = relay_frames.Sorter(), guest_frames.FrameCutter(), relay_frames.Cutter()
    data: list[bytes] = [b"", b"", b""]
    others, packets, start, turn = b"", [], 0, 0
    while start < len(whole):
        piece = whole[start : start + sizes[turn % len(sizes)]]
        start, turn = start + len(piece), turn + 1
        for kind, _, payload in sorter.feed(piece):
            if kind == relay_frames.DATA:
                data[0] += payload
            elif kind == relay_frames.OTHER:
                others += payload
            else:
                packets.append(payload)
        data[1] += b"".join(payload for kind, _, payload in reader.feed(piece) if kind == relay_frames.DATA)
        data[2] += cutter.feed(piece)
    expected = b"".join(payloads[::4])
    assert data == [expected, expected, whole]
    assert packets == payloads[2::4]
    assert others == b"".join(frames.pack(kinds[n % 4], n % 4 + 1, p) for n, p in enumerate(payloads) if n % 2)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1 << 20), st.booleans()), max_size=200))
def test_what_streams_may_be_ahead_is_bounded_in_all(turns: list[tuple[int, int, bool]]) -> None:
    shared = credit.Shared()
    windows = [credit.Window(shared) for _ in range(31)]
    granted = [credit.FIRST] * 31
    for number, count, at_once in turns:
        taken = min(count, granted[number])
        granted[number] += windows[number].passed(taken, at_once=at_once) - taken
    assert all(0 <= room <= credit.MOST for room in granted)
    assert sum(granted) <= 31 * credit.FIRST + credit.SHARED
    for one in windows:
        one.close()
    assert shared.left == credit.SHARED


def test_a_library_that_does_not_read_holds_up_no_connection() -> None:
    """Output that no call reads waits in the host, within bounds, while streams go on."""
    with relaying() as guestd:
        guestd.channel.sendall(frames.pack(frames.STDOUT, 1, bytes(1 << 20)) * 3)
        began = time.monotonic()
        guestd.send(relay_frames.PACKET, 5, _query("web.test"))
        assert guestd.hear(1)[0][:2] == (relay_frames.PACKET, 5)
        assert time.monotonic() - began < 5
