"""What a backend gives the layers above: a place that runs things, behind one byte channel."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Protocol

    from ringfence.plan.model import Plan
    from ringfence.policy.image import Image
    from ringfence.policy.model import Network
    from ringfence.records import HostSummary, Request
    from ringfence.results import Denial, Enforcement, Usage

    class Outlet(Protocol):
        """A sandbox's registration at the gateway, as its box knows it."""

        env: Mapping[str, str]  # variables that belong to this sandbox alone: placeholders of secrets
        defaults: Mapping[str, str]  # variables that image and policy may set otherwise: its trusted roots
        files: Mapping[str, bytes]  # to be there before guest code, by their path inside: its trusted roots

        def add_to(self, usage: Usage) -> Usage:
            """With what went over the network so far."""

        def mark(self) -> int:
            """Where the list of denials ends now."""

        def denials(self, after: int) -> tuple[Denial, ...]:
            """What was refused since that mark, equal ones as one with a count."""

        def requests(self, after: int) -> tuple[Request, ...]:
            """The log but its first `after` lines."""

        def summary(self) -> tuple[HostSummary, ...]: ...

        def set(self, network: Network) -> None:
            """Replace the rules; returns when they hold. PolicyError for what the sandbox was not built for."""

        def close(self) -> None:
            """Cut every connection and answer no more. Does not wait. Idempotent."""

        def wait_ended(self, within_s: float) -> bool:
            """After close(): whether nothing of it is left."""

        def disown_descriptors(self) -> None:
            """Close no descriptor again: the caller closed them, and their numbers may be others' by now."""

        def after_fork(self) -> None:
            """Close a forked child's copies of listeners and connections. Idempotent."""

    class Box(Protocol):
        """One sandbox that has been started and has run nothing yet."""

        backend: str
        channel: socket.socket
        enforcement: Enforcement
        env: Mapping[str, str]
        is_unprotected: bool  # everything inside was ended because a protected path was replaced on the host
        outlet: Outlet | None  # None: no network
        python: Mapping[str, object]  # what a Python job needs besides its code

        @property
        def generation(self) -> object:
            """Sandboxes of the same one have the same addresses, so that memory can be copied between them."""

        @property
        def memory_bytes(self) -> int:
            """The most that everything inside may hold, files in memory included. An image of it holds no more."""

        def owns(self, pid: int) -> bool:
            """Whether that process of the host's, which stands still, is one of this sandbox's."""

        def give_image(self, fd: int) -> None:
            """Memory for its next session that asks for one. Raises UnsupportedError where that cannot be."""

        @property
        def can_freeze(self) -> bool: ...

        def freeze(self) -> bool:
            """Whether everything inside stands still now. False where there is no freezer."""

        def thaw(self) -> None:
            """What must be done before guestd hears that it is to go on. Does nothing to one that runs."""

        def how_it_ended(self) -> str | None:
            """When its channel is gone without a word: what the backend knows of why. May take a moment."""

        def usage(self) -> tuple[Usage, int]:
            """As measured from outside so far, and how often the memory limit killed a process."""

        def kill(self) -> None:
            """Everything inside, at once, without waiting. Idempotent."""

        def close(self) -> None:
            """Kill, and see to it that nothing is left. Does not wait for it. Idempotent."""

        def wait_destroyed(self, timeout_s: float) -> bool:
            """After close(): whether nothing is left."""

        def findings(self) -> tuple[Denial, ...]:
            """What a look at the host's side shows after the end: protected names, set-uid files."""

    class Launcher(Protocol):
        """A backend that can be asked for a plan, and for a box that follows it."""

        twin_of: Outlet | None  # of a sandbox whose placeholders and authority the next box shares

        @property
        def image(self) -> Image: ...

        @property
        def name(self) -> str: ...

        def plan(self) -> Plan: ...

        def launch(self) -> Box: ...
