"""Show what Ringfence is for, in under a minute: run code of an agent, then four hostile snippets.

    make demo

Exit code 0 only when all four were contained. Each verdict is from outside the guest: the file's bytes, the listener,
the host's processes and the result's status, not what the guest printed.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from typing import NamedTuple

import ringfence
from ringfence import Limits, Policy, Result

AGENT_CODE = """
import csv, io, statistics

report = io.StringIO("city,celsius\\nOslo,4\\nCairo,29\\nLima,19\\nPune,31\\n")
rows = list(csv.DictReader(report))
mean = statistics.mean(float(row["celsius"]) for row in rows)
warm = [row["city"] for row in rows if float(row["celsius"]) > mean]
print(f"mean {mean:.1f} °C; above it: {', '.join(warm)}")
"""

READ_SECRET = "print(open({path!r}).read())"

REACH_NETWORK = """
import socket
socket.create_connection(("127.0.0.1", {port}), timeout=3).sendall(b"hello from the guest")
"""

# Children that leave their parent's session: only the sandbox can end them. The name is for the witness.
FORK_BOMB = """
import os, time
open("/proc/self/comm", "w").write("demo-bomb")
started = refused = 0
while refused < 50:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        started += 1
    except OSError:
        refused += 1
print(f"{started} processes, then refused", flush=True)
time.sleep(600)
"""

MEMORY_BOMB = """
held = []
while True:
    held.append(b"x" * 8_000_000)
"""


class Style(NamedTuple):
    bold: str = ""
    good: str = ""
    bad: str = ""
    faint: str = ""
    end: str = ""


class Verdict(NamedTuple):
    contained: bool
    seen: str  # what the witness outside saw
    held_by: str


def style() -> Style:
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        return Style("\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m")
    return Style()


def size(count: int | None) -> str:
    return "not measured here" if count is None else f"{count / (1 << 20):.1f} MiB"


def show_agent_run(look: Style) -> bool:
    print(f"{look.bold}1. Code an agent wrote{look.end}")
    result = ringfence.run(AGENT_CODE, timeout_s=10)
    for line in AGENT_CODE.strip().splitlines():
        print(f"   {look.faint}| {line}{look.end}")
    print(f"   → {result.stdout.strip() or result.stderr.strip()}\n")
    used = result.usage
    cpu = "not measured here" if used.cpu_s is None else f"{used.cpu_s * 1000:.0f} ms"
    print(f"   status     {result.status}, {result.duration_s * 1000:.0f} ms, exit code {result.exit_code}")
    print(f"   usage      CPU {cpu}, memory {size(used.memory_peak_bytes)}, {used.output_bytes} bytes of output")
    print("   enforced by")
    for name in type(result.enforcement).__fields__:
        control = getattr(result.enforcement, name)
        weaker = f"  (weaker: {control.note})" if control.level == "weaker" else ""
        print(f"     {name:10} {control.mechanism}{weaker}")
    again = ringfence.run(AGENT_CODE, timeout_s=10)
    print(f"   again      {again.duration_s * 1000:.1f} ms, now that everything is warm\n")
    return result.ok


def reads_a_secret() -> Verdict:
    secret = f"token-{os.urandom(8).hex()}"
    with tempfile.NamedTemporaryFile("w", prefix="ringfence-demo-", suffix=".key") as file:
        file.write(secret)
        file.flush()
        os.chmod(file.name, 0o644)  # every user of the host may read it; the sandbox does not show it
        result = ringfence.run(READ_SECRET.format(path=file.name), timeout_s=10)
    leaked = secret in result.stdout or secret in result.stderr
    seen = "the secret is in the output" if leaked else f"no byte of it came out; the guest got {last_line(result)}"
    return Verdict(not leaked and result.status == "error", seen, result.enforcement.files.mechanism)


def reaches_the_network() -> Verdict:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=3):  # the witness can see a caller at all
            listener.accept()[0].close()
        result = ringfence.run(REACH_NETWORK.format(port=port), timeout_s=10)
        listener.settimeout(0.3)
        try:
            listener.accept()[0].close()
            reached = True
        except TimeoutError:
            reached = False
    said = "the host's listener was reached" if reached else f"its listener saw no connection; {last_line(result)}"
    return Verdict(not reached and result.status == "error", said, result.enforcement.network.mechanism)


def forks_without_end() -> Verdict:
    limits = Limits(processes=20, memory="128M", timeout_s=2)
    done = threading.Event()
    counts: list[int] = []
    witness = threading.Thread(target=count_until, args=(done, counts))
    witness.start()
    started = time.monotonic()
    try:
        result = ringfence.run(FORK_BOMB, policy=Policy(limits=limits))
    finally:
        done.set()
        witness.join()
    took = time.monotonic() - started
    left = bombs_left()
    most = max(counts, default=0)
    said = f"never more than {most} of its processes; killed after {took:.1f} s; {left} left"
    contained = 1 < most <= limits.processes and result.status == "timeout" and took < 3 and left == 0
    return Verdict(contained, said, f"{result.enforcement.processes.mechanism}; {result.enforcement.time.mechanism}")


def eats_all_memory() -> Verdict:
    before = memory_available()
    limits = Limits(memory="64M", disk="8M", timeout_s=20)
    result = ringfence.run(MEMORY_BOMB, policy=Policy(limits=limits))
    deadline = time.monotonic() + 2
    while (lost := before - memory_available()) > 16 << 20 and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel frees memory a moment after the end
    how = "killed" if result.status == "oom" else f"ended as {result.status} ({last_line(result)})"
    peak = size(result.usage.memory_peak_bytes)
    said = f"{how}, its peak was {peak}; the host has {size(max(0, lost))} less free memory than before"
    held = result.status == "oom" or (result.status == "error" and "MemoryError" in result.stderr)
    return Verdict(held and lost < 512 << 20, said, result.enforcement.memory.mechanism)


def last_line(result: Result) -> str:
    lines = result.stderr.strip().splitlines()
    return lines[-1][:100] if lines else f"status {result.status}"


def bombs() -> int:
    """Count the processes of the fork bomb on the host."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                found += file.read() == "demo-bomb\n"
        except OSError:
            continue
    return found


def count_until(done: threading.Event, counts: list[int]) -> None:
    while not done.wait(0.05):
        counts.append(bombs())


def bombs_left(within_s: float = 3.0) -> int:
    """Return how many processes of the fork bomb are left after `within_s`, or 0 as soon as all are gone."""
    deadline = time.monotonic() + within_s
    while (left := bombs()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def memory_available() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


HOSTILE = [
    ("read a secret of the host", reads_a_secret),
    ("reach the network", reaches_the_network),
    ("fork without end", forks_without_end),
    ("eat all memory", eats_all_memory),
]


def show_hostile_runs(look: Style) -> int:
    print(f"{look.bold}2. Four hostile snippets{look.end}")
    contained = 0
    for title, attempt in HOSTILE:
        verdict = attempt()
        contained += verdict.contained
        word = f"{look.good}contained{look.end}" if verdict.contained else f"{look.bad}NOT CONTAINED{look.end}"
        print(f"   {title:26} {word}")
        print(f"     seen from outside: {verdict.seen}")
        print(f"     enforced by:       {verdict.held_by}")
    return contained


def main() -> int:
    warnings.simplefilter("ignore", ringfence.WeakerLimitWarning)  # the table says it
    look = style()
    started = time.monotonic()
    try:
        ran = show_agent_run(look)
        contained = show_hostile_runs(look)
    except ringfence.UnsupportedError as error:
        print(
            f"{look.bad}this host cannot run the demo:{look.end} {error}\n  fix: {error.fix}\n  more: ringfence doctor"
        )
        return 1
    took = time.monotonic() - started
    print(f"\n{contained} of {len(HOSTILE)} contained, {took:.0f} s in all.")
    return 0 if ran and contained == len(HOSTILE) else 1


if __name__ == "__main__":
    sys.exit(main())
