"""Runs in a network and mount namespace of its own: a small internet on loopback, with a DNS server and a capture.

93.184.216.34 is a public server, in another namespace. Addresses of this one are 169.254.169.254, a metadata service,
and 93.184.216.36, public by number.
Prints what each witness saw, as JSON. Called by test_namespace.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

PUBLIC, OWN, METADATA, DNS = "93.184.216.34", "93.184.216.36", "169.254.169.254", "127.0.0.53"
CLONE_NEWNET = 0x40000000


class Witnesses:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.public: list[bytes] = []
        self.own: list[bytes] = []
        self.metadata: list[bytes] = []
        self.packets: list[bytes] = []
        self.answers: dict[str, list[str]] = {}  # for each time a name is asked for; the last one stays


def dns_server(seen: Witnesses) -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((DNS, 53))
    while True:
        data, peer = sock.recvfrom(4096)
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
            at += data[at] + 1
        name = ".".join(labels).lower()
        (kind,) = struct.unpack_from("!H", data, at + 1)
        record = b""
        if kind == 1:
            seen.asked.append(name)
            known = seen.answers.get(name, [])
            address = known.pop(0) if len(known) > 1 else (known or [""])[0]
            if address:
                record = struct.pack("!3HIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(address)
        code = 0 if name in seen.answers else 3
        head = data[:2] + struct.pack("!5H", 0x8180 | code, 1, int(bool(record)), 0, 0)
        sock.sendto(head + data[12 : at + 5] + record, peer)


def web_server(address: str, log: list[bytes]) -> None:
    listener = socket.create_server((address, 80))
    while True:
        connection, _ = listener.accept()
        log.append(connection.recv(4096))
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nthere")
        connection.close()


def elsewhere(log: list[bytes]) -> None:
    """Serve as PUBLIC in a new network namespace of this thread, at the other end of a virtual cable."""
    here, there = str(os.getpid()), str(threading.get_native_id())
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    for words in (
        ["link", "add", "there", "type", "veth", "peer", "name", "here", "netns", here],
        ["addr", "add", f"{PUBLIC}/24", "dev", "there"],
        ["link", "set", "there", "up"],
    ):
        subprocess.run(["nsenter", f"--net=/proc/{here}/task/{there}/ns/net", "ip", *words], check=True)
    ready.set()
    web_server(PUBLIC, log)


ready = threading.Event()


def capture(seen: Witnesses) -> None:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    while True:
        seen.packets.append(sock.recv(65536))


GUEST = Path(__file__).resolve().parents[1] / "programs/gateway/namespace_guest.py"


def main() -> None:
    run = ["ip", "link", "set", "lo", "up"]
    subprocess.run(run, check=True)
    subprocess.run(["ip", "addr", "add", f"{METADATA}/32", "dev", "lo"], check=True)
    seen = Witnesses()
    seen.answers = {"good.test": [PUBLIC], "rebind.test": [PUBLIC, "127.0.0.1"], "meta.test": [METADATA]}
    seen.answers["own.test"] = [OWN]
    threading.Thread(target=elsewhere, args=(seen.public,), daemon=True).start()
    assert ready.wait(10)
    subprocess.run(["ip", "addr", "add", f"{OWN}/24", "dev", "here"], check=True)
    subprocess.run(["ip", "link", "set", "here", "up"], check=True)
    servers = [(dns_server, (seen,)), (capture, (seen,)), (web_server, (METADATA, seen.metadata))]
    for target, args in (*servers, (web_server, (OWN, seen.own))):
        threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]  # each has its own

    from ringfence import Network, Policy, Sandbox

    with Sandbox(policy=Policy(network=Network(allow=["good.test", "rebind.test", "meta.test", "own.test"]))) as box:
        result = box.run(GUEST.read_text(), timeout_s=25)
    told = {
        "guest": result.stdout.split("\n"),
        "errors": result.stderr,
        "denials": [[denial.target, denial.code, denial.count] for denial in result.denials],
        "asked": seen.asked,
        "public": len(seen.public),
        "own": len(seen.own),
        "metadata": len(seen.metadata),
        "exfil": sum(b"exfil" in packet for packet in seen.packets),
        "captured": any(b"\x04good\x04test" in packet for packet in seen.packets),
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
