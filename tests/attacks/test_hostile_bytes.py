"""A monitor that lies: hostile frames through a socket into both links. The sandbox is lost, the host's memory is flat.

How it works: a pair of sockets stands in for a sandbox's channel, and a thread plays the monitor at its other end.
How it could be passed by: a parser that waits for 4 GiB, keeps what nobody asked for, or goes on after a broken frame.
Why this would notice: the state, the result and the resident memory of this process are looked at after each.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from ringfence import AsyncSandbox, Policy, Sandbox, SandboxLostError
from ringfence.results import Control, Enforcement, Usage
from ringfence.wire.frames import STDOUT, message, pack

MB = 1 << 20
EXIT = {"code": 0, "signal": None, "why": None, "report": "", "cpu_s": 0.0, "ended_at": 0.0}
CONTROL = Control("none: a test", "full")


class FakeBox:
    """A stand-in with the parts of a sandbox that the layers above use, over a socket whose other end is hostile."""

    def __init__(self) -> None:
        self.backend = "process"
        self.channel, self.theirs = socket.socketpair()
        self.enforcement = Enforcement(**dict.fromkeys(Enforcement.__fields__, CONTROL))
        self.env = {"PATH": "/usr/bin"}
        self.outlet = None
        self.is_unprotected = False
        self.python = {"sys_path": [], "executable": "python3", "fresh": False}
        self.killed = 0

    def usage(self) -> tuple[Usage, int]:
        return Usage(), 0

    def kill(self) -> None:
        self.killed += 1

    def close(self) -> None:
        self.channel.close()
        self.theirs.close()

    def wait_destroyed(self, timeout_s: float) -> bool:
        del timeout_s
        return True

    def findings(self) -> tuple[object, ...]:
        return ()


def flood(first: bytes) -> Callable[[socket.socket], None]:
    """Yield `first`, then rubbish as long as the reader takes more, 64 MiB at most."""

    def send(sock: socket.socket) -> None:
        sock.settimeout(2)
        try:
            sock.sendall(first)
            for _ in range(64):
                sock.sendall(bytes(MB))
        except OSError:
            return

    return send


HOSTILE = {
    "a frame of 4 GiB": struct.pack("<IBI", 0xFFFFFFFF, STDOUT, 1),
    "a frame of an unknown type": pack(99, 1, b"x"),
    "input from inside": pack(1, 1, b"x"),
    "output of nobody": pack(STDOUT, 42, b"x"),
    "an event of nobody": message(ev="exit", id=42, **EXIT),
    "an event with another type": message(ev="exit", id=1, **{**EXIT, "code": "0"}),
    "a bool as a number": message(ev="exit", id=True, **EXIT),
    "an event with a field too many": message(ev="exit", id=1, **EXIT, ok=True),
    "an end of its own": message(ev="end", why="closed"),
    "a start in the middle": message(ev="ready", init=1),
    "deep JSON": pack(0, 0, b"[" * 100_000 + b"]" * 100_000),
    "a repeated key": pack(0, 0, json.dumps({"ev": "end"})[:-1].encode() + b', "ev": "end", "why": "idle"}'),
    "not JSON": pack(0, 0, b"\xff\xfe"),
    "more output than was granted": pack(STDOUT, 1, bytes(MB)) * 2,
}
hostile = pytest.mark.parametrize("first", HOSTILE.values(), ids=list(HOSTILE))


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def box() -> Iterator[FakeBox]:
    made = FakeBox()
    yield made
    made.close()


def play(box: FakeBox, monitor: Callable[[socket.socket], None]) -> threading.Thread:
    """Play a monitor that sends `data` after the first request."""

    def answer() -> None:
        heard = b""
        while b'"start"' not in heard:
            heard += box.theirs.recv(1 << 16)
        monitor(box.theirs)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


@hostile
def test_a_sync_sandbox_whose_monitor_lies_is_lost(box: FakeBox, first: bytes) -> None:
    sandbox = Sandbox(policy=Policy(), backend="process")
    sandbox._launcher.launch = lambda: box  # type: ignore[method-assign,assignment,return-value]  # a box of the test's own
    sandbox.start()
    before = resident()
    thread = play(box, flood(first))
    result = sandbox.run("1")
    assert (result.status, result.reason, result.exit_code) == ("lost", "guest-lost", None)
    assert sandbox.state == "lost"
    assert box.killed
    with pytest.raises(SandboxLostError, match="broke the wire's format"):
        sandbox.run("2")
    box.channel.close()
    thread.join(5)
    assert resident() - before < 24 * MB


@hostile
def test_an_async_sandbox_whose_monitor_lies_is_lost(box: FakeBox, first: bytes) -> None:
    before = resident()

    async def use() -> None:
        sandbox = AsyncSandbox(policy=Policy(), backend="process")
        sandbox._launcher.launch = lambda: box  # type: ignore[method-assign,assignment,return-value]  # a box of the test's own
        await sandbox.start()
        thread = play(box, flood(first))
        result = await sandbox.run("1")
        assert (result.status, result.reason, result.exit_code) == ("lost", "guest-lost", None)
        assert sandbox.state == "lost"
        assert box.killed
        await asyncio.sleep(0.1)  # the loop would go on reading here
        with pytest.raises(SandboxLostError, match="broke the wire's format"):
            await sandbox.run("2")
        box.channel.close()
        await asyncio.to_thread(thread.join, 5)

    asyncio.run(use())
    assert resident() - before < 24 * MB


def test_a_monitor_that_falls_silent_in_the_middle_of_a_frame_meets_the_deadline(box: FakeBox) -> None:
    sandbox = Sandbox(policy=Policy(), backend="process")
    sandbox._launcher.launch = lambda: box  # type: ignore[method-assign,assignment,return-value]  # a box of the test's own
    sandbox.start()
    play(box, lambda sock: sock.sendall(struct.pack("<IBI", 1000, STDOUT, 1) + b"half"))
    result = sandbox.run("1", timeout_s=0.2)
    assert (result.status, box.killed) == ("timeout", 1)


def test_a_monitor_that_closes_the_channel_is_a_loss(box: FakeBox) -> None:
    sandbox = Sandbox(policy=Policy(), backend="process")
    sandbox._launcher.launch = lambda: box  # type: ignore[method-assign,assignment,return-value]  # a box of the test's own
    sandbox.start()
    play(box, lambda sock: sock.close())
    result = sandbox.run("1")
    assert (result.status, result.reason, sandbox.state) == ("lost", "guest-lost", "lost")


def test_a_long_value_that_is_not_ascii_is_cut_and_not_lost() -> None:
    """Six bytes of JSON for each character: past the report's cap nothing would parse."""
    import ringfence

    value = ringfence.run("'é' * 60_000").value
    assert value is not None
    assert value.startswith("'ééé")
    assert len(value) > 10_000
