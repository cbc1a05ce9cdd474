"""O: attacks on the host's own process: its memory, the results that callers and models read, and its starts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import socket
import time

from ringfence import Mount, Sandbox, SandboxError, UnsupportedError, rendering
from ringfence.core import arguments, tools
from ringfence.errors import SnapshotError
from ringfence.results import Denial
from ringfence.snapshots import model
from ringfence.values import replace
from ringfence_attacks.arena import LIMITS, POLICY
from ringfence_attacks.case import DOS, HOST_CODE, READ, SPOOF, NotApplicable, Seen, attack, cases
from ringfence_attacks.host_programs import host_process
from ringfence_attacks.witnesses import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence._sync.process import Process
    from ringfence.backends.process.memory.tracee import Tracee
    from ringfence.results import Result
    from ringfence_attacks.arena import Arm


# Memory of the host's process

_MB = 1 << 20
_EACH = 6 * _MB  # sent on each connection
_CONNECTIONS = 16

_SERVER = """
import selectors, socket
server = socket.create_server(("127.0.0.1", 8000), backlog=64)
server.setblocking(False)
waiting = selectors.DefaultSelector()
waiting.register(server, selectors.EVENT_READ)
left, data = {}, bytes(1 << 16)
tell(up=True)
while True:
    for key, _ in waiting.select():
        if key.fileobj is server:
            one = server.accept()[0]
            one.setblocking(False)
            left[one] = each
            waiting.register(one, selectors.EVENT_WRITE)
            continue
        try:
            left[key.fileobj] -= key.fileobj.send(data[:left[key.fileobj]])
        except OSError:
            left[key.fileobj] = 0
        if not left[key.fileobj]:
            waiting.unregister(key.fileobj)
"""


@attack(
    "O21", "data of a connection is not kept on the host after it was read", DOS, off=HOST_CODE, label="no transcript"
)
def kept_connections(arm: Arm) -> Seen:
    """A server inside sends; clients outside read everything and stay connected. Off: each connection is read as the
    output of a process, whose events are kept for its result. Judged by how much the memory of this process grew."""
    box = arm.sandbox(POLICY.replace(limits=replace(LIMITS, output="4M")), whole=True)
    server = arm.spawn(_SERVER, box=box, each=_EACH)
    next(iter(server))
    before = _memory_kib("VmRSS")
    with _read(box) if not arm.off else _read_as_processes(box) as got:
        grown = (_memory_kib("VmRSS") - before) >> 10
    if got != _EACH * _CONNECTIONS:
        raise AssertionError(f"{got} bytes came")
    return Seen(grown > 64, f"{grown} MiB are held after {got // _MB} MiB in {_CONNECTIONS} connections")


@contextlib.contextmanager
def _read(box: Sandbox) -> Iterator[int]:
    """Read all connections in this thread with a single buffer, and leave them open: the clients keep no bytes."""
    buffer, got = bytearray(1 << 16), 0
    with contextlib.ExitStack() as ends, selectors.DefaultSelector() as waiting:
        address = ends.enter_context(box.expose(8000))
        for _ in range(_CONNECTIONS):
            one = ends.enter_context(socket.create_connection((address.host, address.port)))
            waiting.register(one, selectors.EVENT_READ)
        until = time.monotonic() + 20
        while got < _EACH * _CONNECTIONS and time.monotonic() < until:
            for key, _ in waiting.select(1):
                assert isinstance(key.fileobj, socket.socket)
                count = key.fileobj.recv_into(buffer)
                got += count
                if not count:
                    waiting.unregister(key.fileobj)
        yield got


@contextlib.contextmanager
def _read_as_processes(box: Sandbox) -> Iterator[int]:
    """Read all connections as the output of processes, and keep their events."""
    from ringfence._sync.process import Process
    from ringfence.events import Stdout

    place = box._running_place()  # noqa: SLF001  # no public call reads a connection like this
    held: list[Process] = []
    got = 0
    for _ in range(_CONNECTIONS):
        call = arguments.connect_call(8000, box.policy)
        one = Process(place, call, place.link.open(), keep_events=True)._begin()  # noqa: SLF001  # as above
        held.append(one)
        here = 0
        while here < _EACH:
            event = next(one)
            here += len(event.data) if isinstance(event, Stdout) else 0
        got += here
    try:
        yield got
    finally:
        for one in held:
            one.kill()


_NAMES_A_RANGE = """
import ctypes, json, mmap, os, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fd = os.open("/workspace/libc", os.O_RDWR | os.O_CREAT, 0o777)
os.ftruncate(fd, size)
assert libc.mmap(0x100000000, size, 5, 0x2 | 0x10, fd, 0) == 0x100000000
os.close(fd)
os.unlink("/workspace/libc")
text = json.dumps({"m": "done", "n": 2, "exit": None, "exception": None}).encode()
for fd in (3, 4):
    try:
        os.write(fd, struct.pack("<II", len(text), 0) + text)
    except OSError:
        pass
spin = libc.mmap(0, 4096, 7, 0x22, -1, 0)
ctypes.memmove(spin + 64, bytes([0xEB, 0xFE]), 2)
ctypes.CFUNCTYPE(None)(spin + 64)()
"""


@attack(
    "O22", "a memory range that a session names is not read in one piece", DOS, off=HOST_CODE, label="pieces, and a cap"
)
def named_range(arm: Arm) -> Seen:
    """A session reports its end and goes on, outside of any system call: the copier has to look for a call instruction
    in the session's libraries, and one of these is a file of 256 MiB of holes. Judged by the peak memory of this
    process."""
    from ringfence.backends.process.memory import tracee

    size = 256 * _MB
    policy = POLICY.replace(limits=replace(LIMITS, disk="300M"))  # no file may be larger
    try:
        box = arm.sandbox(policy, whole=True, workspace="disk")
    except UnsupportedError as error:
        raise NotApplicable(str(error)) from None
    box.run("1")
    result = box.run(f"size = {size}\n{_NAMES_A_RANGE}")
    if not result.ok:
        raise AssertionError(result.stderr[-300:])
    if arm.off:
        arm.enter(replaced(tracee.Tracee, "_search", _search_carelessly))
    _begin_peak()
    before = _memory_kib("VmHWM")
    met = "copied"
    try:
        box.snapshot(memory=True).delete()
    except (SandboxError, UnsupportedError) as error:
        met = str(error)
    grown = (_memory_kib("VmHWM") - before) >> 10
    return Seen(grown > 64, f"{grown} MiB at the most; {met}")


def _search_carelessly(tracee: Tracee) -> int:
    """Return the address of a call instruction, read as a careless copier would: a whole range at once."""
    with open(f"/proc/{tracee.pid}/maps", "rb") as maps:
        for row in maps:
            if b"r-xp" in row and b"/libc" in row:
                first, last = (int(part, 16) for part in row.split()[0].split(b"-"))
                at = tracee.read(first, last - first).find(b"\x0f\x05")
                if at >= 0:
                    return first + at
    raise AssertionError("no library has a call instruction")


def _memory_kib(name: str) -> int:
    """Return a value of /proc/self/status, after returning free memory to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(row.split()[1]) for row in file if row.startswith(f"{name}:"))


def _begin_peak() -> None:
    """Reset the peak memory that the kernel has recorded for this process."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


# Results and denials

# Calls of tools as the interpreter's own code sends them: the guest writes to the same line.
_CALL = """
import json, os, struct
def call(name):
    text, data = json.dumps({"m": "call", "id": 1, "name": name}).encode(), b'{"args":[],"kwargs":{}}'
    os.write(3, struct.pack("<II", len(text), len(data)) + text + data)
"""
_FLOOD = _CALL + "for number in range(count): call(f'harmless{number}')\n"
_OUTPUT = "what it printed"


def _with_a_tool(arm: Arm) -> Sandbox:
    box = arm.sandbox(whole=True)
    box._tools["lookup"] = lambda: None  # noqa: SLF001  # an arm makes sandboxes without tools; no session has begun
    return box


def _first_hundred(self: tools.Budget, name: str, code: str, why: str) -> None:
    """Keep the first hundred denials and count no others: replaces `Budget.deny`."""
    if len(self._first) < 100:  # the function replaces a method
        key = (f"{name}{len(self._first)}", code)  # as above
        self._first[key] = Denial("tool", name, code, f"{name}: {why}", allow=None)  # as above


@attack(
    "O23", "no flood of refused calls hides another refused call", SPOOF, off=HOST_CODE, label="denials are counted"
)
def hidden_denials(arm: Arm) -> Seen:
    """Call a tool by a new name after many refused calls: first after calls of one name, then of many names."""
    if arm.off:
        arm.enter(replaced(tools.Budget, "deny", _first_hundred))
    hidden = []
    for flood in (_CALL + "for _ in range(200): call('harmless')\n", "count = 3000" + _FLOOD):
        result = _with_a_tool(arm).run(f"{flood}call({arm.canary!r})\n").check()
        count = sum(denial.count for denial in result.denials)
        if not any(denial.target == arm.canary for denial in result.denials):
            hidden.append(f"the name is in none of {len(result.denials)} denials")
        elif count not in (201, 3001):
            hidden.append(f"{count} are counted")
    return Seen(bool(hidden), "; ".join(hidden) or "reported, and all are counted")


def _all_lines(denials: tuple[Denial, ...], room: int) -> list[str]:
    """Return a line for every denial, whatever room there is: replaces `rendering._denial_lines`."""
    del room
    return [f"denied: {denial.message}" for denial in denials]


@attack("O24", "no flood of denials hides what a run printed, or the last denial", SPOOF, off=HOST_CODE, label="shares")
def drowned_rendering(arm: Arm) -> Seen:
    """Look at the text that a model reads of a result. Off: every denial has a line before what the guest printed."""
    if arm.off:
        arm.enter(replaced(rendering, "_denial_lines", _all_lines))
    box = _with_a_tool(arm)
    result = box.run(f"count = 900{_FLOOD}call({arm.canary!r})\nprint({_OUTPUT!r})\n'its value'\n")
    missing = _missing_of(result, arm.canary)
    return Seen(bool(missing), f"{len(result.denials)} denials; missing: {', '.join(missing) or 'nothing'}")


def _missing_of(result: Result, last: str) -> list[str]:
    if result.stdout.strip() != _OUTPUT or len(result.denials) < 900:
        raise AssertionError(f"{result.status}: {result.stdout[:100]!r}, {len(result.denials)} denials")
    text = result.render()
    return [word for word in (_OUTPUT, "its value", last) if word not in text]


@attack(
    "O25",
    "a file that was deleted in a copy of a folder stays deleted in a copy of the sandbox",
    READ,
    off=HOST_CODE,
    label="look before",
)
def brought_back(arm: Arm) -> Seen:
    """A token in the project is removed before other code gets a fork or a snapshot. Off: a new sandbox is filled as if
    its workspace were empty, but the workspace starts as a copy of the folder, as in the first sandbox."""
    path = arm.host_file("project/token")
    os.chmod(os.path.dirname(path), 0o755)
    if arm.off:
        arm.enter(replaced(model, "copies_workspace", lambda _: False))
    policy = POLICY.replace(mounts=[Mount(os.path.dirname(path), target="/workspace", mode="copy")])
    box = arm.sandbox(policy, whole=True)
    box.exec(["sh", "-c", "rm token; echo own > own"]).check()
    made = box.snapshot()
    looted = []
    try:
        for twin in (box.fork(memory=False), Sandbox(policy=policy, snapshot=made, backend="process")):
            arm.enter(twin)
            if twin.files.read_text("own") != "own\n":
                raise AssertionError("the twin does not have the files of the original")
            looted.append(twin.exec(["cat", "token"]).stdout)
    except SnapshotError as error:
        return Seen(False, str(error))
    finally:
        made.delete()
    return Seen(
        any(arm.canary in one for one in looted), f"tokens read: {sum(arm.canary in one for one in looted)} of 2"
    )


# Starts

# One start fails as when a helper process was killed. No engine is reached: only whether one is tried counts.
_ONE_FAULT = """
import os
os.environ["DOCKER_HOST"] = "unix:///nowhere"
import ringfence
from ringfence.backends import auto
from ringfence.backends.process import zygote
from ringfence.errors import UnsupportedError
{careless}
built, faults, others = zygote.Template.wait_built, ["PID 1 could not be set up: it ended"], []
def wait_built(template):
    if faults:
        raise zygote.explain_refusal(faults.pop(), None)
    built(template)
zygote.Template.wait_built = wait_built
pass_over = auto.Launcher._pass_over
def passed_over(*args):
    others.append("others")
    pass_over(*args)
auto.Launcher._pass_over = passed_over
try:
    print(ringfence.run("1").backend, *others)
except UnsupportedError as error:
    print("refused", *others)
"""
_CARELESS = "zygote.explain_refusal = lambda text, number: UnsupportedError(text, code='build')"


@attack(
    "O27",
    "a failure that may be temporary does not lead to another backend",
    SPOOF,
    off=HOST_CODE,
    label="facts of the host alone",
)
def another_wall(arm: Arm) -> Seen:
    """An attacker that makes a start fail, by filling a table or by removing a name at the right moment, could choose
    the backend of the next sandbox of a caller that asked for the best. Off: every failed start counts as a refusal by
    the host.

    Judged by the host's own result, and by whether another backend was tried at all.
    """
    done = host_process(_ONE_FAULT.format(careless=_CARELESS if arm.off else ""), timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    said = done.stdout.split()
    return Seen(said != ["process"], f"the next sandbox: {' '.join(said)}")


# Every process of the library is killed between two runs of a caller.
_KILLED = """
import os, signal, time
import ringfence
from ringfence.backends.process import pool, zygote
{careless}
def ours(parent):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{name}}/stat") as file:
                row = file.read()
        except OSError:
            continue
        if int(row.rpartition(")")[2].split()[1]) == parent and "(rf-" in row:
            found += [int(name), *ours(int(name))]
    return found
ringfence.run("1").check()
killed = ours(os.getpid())
assert killed
for pid in killed:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
def lives(pid):
    try:
        with open(f"/proc/{{pid}}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
while any(map(lives, killed)):  # a busy kernel takes its time to end a killed process
    time.sleep(0.01)
try:
    print(ringfence.run("print(6 * 7)").stdout.strip())
except (ringfence.RingfenceError, OSError) as error:
    print(type(error).__name__, getattr(error, "code", error))
"""
_TRUSTING = "pool._may_pass = lambda error: False; zygote.Zygote.alive = property(lambda one: True)"


@attack(
    "O28",
    "a killed helper process does not make the next call fail",
    DOS,
    off=HOST_CODE,
    label="a dead helper is replaced",
)
def killed_helpers(arm: Arm) -> Seen:
    """An attacker that fills the host's memory until the kernel kills a helper could end the caller's work too, or make
    the failure look like another one. Off: the host believes that a helper is alive, and tries once. Judged by the
    caller's next call, no part of which had run.
    """
    done = host_process(_KILLED.format(careless=_TRUSTING if arm.off else ""), timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    said = done.stdout.strip()
    return Seen(said != "42", f"the next call: {said}")


CASES = cases(globals())
