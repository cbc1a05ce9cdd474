"""A port inside gets an address outside, and only that port does."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time

import pytest

from ringfence import AsyncSandbox, Limits, Policy, Sandbox
from ringfence.testing.checks.reaching import SERVER
from ringfence.wire.inbox import WINDOW

pytestmark = pytest.mark.everywhere


def test_asyncio_callers_have_it_too() -> None:
    async def main() -> bytes:
        async with AsyncSandbox() as box:
            (await box.run(SERVER)).check()
            async with box.expose(8000) as address:
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"GET /3 HTTP/1.0\r\n\r\n")
                data = await reader.read()
                writer.close()
                return data

    assert asyncio.run(main()).endswith(b"hello hello hello ")


ECHO = """
import socket, threading
def echo(connection):
    while data := connection.recv(1 << 16): connection.sendall(data)
    connection.close()
server = socket.create_server(("127.0.0.1", 8000))
def serve():
    while True: threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
"""
SILENT = """
import socket, threading
server = socket.create_server(("127.0.0.1", 8000))
held = []
def serve():
    while True: held.append(server.accept()[0])
threading.Thread(target=serve, daemon=True).start()
"""


def test_bytes_go_both_ways_at_once_and_none_is_lost_where_the_client_reads_late() -> None:
    sent, got = random.Random(1).randbytes(12 << 20), bytearray()
    with Sandbox(policy=Policy(limits=Limits(output="1M"))) as box:
        box.run(ECHO).check()
        with box.expose(8000) as address, socket.create_connection((address.host, address.port), timeout=30) as one:
            half = threading.Event()

            def send() -> None:
                one.sendall(sent[: len(sent) // 2])
                half.set()
                one.sendall(sent[len(sent) // 2 :])
                one.shutdown(socket.SHUT_WR)

            threading.Thread(target=send, daemon=True).start()
            half.wait(3)  # by then every buffer between is full, and no byte was read
            while data := one.recv(1 << 16):
                got += data
    assert (len(got), bytes(got) == sent) == (len(sent), True)


def test_what_a_client_has_not_read_is_no_more_than_the_window() -> None:
    """The server waits for the client, and the host keeps no more bytes than the window."""
    sends = "def flood(connection):\n    while True: connection.sendall(bytes(1 << 20))\n"
    code = SILENT.replace("held.append(server.accept()[0])", "held.append(server.accept()[0]); flood(held[-1])")
    with Sandbox() as box:
        box.run(sends + code).check()
        with box.expose(8000) as address, socket.create_connection((address.host, address.port), timeout=10):
            place = box._running_place()
            seen, until = [0], time.monotonic() + 20
            while not any(address._open.values()) and time.monotonic() < until:
                time.sleep(0.01)
            inbox = next(iter(address._open.values()))._inbox  # type: ignore[union-attr]  # it is there by now
            while time.monotonic() < until and (seen[-1] == 0 or len(seen) < 8 or seen[-1] != seen[-8]):
                time.sleep(0.05)
                place.link.poll()
                seen.append(sum(len(data) for _, data in list(inbox.items)))
            assert 0 < seen[-1] <= WINDOW


def test_an_address_for_which_no_thread_was_left_serves_the_next_client(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, [2]

    def fails(thread: threading.Thread) -> None:
        if thread.name == "ringfence-expose" and failures[0]:
            failures[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    with Sandbox() as box:
        box.run(ECHO).check()
        with box.expose(8000) as address:
            monkeypatch.setattr(threading.Thread, "start", fails)
            for _ in range(2):
                with socket.create_connection((address.host, address.port), timeout=5) as one:
                    assert one.recv(1) == b""
            with socket.create_connection((address.host, address.port), timeout=5) as one:
                one.sendall(b"x")
                assert one.recv(1) == b"x"


def _break_off(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_clients_that_break_off_take_no_place_though_the_server_says_nothing() -> None:
    with Sandbox(policy=Policy(limits=Limits(processes=64))) as box:
        box.run(SILENT).check()
        with box.expose(8000) as address:
            for _ in range(70):  # more than may be open at once
                with socket.create_connection((address.host, address.port), timeout=10) as one:
                    one.sendall(b"x")
                    one.settimeout(0.02)
                    with pytest.raises(TimeoutError):  # the server holds it
                        one.recv(1)
                    _break_off(one)
            with socket.create_connection((address.host, address.port), timeout=0.5) as one:
                with pytest.raises(TimeoutError):
                    one.recv(1)
