"""A sandbox on this machine's cgroups, end to end: `tests/v2/run -- python3 tests/v2/smoke.py`. Exit 1: not so."""

from __future__ import annotations

import sys
import warnings

import ringfence
from ringfence import Limits, Policy, Sandbox

warnings.simplefilter("ignore")
HOG = "x = bytearray(400 << 20)\nx[::4096] = b'1' * len(x[::4096])"
failed: list[str] = []


def check(what: str, seen: object, wanted: object) -> None:
    print("ok  " if seen == wanted else "FAIL", what, "" if seen == wanted else f"{seen!r}, not {wanted!r}", flush=True)
    if seen != wanted:
        failed.append(what)


first = ringfence.run("print(6 * 7)", timeout_s=30)
check("a run", (first.status, first.stdout), ("ok", "42\n"))
print("    ", first.enforcement.memory, "|", first.enforcement.cpu, "|", first.usage, flush=True)
again = [ringfence.run("1 + 1", timeout_s=30).value for _ in range(5)]
check("five more", again, ["2"] * 5)
small = Policy(limits=Limits(memory="64M", disk="10M"))
if "cgroup" in first.enforcement.memory.mechanism:
    check("a memory hog", ringfence.run(HOG, policy=small, timeout_s=30).status, "oom")
check("a timeout", ringfence.run("while True: pass", timeout_s=2).status, "timeout")
with Sandbox() as box:
    box.files.write("a.txt", "hello")
    check("a command", box.exec(["cat", "a.txt"]).stdout, "hello")
    check("a command that fails", box.exec(["false"]).exit_code, 1)
    box.run("x = 41").check()
    check("a session", box.run("x + 1").value, "42")
    with box.fork() as copy:
        copy.run("x = 0").check()
        both = copy.run("x").value, box.run("x").value, copy.files.read("a.txt")
        check("a copy with memory", both, ("0", "41", b"hello"))
    snapshot = box.snapshot()
    box.files.write("a.txt", "changed")
    box.rollback(snapshot)
    check("a rollback", box.files.read_text("a.txt"), "hello")
    try:
        box.pause()
        paused = box.state
        box.resume()
        check("a pause", (paused, box.run("1").value), ("paused", "1"))
    except ringfence.UnsupportedError as error:
        print("    ", error, flush=True)
with Sandbox(policy=Policy(network=ringfence.Network(allow=["nowhere.invalid"]))) as box:
    refused = box.exec(["python3", "-c", "import socket; socket.getaddrinfo('example.org', 443)"])
    check("a name that is not allowed", (refused.exit_code, [d.target for d in box.denials()]), (1, ["example.org"]))
sys.exit(bool(failed))
