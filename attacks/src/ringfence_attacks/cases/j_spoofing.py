"""J: spoofing: a guest makes the host believe something false.

Status, exit code, signal and usage of a run come from outside the guest. Its value and its exception are guest-made
text by contract; nothing else may depend on what a guest writes.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time

from ringfence.errors import RingfenceError
from ringfence_attacks.case import CRASH, HOST_CODE, SPOOF, WRITE, Seen, attack, cases, not_applicable
from ringfence_attacks.tracer import Attempt, answers, host_pid, reported_pid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence import Sandbox
    from ringfence.results import Result
    from ringfence_attacks.arena import Arm

_LIE = '{"ev": "exit", "id": 1, "code": 0, "signal": null, "why": null, "report": "", "cpu_s": 0.0, "ended_at": 0.0}'
_MEMORY_TOP = 200 << 20


def _believed(result: Result, code: int) -> Seen:
    """The attack succeeds when the result is anything but the true end of the process: an exit with `code`."""
    true = (result.status, result.exit_code, result.signal) == ("error", code, None)
    return Seen(not true, f"{result.status}, {result.reason}, exit {result.exit_code} where {code} was true")


def _naive(text: str, code: int) -> Seen:
    """Off: judge as a host would that takes the last line that looks like a result for the result."""
    lines = [line for line in text.splitlines() if '"code"' in line]
    taken = json.loads(lines[-1])["code"] if lines else code
    return Seen(taken != code, f"a host that reads markers takes {taken} where {code} was true")


def _goes_on(box: Sandbox) -> str:
    """Run a command that exits with 5. Returns "exit 5" when its result says that, else what came instead."""
    try:
        result = box.exec(["sh", "-c", "exit 5"])
        return f"exit {result.exit_code}" if result.exit_code == 5 else f"false: {result.status} {result.exit_code}"
    except (RingfenceError, OSError) as error:
        return f"{type(error).__name__}: {error}"


_PRINTED = """
import os, struct, sys
lie = {lie!r}
print(lie)
print("__RESULT__", lie, flush=True)
frame = struct.pack("<IBI", len(lie), 0, 0) + lie.encode()
os.write(1, frame)
os.write(2, frame + b"\\n")
os._exit(3)
"""


@attack("J01", "frames and markers printed on standard output change nothing", SPOOF, off=HOST_CODE)
def printed_frames(arm: Arm) -> Seen:
    result = arm.run(arm.sandbox(whole=True), _PRINTED.format(lie=_LIE))
    return _naive(_LIE, 3) if arm.off and _LIE in result.stdout else _believed(result, 3)


_EVERY_FD = """
import os, struct
lie = {lie!r}.encode()
fake = b'{{"exit_code": 0, "status": "ok", "code": 0, "signal": null}}'
for fd in range(3, 64):
    for data in (struct.pack("<IBI", len(lie), 0, 0) + lie, lie, fake):
        try: os.write(fd, data)
        except OSError: pass
os._exit(3)
"""


@attack(
    "J02",
    "what is written to the report and to every open descriptor does not change the verdict",
    SPOOF,
    off=HOST_CODE,
)
def written_frames(arm: Arm) -> Seen:
    result = arm.run(arm.sandbox(whole=True), _EVERY_FD.format(lie=_LIE))
    return _naive(_LIE, 3) if arm.off else _believed(result, 3)


_EARLY = "import json, os\nos.write(3, json.dumps({said!r}).encode())\nos._exit({code})"


@attack("J02-early", "a guest cannot say that it was never started", SPOOF, off=HOST_CODE)
def forged_start_failure(arm: Arm) -> Seen:
    """Off: a host that believes every report."""
    from ringfence.core import arguments

    forged = {"stage": "cwd", "errno": 4}
    if arm.off:
        report = arguments.report_of({"report": json.dumps(forged)})
        return Seen(report.get("stage") == "cwd", "the report alone looks like the launcher's own")
    box = arm.sandbox(whole=True)
    try:
        first = arm.run(box, _EARLY.format(said=forged, code=125))
        second = arm.run(box, _EARLY.format(said={"stage": "exec", "errno": 2}, code=127))
    except OSError as error:
        return Seen(succeeded=True, what=f"the caller got {type(error).__name__}: {error}")
    true = (first.reason, first.exit_code, second.reason, second.exit_code) == ("exit", 125, "exit", 127)
    return Seen(not true, f"{first.reason} {first.exit_code}, {second.reason} {second.exit_code}")


_ADOPTED = """
pid = call(56, 0x8000 | 17, 0, 0, 0, 0)
if pid == 0:
    time.sleep(8)
    os._exit(0)
tell(child=pid)
tell(pid=os.getpid())
time.sleep(8)
"""


@attack(
    "J02-parent",
    "a guest makes no process that the monitor takes for its own child",
    SPOOF,
    off="seccomp:clone-parent",
)
def child_of_the_monitor(arm: Arm) -> Seen:
    box = arm.sandbox()
    try:
        inner, said = reported_pid(arm.spawn(_ADOPTED, box=box))
    except TimeoutError as error:
        return Seen(succeeded=False, what=str(error).strip().splitlines()[-1])
    child = int(said.partition('"child": ')[2].split("}")[0])
    parents = [_parent(host_pid(box, number)) for number in (inner, child)]
    return Seen(parents[0] == parents[1], f"parents on the host: {parents}")


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


_PATCHES = """
import atexit, builtins, gc, json, os, sys
real = os._exit
sys.exit = lambda *a: None
json.dumps = lambda *a, **k: {lie!r}
builtins.print = lambda *a, **k: None
sys.excepthook = lambda *a: None
sys.settrace(lambda *a: None)
for thing in gc.get_objects():
    if isinstance(thing, dict) and "REPORT_FD" in thing:
        thing["REPORT_FD"] = 1
builtins.int = builtins.str = builtins.len = None
"""


@attack("J03", "patching the interpreter from inside does not change how its end is seen", SPOOF, off=HOST_CODE)
def patched_interpreter(arm: Arm) -> Seen:
    code = _PATCHES.format(lie=_LIE) + "os.kill(os.getpid(), 9)"
    if arm.off:
        return _in_one_process()
    result = arm.run(arm.sandbox(whole=True), code)
    return Seen((result.status, result.signal) != ("error", 9), f"{result.status}, signal {result.signal}")


def _in_one_process() -> Seen:
    """Off: a runner executes guest code in its own process, and decides the verdict there, with code that the guest
    could change."""
    code = "space = {'verdict': lambda failed: 'error' if failed else 'ok'}\n"
    code += "exec(\"verdict = lambda failed: 'ok'\", space)\nprint(space['verdict'](True))"
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True).stdout.decode().strip()
    return Seen(said == "ok", "the runner's own verdict was replaced")


@attack("J04", "a builtin that one run redefines is as usual in the next run", SPOOF, off=HOST_CODE)
def redefined_builtin(arm: Arm) -> Seen:
    """Off: the same interpreter runs both pieces of code."""
    first, second = "import builtins\nbuiltins.len = lambda x: 42\n", "print(len('abc'))"
    box = arm.sandbox(whole=True)
    if arm.off:
        out = arm.run(box, first + second).stdout
    else:
        arm.run(box, first)
        out = arm.run(box, second).stdout
    return Seen(out.strip() != "3", f"len('abc') is {out.strip()}")


_KILLS = """
import os, signal
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (1, os.getpid()):
        try: os.kill(int(name), signal.{signal})
        except OSError: pass
os._exit({code})
"""


@attack(
    "J05",
    "a guest that kills every process inside and exits is reported as such, and the sandbox goes on",
    SPOOF,
    off=HOST_CODE,
)
def kill_the_spawner(arm: Arm) -> Seen:
    """Off: PID 1 is killed too, which no guest can do; the sandbox must then report that it is lost."""
    box = arm.sandbox(whole=True)
    result = arm.run(box, _KILLS.format(signal="SIGKILL", code=4))
    if arm.off:
        os.kill(host_pid(box, 1), 9)
        time.sleep(0.3)
    after = _goes_on(box)
    return Seen(result.exit_code != 4 or after != "exit 5", f"exit {result.exit_code}; then {after}")


@attack("J05-stop", "a guest that stops the spawner delays a call and forges nothing", SPOOF, off=HOST_CODE)
def stop_the_spawner(arm: Arm) -> Seen:
    box = arm.sandbox(whole=True)
    result = arm.run(box, _KILLS.format(signal="SIGSTOP", code=4))
    if arm.off:
        os.kill(host_pid(box, 1), 9)
        time.sleep(0.3)
    before = time.monotonic()
    after = [_goes_on(box), _goes_on(box)]
    took = time.monotonic() - before
    wrong = result.exit_code != 4 or after != ["exit 5", "exit 5"] or took > 3
    return Seen(wrong, f"exit {result.exit_code}; then {after} after {took:.1f} s")


@attack("J06", "usage is what was used, whatever the guest's report says", SPOOF, off=HOST_CODE)
def forged_usage(arm: Arm) -> Seen:
    lie = {"cpu_s": 0.0, "usage": {"cpu_s": 0.0, "memory_peak_bytes": 1}}
    code = "import json, os, time\nheld = bytearray(40 << 20)\nheld[::4096] = bytes(len(held[::4096]))\n"
    code += "while time.process_time() < 0.4: pass\n"
    code += f"os.write(3, json.dumps({lie!r}).encode())\nos._exit(0)"
    result = arm.run(arm.sandbox(whole=True), code)
    if arm.off:
        return Seen(float(str(lie["cpu_s"])) < 0.3, "a host that believes the report reads 0.0 s")
    used, peak = result.usage.cpu_s or 0.0, result.usage.memory_peak_bytes
    return Seen(used < 0.3 or (peak is not None and peak < 30 << 20), f"{used:.2f} s, peak {peak}")


@attack(
    "J07",
    "a frame of 4 GiB, of an unknown type or for no call ends the sandbox and takes no memory of the host",
    CRASH,
    off=HOST_CODE,
)
def hostile_frames(arm: Arm) -> Seen:
    """Off: a reader that allocates as many bytes as the header says."""
    from ringfence.wire.inbox import Switchboard

    header = struct.pack("<IBI", 0xFFFFFFFF, 2, 1)
    if arm.off:
        wanted = struct.unpack("<IBI", header)[0]
        return Seen(wanted > _MEMORY_TOP, f"a careless reader would wait for {wanted} bytes")
    wrong = []
    for name, data in _hostile(header).items():
        switch = Switchboard()
        switch.open()
        for _ in range(3):
            switch.feed(data)
        if switch.over != "protocol":
            wrong.append(f"{name}: {switch.over}")
    return Seen(bool(wrong), "; ".join(wrong) or "each ends the channel")


def _hostile(header: bytes) -> dict[str, bytes]:
    from ringfence.wire.frames import message, pack

    exit_event = json.loads(_LIE)
    return {
        "4 GiB": header + bytes(100),
        "unknown type": pack(9, 1, b"x"),
        "input from inside": pack(1, 1, b"x"),
        "output of nobody": pack(2, 77, b"x"),
        "empty output": pack(2, 1, b""),
        "two ends": message(**exit_event) * 2,
        "end of nobody": message(**{**exit_event, "id": 99}),
        "more than was granted": pack(2, 1, bytes(1 << 20)) * 2,
    }


_CONFUSED: dict[str, object] = {
    "a bool as a number": {**json.loads(_LIE), "id": True},
    "a text as a number": {**json.loads(_LIE), "code": "0"},
    "an extra field": {**json.loads(_LIE), "__class__": "os.system"},
    "a field less": {"ev": "exit", "id": 1},
    "a list": [1, 2],
    "an unknown event": {"ev": "__init__"},
    "an end of its own": {"ev": "end", "why": "closed"},
}


@attack("J08", "an event with too many fields, too few, or one of another type is refused", SPOOF, off=HOST_CODE)
def confused_types(arm: Arm) -> Seen:
    """Off: a plain parser."""
    from ringfence.wire.frames import WireError, event

    if arm.off:
        return Seen(json.loads('{"id": true}')["id"] == 1, "a plain parser takes true for 1")
    taken = []
    for name, value in _CONFUSED.items():
        try:
            event(json.dumps(value).encode())
        except WireError:
            continue
        taken.append(name)
    return Seen(bool(taken), f"taken: {', '.join(taken) or 'none'}")


# ── files that are not what they seem ────────────────────────────────────────────────────────────

_LINKS = {
    "report": "/proc/self/fd/3",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/dev/stderr",
    "memory": "/proc/self/mem",
    "init memory": "/proc/1/mem",
    "init root": "/proc/1/root",
    "init fd": "/proc/1/fd/3",
    "spawner fd": "/proc/2/fd/4",
    "own root": "/proc/self/root/etc/passwd",
    "cwd": "/proc/self/cwd",
    "loop": "loop",
}
_TRAPS = """
for name, target in links.items():
    os.symlink(target, "/workspace/" + name)
os.mkfifo("/workspace/fifo")
import socket
socket.socket(socket.AF_UNIX).bind("/workspace/socket")
"""
_FORGED = b'{"info": {"path": "forged", "kind": "file", "size": 1, "mode": 0, "modified": 0, "target": null}}'


@attack(
    "J18", "files() through links to descriptors, memory, FIFOs and sockets is refused in time", SPOOF, off=HOST_CODE
)
def trapped_files(arm: Arm) -> Seen:
    """Off: a plain open of the link, which reaches the descriptor that the link names."""
    box = arm.sandbox(whole=True)
    arm.python(_TRAPS, box=box, links=_LINKS)
    if arm.off:
        out = arm.run(box, "open('/workspace/stdout', 'w').write('through the link')").stdout
        return Seen("through the link" in out, f"a plain open wrote to the stream: {out!r}")
    wrong = []
    before = time.monotonic()
    for name in (*_LINKS, "fifo", "socket"):
        for what, each in _operations(box, name).items():
            word = _refusal(each)
            if word is not None:
                wrong.append(f"{what} {name}: {word}")
    took = time.monotonic() - before
    alive = _goes_on(box) == "exit 5" and box.files.write("plain", "x").size == 1
    words = "; ".join(wrong) or f"each refused, {took:.1f} s for all; the sandbox goes on: {alive}"
    return Seen(bool(wrong) or not alive or took > 10, words)


def _operations(box: Sandbox, name: str) -> dict[str, Callable[[], object]]:
    files = box.files
    return {
        "read": lambda: files.read(name),
        "append": lambda: files.write(name, _FORGED, append=True),
        "list": lambda: list(files.list(name)),
        "chmod": lambda: (
            files.chmod(name, 0o600) if name not in ("fifo", "socket") else os.strerror(files.read(name)[0])
        ),
    }


def _refusal(function: Callable[[], object]) -> str | None:
    """Return None when `function` raises OSError, as a refused file operation does; else what came instead."""
    try:
        value = function()
    except OSError:
        return None
    except Exception as error:  # noqa: BLE001  # which exception came is the finding
        return f"{type(error).__name__}: {error}"
    return f"it gave {str(value)[:60]!r}"


ELSEWHERE = [
    not_applicable(
        "J09", "no pickle, marshal or eval of guest bytes", CRASH, "a test reads the package's source for them"
    ),
    not_applicable("J10", "no exception is rebuilt by name", CRASH, "a test reads the package's source for it"),
    not_applicable(
        "J11", "guest-made HTML is never of the console's origin", SPOOF, "there is no console in this version"
    ),
    not_applicable(
        "J12", "escape sequences do not reach a terminal", SPOOF, "the command line's: its own tests try them"
    ),
    not_applicable("J13", "one event is one line of the log", SPOOF, "the command line's: its own tests try it"),
    not_applicable("J14", "guest text is data to a model's client", SPOOF, "there is no MCP server in this version"),
    not_applicable(
        "J15",
        "no other program answers in the agent's place",
        SPOOF,
        "the channel is a pair of sockets made before any guest",
    ),
    not_applicable("J16", "the audit log is a chain", SPOOF, "there is no audit log in this version"),
]

# J17: PID 1 and the spawner. A guest knows their pids, but must not write to their memory, limit them, or choose them
# for the kernel to kill.

_POKE = """
def poke(pid):
    with open(f"/proc/{pid}/maps") as file:
        line = next(line for line in file if "[stack]" in line)
    start = int(line.split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(mark.encode())
    tell(address=start)
attempt("mem", poke, target)
attempt("fd", lambda: [os.readlink(f"/proc/{target}/fd/{n}") for n in os.listdir(f"/proc/{target}/fd")])
tell(pid=os.getpid())
time.sleep(8)
"""


def _poked(arm: Arm, target: int) -> Seen:
    """A guest writes a mark to the unused end of the target's stack. The host looks for the mark in that memory."""
    box = arm.sandbox()
    _, said = reported_pid(arm.spawn(_POKE, box=box, target=target, mark=arm.canary))
    words = "; ".join(line for line in said.splitlines() if "tried" in line)
    if '"address": ' not in said:
        return Seen(succeeded=False, what=words)
    address = int(said.partition('"address": ')[2].split("}")[0])
    with open(f"/proc/{host_pid(box, target)}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        found = memory.read(len(arm.canary)) == arm.canary.encode()
    return Seen(found, words)


@attack(
    "J17",
    "PID 1's memory is not written, nor its descriptors read: it is not dumpable",
    WRITE,
    off="not-dumpable",
    behind=("landlock-scopes", "landlock-files"),
)
def memory_of_init(arm: Arm) -> Seen:
    return _poked(arm, 1)


@attack(
    "J17-domain",
    "PID 1's memory is not written, nor its descriptors read: it is outside the guest's Landlock domain",
    WRITE,
    off=("landlock-scopes", "landlock-files"),
    behind="not-dumpable",
    needs="landlock",
)
def domain_of_init(arm: Arm) -> Seen:
    return _poked(arm, 1)


@attack("J17-spawner", "the spawner's memory is not written, nor its descriptors read", WRITE, off="not-dumpable")
def memory_of_the_spawner(arm: Arm) -> Seen:
    return _poked(arm, 2)


_CHOSEN = """
attempt("oom_score_adj", spill, f"/proc/{target}/oom_score_adj", "1000")
tell(pid=os.getpid())
time.sleep(8)
"""


def _chosen(arm: Arm, target: int) -> Seen:
    box = arm.sandbox()
    _, said = reported_pid(arm.spawn(_CHOSEN, box=box, target=target))
    with open(f"/proc/{host_pid(box, target)}/oom_score_adj", encoding="ascii") as file:
        value = file.read().strip()
    return Seen(value == "1000", f"{said.splitlines()[0]}; oom_score_adj {value}")


@attack("J17-oom", "a guest does not choose PID 1 for the kernel to kill", SPOOF, off="not-dumpable")
def choose_init(arm: Arm) -> Seen:
    return _chosen(arm, 1)


@attack("J17-oom-spawner", "a guest does not choose the spawner for the kernel to kill", SPOOF, off="not-dumpable")
def choose_the_spawner(arm: Arm) -> Seen:
    return _chosen(arm, 2)


_LIMITED = """
import struct
attempt("prlimit", call, 302, target, 7, struct.pack("QQ", 3, 4), 0)
tell(pid=os.getpid())
time.sleep(8)
"""


def _limited(arm: Arm, target: int) -> Seen:
    box = arm.sandbox()
    _, said = reported_pid(arm.spawn(_LIMITED, box=box, target=target))
    with open(f"/proc/{host_pid(box, target)}/limits", encoding="ascii") as file:
        soft = next(line for line in file if line.startswith("Max open files")).split()[3]
    return Seen(soft == "3", f"{said.splitlines()[0]}; soft limit of open files {soft}")


@attack("J17-prlimit", "PID 1's limits are not lowered", SPOOF, off="seccomp:prlimit")
def limits_of_init(arm: Arm) -> Seen:
    return _limited(arm, 1)


@attack("J17-prlimit-spawner", "the spawner's limits are not lowered", SPOOF, off="seccomp:prlimit")
def limits_of_the_spawner(arm: Arm) -> Seen:
    return _limited(arm, 2)


@attack("J17-signals", "no signal reaches PID 1", SPOOF, off="landlock-scopes", needs="landlock")
def signals_to_init(arm: Arm) -> Seen:
    """The kernel drops signals for which PID 1 has no handler; Landlock refuses that a guest sends any."""
    attempts = [Attempt(f"signal {number}", 62, (1, number)) for number in range(1, 65) if number not in (32, 33)]
    box = arm.sandbox()
    got = answers(arm, box, attempts)
    sent = [name for name, result in got.items() if result == 0]
    alive = _goes_on(box) == "exit 5"
    return Seen(bool(sent) or not alive, f"{len(sent)} of {len(got)} sent; the sandbox goes on: {alive}")


CASES = cases(globals())
