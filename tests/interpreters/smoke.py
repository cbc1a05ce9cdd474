"""Do what a user does, on the interpreter that runs this; print a line of JSON. Needs only the package."""

from __future__ import annotations

import http.server
import json
import sys
import threading

import ringfence
from ringfence import Network, Policy, Rule, Sandbox
from ringfence.gateway.service import service


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def run() -> object:
    done = ringfence.run("import sys; print(*sys.version_info[:2]); 6 * 7")
    return [done.status, done.stdout, done.value]


def session_and_files(box: Sandbox) -> object:
    box.files.write("in.csv", "a,b\n1,2\n")
    box.run("rows = open('in.csv').read().split()\nbig = list(range(1000))")
    return [box.run("len(rows)").value, box.files.read_text("in.csv"), box.exec(["cat", "in.csv"]).stdout]


def fork(box: Sandbox) -> object:
    with box.fork() as twin:
        found = twin.run("rows.append(3)\nlen(rows), sum(big)").value
    return [found, box.run("len(rows)").value]


def snapshot(box: Sandbox) -> object:
    snap = box.snapshot()
    box.files.write("in.csv", "x")
    box.rollback(snap)
    return box.files.read_text("in.csv")


def gateway() -> object:
    """Send plain bytes through the gateway: HTTP would need a package."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    service().resolver.lookup = lambda *_: ["127.0.0.1"]
    network = Network(rules=[Rule(f"web.test:{port}", protocol="tcp")], private=["127.0.0.0/8"])
    code = f"""
import socket
sock = socket.create_connection(("web.test", {port}))
sock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
print(sock.makefile("rb").read().rpartition(b"\\n")[2])
"""
    with Sandbox(policy=Policy(network=network)) as box:
        allowed = box.run(code)
    denied = ringfence.run(code)
    server.shutdown()
    server.server_close()
    return [allowed.stdout, denied.status]


def main() -> None:
    found = {"python": list(sys.version_info[:2]), "run": run()}
    with Sandbox() as box:
        found["session"] = session_and_files(box)
        found["fork"] = fork(box)
        found["snapshot"] = snapshot(box)
    found["gateway"] = gateway()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
