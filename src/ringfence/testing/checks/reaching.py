"""Terminals, ports and pauses: the ways a caller reaches into a sandbox that runs."""

from __future__ import annotations

import socket
import time

from ringfence import Exit, PolicyError, Process, Sandbox, SandboxError, Stdout
from ringfence.testing.model import in_box, raises

SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 8123))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"hello " + peer.recv(100)); peer.close()
"""
COUNTER = """
import os, time
n = 0
while True:
    n += 1
    with open("n.new", "w") as file: file.write(str(n))
    os.replace("n.new", "n")
    time.sleep(0.01)
"""


def _until(process: Process, words: str) -> str:
    seen = ""
    for event in process:
        if isinstance(event, Stdout):
            seen += event.text
        if words in seen or isinstance(event, Exit):
            break
    return seen


def a_terminal_has_a_size_and_can_be_resized(box: Sandbox) -> None:
    with box.pty(["sh", "-c", "test -t 0 && echo terminal; stty size; read x; stty size"], cols=90, rows=30) as pty:
        seen = _until(pty, "30 90")
        pty.resize(cols=101, rows=41)
        pty.write("\n")
        seen += _until(pty, "41 101")
    assert "terminal\r\n30 90\r\n" in seen
    assert "41 101\r\n" in seen


def control_c_in_a_terminal_interrupts_what_runs_there(box: Sandbox) -> None:
    with box.pty(["sh", "-c", "trap 'echo caught; exit 5' INT; echo up; while :; do sleep 0.05; done"]) as pty:
        _until(pty, "up")
        pty.write("\x03")
        result = pty.wait(timeout_s=10)
    assert (result.exit_code, "caught" in result.stdout) == (5, True)


def a_size_that_is_none_is_refused(box: Sandbox) -> None:
    for cols, rows in ((0, 24), (80, -1), (10**6, 24)):
        with raises(PolicyError):
            box.pty(["true"], cols=cols, rows=rows)


def a_server_inside_is_reached_at_its_address_and_no_other(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", SERVER]) as server:
        _until(server, "up")
        with box.expose(8123) as address:
            with socket.create_connection((address.host, address.port), timeout=10) as peer:
                peer.sendall(b"host")
                assert peer.makefile("rb").read() == b"hello host"
            host, port = address.host, address.port
        with raises(OSError):
            socket.create_connection((host, port), timeout=2).close()


def a_paused_sandbox_does_nothing_until_it_goes_on(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", COUNTER]):
        time.sleep(0.5)
        states = [box.state]
        box.pause()
        states.append(box.state)
        with raises(SandboxError, match="paused"):
            box.files.read("n")
        time.sleep(0.3)
        box.resume()
        states.append(box.state)
        first = int(box.files.read_text("n"))
        time.sleep(0.5)
        assert int(box.files.read_text("n")) > first
    assert states == ["running", "paused", "running"]


CHECKS = (
    in_box(a_terminal_has_a_size_and_can_be_resized),
    in_box(control_c_in_a_terminal_interrupts_what_runs_there, "terminal-signals"),
    in_box(a_size_that_is_none_is_refused),
    in_box(a_server_inside_is_reached_at_its_address_and_no_other),
    in_box(a_paused_sandbox_does_nothing_until_it_goes_on, "pause"),
)
