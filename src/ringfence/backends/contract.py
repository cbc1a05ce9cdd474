"""The contract between Ringfence and a backend: what a new backend implements.

A backend is one object with a name and four methods:

    facts()   read what this host can do               cheap; starts nothing, changes nothing
    plan()    return how a policy would be kept        pure; raises UnsupportedError for a policy it cannot keep
    launch()  make a sandbox that has run nothing      the only method that starts something
    doctor()  try every step that launch() needs       for a person who asks why it does not work

`launch` returns a `Box`: a place with guestd inside, behind one byte channel. Running code, commands, files, terminals
and sessions are written once, above the box, for all backends. So is the way to a network: a box whose policy has a
network hands over listening sockets or a channel, and the caller of `launch` connects the gateway to them.

A backend of another distribution is found by its entry point in the group `ringfence.backends`; an object that keeps
this contract can be passed as it is: `Sandbox(backend=Mine())`. "auto" takes neither. `ringfence.backends.engine` holds
what such a backend needs to put guestd inside, and `ringfence.testing.conformance` says what it must keep.
"""

from __future__ import annotations

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Any, Literal, Protocol, TypeAlias

    from ringfence.plan.controls import Controls
    from ringfence.plan.model import FoundImage, SandboxPlan
    from ringfence.policy.model import Network, Policy
    from ringfence.records import HostSummary, Request
    from ringfence.results import Denial, Enforcement, Usage
    from ringfence.values import Isolation

    Condition: TypeAlias = Literal["ok", "weaker", "missing"]
else:
    Protocol = object

__all__ = ["Backend", "BackendReport", "Box", "Finding", "Outlet", "SessionMemory"]


class Backend(Protocol):
    """How sandboxes are isolated. Frozen; options are fields of the object, such as `Container(engine="podman")`.

    The plan and the facts are the backend's own: `launch` gets the very plan that `plan` made, and `plan` gets the
    facts that `facts` returned. A plan is a `SandboxPlan`, or a subclass with more fields.
    """

    @property
    def name(self) -> str:
        """The name that results and `--backend` use."""

    @property
    def isolation(self) -> Isolation:
        """The isolation between guest and host. A policy that asks for a stronger one is refused before `plan`."""

    def facts(self) -> Any:
        """Return what this host can do. Raises UnsupportedError where the backend cannot work at all."""

    def plan(self, policy: Policy, image: FoundImage, facts: Any) -> SandboxPlan:
        """Return what `launch` would do, without doing any of it.

        Raises UnsupportedError, with what is missing and how to get it, when the policy cannot be kept. Containment
        never degrades. A weaker mechanism may enforce a limit unless `policy.strict`, and `enforcement` says so.
        """

    def launch(self, plan: Any, *, controls: Controls = ...) -> Box:
        """Make a sandbox that follows the plan and has run nothing.

        Raises UnsupportedError for a fact of this host: "auto" then takes another backend. Raises SandboxError for a
        failure that may pass, SandboxLostError where another attempt may succeed. Nothing is left behind then.
        `controls` is `ringfence.plan.controls.ALL_ON` in production; only the attack suite leaves a control out.
        """

    def doctor(self) -> BackendReport:
        """Try every step of a launch, in a second or two, and report each with its fix. Leaves nothing behind."""


class Box(Protocol):
    """A started sandbox that has run nothing yet. guestd inside has reported that it is ready."""

    channel: socket.socket  # to guestd: the frames of ringfence.wire
    listeners: list[int]  # with a network: guestd's listening sockets for the gateway; without any, guestd relays
    outlet: Outlet | None  # the gateway's side, set by the caller of `launch`; None: no network
    env: Mapping[str, str]  # variables of every process inside
    is_unprotected: bool  # everything inside was ended because a protected path was replaced on the host

    @property
    def backend(self) -> str:
        """The name of the backend that made this box."""

    @property
    def enforcement(self) -> Enforcement:
        """The mechanism that enforces each promise now."""

    @property
    def python(self) -> Mapping[str, object]:
        """The settings of a Python job: "executable", "sys_path" (None: the executable's default), "fresh"."""

    @property
    def generation(self) -> object:
        """The object that boxes with the same memory addresses share. Memory can be copied between them."""

    @property
    def memory_bytes(self) -> int:
        """The limit of memory for everything inside, files in memory included. A memory image is no larger."""

    def owns(self, pid: int) -> bool:
        """Return whether a stopped process, by its number on the host, belongs to this sandbox."""

    def give_image(self, fd: int) -> None:
        """Hand over a memory image for the next session that asks for one.

        Raises UnsupportedError where memory cannot be copied.
        """

    @property
    def can_freeze(self) -> bool:
        """Whether `freeze` can stop everything inside."""

    def freeze(self) -> bool:
        """Stop everything inside. Returns False where there is no freezer."""

    def thaw(self) -> None:
        """Undo `freeze` as far as the host must, before guestd lets jobs go on. Does nothing to a box that runs."""

    def how_it_ended(self) -> str | None:
        """Return why the channel ended without a message, as far as the backend knows. May take a moment."""

    def usage(self) -> tuple[Usage, int]:
        """Return the use as measured from outside so far, and how often the memory limit killed a process."""

    def kill(self) -> None:
        """Kill everything inside at once, without waiting. Idempotent."""

    def close(self) -> None:
        """Kill everything inside and begin to remove what is left. Does not wait for the end. Idempotent."""

    def wait_destroyed(self, timeout_s: float) -> bool:
        """Return, after `close`, whether nothing is left."""

    def findings(self) -> tuple[Denial, ...]:
        """Return the problems found on the host after the end: protected names, set-uid files."""


class Outlet(Protocol):
    """A sandbox's registration at the gateway, as seen by its box. Only the gateway makes registrations."""

    env: Mapping[str, str]  # variables that belong to this sandbox alone: placeholders of secrets
    defaults: Mapping[str, str]  # variables that image and policy may override: the trusted certificates
    files: Mapping[str, bytes]  # files to write before guest code runs, by their path inside: trusted certificates

    def add_to(self, usage: Usage) -> Usage:
        """Return the use together with the network traffic so far."""

    def mark(self) -> int:
        """Return the current end of the list of denials."""

    def denials(self, after: int) -> tuple[Denial, ...]:
        """Return the denials since a mark. Equal denials are one with a count."""

    def requests(self, after: int) -> tuple[Request, ...]:
        """Return the log of requests without the first `after` lines."""

    def summary(self) -> tuple[HostSummary, ...]:
        """Return the traffic by host."""

    def set(self, network: Network) -> None:
        """Replace the rules; return when the new rules are in force.

        Raises PolicyError for rules that the sandbox was not built for.
        """

    def close(self) -> None:
        """Cut every connection and accept no more. Does not wait. Idempotent."""

    def wait_ended(self, within_s: float) -> bool:
        """Return, after `close`, whether every connection has ended."""

    def disown_descriptors(self) -> None:
        """Forget every descriptor without closing any: the caller did that, and may have reused the numbers."""

    def after_fork(self) -> None:
        """Close a forked child's copies of listeners and connections. Idempotent."""


class SessionMemory(Protocol):
    """The memory of a session at a moment, kept by the backend that took it."""

    generation: object  # as in `Box`: this memory fits sandboxes of the same generation alone
    fd: int
    identity: tuple[str, int] | None  # by which /proc/<pid>/maps shows that a process maps this memory
    had: frozenset[int]  # process numbers inside that no copy must have: a copy would draw the same keys (K05)

    @property
    def size_bytes(self) -> int:
        """The size of the memory."""

    def close(self) -> None:
        """Give the memory back when no copy uses it any more."""


@final
class Finding(Struct):
    """The outcome of one trial. "weaker": sandboxes run, and something is refused or enforced less well."""

    what: str
    state: Condition
    detail: str
    fix: str | None = None  # for a person: a command, or what to change in words
    script: str | None = None  # the fix for a root shell; None: not part of the script


@final
class BackendReport(Struct):
    """The report of one backend: whether the backend works here, and the findings that decide this."""

    name: str
    works: bool
    findings: tuple[Finding, ...]

    @property
    def lines(self) -> list[tuple[str, Condition, str, str | None]]:
        """What, state, detail and fix of each finding, in the order of the trials."""
        return [(each.what, each.state, each.detail, each.fix) for each in self.findings]
