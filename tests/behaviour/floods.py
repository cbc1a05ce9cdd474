"""Every verb of the public surface against a guest that floods it. Run as a program, under a limit on its memory.

Each verb ends with a value or with an error of ours or Python's own, and a line says which. Whoever started this judges
from outside: that it lives, and how much memory it came to have.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import ringfence
from ringfence import AsyncSandbox, Limits, Mount, Network, Policy, RingfenceError, Sandbox, SandboxManager, Snapshot
from ringfence.events import Gap
from ringfence.shared.tree_walk import remove_tree
from ringfence.types import Process
from ringfence.values import replace

MOST = 256 << 20
_MB = 1 << 20
_trim = ctypes.CDLL(None).malloc_trim
LIMITS = Limits(
    memory="128M",
    disk="96M",
    disk_files=120_000,
    output="4M",
    timeout_s=10,
    cpu_time_s=20,
    processes=128,
    open_files=1024,
)
POLICY = Policy(limits=LIMITS)

# What a guest says on its own line, where only its interpreter is to speak.
_LINE = r"""
import ctypes, json, os, struct, sys, threading
def say(message, data=b""):
    text = json.dumps(message).encode()
    whole = memoryview(struct.pack("<II", len(text), len(data)) + text + data)
    while whole: whole = whole[os.write(line, whole):]
def finds_line():
    for fd in (3, 4, 5):
        try:
            os.write(fd, b"")  # the other one is read from
            return fd
        except OSError: pass
    raise SystemExit("there is no line")
line = finds_line()
"""
_DISPLAYS = """
for n in range(5): say({"m": "display", "value": False, "mimes": [["text/plain", 16 << 20]]}, bytes(16 << 20))
for n in range(4000): say({"m": "display", "value": True, "mimes": [["application/json", 3]] * 1}, b"[1]")
"""
_JSON = """
data = b"[" + b"[]," * ((8 << 20) // 3 - 1) + b"1]"
say({"m": "display", "value": True, "mimes": [["application/json", len(data)]]}, data)
"""
_CALLS = """
for n in range(30):
    say({"m": "call", "id": n, "name": "tool" if n % 2 else "x" * 200_000}, b"[" + b"[]," * 5_000_000 + b"1]")
for n in range(60):
    say({"m": "call", "id": n, "name": "tool"}, b"[" + b" " * 1_000_000 + b"1]")
"""
_PROMPTS = """
for n in range(5): say({"m": "prompt"}, b"x" * ((16 << 20) - 4) + "\\U0001f600".encode())
"""
_NONSENSE = "os.write(line, b'\\xff' * (1 << 20))"
_PRINTS = "import os\nfor n in range(100): os.write(1, bytes(1 << 20)); os.write(2, b'x' * (1 << 19))"
# A session that says it is done, spins outside of any system call, and has a range called libc that is 4 GiB long.
_RANGE = r"""
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fd = os.open("/workspace/libc", os.O_RDWR | os.O_CREAT, 0o777)
os.ftruncate(fd, 1 << 30)
for n in range(4):
    at = libc.mmap(0x100000000 + n * (1 << 31), 1 << 30, 5, 0x2 | 0x10, fd, 0)
    assert at == 0x100000000 + n * (1 << 31), at
os.close(fd)
os.unlink("/workspace/libc")
say({"m": "done", "n": NUMBER, "exit": None, "exception": None})
loop = libc.mmap(0, 4096, 7, 0x22, -1, 0)
ctypes.memmove(loop + 64, b"\xeb\xfe", 2)
ctypes.CFUNCTYPE(None)(loop + 64)()
"""
_TREE = """
import os
os.makedirs("wide")
os.chdir("wide")
for n in range(100_000): os.close(os.open(f"{n:06}" + "n" * 200, os.O_CREAT | os.O_WRONLY))
os.chdir("..")
os.makedirs("deep")
os.chdir("deep")
for n in range(800): os.mkdir("d"); os.chdir("d")
os.chdir("/workspace")
os.makedirs("big")
os.truncate(os.open("big/holes", os.O_CREAT | os.O_WRONLY), (1 << 63) - 4096)
os.truncate(os.open("holes", os.O_CREAT | os.O_WRONLY), 300 << 20)
os.truncate(os.open("most", os.O_CREAT | os.O_WRONLY), 64 << 20)
with open("wide.txt", "w") as file:
    for n in range(15): file.write("x" * (1 << 20))
    file.write("\\U0001f600")
with open("line", "w") as file:
    for n in range(20): file.write("needle" * (1 << 16) + "\\n")
"""
_UP = """
import os
os.chdir(SHARED)
os.mkdir("up")
for n in range(2000): open(f"up/{n:06}" + "n" * 200, "w").close()
"""
_CHANGES = """
import os, time
end = time.monotonic() + 3
while time.monotonic() < end:
    for n in range(200): open(f"/workspace/watched/{n}" + "w" * 200, "w").close()
    for n in range(200): os.unlink(f"/workspace/watched/{n}" + "w" * 200)
"""
_SERVER = """
import socket, threading
threading.stack_size(1 << 18)
data = bytes(1 << 20)
server = socket.create_server(("127.0.0.1", 8000), backlog=128)
print("up", flush=True)
def serve(connection):
    try:
        for _ in range(MEGABYTES): connection.sendall(data)
        connection.recv(1)
    except OSError: pass
while True: threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""
_NAMES = """
import socket
for n in range(2500):
    try: socket.getaddrinfo(("n%05d." % n + "a" * 60 + ".") + "b" * 60 + "." + "c" * 60 + ".example", 80)
    except OSError: pass
"""

Play = Callable[["Place"], object]
VERBS: dict[str, Play] = {}


def floods(*names: str) -> Callable[[Play], Play]:
    """Register the decorated function for the public names called there, which a guest floods."""

    def add(play: Play) -> Play:
        for name in names:
            VERBS[name] = play
        return play

    return add


class Place:
    """Sandboxes that several verbs use, and a folder of the host's."""

    def __init__(self, folder: str, ends: contextlib.ExitStack, tree: Callable[[], Sandbox]) -> None:
        self.folder = folder
        self._ends = ends
        self._tree = tree

    def box(self, policy: Policy = POLICY, **options: object) -> Sandbox:
        return self._ends.enter_context(Sandbox(policy=policy, backend="process", **options))  # type: ignore[arg-type]  # options of Sandbox

    @property
    def tree(self) -> Sandbox:
        """A sandbox whose files are a flood, made on first use and kept."""
        return self._tree()


def _grown() -> Sandbox:
    box = Sandbox(policy=POLICY, backend="process").start()
    result = box.run(_TREE)
    assert result.ok, result.stderr
    return box


def _counted(items: Iterator[object]) -> int:
    return sum(1 for _ in items)


# commands and cells


@floods("run", "Result.check", "Result.render", "Result.to_dict", "Result.ok", "Result.stdout", "Result.stderr")
def _run(_: Place) -> object:
    result = ringfence.run(_PRINTS, policy=POLICY, backend="process")
    assert (result.check() is result, result.truncated, len(result.stdout) > _MB) == (True, True, True)
    assert len(result.stderr) > _MB
    assert len(result.render()) < 10_000
    return len(json.dumps(result.to_dict()))


@floods("run_async", "Sandbox.exec")
def _exec(place: Place) -> object:
    box = place.box()
    argv = ["python3", "-c", _PRINTS]
    asyncio.run(_exec_async(argv))
    return box.exec(argv).usage.output_bytes


async def _exec_async(argv: list[str]) -> None:
    await ringfence.run_async(_PRINTS, policy=POLICY, backend="process")
    async with AsyncSandbox(policy=POLICY, backend="process") as box:
        assert (await box.exec(argv)).truncated


@floods("Sandbox.run", "Session.run", "Output.text", "Output.html", "Output.json", "Output.png", "Output.svg")
@floods("Result.value", "Sandbox.session", "Sandbox.sessions")
def _cells(place: Place) -> object:
    box = place.box(tools={"tool": lambda *_: "x" * 900_000})
    told = []
    for number, flood in enumerate((_DISPLAYS, _JSON, _CALLS, _NONSENSE, _PRINTS)):
        result = box.session(f"flood-{number}").run(_LINE + flood, timeout_s=4)
        told.append(result.status)
        shown = [(o.text, o.html, o.json, o.png, o.svg) for o in result.outputs[-50:]]
        assert len(shown) == len(result.outputs[-50:])
        assert result.value is None or len(result.value) < 20 * _MB
        del result, shown
    box.run("1")
    assert len(box.sessions()) == 6
    return told


@floods("Session.spawn", "Session.interrupt", "Session.restart", "Session.close")
def _spawned_cells(place: Place) -> object:
    session = place.box().session("s")
    told = []
    for flood in (_DISPLAYS, _PROMPTS, _PRINTS):
        cell = session.spawn(_LINE + flood, timeout_s=8)
        told.append(_counted(iter(cell)))
    cell = session.spawn(_PRINTS + "\nwhile True: os.write(1, bytes(1 << 16))")
    time.sleep(0.3)
    assert session.interrupt()
    with contextlib.suppress(BrokenPipeError):
        cell.write("x")
    session.restart()
    session.close()
    return told


@floods("Sandbox.spawn", "Sandbox.process", "Sandbox.processes", "Process.wait", "Process.running", "Process.write")
@floods("Process.close_stdin", "Process.signal", "Process.kill", "Process.__iter__", "Process.__next__")
def _processes(place: Place) -> object:
    """Processes are read late, read again from the start, written to while they do not read, and ended in a flood."""
    box = place.box()
    first = box.spawn(["python3", "-c", _PRINTS])
    time.sleep(0.3)
    events = _counted(iter(first))
    again = box.process(first.id)
    assert isinstance(next(iter(again)), Gap)
    forever = box.spawn(["python3", "-c", "import os\nwhile True: os.write(1, bytes(1 << 16))"])
    threading.Thread(target=_write_on, args=(forever,), daemon=True).start()
    time.sleep(0.5)
    assert forever.running
    with contextlib.suppress(TimeoutError):
        forever.wait(timeout_s=0.5)
    forever.close_stdin()
    forever.signal(signal.SIGTERM)
    forever.wait(timeout_s=5)
    last = box.spawn(["python3", "-c", "import os\nwhile True: os.write(1, bytes(1 << 16))"])
    last.kill()
    return events, len(box.processes())


def _write_on(process: Process) -> None:
    with contextlib.suppress(OSError, RingfenceError):
        for _ in range(100):
            process.write(bytes(_MB))


@floods(
    "Sandbox.pty", "Pty.resize", "Pty.wait", "Pty.running", "Pty.write", "Pty.close_stdin", "Pty.signal", "Pty.kill"
)
@floods("Pty.__iter__", "Pty.__next__")
def _terminal(place: Place) -> object:
    box = place.box()
    terminal = box.pty(
        ["python3", "-c", "import os\nfor n in range(600): os.write(1, b'\\x1b[31m' + b'x' * (1 << 16))"]
    )
    terminal.resize(cols=100, rows=30)
    terminal.write("x" * 1000)
    events = _counted(iter(terminal))
    terminal.wait()
    last = box.pty(["python3", "-c", "import os\nwhile True: os.write(1, bytes(1 << 16))"])
    last.signal(signal.SIGHUP)
    last.close_stdin()
    assert last.running in (True, False)
    last.kill()
    return events


# files


@floods("Files.read", "Files.read_text", "Files.chunks", "Files.stat", "Files.exists", "Files.usage")
def _reading(place: Place) -> object:
    files = place.tree.files
    for name in ("big/holes", "holes"):
        with contextlib.suppress(OSError):
            files.read(name)
            raise AssertionError(f"{name} was read")
    assert len(files.read("most")) == 64 * _MB
    text = files.read_text("wide.txt")
    part = files.read("big/holes", offset=1 << 60, size=_MB)
    streamed = sum(len(chunk) for chunk in files.chunks("holes", offset=_MB))
    assert (files.exists("wide"), files.stat("big/holes").size > 1 << 62) == (True, True)
    return len(text), len(part), streamed, files.usage().files


@floods("Files.list", "Files.search")
def _listing(place: Place) -> object:
    files = place.tree.files
    found = _counted(files.search("needle", limit=100))
    return _counted(files.list(recursive=True)), found


@floods("Files.pack", "Files.download")
def _leaving(place: Place) -> object:
    told: list[int] = []
    for path, kind in (("holes", "tar"), ("deep", "zip"), ("big", "zip")):
        with contextlib.suppress(OSError):
            told.append(sum(map(len, place.tree.files.pack(path, format=kind))))  # type: ignore[arg-type]  # both are
        with contextlib.suppress(OSError):
            place.tree.files.download(path, f"{place.folder}/{path}")
    return told


@floods("Files.upload", "Files.unpack", "Files.write", "Files.mkdir", "Files.rename", "Files.chmod", "Files.remove")
def _arriving(place: Place) -> object:
    """Upload a folder that a guest has filled, and download to names that a guest made."""
    shared = f"{place.folder}/shared"
    os.mkdir(shared)
    os.chmod(shared, 0o777)
    box = place.box(POLICY.replace(mounts=[Mount(shared, mode="rw")]))
    assert box.run(_UP.replace("SHARED", repr(shared))).ok
    box.files.upload(f"{shared}/up", "up")
    files = box.files
    box.run("import os\nos.mkfifo('pipe')\nos.makedirs('a/b')")
    for call in (
        lambda: files.write("pipe/x", b"x"),
        lambda: files.unpack(b"x" * 1024, "a"),
        lambda: files.chmod("pipe", 0o600),
        lambda: files.mkdir("pipe"),
        lambda: files.rename("a", "up/a"),
    ):
        with contextlib.suppress(OSError):
            call()
    files.remove("up", recursive=True)
    box.close()
    return len(box.denials())


@floods("Files.watch", "Watch.__iter__", "Watch.__next__", "Watch.close")
def _watching(place: Place) -> object:
    box = place.box()
    box.files.mkdir("watched")
    with box.files.watch("watched") as watch:
        box.spawn(["python3", "-c", _CHANGES])
        time.sleep(1)  # nobody reads
        return [next(watch).kind for _ in range(2000)][-1]


# copies


@floods("Sandbox.snapshot", "Sandbox.rollback", "Snapshot.diff", "Snapshot.export", "Snapshot.load", "Snapshot.delete")
def _snapshots(place: Place) -> object:
    box = place.box()
    changed = "import os\nfor n in range(2000): open(f'{n:05}' + 'n' * 100, 'w').write(('%d\\n' % (n + NUMBER)) * 200)"
    box.run(changed.replace("NUMBER", "0"))
    first = box.snapshot()
    box.run(changed.replace("NUMBER", "1"))
    second = box.snapshot()
    told = len(first.diff(second))
    first.export(f"{place.folder}/exported")
    loaded = Snapshot.load(f"{place.folder}/exported")
    box.rollback(first)
    for made in (first, second, loaded):
        made.delete()
    with contextlib.suppress(RingfenceError):
        place.tree.snapshot().delete()
    return told


@floods("Sandbox.fork")
def _forks(place: Place) -> object:
    # On disk a file with holes can be read from end to end; none may be larger than the limit.
    box = place.box(POLICY.replace(limits=replace(LIMITS, disk="1G")), workspace="disk")
    box.run("1")
    said = box.session("python").run((_LINE + _RANGE).replace("NUMBER", "2"), timeout_s=8)
    assert said.ok, said.stderr
    told = []
    for memory in (True, False):
        try:
            box.fork(memory=memory).close()
            told.append("copied")
        except RingfenceError as error:
            told.append(str(error))
    many = place.box()
    many.run("import mmap\nkept = [mmap.mmap(-1, 4096, mmap.MAP_PRIVATE) for n in range(2)]\nx = bytes(40 << 20)")
    many.fork().close()
    return told


# reaching in


@floods("Sandbox.expose", "Address.close")
def _exposed(place: Place) -> object:
    """Open as many connections as permitted: most are read, some are not."""
    box = place.box()
    next(iter(box.spawn(["python3", "-c", _SERVER.replace("MEGABYTES", "12")])))
    with box.expose(8000) as address:
        got = _read_all(address.port, connections=36, silent=8)
    asyncio.run(_exposed_async())
    return got // _MB


async def _exposed_async() -> None:
    async with AsyncSandbox(policy=POLICY, backend="process") as box:
        server = await box.spawn(["python3", "-c", _SERVER.replace("MEGABYTES", "12")])
        await anext(aiter(server))
        async with box.expose(8000) as address:
            await asyncio.to_thread(_read_all, address.port, connections=24, silent=4)


def _read_all(port: int, *, connections: int, silent: int) -> int:
    """Read all connections in this thread with a single buffer: this side keeps no bytes."""
    buffer, got = bytearray(1 << 16), 0
    want = 12 * _MB
    with contextlib.ExitStack() as ends, selectors.DefaultSelector() as waiting:
        left: dict[socket.socket, int] = {}
        for number in range(connections):
            one = ends.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number >= silent:
                left[one] = want
                waiting.register(one, selectors.EVENT_READ)
        until = time.monotonic() + 40
        while left and time.monotonic() < until:
            for key, _ in waiting.select(1):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                count = sock.recv_into(buffer)
                got, left[sock] = got + count, left[sock] - count
                if left[sock] <= 0 or not count:
                    waiting.unregister(sock)
                    del left[sock]
        assert got == want * (connections - silent), got
    return got


@floods("Gateway.log", "Gateway.summary", "Gateway.set", "Sandbox.denials")
def _refused(place: Place) -> object:
    network = Network(allow=["one.example"])
    box = place.box(POLICY.replace(network=network))
    box.run(_NAMES)
    box.network.set(network)
    return len(box.network.log()), len(box.network.summary()), len(box.denials())


# what looks on


@floods("Sandbox.start", "Sandbox.close", "Sandbox.state", "Sandbox.plan", "Sandbox.backend", "Sandbox.enforcement")
@floods("Sandbox.usage", "Sandbox.pause", "Sandbox.resume", "Sandbox.set_lifetime", "Sandbox.files")
def _standing(place: Place) -> object:
    box = Sandbox(policy=POLICY, backend="process").start()
    box.spawn(["python3", "-c", "import os\nwhile True: os.write(1, bytes(1 << 16))"])
    time.sleep(0.2)
    with contextlib.suppress(RingfenceError):
        box.pause()
        box.resume()
    box.set_lifetime(60)
    told = (box.state, box.backend, box.plan().backend, box.enforcement.memory.level, box.usage().cpu_s)
    box.close()
    return told


@floods("SandboxManager.sandbox", "SandboxManager.environment", "SandboxManager.environments", "SandboxManager.get")
@floods(
    "SandboxManager.sandboxes", "SandboxManager.close", "Environment.run", "Environment.exec", "Environment.sandbox"
)
@floods(
    "Environment.sandboxes", "Environment.usage", "Environment.requests", "Environment.history", "Environment.remove"
)
def _managed(place: Place) -> object:
    policy = POLICY.replace(limits=replace(LIMITS, disk_files=10_000))
    with SandboxManager(policy=policy, backend="process") as manager:
        agent = manager.environment("agent")
        agent.run(_PRINTS)
        agent.exec(["python3", "-c", _PRINTS])
        with agent.sandbox() as another:
            manager.get(another.id)
            another.exec(["python3", "-c", _PRINTS])
        with manager.sandbox() as third:
            third.run(_PRINTS)
        told = (len(agent.history()), len(agent.sandboxes()), len(manager.sandboxes()), len(manager.environments()))
        agent.usage()
        agent.requests()
        agent.remove()
    return told


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Make a folder of the host. A guest makes a tree there that is too deep for Python's own removal."""
    folder = tempfile.mkdtemp(prefix="rf-tests-", dir="/var/tmp")
    try:
        yield folder
    finally:
        top = os.open("/var/tmp", os.O_RDONLY | os.O_DIRECTORY)
        remove_tree(top, os.path.basename(folder))
        os.close(top)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    threading.stack_size(1 << 19)
    ringfence.run("1", policy=POLICY, backend="process")  # the zygote is there: what follows is this process's alone
    resource.setrlimit(resource.RLIMIT_DATA, (MOST, MOST))
    tree = functools.cache(_grown)
    for play in dict.fromkeys(VERBS.values()):
        if names and play.__name__ not in names:
            continue
        started = time.monotonic()
        try:
            with contextlib.ExitStack() as ends:
                folder = ends.enter_context(_folder())
                ended = repr(play(Place(folder, ends, tree)))[:200]
            typed = True
        except (RingfenceError, OSError) as error:
            ended, typed = f"{type(error).__name__}: {error}"[:300], True
        except BaseException as error:  # reported, and judged by the test
            import traceback

            ended, typed = f"{type(error).__name__}: {error}"[:300] + traceback.format_exc()[-600:], False
        seconds = round(time.monotonic() - started, 1)
        gc.collect()  # what one verb left in the heap is no part of the next one's
        _trim(0)
        print(json.dumps({"play": play.__name__, "ended": ended, "typed": typed, "seconds": seconds}), flush=True)
        sys.stdin.readline()  # until the test has read this process's peak memory
    if tree.cache_info().currsize:
        tree().close()


if __name__ == "__main__":
    main(sys.argv[1:])
