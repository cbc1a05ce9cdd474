"""Checks of terminals, ports and pauses: the ways a caller reaches into a running sandbox."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from ringfence import Limits, Policy, PolicyError, Sandbox, SandboxClosedError, SandboxError
from ringfence.events import Exit, Stdout
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker

if TYPE_CHECKING:
    from ringfence.types import Address, Process

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


def a_terminal_that_ended_has_its_exit_code_and_no_size(box: Sandbox) -> None:
    with box.pty(["sh"], cols=100, rows=30) as pty:
        pty.write("exit 3\n")
        result = pty.wait(timeout_s=20)
    assert (result.status, result.exit_code) == ("error", 3)
    with raises(SandboxClosedError, match="the terminal of sh is closed"):
        pty.resize(cols=80, rows=24)
    assert box.run("1").value == "1"


def a_terminal_that_somebody_has_open_after_its_program_ended_takes_nothing_with_it(box: Sandbox) -> None:
    box.run("kept = 41").check()
    left = "trap '' HUP; (trap '' HUP; sleep 0.3; echo done > ended) & exit 0"
    assert box.pty(["sh", "-c", left]).wait(timeout_s=20).ok
    for _ in range(4):
        with box.pty(["true"]):
            pass
        box.pty(["true"]).kill()
    box.exec(["sh", "-c", "until test -e ended; do sleep 0.05; done; sleep 0.1"]).check()
    assert (box.state, box.run("kept + 1").value) == ("running", "42")


def input_for_a_terminal_that_nobody_has_open_any_more_is_a_broken_pipe(box: Sandbox) -> None:
    code = "import os, time, tty\ntty.setraw(0)\nos.write(1, b'up')\ntime.sleep(0.5)\n"
    code += "for fd in (0, 1, 2): os.close(fd)\ntime.sleep(60)"
    with box.pty(["python3", "-c", code]) as pty:
        _until(pty, "up")
        with raises(BrokenPipeError, match="is closed"):
            pty.write(b"x" * (4 << 20))


def _asked(address: Address, path: str, data: bytes | None = None) -> bytes:
    connection = HTTPConnection(address.host, address.port, timeout=30)
    try:
        connection.request("GET" if data is None else "POST", path, data)
        return connection.getresponse().read()
    finally:
        connection.close()


def a_server_inside_is_reached_at_its_address_and_no_other(box: Sandbox) -> None:
    box.run(SERVER).check()
    with box.expose(8000) as address:
        assert (address.host, address.url) == ("127.0.0.1", f"http://127.0.0.1:{address.port}")
        for count in (1, 100_000):
            assert _asked(address, f"/{count}") == b"hello " * count
        data = bytes(range(256)) * 2000
        assert _asked(address, "/", data) == data[::-1]
    with raises(OSError, match=r"refused"):
        socket.create_connection((address.host, address.port), timeout=5)


def a_port_where_nobody_listens_closes_the_connection_and_may_open_later(box: Sandbox) -> None:
    with box.expose(8000) as address:
        with socket.create_connection((address.host, address.port), timeout=30) as connection:
            assert connection.recv(1) == b""
        box.run(SERVER).check()
        assert _asked(address, "/1") == b"hello "


def an_address_ends_with_its_sandbox(make: MakeSandbox) -> None:
    with make() as box:
        box.run(SERVER).check()
        address = box.expose(8000)
        connection = socket.create_connection((address.host, address.port), timeout=30)
    with connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    with raises(OSError, match=r"refused"):
        socket.create_connection((address.host, address.port), timeout=5)


def a_port_that_is_none_is_refused(box: Sandbox) -> None:
    for port in (0, -1, 65536, True, "80"):
        with raises(PolicyError, match="it is a number from 1 to 65535"):
            box.expose(port)  # type: ignore[arg-type]  # the point of this check


def a_paused_sandbox_does_nothing_until_it_goes_on(box: Sandbox) -> None:
    box.run("x = 1").check()
    with box.spawn(["python3", "-c", COUNTER]):
        time.sleep(0.5)
        states = [box.state]
        box.pause()
        box.pause()
        states.append(box.state)
        for use in (lambda: box.files.read("n"), lambda: box.run("1"), box.snapshot):
            with raises(SandboxError, match="paused"):
                use()
        time.sleep(0.3)
        box.resume()
        box.resume()
        states.append(box.state)
        first = int(box.files.read_text("n"))
        time.sleep(0.5)
        assert int(box.files.read_text("n")) > first
    assert states == ["running", "paused", "running"]
    assert box.run("x").value == "1", "state survives"


def a_paused_sandbox_uses_no_cpu_time(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", "while True: pass"]):
        time.sleep(0.3)
        before = box.usage().cpu_s
        box.pause()
        time.sleep(2)
        box.resume()
        after = box.usage().cpu_s
    assert before is not None
    assert after is not None
    assert after - before < 1, "two seconds on a processor of its own"


def a_deadline_stands_still_while_it_is_paused(box: Sandbox) -> None:
    with box.spawn(["sleep", "60"], timeout_s=2) as process:
        box.pause()
        time.sleep(3)
        box.resume()
        assert process.running, "the pause counted"
        assert process.wait().status == "timeout"


def a_deadline_stands_still_for_who_waits_for_it_too(box: Sandbox) -> None:
    results = []
    waiting = threading.Thread(target=lambda: results.append(box.exec(["sleep", "0.7"], timeout_s=1.5)))
    waiting.start()
    time.sleep(0.3)
    box.pause()
    time.sleep(3)
    box.resume()
    waiting.join()
    assert (results[0].status, box.state) == ("ok", "running"), "the pause counted"


def a_paused_sandbox_can_be_closed(make: MakeSandbox) -> None:
    box = make().start()
    box.spawn(["sleep", "60"])
    box.pause()
    box.close()
    assert box.state == "closed"


def an_idle_sandbox_is_paused_by_its_policy_and_the_next_call_wakes_it(make: MakeSandbox) -> None:
    with make(policy=Policy(limits=Limits(idle_s=0.3, on_idle="pause"))) as box:
        box.run("x = 5").check()
        box.files.write("f", "1")
        box.snapshot().delete()
        for use, answer in ((lambda: box.run("x").value, "5"), (lambda: box.files.read("f"), b"1")):
            _becomes_paused(box)
            assert use() == answer
        _becomes_paused(box)
        box.snapshot().delete()


def _becomes_paused(box: Sandbox) -> None:
    deadline = time.monotonic() + 20
    while box.state != "paused":
        assert time.monotonic() < deadline, "it is not paused"
        time.sleep(0.02)


CHECKS = (
    in_box(a_terminal_has_a_size_and_can_be_resized),
    in_box(control_c_in_a_terminal_interrupts_what_runs_there, "terminal-signals"),
    in_box(a_size_that_is_none_is_refused),
    in_box(a_terminal_that_ended_has_its_exit_code_and_no_size),
    in_box(a_terminal_that_somebody_has_open_after_its_program_ended_takes_nothing_with_it),
    in_box(input_for_a_terminal_that_nobody_has_open_any_more_is_a_broken_pipe),
    in_box(a_server_inside_is_reached_at_its_address_and_no_other),
    in_box(a_port_where_nobody_listens_closes_the_connection_and_may_open_later),
    with_maker(an_address_ends_with_its_sandbox),
    in_box(a_port_that_is_none_is_refused),
    in_box(a_paused_sandbox_does_nothing_until_it_goes_on, "pause"),
    in_box(a_paused_sandbox_uses_no_cpu_time, "pause", "usage"),
    in_box(a_deadline_stands_still_while_it_is_paused, "pause"),
    in_box(a_deadline_stands_still_for_who_waits_for_it_too, "pause"),
    with_maker(a_paused_sandbox_can_be_closed, "pause"),
    with_maker(an_idle_sandbox_is_paused_by_its_policy_and_the_next_call_wakes_it, "pause"),
)
