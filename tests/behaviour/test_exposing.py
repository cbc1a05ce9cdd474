"""A port inside gets an address outside, and only that port does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request

import pytest

from ringfence import AsyncSandbox, PolicyError, Sandbox

SERVER = """
import http.server, threading
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'hello ' * int(self.path[1:]))
    def do_POST(self):
        data = self.rfile.read(int(self.headers['Content-Length']))
        self.send_response(200); self.end_headers(); self.wfile.write(data[::-1])
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Hello)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


def test_a_server_inside_is_reached_by_its_address(box: Sandbox) -> None:
    box.run(SERVER).check()
    with box.expose(8000) as address:
        assert (address.host, address.url) == ("127.0.0.1", f"http://127.0.0.1:{address.port}")
        for count in (1, 100_000):
            with urllib.request.urlopen(f"{address.url}/{count}", timeout=10) as answer:
                assert answer.read() == b"hello " * count
        data = bytes(range(256)) * 2000
        with urllib.request.urlopen(f"{address.url}/", data=data, timeout=10) as answer:
            assert answer.read() == data[::-1]
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection((address.host, address.port), timeout=5)


def test_a_port_where_nobody_listens_closes_the_connection_and_may_open_later(box: Sandbox) -> None:
    with box.expose(8000) as address:
        with socket.create_connection((address.host, address.port), timeout=5) as connection:
            assert connection.recv(1) == b""
        box.run(SERVER).check()
        with urllib.request.urlopen(f"{address.url}/1", timeout=10) as answer:
            assert answer.read() == b"hello "


def test_an_address_ends_with_its_sandbox() -> None:
    with Sandbox() as box:
        box.run(SERVER).check()
        address = box.expose(8000)
        connection = socket.create_connection((address.host, address.port), timeout=5)
    with connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection((address.host, address.port), timeout=5)


@pytest.mark.parametrize("port", [0, -1, 65536, True, "80"])
def test_a_port_that_is_none(box: Sandbox, port: int) -> None:
    with pytest.raises(PolicyError, match="it is a number from 1 to 65535"):
        box.expose(port)


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
