"""Servers for tests: an authority, and a TLS server for HTTP/1.1 and HTTP/2 that keeps every request."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import h2.config
import h2.connection
import h2.events
import h11
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ringfence.gateway.secrets.ca import _usage

Headers = list[tuple[bytes, bytes]]


class Roots:
    """A certificate authority of the test's, and certificates for servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self._certificate = self._sign(self._name, self._key.public_key(), [], is_authority=True)
        self.path = folder / "roots.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def server(self, *names: str, alpn: tuple[str, ...] = ("h2", "http/1.1"), days: int = 2) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [_alternative(name) for name in names]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = self._sign(subject, key.public_key(), alternatives, days=days)
        path = self._folder / f"{names[0]}-{days}-{'-'.join(alpn).replace('/', '_')}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        context.set_alpn_protocols(list(alpn))
        return context

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        names: list[x509.GeneralName],
        *,
        days: int = 2,
        is_authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=3))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=is_authority), critical=True)  # 3.13 asks for it
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Seen(NamedTuple):
    """A request as the server saw it. The headers include trailers."""

    protocol: str
    method: str
    target: str
    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value.decode() for key, value in self.headers if key.lower() == name.encode()), None)


class Answer(NamedTuple):
    status: int = 200
    headers: Headers = []
    parts: list[bytes] = []  # each sent by itself
    pause_s: float = 0.0  # before each part
    trailers: Headers = []


Handler = Callable[[Seen], Answer]


def echo(seen: Seen) -> Answer:
    """Answer with the request itself, or with a form of the request that the path names."""
    path = seen.target.partition("?")[0]
    told = json.dumps([[name.decode(), value.decode()] for name, value in seen.headers]).encode()
    authorization = (seen.header("authorization") or "").encode()
    if path == "/in-header":
        return Answer(headers=[(b"x-echo", authorization), (b"content-length", b"0")])
    if path == "/in-name":
        return Answer(headers=[(b"x-" + authorization.lower(), b"1"), (b"content-length", b"0")])
    if path == "/in-trailer":
        return Answer(parts=[b"body"], trailers=[(b"x-echo", authorization)])
    if path == "/in-pieces":
        return Answer(parts=[bytes([byte]) for byte in authorization])
    if path == "/gzip":
        return Answer(headers=[(b"content-encoding", b"gzip")], parts=[gzip.compress(authorization)])
    if path == "/body":
        return Answer(parts=[seen.body] if seen.body else [])
    if path == "/big":
        return Answer(parts=[b"x" * 65_536] * 64)
    if path == "/redirect":
        return Answer(302, [(b"location", seen.target.partition("?to=")[2].encode()), (b"content-length", b"0")])
    return Answer(headers=[(b"content-type", b"application/json")], parts=[told])


class Server:
    """A server on loopback; `seen` is its log."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.seen: list[Seen] = []
        self.connections = 0
        self.port = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        tls = writer.get_extra_info("ssl_object")
        try:
            if tls is not None and tls.selected_alpn_protocol() == "h2":
                await self._http2(reader, writer)
            else:
                await self._http1(reader, writer)
        except (OSError, h11.ProtocolError, asyncio.IncompleteReadError):
            pass  # a client that broke off, as tests have it do
        finally:
            writer.close()

    async def _http1(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        head: h11.Request | None = None
        body = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                if http.they_are_waiting_for_100_continue:
                    writer.write(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                http.receive_data(await reader.read(65_536))
            elif isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = [(bytes(name), bytes(value)) for name, value in (*head.headers, *event.headers)]
                seen = Seen("http/1.1", head.method.decode(), head.target.decode(), headers, body)
                self.seen.append(seen)
                if seen.header("upgrade") == "websocket":
                    await self._websocket(http, reader, writer, seen)
                    return
                answer = self.handler(seen)
                await self._answer1(http, writer, answer._replace(parts=[]) if seen.method == "HEAD" else answer)
                if http.our_state is h11.MUST_CLOSE:
                    return
                http.start_next_cycle()
            else:
                return

    async def _answer1(self, http: h11.Connection, writer: asyncio.StreamWriter, answer: Answer) -> None:
        writer.write(http.send(h11.Response(status_code=answer.status, headers=answer.headers)) or b"")
        for part in answer.parts:
            await asyncio.sleep(answer.pause_s)
            writer.write(http.send(h11.Data(data=part)) or b"")
            await writer.drain()
        writer.write(http.send(h11.EndOfMessage(headers=answer.trailers)) or b"")
        await writer.drain()

    async def _websocket(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen
    ) -> None:
        headers: Headers = [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
        writer.write(http.send(h11.InformationalResponse(status_code=101, headers=headers)) or b"")
        value = (seen.header("authorization") or "").encode()
        if seen.target == "/not-ws":
            writer.write(value)
        writer.write(frame(0x01, value[:6]) + frame(0x80, value[6:] + b"|"))
        while data := http.trailing_data[0] or await reader.read(4096):
            writer.write(frame(0x82, data.upper()))
            await writer.drain()

    async def _http2(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=False))
        http.initiate_connection()
        writer.write(http.data_to_send())
        heads: dict[int, Headers] = {}
        bodies: dict[int, bytes] = {}
        answers: set[asyncio.Task[None]] = set()
        grown = asyncio.Event()
        while data := await reader.read(65_536):
            for event in http.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    heads[event.stream_id] = [(bytes(name), bytes(value)) for name, value in event.headers]
                    bodies[event.stream_id] = b""
                elif isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] += bytes(event.data)
                    http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.TrailersReceived):
                    heads[event.stream_id] += [(bytes(name), bytes(value)) for name, value in event.headers]
                elif isinstance(event, h2.events.StreamEnded):
                    seen = _seen2(heads.pop(event.stream_id), bodies.pop(event.stream_id))
                    self.seen.append(seen)
                    answer = self._answer2(http, writer, event.stream_id, self.handler(seen), grown)
                    answers.add(asyncio.create_task(answer))
                elif isinstance(event, h2.events.WindowUpdated):
                    grown.set()
            writer.write(http.data_to_send())
            await writer.drain()
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def _answer2(
        self,
        http: h2.connection.H2Connection,
        writer: asyncio.StreamWriter,
        stream: int,
        answer: Answer,
        grown: asyncio.Event,
    ) -> None:
        http.send_headers(stream, [(b":status", str(answer.status).encode()), *answer.headers])
        for part in answer.parts:
            await asyncio.sleep(answer.pause_s)
            while part:
                room = min(http.local_flow_control_window(stream), http.max_outbound_frame_size)
                if room <= 0:
                    writer.write(http.data_to_send())
                    grown.clear()
                    await grown.wait()
                    continue
                http.send_data(stream, part[:room])
                part = part[room:]
            writer.write(http.data_to_send())
            await writer.drain()
        if answer.trailers:
            http.send_headers(stream, answer.trailers, end_stream=True)
        else:
            http.end_stream(stream)
        writer.write(http.data_to_send())


def _seen2(headers: Headers, body: bytes) -> Seen:
    pseudo = {name: value.decode() for name, value in headers if name.startswith(b":")}
    plain = [(b"host", pseudo[b":authority"].encode())]
    plain += [pair for pair in headers if not pair[0].startswith(b":")]
    return Seen("h2", pseudo[b":method"], pseudo[b":path"], plain, body)


def frame(first: int, payload: bytes) -> bytes:
    """Return a websocket frame as a server sends it; `first` is the kind, plus 0x80 for the last frame of a message."""
    if len(payload) < 126:
        return bytes([first, len(payload)]) + payload
    if len(payload) < 1 << 16:
        return bytes([first, 126]) + len(payload).to_bytes(2, "big") + payload
    return bytes([first, 127]) + len(payload).to_bytes(8, "big") + payload


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.do(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def serving(
    loop: Loop, tls: ssl.SSLContext | None, handler: Handler = echo, *, address: str = "127.0.0.1"
) -> Iterator[Server]:
    server = Server(handler)
    listener = loop.do(asyncio.start_server(server.connection, address, 0, ssl=tls))
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:

        async def stop() -> None:
            listener.close()

        loop.do(stop())
