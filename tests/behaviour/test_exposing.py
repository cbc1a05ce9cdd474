"""A port inside gets an address outside, and only that port does."""

from __future__ import annotations

import asyncio

from ringfence import AsyncSandbox

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
