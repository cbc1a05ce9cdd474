"""How a run or exec ended: facts from outside the guest, and guest-made bytes marked as such.

Nothing guest-made chooses a type, a name or a format here; it is carried, cut and quoted.
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
    from datetime import UTC, datetime  # 2 ms: only results that were denied something pay it here

    return datetime.now(UTC)


@final
class Control(Struct):
    """What stands behind one promise. str() is the mechanism."""

    mechanism: str  # "cgroup v2 memory.max"
    level: Literal["full", "weaker"]
    note: str = ""  # what "weaker" means here: "per process, not for the tree"
    reports: bool = False  # refusals are seen by the host and listed in denials

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
        """Names of the promises a weaker mechanism holds; empty under `strict`."""
        return tuple(name for name in type(self).__fields__ if getattr(self, name).level == "weaker")


@final
class Usage(Struct):
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
class Denial(Struct):
    """Something the policy refused and the host saw. Equal ones are one with a count."""

    kind: Literal["network", "command", "mount", "syscall", "secret", "tool"]
    target: str  # "registry.example.org:443"
    code: str  # stable: "net.not-allowed", "net.private-address", "exec.not-listed" …
    message: str  # one sentence
    allow: str | None  # the policy line that would permit it, None: never
    count: int = 1
    first_at: datetime = factory(_now)


@final
class Output(Struct):
    """One displayed object in its representations. Guest-made bytes."""

    data: Mapping[str, bytes]  # by MIME type
    is_value: bool = False  # the cell's last expression, not display()

    def __post_init__(self) -> None:
        put(self, "data", frozen_map(self.data))

    @property
    def text(self) -> str | None:
        """`text/plain`, undecodable bytes replaced."""
        return self._decoded("text/plain")

    @property
    def html(self) -> str | None:
        """`text/html`. Guest-made: never put it into a page of your own origin."""
        return self._decoded("text/html")

    @property
    def png(self) -> bytes | None:
        """`image/png`, not checked to be one."""
        return self.data.get("image/png")

    @property
    def svg(self) -> str | None:
        """`image/svg+xml`. Guest-made: it may hold script."""
        return self._decoded("image/svg+xml")

    @property
    def json(self) -> Json:
        """Parsed with caps on size and depth; None where there is none, or it is not JSON within them."""
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
    """What the guest says it raised. Guest-made text."""

    name: str
    message: str
    traceback: str


@final
class Result(Struct):
    """How one run or exec ended. `status`, `exit_code`, `usage` and `enforcement` come from outside the guest."""

    id: str
    status: Status
    reason: Reason
    exit_code: int | None  # None: no process of its own ended (a cell), or it was killed
    signal: int | None
    stdout_bytes: bytes
    stderr_bytes: bytes
    truncated: bool
    outputs: tuple[Output, ...]
    exception: GuestException | None
    state_kept: bool  # False: the session died; the next run starts a new one
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
        """True when it ended by itself, without an error."""
        return self.status == "ok"

    @property
    def stdout(self) -> str:
        """UTF-8, undecodable bytes replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """UTF-8, undecodable bytes replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def value(self) -> str | None:
        """Return the repr of the last expression as a str that the guest made: "42" for 6 * 7. None without one."""
        for output in reversed(self.outputs):
            if output.is_value:
                return output.text
        return None

    def check(self) -> Self:
        """Self when ok, else GuestError."""
        if self.ok:
            return self
        from ringfence.errors import GuestError
        from ringfence.rendering import failure

        raise GuestError(failure(self), result=self, code=f"guest-{self.status}")

    def render(self, *, max_chars: int = 8_000) -> str:
        """For a model's context: status, value, both ends of the output, denials with what would allow them.

        Of many denials the most severe and the last; `denials` has all.
        """
        from ringfence.rendering import render

        return render(self, max_chars)

    def to_dict(self) -> dict[str, Json]:
        """The object that `--json`, the HTTP API and the audit trail use. Bytes as base64."""
        from ringfence.rendering import to_dict

        return to_dict(self)
