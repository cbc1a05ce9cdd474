"""F: exhaustion of the host's own process, by floods and bombs that the library reads, parses or counts."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time

from ringfence.errors import PolicyError
from ringfence_attacks.case import DOS, HOST_CODE, SPOOF, Seen, attack, cases
from ringfence_attacks.tracer import monitor_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence_attacks.arena import Arm

_MB = 1 << 20
_DEAR = 0.1  # seconds of CPU time used in about one second


_FLOODS = {
    "no newline": "for _ in range(96): os.write(1, bytes(1 << 20))",
    "one byte at a time": "for _ in range(60000): os.write(1, b'x'); os.write(2, b'y')",
}


@attack(
    "F16",
    "a flood of output does not fill the caller's memory, and the result says that output was cut",
    DOS,
    off=HOST_CODE,
)
def output_flood(arm: Arm) -> Seen:
    box = arm.sandbox(whole=True)
    arm.run(box, "1")
    before = _resident()
    if arm.off:
        kept = list(box.spawn(["python3", "-c", "import os\n" + _FLOODS["no newline"]]))
        grown = _resident() - before
        return Seen(grown > 40 * _MB, f"{len(kept)} events kept, {grown // _MB} MB more")
    results = {name: arm.run(box, "import os\n" + code) for name, code in _FLOODS.items()}
    grown = _resident() - before
    first = results["no newline"]
    words = f"{first.usage.output_bytes // _MB} MB came, {len(first.stdout_bytes)} bytes kept, {grown // _MB} MB more"
    return Seen(grown > 40 * _MB or not first.truncated or len(first.stdout_bytes) > 2 * _MB, words)


def _resident() -> int:
    """Return the memory of this process in bytes, after returning free memory to the kernel.

    Else a flood would first fill what earlier attacks left free in the allocator.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_REPORT_FLOOD = """
import signal, threading
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
end = time.monotonic() + 1.2
tell(pid=os.getpid())
while time.monotonic() < end:
    try: os.write(3, bytes(1 << 16))
    except OSError: time.sleep(0.01)
"""


@attack("F16-monitor", "a flood of nonsense on the line to the host costs the host no CPU time", DOS, off=HOST_CODE)
def flood_of_the_report(arm: Arm) -> Seen:
    """The host closes the line at the first nonsense. Else the monitor would read for ever, as the off arm does."""
    if arm.off:
        used = _cpu_to_read_a_flood()
        return Seen(used > _DEAR, f"a reader without a cap used {used:.2f} s of CPU time in 1 s")
    box = arm.sandbox(whole=True)
    monitor = monitor_of(box)
    before = _ticks(monitor)
    report = arm.python(_REPORT_FLOOD, box=box)
    used = _ticks(monitor) - before
    return Seen(
        used > _DEAR or report.exit_code != 0, f"the monitor used {used:.2f} s of CPU time in 1.2 s; {report.status}"
    )


def _cpu_to_read_a_flood() -> float:
    code = "import os\nwhile True: os.write(1, bytes(1 << 16))"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        before, end = time.process_time(), time.monotonic() + 1.0
        while time.monotonic() < end:
            os.read(process.stdout.fileno(), 1 << 16)
        used = time.process_time() - before
        process.kill()
    return used


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _ticks(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@attack("F17", "standard error that no program reads does not block the guest", DOS, off=HOST_CODE)
def other_stream_full(arm: Arm) -> Seen:
    code = "import os\nfor _ in range(64): os.write(2, bytes(1 << 16))\nos.write(1, b'done')"
    if not arm.off:
        result = arm.run(arm.sandbox(whole=True), code, timeout_s=5)
        return Seen(not result.ok, f"{result.status}, {len(result.stderr_bytes)} bytes of stderr kept")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=pipe, stderr=pipe) as process:
        time.sleep(0.7)
        stuck = process.poll() is None
        process.kill()
    return Seen(stuck, "reading standard output alone, the process never ends" if stuck else "it ended")


@attack(
    "F19",
    "arguments, variables, code and input that are too large are refused with a reason, not a traceback",
    DOS,
    off=HOST_CODE,
)
def huge_arguments(arm: Arm) -> Seen:
    if arm.off:
        try:
            subprocess.run(["/bin/true", "x" * (3 * _MB)], check=False)
        except OSError as error:
            return Seen(succeeded=True, what=f"a plain exec: {error.strerror}")
        return Seen(succeeded=False, what="a plain exec took 3 MiB")
    box = arm.sandbox(whole=True)
    tries: dict[str, Callable[[], object]] = {
        "argv": lambda: box.exec(["true", "x" * (3 * _MB)]),
        "100,000 arguments": lambda: box.exec(["true"] + ["x"] * 200_000),
        "env": lambda: box.exec(["true"], env={"X": "x" * (3 * _MB)}),
        "code": lambda: arm.run(box, "#" * (40 * _MB)),
        "stdin": lambda: box.exec(["true"], stdin=bytes(64 * _MB)).check(),
    }
    seen = {name: _answer(each) for name, each in tries.items()}
    strange = [name for name, word in seen.items() if word not in ("PolicyError", "ok")]
    return Seen(bool(strange), "; ".join(f"{name}: {word}" for name, word in seen.items()))


def _answer(function: Callable[[], object]) -> str:
    try:
        function()
    except PolicyError:
        return "PolicyError"
    except Exception as error:  # noqa: BLE001  # which exception came is the finding
        return f"{type(error).__name__}: {str(error)[:80]}"
    return "ok"


_SAY = """
import os
data = ({text}).encode()
try:
    while data: data = data[os.write(3, data):]
except OSError: pass  # the host hung up on nonsense
os._exit(7)
"""
_JSON_BOMBS = {
    "deep": "'[' * 100000 + ']' * 100000",
    "huge number": "'{\"value\": ' + '9' * 5000 + '}'",
    "infinite": "'{\"value\": 1e999}'",
    "not a number": "'{\"value\": NaN}'",
    "repeated key": '\'{"value": "a", "value": "b"}\'',
    "control characters": "'\\x01' * 250000",
    "surrogate": '\'{"exception": {"name": "\\\\ud800", "message": "", "traceback": ""}}\'',
    "many keys": "'{' + ','.join('\"%d\":0' % n for n in range(20000)) + '}'",
}


@attack("F20", "a result that is a bomb for parsers gives a result without a value", SPOOF, off=HOST_CODE)
def result_bombs(arm: Arm) -> Seen:
    import json

    if arm.off:
        try:
            json.loads("[" * 100_000 + "]" * 100_000)
        except RecursionError:
            return Seen(succeeded=True, what="a plain parser: RecursionError")
        return Seen(succeeded=False, what="a plain parser took it")
    box = arm.sandbox(whole=True)
    wrong = []
    for name, text in _JSON_BOMBS.items():
        result = arm.run(box, _SAY.format(text=text))
        shown = str(result.to_dict()).encode()
        if (result.status, result.exit_code, result.value) != ("error", 7, None) or not shown:
            wrong.append(f"{name}: {result.status} {result.exit_code} {result.value!r:.40}")
    return Seen(bool(wrong), "; ".join(wrong) or f"{len(_JSON_BOMBS)} bombs, exit code 7 each time, no value")


@attack("F23", "a pattern given to files.list is matched in linear time", DOS, off=HOST_CODE)
def pattern_bomb(arm: Arm) -> Seen:
    name = "a" * 25
    before = time.monotonic()
    if arm.off:
        import re

        re.match("(a*)*b", name)
    else:
        box = arm.sandbox(whole=True)
        box.files.write("a" * 200, b"")
        before = time.monotonic()
        list(box.files.list(pattern="*a" * 60 + "b"))
    took = time.monotonic() - before
    return Seen(took > (0.4 if arm.off else 4), f"{took:.3f} s")  # on a busy host, starting the worker takes a while


@attack(
    "F24", "after forty sandboxes the host has as many groups, mounts and descriptors as before", DOS, off=HOST_CODE
)
def start_storm(arm: Arm) -> Seen:
    from ringfence import Sandbox

    arm.run(arm.sandbox(whole=True), "1")
    before = _holdings()
    kept = []
    for _ in range(8):
        boxes = [Sandbox(backend="process").start() for _ in range(5)]
        if arm.off:
            kept += boxes[:1]
        for box in boxes[1:] if arm.off else boxes:
            box.close()
    after = _settled(before, 0.5 if arm.off else 2)
    for box in kept:
        box.close()
    return Seen(_grown(before, after), f"{before} before, {after} after")


def _holdings() -> tuple[int, int]:
    """Return two numbers: the monitors below this process, and its open descriptors; the spares' are not counted."""
    from ringfence.backends.process import pool

    pools = pool._pools.values()  # noqa: SLF001  # the pool has no public count, and callers need none
    spares = sum(len(shelf.spares) for each in pools for shelf in each._shelves.values())  # noqa: SLF001  # as above
    monitors = sum(
        _name_of(pid) == "rf-monitor" and _is_descendant(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()
    )
    return max(0, monitors - spares), max(0, len(os.listdir("/proc/self/fd")) - 2 * spares)


def _is_descendant(pid: int) -> bool:
    try:
        while pid > 1 and pid != os.getpid():
            pid = _parent(pid)
    except OSError:
        return False
    return pid == os.getpid()


def _name_of(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _settled(before: tuple[int, int], within_s: float) -> tuple[int, int]:
    deadline = time.monotonic() + within_s
    while _grown(before, _holdings()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return _holdings()


def _grown(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Return whether a count grew by more than the spares that are being made and are on no shelf yet may explain."""
    return any(now > then + 4 for now, then in zip(after, before, strict=True))


CASES = cases(globals())
