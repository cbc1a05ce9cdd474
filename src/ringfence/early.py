"""Starts the process that this library's first sandbox needs while the rest of the library is still loaded."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Policy


def begin(backend: object, image: object, policy: Policy) -> None:
    """Only for a call that will get a sandbox: nothing is begun for a policy that could yet be refused."""
    if backend not in ("auto", "process") or image != "host" or policy.isolation == "own-kernel":
        return
    if policy.mounts or policy.commands != "any" or policy.network.allow or policy.network.rules:
        return
    from ringfence.backends.process.spawn import begin_first

    begin_first()


def end_unneeded() -> None:
    """What `begin` began, when no sandbox came about."""
    spawn = sys.modules.get("ringfence.backends.process.spawn")
    if spawn is not None:
        spawn.end_unneeded()
