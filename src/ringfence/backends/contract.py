"""The contract between Ringfence and a backend. Read this page to add one; docs/how-to/add-a-backend.md walks through.

A backend is one object with a name that keeps four promises:

    facts()   reads what this host can do             cheap, starts nothing, changes nothing
    plan()    says how a policy would be kept         pure; raises UnsupportedError for what it cannot keep
    launch()  makes a sandbox that has run nothing    the only one that starts something
    doctor()  tries what launch() rests on            for a person who asks why it does not work

What `launch` returns is a `Box`: a place with guestd inside, behind one byte channel. Running code, commands, files,
terminals and sessions are written once, above it. So is the way to a network: a box whose policy has one hands over
listening sockets or a channel, and the gateway is connected to it by whoever asked for the launch.

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
    """How sandboxes are isolated. Frozen; its options are fields of the object, such as `Container(engine="podman")`.

    The plan and the facts are the backend's own: `launch` gets the very plan that its `plan` made, and `plan` the facts
    that its `facts` returned. A plan is a `SandboxPlan`, or a subclass that says more.
    """

    @property
    def name(self) -> str:
        """The name that results and `--backend` use."""

    @property
    def isolation(self) -> Isolation:
        """The wall between guest and host. A policy that asks for a stronger one is refused before `plan`."""

    def facts(self) -> Any:
        """Return what this host can do. Raises UnsupportedError where the backend cannot work at all."""

    def plan(self, policy: Policy, image: FoundImage, facts: Any) -> SandboxPlan:
        """Return what `launch` would do, without doing any of it.

        Raises UnsupportedError, with what is missing and how to get it, when the policy cannot be kept. Containment
        never degrades; a limit may be held by a weaker mechanism unless `policy.strict`, and `enforcement` says so.
        """

    def launch(self, plan: Any, *, controls: Controls = ...) -> Box:
        """Make a sandbox that follows the plan and has run nothing.

        Raises UnsupportedError for a fact of this host: "auto" then takes another backend. Raises SandboxError for what
        may pass, SandboxLostError where another attempt may do. Nothing is left behind then.
        `controls` stands whole in production; only the attack suite leaves one out.
        """

    def doctor(self) -> BackendReport:
        """Try what a launch rests on, in a second or two, and report each part with its fix. Leaves nothing behind."""


class Box(Protocol):
    """One sandbox that has been started and has run nothing yet. guestd inside has reported that it is ready."""

    channel: socket.socket  # to guestd: the frames of ringfence.wire
    listeners: list[int]  # with a network: guestd's listening sockets for the gateway; none: guestd relays
    outlet: Outlet | None  # the gateway's side, set by whoever asked for the launch; None: no network
    env: Mapping[str, str]  # variables of every process inside
    is_unprotected: bool  # everything inside was ended because a protected path was replaced on the host

    @property
    def backend(self) -> str:
        """The name of the backend that made it."""

    @property
    def enforcement(self) -> Enforcement:
        """What holds each promise now."""

    @property
    def python(self) -> Mapping[str, object]:
        """What a Python job needs besides its code: "executable", "sys_path" (None: its own), "fresh"."""

    @property
    def generation(self) -> object:
        """Sandboxes of the same generation have the same addresses, so that memory can be copied between them."""

    @property
    def memory_bytes(self) -> int:
        """The most that everything inside may hold, files in memory included. A memory image holds no more."""

    def owns(self, pid: int) -> bool:
        """Return whether that process of the host's, which stands still, is one of this sandbox's."""

    def give_image(self, fd: int) -> None:
        """Hand over memory for the next session that asks for some. Raises UnsupportedError where that cannot be."""

    @property
    def can_freeze(self) -> bool:
        """Whether `freeze` can stop everything inside."""

    def freeze(self) -> bool:
        """Stop everything inside. Returns False where there is no freezer."""

    def thaw(self) -> None:
        """Do what must be done before guestd hears that it is to go on. Does nothing to a box that runs."""

    def how_it_ended(self) -> str | None:
        """Return what the backend knows of why the channel is gone without a word. May take a moment."""

    def usage(self) -> tuple[Usage, int]:
        """Return the use as measured from outside so far, and how often the memory limit killed a process."""

    def kill(self) -> None:
        """Kill everything inside at once, without waiting. Idempotent."""

    def close(self) -> None:
        """Kill everything inside, and see to it that nothing is left. Does not wait for it. Idempotent."""

    def wait_destroyed(self, timeout_s: float) -> bool:
        """Return, after `close`, whether nothing is left."""

    def findings(self) -> tuple[Denial, ...]:
        """Return what a look at the host's side shows after the end: protected names, set-uid files."""


class Outlet(Protocol):
    """A sandbox's registration at the gateway, as its box knows it. Backends never make one."""

    env: Mapping[str, str]  # variables that belong to this sandbox alone: placeholders of secrets
    defaults: Mapping[str, str]  # variables that image and policy may set otherwise: its trusted roots
    files: Mapping[str, bytes]  # to be there before guest code, by their path inside: its trusted roots

    def add_to(self, usage: Usage) -> Usage:
        """Return the use with what went over the network so far."""

    def mark(self) -> int:
        """Return where the list of denials ends now."""

    def denials(self, after: int) -> tuple[Denial, ...]:
        """Return what was refused since that mark, equal denials as one with a count."""

    def requests(self, after: int) -> tuple[Request, ...]:
        """Return the log without its first `after` lines."""

    def summary(self) -> tuple[HostSummary, ...]:
        """Return the traffic by host."""

    def set(self, network: Network) -> None:
        """Replace the rules; returns when they hold. PolicyError for what the sandbox was not built for."""

    def close(self) -> None:
        """Cut every connection and answer no more. Does not wait. Idempotent."""

    def wait_ended(self, within_s: float) -> bool:
        """Return, after `close`, whether nothing of it is left."""

    def disown_descriptors(self) -> None:
        """Close no descriptor again: the caller closed them, and their numbers may be others' by now."""

    def after_fork(self) -> None:
        """Close a forked child's copies of listeners and connections. Idempotent."""


class SessionMemory(Protocol):
    """The memory of one session at one moment, as the backend that took it keeps it."""

    generation: object  # as of `Box`: it fits sandboxes of the same alone
    fd: int
    identity: tuple[str, int] | None  # how a process that maps it is known
    had: frozenset[int]  # process numbers inside that a copy must not have: it would draw the same keys (K05)

    @property
    def size_bytes(self) -> int:
        """How much memory it holds."""

    def close(self) -> None:
        """Give the memory back when no copy uses it any more."""


@final
class Finding(Struct):
    """One thing that was tried. "weaker": a sandbox runs without it, and something is refused or held less well."""

    what: str
    state: Condition
    detail: str
    fix: str | None = None  # for a person: a command, or what to change in words
    script: str | None = None  # the same for a root shell; None: not part of the script


@final
class BackendReport(Struct):
    """One backend: whether it works here, and what that rests on."""

    name: str
    works: bool
    findings: tuple[Finding, ...]

    @property
    def lines(self) -> list[tuple[str, Condition, str, str | None]]:
        """(what, state, detail, fix) of each finding, in the order they were tried."""
        return [(each.what, each.state, each.detail, each.fix) for each in self.findings]
