"""Streams of the gateway: a stream that always has data leaves other connections their turns."""

from __future__ import annotations

import asyncio
import socket
import ssl

from ringfence.gateway.secrets.ca import Authority
from ringfence.gateway.stream import ByteStream, Plain, Tls, client_context

READS = 64


async def _turns_of_others(stream: ByteStream) -> int:
    """Return the turns that others get while so many reads find data."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    for _ in range(READS):
        assert await stream.receive() == b"x"
    task.cancel()
    return turns


async def _plain() -> int:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a byte sent is a byte read
    with theirs, ours:
        ours.setblocking(False)
        for _ in range(READS):
            theirs.send(b"x")
        return await _turns_of_others(Plain(ours))


class _Full:
    """A TLS session that always has another record, of a single byte."""

    def read(self, size: int) -> bytes:
        del size
        return b"x"


async def _tls() -> int:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        stream = Tls(Plain(ours), ssl.create_default_context(), server_name="a.test")
        stream._tls = _Full()  # type: ignore[assignment]  # of all its methods, only this one is called
        return await _turns_of_others(stream)


def test_a_peer_that_never_pauses_leaves_others_their_turns() -> None:
    assert asyncio.run(_plain()) >= READS // 8 - 1
    assert asyncio.run(_tls()) >= READS // 8 - 1


class _Empty:
    """A TLS session without data, such as one in which keys are updated again and again."""

    def read(self, size: int) -> bytes:
        del size
        raise ssl.SSLWantReadError


async def _fruitless() -> int:
    """Return how many bytes were taken."""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        for sock in (theirs, ours):
            sock.setblocking(False)
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(theirs, b"x" * (1 << 22)))
        stream = Tls(Plain(ours), ssl.create_default_context(), server_name="a.test")
        stream._tls = _Empty()  # type: ignore[assignment]  # as above
        try:
            await stream.receive()
        except ConnectionAbortedError:
            return stream._incoming.pending
        finally:
            sending.cancel()
    raise AssertionError("it goes on for ever")


def test_a_peer_whose_records_carry_nothing_is_cut_off() -> None:
    assert asyncio.run(asyncio.wait_for(_fruitless(), 5)) <= 1 << 17


def test_neither_side_may_negotiate_tls_again() -> None:
    contexts = (Authority().server("a.test", ["http/1.1"]), client_context(["http/1.1"]))
    assert [bool(context.options & ssl.OP_NO_RENEGOTIATION) for context in contexts] == [True, True]
