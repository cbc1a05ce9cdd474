"""Measure what the gateway costs: bytes, small requests, latency with and without a secret, a start with a network."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measuring import TIMES, Row, Series, alternate, compared, seconds
from ringfence import Limits, Network, Policy, Rule, Sandbox, Secret, UnsupportedError
from ringfence.gateway import stream
from ringfence.gateway.service import service

NAME = "bench.test"
_PEERS = Path(__file__).resolve().parent / "peers"
_SERVER, _CLIENT = _PEERS / "server.py", _PEERS / "client.py"
_LIMITS = Limits(memory="512M", timeout_s=600)
_LOOPBACK = ["127.0.0.0/8"]
_ROUNDS = 5
_Client = Callable[[], list[float]]


@contextlib.contextmanager
def _serving(kind: str, *args: str) -> Iterator[int]:
    """Start the server in a process of its own; the gateway's resolver finds it under NAME."""
    process = subprocess.Popen([sys.executable, str(_SERVER), kind, *args], stdout=subprocess.PIPE, text=True)
    resolver = service().resolver
    before, resolver.lookup = resolver.lookup, lambda _name, _port: ["127.0.0.1"]
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        resolver.lookup = before
        process.kill()
        process.communicate()


def _bare(*args: str) -> list[float]:
    """Run the client as a process of this host."""
    told = subprocess.run([sys.executable, str(_CLIENT), *args], check=True, capture_output=True, text=True)
    found: list[float] = json.loads(told.stdout)
    return found


def _inside(box: Sandbox, *args: str) -> list[float]:
    """Run the same client in a sandbox."""
    told = box.exec(["python3", "client.py", *args], timeout_s=300).check()
    found: list[float] = json.loads(told.stdout)
    return found


@contextlib.contextmanager
def _sandbox(policy: Policy, backend: str = "process", **files: bytes) -> Iterator[Sandbox]:
    with Sandbox(policy=policy, backend=backend) as box:  # type: ignore[arg-type]  # a name of a backend
        box.files.write("client.py", _CLIENT.read_bytes())
        for name, data in files.items():
            box.files.write(name, data)
        yield box


def _policy(port: int, *, host: str = NAME, secrets: tuple[Secret, ...] = (), opaque: bool = False) -> Policy:
    place = f"{host}:{port}"
    allow, rules = ([], [Rule(place, protocol="tcp")]) if opaque else ([place], [])
    network = Network(allow=allow, rules=rules, private=_LOOPBACK, upload="1000G", download="1000G", connections=64)
    return Policy(limits=_LIMITS, network=network, secrets=secrets)


# bytes


def many_bytes(megabytes: int) -> list[Row]:
    """Measure one connection whose bytes are not read: with listeners that were handed over, and relayed."""
    return [_bytes("process", 0.4, megabytes), _bytes("gvisor", 0.15, megabytes)]


def _bytes(backend: str, bar: float, megabytes: int) -> Row:
    how = "relayed" if backend == "gvisor" else "spliced"
    name = f"{megabytes} MB through the gateway, {how} / direct"
    with _serving("bytes") as port:
        args = (str(port), str(megabytes))
        try:
            with _sandbox(_policy(port, opaque=True), backend) as box:
                ours, bare = alternate(
                    _ROUNDS,
                    lambda: _inside(box, "bytes", NAME, *args)[0],
                    lambda: _bare("bytes", "127.0.0.1", *args)[0],
                    warm_up=1,
                )
        except UnsupportedError as error:
            return Row(name, bar, at_least=True, notes=(f"{backend}: {error}",))
    rates = [f"{megabytes / each.p50 / 1000:.2f} GB/s" for each in (ours, bare)]
    return Row(name, bar, bare.p50 / ours.p50, None, True, TIMES, rates[0], f"direct: {rates[1]}")


# small requests


def small_requests(count: int) -> list[Row]:
    """Measure plain HTTP by proxy: the same requests to the same address, a connection each, four at a time."""
    name = "small requests per second / tinyproxy"
    program = shutil.which("tinyproxy")
    if program is None:
        return [Row(name, 0.4, at_least=True, notes=("tinyproxy is not installed",))]
    with _serving("http") as port, _tinyproxy(program) as proxy, _sandbox(_policy(port, host="127.0.0.1")) as box:
        ours, theirs = alternate(
            _ROUNDS,
            lambda: _inside(box, "requests", "3128", f"127.0.0.1:{port}", str(count))[0],
            lambda: _bare("requests", str(proxy), f"127.0.0.1:{port}", str(count))[0],
            warm_up=1,
        )
    rates = [f"{count / each.p50:.0f} /s" for each in (ours, theirs)]
    return [Row(name, 0.4, theirs.p50 / ours.p50, None, True, TIMES, rates[0], f"tinyproxy: {rates[1]}")]


@contextlib.contextmanager
def _tinyproxy(program: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        port = _free_port()
        config = Path(folder, "tinyproxy.conf")
        lines = [f"Port {port}", "Listen 127.0.0.1", "Timeout 60", "MaxClients 100", "LogLevel Critical"]
        config.write_text("\n".join([*lines, f'LogFile "{folder}/log"', ""]))
        process = subprocess.Popen([program, "-d", "-c", str(config)], stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield port
        finally:
            process.terminate()
            process.wait(10)


def _free_port() -> int:
    """Return a port that no process uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on {port}")


# latency


def latency(count: int) -> list[Row]:
    """Measure how much longer an HTTPS request takes than without a sandbox. Each has a connection of its own."""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        roots = _certificate(Path(folder))
        with _serving("https", str(roots), f"{folder}/key.pem") as port:

            def bare() -> list[float]:
                return _bare("https", "127.0.0.1", str(port), str(roots), str(count))

            with _sandbox(_policy(port), roots=roots.read_bytes()) as box:
                plain = _added(lambda: _inside(box, "https", NAME, str(port), "roots", str(count)), bare)
            secrets = (Secret("TOKEN", "a-value-of-some-length", hosts=[NAME]),)
            with _trusting(roots), _sandbox(_policy(port, secrets=secrets)) as box:
                swapped = _added(lambda: _inside(box, "https", NAME, str(port), "", str(count)), bare)
            beside = _mitmproxy(port, roots, count, Path(folder), bare)
    return [
        _latency_row("added latency, permitted HTTPS request", 2, *plain),
        _latency_row("added latency, a secret injected", 10, *swapped, beside),
    ]


def _added(ours: _Client, bare: _Client) -> tuple[Series, Series]:
    """Return the samples of both sides, from rounds taken in turns."""
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(_ROUNDS):
        mine += ours()
        theirs += bare()
    return Series.of(mine), Series.of(theirs)


def _latency_row(name: str, bar: float, ours: Series, bare: Series, *notes: str) -> Row:
    mine, theirs = (f"p50 {each.p50 * 1e3:.2f} ms" for each in (ours, bare))
    value, worst = (ours.p50 - bare.p50) * 1e3, (ours.p99 - bare.p99) * 1e3
    return Row(name, bar, value, worst, unit="ms", ours=mine, against=f"direct: {theirs}", notes=notes)


def _certificate(folder: Path) -> Path:
    """Make a certificate for the server, and the root that signed it."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = f"subjectAltName=DNS:{NAME},IP:127.0.0.1"
    where = ["-keyout", f"{folder}/key.pem", "-out", f"{folder}/roots.pem"]
    subprocess.run([*command, "-subj", f"/CN={NAME}", "-addext", names, *where], check=True, capture_output=True)
    return folder / "roots.pem"


@contextlib.contextmanager
def _trusting(roots: Path) -> Iterator[None]:
    """Have the gateway trust the server's certificate. No setting of the installed package does this."""
    before = stream.trusted_roots

    def load(context: ssl.SSLContext) -> None:
        context.load_verify_locations(roots)

    stream.trusted_roots = load
    try:
        yield
    finally:
        stream.trusted_roots = before


def _mitmproxy(port: int, roots: Path, count: int, folder: Path, bare: _Client) -> str:
    """Measure what mitmproxy adds to the same request. `scripts/setup mitmproxy` installs it."""
    own = Path(sys.prefix, "peers", "mitmproxy", "bin", "mitmdump")
    program = str(own) if own.exists() else shutil.which("mitmdump")
    if program is None:
        return "mitmproxy is not installed: not measured"
    at = _free_port()
    options = [f"ssl_verify_upstream_trusted_ca={roots}", f"confdir={folder}/mitm", "termlog_verbosity=error"]
    sets = [word for option in options for word in ("--set", option)]
    command = [program, "-q", "--listen-host", "127.0.0.1", "-p", str(at), *sets]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(at)
        through = f"127.0.0.1:{port}@{at}"
        authority = f"{folder}/mitm/mitmproxy-ca-cert.pem"
        ours, direct = _added(lambda: _bare("https", through, str(port), authority, str(count)), bare)
    finally:
        process.terminate()
        process.wait(10)
    return f"mitmproxy adds {(ours.p50 - direct.p50) * 1e3:.2f} ms"


# starting


def starting(count: int) -> list[Row]:
    """Measure a run of `true` to its end, with and without a network."""
    without = Policy(limits=_LIMITS)
    with_one = Policy(limits=_LIMITS, network=Network(allow=["a.test"]))

    def start(policy: Policy) -> float:
        return seconds(lambda: _true(policy))

    mine, bare = alternate(count, lambda: start(with_one), lambda: start(without), warm_up=3)
    spread = f"spread {statistics.pstdev(mine.samples) * 1e3:.2f} ms"
    return [compared("start with a network / without", 1.5, mine, bare, "without", spread)]


def _true(policy: Policy) -> None:
    with Sandbox(policy=policy) as box:
        box.exec(["true"]).check()
