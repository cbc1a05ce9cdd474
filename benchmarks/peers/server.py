"""Be the server of benchmarks.gateway, in a process of its own: send bytes, or answer small requests, plain or by TLS.

python server.py bytes | http | https CERTIFICATE KEY      prints its port
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def give_bytes() -> None:
    """Send each connection as many megabytes as it asks for."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    megabyte = bytes(1 << 20)

    def give(connection: socket.socket) -> None:
        with connection:
            for _ in range(int(connection.recv(20))):
                connection.sendall(megabyte)

    while True:
        threading.Thread(target=give, args=(listener.accept()[0],), daemon=True).start()


async def answer(context: ssl.SSLContext | None) -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_ANSWER)
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0, ssl=context, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(kind: str, *files: str) -> None:
    if kind == "bytes":
        give_bytes()
        return
    context = None
    if kind == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
    asyncio.run(answer(context))


if __name__ == "__main__":
    main(*sys.argv[1:])
