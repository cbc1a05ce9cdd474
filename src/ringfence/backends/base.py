"""What a backend gives the layers above: a place that runs things, behind one byte channel."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Protocol

    from ringfence.plan.model import Plan
    from ringfence.results import Denial, Enforcement, Usage

    class Box(Protocol):
        """One sandbox that has been started and has run nothing yet."""

        channel: socket.socket
        enforcement: Enforcement
        env: Mapping[str, str]
        python: Mapping[str, object]  # what a Python job needs besides its code

        def usage(self) -> tuple[Usage, bool]:
            """As measured from outside so far, and whether the memory limit killed a process since the last call."""

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

        def plan(self) -> Plan: ...

        def launch(self) -> Box: ...
