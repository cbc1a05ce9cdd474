"""Witnesses on the host: listeners, a process, a variable, a key and files that an attack reaches if it succeeds."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from typing import TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tempfile
    from collections.abc import Iterator
    from typing import Self

T = TypeVar("T")
_GRACE_S = 0.15
_PLACE = "/var/tmp"  # not /tmp: a sandbox covers the host's /tmp with its own, even where it shows the host's root


def host_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a new folder on the host, for one arm."""
    import tempfile

    return tempfile.TemporaryDirectory(prefix=_folders_of(os.getpid()), dir=_PLACE, ignore_cleanup_errors=True)


def remove_folders(pid: int) -> None:
    """Remove the folders of arms that the process `pid` left behind."""
    import shutil

    for entry in os.scandir(_PLACE):
        if entry.name.startswith(_folders_of(pid)):
            shutil.rmtree(entry.path, ignore_errors=True)


def _folders_of(pid: int) -> str:
    return f"ringfence-attack-{pid}-"


class Listener:
    """A listening socket of the host. `received` accepts and reads; no thread runs."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._accepted: list[socket.socket] = []
        sock.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """The path or abstract name of a unix socket."""
        name = self._socket.getsockname()
        return name.decode().lstrip("\0") if isinstance(name, bytes) else str(name)

    def received(self, wait_s: float = _GRACE_S) -> list[bytes]:
        """Return the first bytes of each connection, or each datagram, that has come."""
        if self._socket.type & socket.SOCK_STREAM:
            while self._ready(self._socket, 0):
                self._accepted.append(self._socket.accept()[0])
            return [self._first_bytes(connection, wait_s) for connection in self._accepted]
        found: list[bytes] = []
        while self._ready(self._socket, wait_s if not found else 0):
            found.append(self._socket.recv(4096))
        return found

    def _first_bytes(self, connection: socket.socket, wait_s: float) -> bytes:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            return connection.recv(4096) if self._ready(connection, wait_s) else b""
        return b""

    @staticmethod
    def _ready(sock: socket.socket, wait_s: float) -> bool:
        return bool(select.select([sock], [], [], wait_s)[0])

    def close(self) -> None:
        for sock in (*self._accepted, self._socket):
            sock.close()


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of the library, such as a check, in this process while the block runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _listening(sock: socket.socket) -> Iterator[Listener]:
    listener = Listener(sock)
    try:
        yield listener
    finally:
        listener.close()


def tcp(*, ipv6: bool = False) -> contextlib.AbstractContextManager[Listener]:
    """Listen on a TCP port of loopback."""
    family, host = (socket.AF_INET6, "::1") if ipv6 else (socket.AF_INET, "127.0.0.1")
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, 0))
    sock.listen(64)
    return _listening(sock)


def udp() -> contextlib.AbstractContextManager[Listener]:
    """Listen on a UDP port of loopback."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return _listening(sock)


def abstract(canary: str) -> contextlib.AbstractContextManager[Listener]:
    """Listen on an abstract unix socket, whose name ends with the canary."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0ringfence-attack-{canary}")
    sock.listen(64)
    return _listening(sock)


def path(name: str) -> contextlib.AbstractContextManager[Listener]:
    """Listen on a unix socket at the path `name`, open to any user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(name)
    os.chmod(name, 0o777)
    sock.listen(64)
    return _listening(sock)


_VICTIM = """
import signal, sys
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
secret = sys.stdin.readline().strip()
print("ready", flush=True)
sys.stdin.read()
"""


class Victim:
    """A sleeping process of the host's user, with the canary in its arguments, environment and memory."""

    def __init__(self, canary: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _VICTIM, canary],
            env={"RINGFENCE_ATTACK_CANARY": canary, "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(canary.encode() + b"\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    @property
    def alive(self) -> bool:
        """Whether the process lives, after a moment in which a signal may still arrive."""
        deadline = time.monotonic() + _GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process's environment while the block runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


_NR_ADD_KEY, _NR_KEYCTL = 248, 250
_SESSION_KEYRING = -3
_KEYCTL_UNLINK = 9


@contextlib.contextmanager
def session_key(canary: str) -> Iterator[int]:
    """Add a key of type "user" to the session keyring. Raises OSError where the kernel has no keys."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    data = canary.encode()
    words = [ctypes.c_long(len(data)), ctypes.c_long(_SESSION_KEYRING)]
    name = b"ringfence-attack-" + data[:8]
    key = libc.syscall(ctypes.c_long(_NR_ADD_KEY), b"user", name, data, *words)
    if key < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        yield int(key)
    finally:
        ring = ctypes.c_long(_SESSION_KEYRING)
        libc.syscall(ctypes.c_long(_NR_KEYCTL), ctypes.c_long(_KEYCTL_UNLINK), ctypes.c_long(key), ring)


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of /proc/<pid>/status as the host reads them; {} when the process is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return {}


def processes_with(mark: str) -> list[int]:
    """Return the pids of all processes on the host whose first argument contains `mark`. Zombies have no arguments."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            if mark.encode() in file.read(4096).split(b"\0")[0]:
                found.append(int(name))
    return found


def waiting_process(mark: str, wait_s: float = 3.0) -> int | None:
    """Wait for a process with `mark` in the first argument and return its pid; None when none came in time."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        found = processes_with(mark)
        if found:
            return found[0]
        time.sleep(0.01)
    return None


def text_of(path: str) -> str:
    """Return the text of a host file; "" when the file cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def handle_of(path: str) -> bytes:
    """Return the kernel's handle of a host file, for `open_by_handle_at`. Raises OSError when the file has none."""
    import ctypes

    buffer = ctypes.create_string_buffer(_HANDLE_HEAD + _HANDLE_MAX)
    ctypes.c_uint.from_buffer(buffer, 0).value = _HANDLE_MAX
    mount = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.name_to_handle_at(ctypes.c_int(-100), path.encode(), buffer, ctypes.byref(mount), ctypes.c_int(0)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return buffer.raw[: _HANDLE_HEAD + ctypes.c_uint.from_buffer(buffer, 0).value]


_HANDLE_HEAD, _HANDLE_MAX = 8, 128

_IN_USER_NAMESPACE = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(int(sys.argv[1])), 0x10000000) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print(open(sys.argv[2]).read())
"""


def setting_of(pid: int, path: str) -> str:
    """Return the value of `path` below /proc/sys in the user namespace of `pid`, read by a child process that enters
    only that namespace. Raises OSError when it cannot."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _IN_USER_NAMESPACE, str(pid), f"/proc/sys/{path}"],
        capture_output=True,
        text=True,
        timeout=5,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"the user namespace of {pid} could not be entered: {done.stderr[-200:]}")
    return done.stdout.strip()


def holds(directory: str, mark: str) -> bool:
    """Return whether a file anywhere below `directory` contains `mark`. Links are not followed."""
    for top, _, names in os.walk(directory):
        paths = [f"{top}/{name}" for name in names]
        if any(os.path.isfile(path) and not os.path.islink(path) and mark in text_of(path) for path in paths):
            return True
    return False


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below `pid`, nearest first."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = int(status_of(int(name)).get("PPid", "0"))
            parents.setdefault(parent, []).append(int(name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = parents.get(queue.pop(0), [])
        found += below
        queue += below
    return found
