"""What calls return: records, and the objects that a sandbox or a manager hands out. No caller makes one."""
import signal as _signal
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import BinaryIO, Generic, Literal, Self, TypeVar, final

from ringfence import AsyncSandbox, Network, Policy, Quota, Result, Sandbox
from ringfence.events import Event, FileEvent
from ringfence.values import Argv, GuestPath, HostPath, Json, SessionLanguage, State

__all__ = [
    "Address", "AsyncAddress", "AsyncEnvironment", "AsyncFiles", "AsyncGateway", "AsyncProcess", "AsyncPty",
    "AsyncSession", "AsyncWatch", "Change", "Control", "Denial", "DiskUsage", "Enforcement", "Environment",
    "FileInfo", "Files", "Gateway", "GuestException", "HostSummary", "Match", "Missing", "Output", "Plan",
    "Process", "ProcessInfo", "Pty", "Request", "SandboxInfo", "Session", "Usage", "Watch",
]

_T = TypeVar("_T")

@final
@dataclass(frozen=True)
class Control:
    """What stands behind one promise. str() is the mechanism."""

    mechanism: str  # "cgroup v2 memory.max"
    level: Literal["full", "weaker"]
    note: str = ""  # what "weaker" means here: "per process, not for the tree"
    reports: bool = False  # refusals are seen by the host and listed in denials

@final
@dataclass(frozen=True)
class Enforcement:
    files: Control
    network: Control
    processes: Control
    syscalls: Control
    privileges: Control
    time: Control
    cpu: Control
    memory: Control
    disk: Control
    output: Control
    @property
    def weaker(self) -> tuple[str, ...]:
        """Names of the promises a weaker mechanism holds; empty under `strict`."""

@final
@dataclass(frozen=True)
class Usage:
    """Measured from outside. None: this backend cannot measure it."""

    cpu_s: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    disk_bytes: int | None = None
    disk_files: int | None = None
    output_bytes: int = 0  # produced, kept or not
    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0

@final
@dataclass(frozen=True)
class Denial:
    """Something the policy refused and the host saw. Equal ones are one with a count."""

    kind: Literal["network", "command", "mount", "syscall", "secret", "tool"]
    target: str  # "registry.example.org:443"
    code: str  # stable: "net.not-allowed", "net.private-address", "exec.not-listed" …
    message: str  # one sentence
    allow: str | None  # the policy line that would permit it, None: never
    count: int = 1
    first_at: datetime = ...

@final
@dataclass(frozen=True)
class Output:
    """One displayed object in its representations. Guest-made bytes."""

    data: Mapping[str, bytes]  # by MIME type
    is_value: bool = False  # the cell's last expression, not display()
    @property
    def text(self) -> str | None: ...
    @property
    def html(self) -> str | None: ...
    @property
    def png(self) -> bytes | None: ...
    @property
    def svg(self) -> str | None: ...
    @property
    def json(self) -> Json:
        """Parsed with caps on size and depth; None where there is none."""

@final
@dataclass(frozen=True)
class GuestException:
    """What the guest says it raised. Guest-made text."""

    name: str
    message: str
    traceback: str

@final
@dataclass(frozen=True)
class Plan:
    """What a backend will do to keep a policy. Pure; nothing has started."""

    backend: str
    enforcement: Enforcement
    rejected: Mapping[str, str]  # backend → why "auto" did not take it
    def explain(self) -> str: ...

@final
@dataclass(frozen=True)
class FileInfo:
    path: str  # as asked for, below the listed directory
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    modified_at: datetime
    target: str | None = None  # of a symlink, unresolved

@final
@dataclass(frozen=True)
class Match:
    path: str
    line: int
    text: str

@final
@dataclass(frozen=True)
class DiskUsage:
    bytes: int
    bytes_limit: int
    files: int
    files_limit: int

@final
@dataclass(frozen=True)
class Request:
    """One connection or, where seen, one HTTP request, and the gateway's decision."""

    at: datetime
    host: str
    port: int
    verdict: Literal["allowed", "denied", "failed"]
    code: str
    rule: str | None
    method: str | None
    path: str | None
    status: int | None
    sent_bytes: int
    received_bytes: int
    duration_s: float

@final
@dataclass(frozen=True)
class HostSummary:
    host: str
    allowed: int
    denied: int
    failed: int
    methods: Mapping[str, int]
    statuses: Mapping[int, int]
    sent_bytes: int
    received_bytes: int

@final
@dataclass(frozen=True)
class ProcessInfo:
    id: str
    argv: tuple[str, ...]
    running: bool
    started_at: datetime

@final
@dataclass(frozen=True)
class SandboxInfo:
    id: str
    state: State
    backend: str
    agent: str | None
    labels: Mapping[str, str]
    started_at: datetime
    ends_at: datetime

@final
@dataclass(frozen=True)
class Change:
    path: str
    kind: Literal["added", "changed", "removed"]
    before_bytes: int | None
    after_bytes: int | None
    diff: str | None  # unified, for text up to a cap

@final
@dataclass(frozen=True)
class Missing:
    backend: str
    what: str
    fix: str | None

class Opening(Awaitable[_T], AbstractAsyncContextManager[_T, None], Generic[_T]):
    """`p = await box.spawn(…)` or `async with box.spawn(…) as p`; the second also ends it."""

    def __await__(self) -> Generator[object, None, _T]: ...
    async def __aenter__(self) -> _T: ...
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class AsyncProcess:
    """A command, terminal or cell that is running. Leaving `with` kills it; without `with` it lives as long
    as the sandbox and survives a lost connection."""

    id: str
    argv: tuple[str, ...]
    @property
    def running(self) -> bool: ...
    def __aiter__(self) -> AsyncIterator[Event]:
        """From the first event not yet read; ends after Exit."""
    async def wait(self, *, timeout_s: float | None = None) -> Result:
        """Raises TimeoutError when it still runs then; it is not killed."""
    async def write(self, data: bytes | str) -> None:
        """To stdin. Raises BrokenPipeError when it is closed."""
    async def close_stdin(self) -> None: ...
    async def signal(self, signal: _signal.Signals) -> None: ...
    async def kill(self) -> Result:
        """The whole tree. Idempotent."""
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class AsyncPty(AsyncProcess):
    """A process on a terminal: one stream, as Stdout."""

    async def resize(self, *, cols: int, rows: int) -> None: ...

class AsyncSession:
    """An interpreter kept alive. Calls queue; one cell runs at a time."""

    name: str
    language: SessionLanguage
    async def run(
        self,
        code: str,
        *,
        stdin: bytes | str | None = None,  # for input(); None: input() raises EOFError
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,  # the cell is interrupted, then killed: see Result.state_kept
    ) -> Result: ...
    def spawn(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Opening[AsyncProcess]: ...
    async def interrupt(self) -> bool:
        """Stop the running cell, keep the state. False when nothing ran."""
    async def restart(self) -> None: ...
    async def close(self) -> None: ...

class AsyncWatch(AsyncIterator[FileEvent]):
    async def __anext__(self) -> FileEvent: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class AsyncFiles:
    """Files inside, through guestd, as the guest's user. Never a host path, except in upload and download."""

    async def read(self, path: GuestPath, *, offset: int = 0, size: int | None = None) -> bytes: ...
    async def read_text(self, path: GuestPath, *, encoding: str = "utf-8", errors: str = "strict") -> str: ...
    def chunks(self, path: GuestPath, *, offset: int = 0) -> AsyncIterator[bytes]: ...
    async def write(
        self,
        path: GuestPath,
        data: bytes | str | BinaryIO | AsyncIterable[bytes],
        *,
        append: bool = False,
        mode: int | None = None,
    ) -> FileInfo:
        """Parents are made. A str is written as UTF-8. Replaces as a whole or not at all."""
    def list(
        self, path: GuestPath = ".", *, recursive: bool = False, pattern: str | None = None
    ) -> AsyncIterator[FileInfo]:
        """Sorted by name, fetched in pages; symlinks are shown, never followed."""
    def search(
        self, text: str, path: GuestPath = ".", *, regex: bool = False, pattern: str | None = None, limit: int = 1000
    ) -> AsyncIterator[Match]: ...
    async def stat(self, path: GuestPath) -> FileInfo: ...
    async def exists(self, path: GuestPath) -> bool: ...
    async def mkdir(self, path: GuestPath, *, parents: bool = True, exist_ok: bool = True) -> None: ...
    async def rename(self, source: GuestPath, target: GuestPath) -> None: ...
    async def remove(self, path: GuestPath, *, recursive: bool = False, missing_ok: bool = False) -> None: ...
    async def chmod(self, path: GuestPath, mode: int) -> None: ...
    def watch(self, path: GuestPath = ".", *, recursive: bool = False) -> Opening[AsyncWatch]: ...
    async def upload(
        self, source: HostPath, target: GuestPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """A host file or folder into the sandbox."""
    async def download(
        self, source: GuestPath, target: HostPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """Out of the sandbox, into a host folder that is held open; a hostile tree cannot leave it."""
    def pack(self, path: GuestPath = ".", *, format: Literal["tar", "zip"] = "tar") -> AsyncIterator[bytes]: ...
    async def unpack(
        self,
        data: bytes | BinaryIO | AsyncIterable[bytes],
        path: GuestPath = ".",
        *,
        format: Literal["tar", "zip"] = "tar",
    ) -> None: ...
    async def usage(self) -> DiskUsage: ...

class AsyncGateway:
    """The only way out: what it decided, and live rules."""

    async def log(self, *, after: int = 0) -> tuple[Request, ...]: ...
    async def summary(self) -> tuple[HostSummary, ...]: ...
    async def set(self, network: Network) -> None:
        """Replace the rules; connections no longer permitted are cut. Never beyond a manager's policy."""

class AsyncAddress:
    """A local address that reaches one port inside. Closed with the sandbox."""

    host: str
    port: int
    url: str
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class AsyncEnvironment:
    """What one agent owns: a workspace that stays, a policy, a quota, a history."""

    agent: str
    policy: Policy
    quota: Quota
    files: AsyncFiles
    async def run(
        self, code: str, *, language: str = "python", stdin: bytes | str | None = None, timeout_s: float | None = None
    ) -> Result:
        """In the agent's own sandbox, started on first use, ended by `idle_s`."""
    async def exec(
        self, argv: Argv, *, stdin: bytes | str | None = None, cwd: GuestPath | None = None, timeout_s: float | None = None
    ) -> Result: ...
    def sandbox(self, *, policy: Policy | None = None) -> AsyncSandbox:
        """Another one on the same quota; `policy` can only narrow."""
    async def sandboxes(self) -> tuple[SandboxInfo, ...]: ...
    async def usage(self) -> Usage: ...
    async def requests(self) -> tuple[HostSummary, ...]: ...
    async def history(self, *, limit: int = 100) -> tuple[Result, ...]:
        """Newest first, output cut to a line."""
    async def remove(self) -> None:
        """End its sandboxes, delete its workspace."""

class Process:
    """A command, terminal or cell that is running. Leaving `with` kills it; without `with` it lives as long
    as the sandbox and survives a lost connection."""

    id: str
    argv: tuple[str, ...]
    @property
    def running(self) -> bool: ...
    def __iter__(self) -> Iterator[Event]:
        """From the first event not yet read; ends after Exit."""
    def wait(self, *, timeout_s: float | None = None) -> Result:
        """Raises TimeoutError when it still runs then; it is not killed."""
    def write(self, data: bytes | str) -> None:
        """To stdin. Raises BrokenPipeError when it is closed."""
    def close_stdin(self) -> None: ...
    def signal(self, signal: _signal.Signals) -> None: ...
    def kill(self) -> Result:
        """The whole tree. Idempotent."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class Pty(Process):
    """A process on a terminal: one stream, as Stdout."""

    def resize(self, *, cols: int, rows: int) -> None: ...

class Session:
    """An interpreter kept alive. Calls queue; one cell runs at a time."""

    name: str
    language: SessionLanguage
    def run(
        self,
        code: str,
        *,
        stdin: bytes | str | None = None,  # for input(); None: input() raises EOFError
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,  # the cell is interrupted, then killed: see Result.state_kept
    ) -> Result: ...
    def spawn(
        self,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Process: ...
    def interrupt(self) -> bool:
        """Stop the running cell, keep the state. False when nothing ran."""
    def restart(self) -> None: ...
    def close(self) -> None: ...

class Watch(Iterator[FileEvent]):
    def __next__(self) -> FileEvent: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class Files:
    """Files inside, through guestd, as the guest's user. Never a host path, except in upload and download."""

    def read(self, path: GuestPath, *, offset: int = 0, size: int | None = None) -> bytes: ...
    def read_text(self, path: GuestPath, *, encoding: str = "utf-8", errors: str = "strict") -> str: ...
    def chunks(self, path: GuestPath, *, offset: int = 0) -> Iterator[bytes]: ...
    def write(
        self,
        path: GuestPath,
        data: bytes | str | BinaryIO | Iterable[bytes],
        *,
        append: bool = False,
        mode: int | None = None,
    ) -> FileInfo:
        """Parents are made. A str is written as UTF-8. Replaces as a whole or not at all."""
    def list(
        self, path: GuestPath = ".", *, recursive: bool = False, pattern: str | None = None
    ) -> Iterator[FileInfo]:
        """Sorted by name, fetched in pages; symlinks are shown, never followed."""
    def search(
        self, text: str, path: GuestPath = ".", *, regex: bool = False, pattern: str | None = None, limit: int = 1000
    ) -> Iterator[Match]: ...
    def stat(self, path: GuestPath) -> FileInfo: ...
    def exists(self, path: GuestPath) -> bool: ...
    def mkdir(self, path: GuestPath, *, parents: bool = True, exist_ok: bool = True) -> None: ...
    def rename(self, source: GuestPath, target: GuestPath) -> None: ...
    def remove(self, path: GuestPath, *, recursive: bool = False, missing_ok: bool = False) -> None: ...
    def chmod(self, path: GuestPath, mode: int) -> None: ...
    def watch(self, path: GuestPath = ".", *, recursive: bool = False) -> Watch: ...
    def upload(
        self, source: HostPath, target: GuestPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """A host file or folder into the sandbox."""
    def download(
        self, source: GuestPath, target: HostPath, *, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """Out of the sandbox, into a host folder that is held open; a hostile tree cannot leave it."""
    def pack(self, path: GuestPath = ".", *, format: Literal["tar", "zip"] = "tar") -> Iterator[bytes]: ...
    def unpack(
        self,
        data: bytes | BinaryIO | Iterable[bytes],
        path: GuestPath = ".",
        *,
        format: Literal["tar", "zip"] = "tar",
    ) -> None: ...
    def usage(self) -> DiskUsage: ...

class Gateway:
    """The only way out: what it decided, and live rules."""

    def log(self, *, after: int = 0) -> tuple[Request, ...]: ...
    def summary(self) -> tuple[HostSummary, ...]: ...
    def set(self, network: Network) -> None:
        """Replace the rules; connections no longer permitted are cut. Never beyond a manager's policy."""

class Address:
    """A local address that reaches one port inside. Closed with the sandbox."""

    host: str
    port: int
    url: str
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

class Environment:
    """What one agent owns: a workspace that stays, a policy, a quota, a history."""

    agent: str
    policy: Policy
    quota: Quota
    files: Files
    def run(
        self, code: str, *, language: str = "python", stdin: bytes | str | None = None, timeout_s: float | None = None
    ) -> Result:
        """In the agent's own sandbox, started on first use, ended by `idle_s`."""
    def exec(
        self, argv: Argv, *, stdin: bytes | str | None = None, cwd: GuestPath | None = None, timeout_s: float | None = None
    ) -> Result: ...
    def sandbox(self, *, policy: Policy | None = None) -> Sandbox:
        """Another one on the same quota; `policy` can only narrow."""
    def sandboxes(self) -> tuple[SandboxInfo, ...]: ...
    def usage(self) -> Usage: ...
    def requests(self) -> tuple[HostSummary, ...]: ...
    def history(self, *, limit: int = 100) -> tuple[Result, ...]:
        """Newest first, output cut to a line."""
    def remove(self) -> None:
        """End its sandboxes, delete its workspace."""
