"""A TLS server on the loopback, which the gateway knows while an attack lasts. Nothing leaves the machine.

The server keeps every byte that it receives, and answers each request with the request itself, as a careless service
might.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from ringfence import Network, Policy
from ringfence.gateway import stream
from ringfence.gateway.secrets.ca import Authority
from ringfence.gateway.service import service
from ringfence_attacks.arena import LIMITS

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from ringfence import Rule, Secret
    from ringfence_attacks.arena import Arm

HOST, OTHER = "api.example.com", "other.example.com"
_ZONE = ".example.com"
_SILENCE_S = 0.25  # a request is over when nothing came for so long


class Echo:
    """A server for both names. `heard` has the bytes received over TLS, `plain` the bytes received without TLS."""

    def __init__(self, authority: Authority) -> None:
        self.heard = b""
        self.plain = b""
        self._authority = authority
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _begin(self, work: object, *args: object) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._begin(self._serve, self._listener.accept()[0])

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            sock.settimeout(5)
            if sock.recv(1, socket.MSG_PEEK) != b"\x16":
                self.plain += self._answer(sock)
                return
            context = self._authority.server(HOST, ["http/1.1"])
            context.sni_callback = self._present
            with context.wrap_socket(sock, server_side=True) as tls:
                self.heard += self._answer(tls)

    def _present(self, tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        if name == OTHER:
            tls.context = self._authority.server(OTHER, ["http/1.1"])

    @staticmethod
    def _answer(sock: socket.socket) -> bytes:
        request = sock.recv(65_536)
        sock.settimeout(_SILENCE_S)
        with contextlib.suppress(TimeoutError):
            while more := sock.recv(65_536):
                request += more
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(request)}\r\nConnection: close\r\n\r\n".encode()
        sock.sendall(head + request)
        return request


@contextlib.contextmanager
def _known(authority: Authority) -> Iterator[None]:
    """Make the gateway of this process trust the attack's authority and resolve the server's names to loopback."""
    resolver = service().resolver
    roots = stream.trusted_roots
    lookup = resolver.lookup

    def trust(context: ssl.SSLContext) -> None:
        context.load_verify_locations(cadata=authority.certificate.decode())

    def find(name: str, port: int) -> list[str]:
        return ["127.0.0.1"] if name.endswith(_ZONE) else lookup(name, port)

    stream.trusted_roots = trust
    resolver.lookup = find
    try:
        yield
    finally:
        stream.trusted_roots = roots
        resolver.lookup = lookup


def echo(arm: Arm) -> Echo:
    """Start a server that the gateway knows while the arm lasts."""
    authority = Authority()
    arm.enter(_known(authority))
    return arm.enter(contextlib.closing(Echo(authority)))


def policy(server: Echo, *secrets: Secret, rules: tuple[Rule, ...] = (), allow: tuple[str, ...] = (HOST,)) -> Policy:
    """Return a policy that permits the server's names, on the server's port."""
    entries = [f"{name}:{server.port}" for name in allow]
    network = Network(allow=entries, rules=rules, private=["127.0.0.0/8"], ports=[server.port])
    return Policy(network=network, secrets=secrets, limits=LIMITS)


# For guest scripts: sends one request over TLS and returns what came back. The guest checks no certificate: it does not
# have the certificate of the attack's authority, and an attacker would trust every server.
FETCH = r"""
import socket, ssl
def fetch(host, port, data, tls=True):
    sock = socket.create_connection((host, port), timeout=3)
    if tls:
        context = ssl._create_unverified_context()
        context.set_alpn_protocols(["http/1.1"])
        sock = context.wrap_socket(sock, server_hostname=host)
    sock.sendall(data if isinstance(data, bytes) else data.encode())
    got = b""
    try:
        while more := sock.recv(65536):
            got += more
            sock.settimeout(0.4)
    except OSError:
        pass
    return got
"""
