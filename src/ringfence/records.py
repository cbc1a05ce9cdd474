"""Records of which lists, logs and summaries are made. Callers find the names in `ringfence.types`."""

from __future__ import annotations

from ringfence.values import Struct, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from typing import Literal

    from ringfence.values import State


@final
class FileInfo(Struct):
    """A file inside the sandbox, as the guest's user sees it."""

    path: str  # as the caller wrote it; in a list, below the listed directory
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    modified_at: datetime
    target: str | None = None  # of a symlink, unresolved


@final
class Match(Struct):
    """One line that a search found."""

    path: str
    line: int
    text: str


@final
class DiskUsage(Struct):
    """How much the workspace holds, and its limits."""

    bytes: int
    bytes_limit: int
    files: int
    files_limit: int


@final
class Request(Struct):
    """A connection or, where the gateway reads HTTP, a request, and the gateway's decision."""

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
class HostSummary(Struct):
    """All requests to one host, counted."""

    host: str
    allowed: int
    denied: int
    failed: int
    methods: Mapping[str, int]
    statuses: Mapping[int, int]
    sent_bytes: int
    received_bytes: int

    def __post_init__(self) -> None:
        put(self, "methods", frozen_map(self.methods))
        put(self, "statuses", frozen_map(self.statuses))


@final
class ProcessInfo(Struct):
    """A process that a sandbox spawned."""

    id: str
    argv: tuple[str, ...]
    running: bool
    started_at: datetime


@final
class SandboxInfo(Struct):
    """A sandbox in a manager's list."""

    id: str
    state: State
    backend: str
    agent: str | None
    labels: Mapping[str, str]
    started_at: datetime
    ends_at: datetime

    def __post_init__(self) -> None:
        put(self, "labels", frozen_map(self.labels))


@final
class Change(Struct):
    """One difference between two snapshots."""

    path: str
    kind: Literal["added", "changed", "removed"]
    before_bytes: int | None
    after_bytes: int | None
    diff: str | None  # a unified diff, for text up to a cap
