"""O: what the host's own process comes to hold because a guest chose it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import selectors
import socket
import time

from ringfence import SandboxError, UnsupportedError
from ringfence.core import arguments
from ringfence.values import replace
from ringfence_attacks.arena import LIMITS, POLICY
from ringfence_attacks.case import DOS, HOST_CODE, NotApplicable, Seen, attack, cases
from ringfence_attacks.witnesses import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence import Sandbox
    from ringfence._sync.process import Process
    from ringfence.backends.process.memory.tracee import Tracee
    from ringfence_attacks.arena import Arm

_MB = 1 << 20
_EACH = 6 * _MB  # that a connection brings
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


@attack("O21", "a connection that was read is not kept on the host", DOS, off=HOST_CODE, label="no transcript")
def kept_connections(arm: Arm) -> Seen:
    """A server inside sends, clients outside read all of it, and stay. Off: each connection is read as a process is,
    whose events and result somebody may ask for. Judged by the memory that this process has more afterwards."""
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
    """Read all connections by one thread and one buffer, and leave them open: this side holds no bytes."""
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


@attack("O22", "a range that a session names is not read as a whole", DOS, off=HOST_CODE, label="pieces, and a cap")
def named_range(arm: Arm) -> Seen:
    """A session reports its end and goes on outside of any system call: the copier has to look for a call instruction
    in its libraries; one of these is a file of 256 MiB of holes. Judged by the peak of this process's memory."""
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


def _search_carelessly(found: Tracee) -> int:
    with open(f"/proc/{found.pid}/maps", "rb") as maps:
        for row in maps:
            if b"r-xp" in row and b"/libc" in row:
                first, last = (int(part, 16) for part in row.split()[0].split(b"-"))
                at = found.read(first, last - first).find(b"\x0f\x05")
                if at >= 0:
                    return first + at
    raise AssertionError("no library has one")


def _memory_kib(name: str) -> int:
    """Of this process, without what the heap only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(row.split()[1]) for row in file if row.startswith(f"{name}:"))


def _begin_peak() -> None:
    """What follows has a peak of its own."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


CASES = cases(globals())
