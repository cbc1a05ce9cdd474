"""Be the client of benchmarks.gateway, on the host and in a sandbox. Prints seconds as JSON.

python client.py bytes HOST PORT MEGABYTES            of one transfer
python client.py requests PROXY-PORT HOST:PORT COUNT  of all of them, four at a time
python client.py https HOST PORT ROOTS COUNT          of each; HOST may be `name:port@proxy-port`
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import threading
import time

_THREADS = 4


def receive(host: str, port: str, megabytes: str) -> list[float]:
    with socket.create_connection((host, int(port))) as sock:
        begun = time.perf_counter()
        sock.sendall(megabytes.encode())
        buffer, got = bytearray(1 << 18), 0
        while count := sock.recv_into(buffer):
            got += count
        taken = time.perf_counter() - begun
    assert got == int(megabytes) << 20, got
    return [taken]


def ask_proxy(proxy: str, place: str, count: str) -> list[float]:
    request = f"GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode()
    failed: list[bytes] = []

    def some() -> None:
        for _ in range(int(count) // _THREADS):
            answer = b""
            with socket.create_connection(("127.0.0.1", int(proxy))) as sock:
                sock.sendall(request)
                while piece := sock.recv(4096):
                    answer += piece
            if b" 200 " not in answer[:20]:
                failed.append(answer[:200])

    threads = [threading.Thread(target=some) for _ in range(_THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    return [time.perf_counter() - begun]


def ask_https(host: str, port: str, roots: str, count: str) -> list[float]:
    context = ssl.create_default_context(cafile=roots or None)
    name, _, proxy = host.partition("@")
    token = os.environ.get("TOKEN", "none")
    request = f"GET / HTTP/1.1\r\nHost: {name}:{port}\r\nX-Token: {token}\r\nConnection: close\r\n\r\n".encode()
    return [_one(context, name, int(port), int(proxy or 0), request) for _ in range(int(count))]


def _one(context: ssl.SSLContext, name: str, port: int, proxy: int, request: bytes) -> float:
    begun = time.perf_counter()
    if proxy:
        sock = socket.create_connection(("127.0.0.1", proxy))
        sock.sendall(f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
        assert b" 200 " in sock.recv(4096)
        name = name.partition(":")[0]
    else:
        sock = socket.create_connection((name, port))
    with sock, context.wrap_socket(sock, server_hostname=name) as tls:
        tls.sendall(request)
        answer = b""
        while piece := tls.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    return time.perf_counter() - begun


if __name__ == "__main__":
    work = {"bytes": receive, "requests": ask_proxy, "https": ask_https}[sys.argv[1]]
    print(json.dumps(work(*sys.argv[2:])))
