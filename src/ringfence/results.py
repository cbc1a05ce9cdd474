"""How a run or exec ended: facts seen from outside the guest, and bytes made by the guest, which are marked.

Bytes from the guest choose no type, no name and no format here; they are carried, cut and quoted.
"""

from __future__ import annotations

from ringfence.values import Struct, factory, final, frozen_map, put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from typing import Literal, Self

    from ringfence.values import Json, Reason, Status


def _now() -> datetime:
    from datetime import UTC, datetime  # 2 ms: only a result with a denial pays for this import

    return datetime.now(UTC)


@final
class Control(Struct):
    """The mechanism behind one promise of the sandbox. str() returns `mechanism`."""

    mechanism: str  # "cgroup v2 memory.max"
    level: Literal["full", "weaker"]
    note: str = ""  # what "weaker" means for this mechanism: "per process, not for the tree"
    reports: bool = False  # the host sees refusals and lists them in denials

    def __str__(self) -> str:
        return self.mechanism


@final
class Enforcement(Struct):
    """The mechanism behind each promise of one sandbox."""

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
        """Return the names of the promises that a weaker mechanism keeps; empty under `strict`."""
        return tuple(name for name in type(self).__fields__ if getattr(self, name).level == "weaker")


@final
class Usage(Struct):
    """What a run or a sandbox used, measured from outside. A value is None where the backend cannot measure it."""

    cpu_s: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    disk_bytes: int | None = None
    disk_files: int | None = None
    output_bytes: int = 0  # bytes that were produced, kept or not
    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0


@final
class Denial(Struct):
    """Something that the policy refused and the host saw. Equal denials are listed once, with a count."""

    kind: Literal["network", "command", "mount", "syscall", "secret", "tool"]
    target: str  # "registry.example.org:443"
    code: str  # stable: "net.not-allowed", "net.private-address", "exec.not-listed" …
    message: str  # one sentence
    allow: str | None  # the policy line that would permit the target; None where no line would
    count: int = 1
    first_at: datetime = factory(_now)


@final
class Output(Struct):
    """An object that the guest displayed, in several representations. The bytes are made by the guest."""

    data: Mapping[str, bytes]  # by MIME type
    is_value: bool = False  # the cell's last expression, not display()

    def __post_init__(self) -> None:
        put(self, "data", frozen_map(self.data))

    @property
    def text(self) -> str | None:
        """Return `text/plain` as a str, with undecodable bytes replaced."""
        return self._decoded("text/plain")

    @property
    def html(self) -> str | None:
        """Return `text/html`. The guest made the text: never put it into a page of your own origin."""
        return self._decoded("text/html")

    @property
    def png(self) -> bytes | None:
        """Return `image/png`, unchecked: the bytes may be no PNG."""
        return self.data.get("image/png")

    @property
    def svg(self) -> str | None:
        """Return `image/svg+xml`. The guest made the text, which may hold script."""
        return self._decoded("image/svg+xml")

    @property
    def json(self) -> Json:
        """Return `application/json`, parsed with caps on size and depth.

        Return None where there is no such representation, or where its bytes are not JSON within the caps.
        """
        data = self.data.get("application/json")
        if data is None:
            return None
        from ringfence.rendering import parse_json

        return parse_json(data)

    def _decoded(self, mime: str) -> str | None:
        data = self.data.get(mime)
        return None if data is None else data.decode("utf-8", "replace")


@final
class GuestException(Struct):
    """The exception that the guest says it raised. All of the text is made by the guest."""

    name: str
    message: str
    traceback: str


@final
class Result(Struct):
    """How one run or exec ended. `status`, `exit_code`, `usage` and `enforcement` come from outside the guest."""

    id: str
    status: Status
    reason: Reason
    exit_code: int | None  # None for a cell, which has no process of its own, and for a process that was killed
    signal: int | None
    stdout_bytes: bytes
    stderr_bytes: bytes
    truncated: bool
    outputs: tuple[Output, ...]
    exception: GuestException | None
    state_kept: bool  # False when the session died; the next run starts a new session
    duration_s: float
    started_at: datetime
    usage: Usage
    denials: tuple[Denial, ...]
    enforcement: Enforcement
    backend: str
    image: str
    policy_digest: str

    @property
    def ok(self) -> bool:
        """Return True when the code ended by itself, without an error."""
        return self.status == "ok"

    @property
    def stdout(self) -> str:
        """Return standard output as UTF-8, with undecodable bytes replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Return standard error as UTF-8, with undecodable bytes replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def value(self) -> str | None:
        """Return the repr of the last expression as a str that the guest made: "42" for 6 * 7.

        Return None without a value.
        """
        for output in reversed(self.outputs):
            if output.is_value:
                return output.text
        return None

    def check(self) -> Self:
        """Return this result when `ok`, else raise GuestError."""
        if self.ok:
            return self
        from ringfence.errors import GuestError
        from ringfence.rendering import failure

        raise GuestError(failure(self), result=self, code=f"guest-{self.status}")

    def render(self, *, max_chars: int = 8_000) -> str:
        """Return text for a model's context: status, value, the ends of the output, denials with what would allow them.

        When there are many denials, the text has the most severe and the last; `denials` has all.
        """
        from ringfence.rendering import render

        return render(self, max_chars)

    def to_dict(self) -> dict[str, Json]:
        """Return the object that `--json`, the HTTP API and the audit trail use. Bytes are encoded as base64."""
        from ringfence.rendering import to_dict

        return to_dict(self)
