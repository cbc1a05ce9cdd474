"""Holds the sources of mounts, with every link followed, below a ceiling: a guest can put links where it may write.

`Policy.narrow` compares paths as text, so a link in a writable mount would lead a narrowed mount out of the ceiling.
"""

from __future__ import annotations

import os

from ringfence.errors import PolicyError
from ringfence.policy.model import Policy
from ringfence.values import replace


class Sources:
    """Where the mounts of a ceiling led when it was made: later, a guest may have replaced what is inside another."""

    def __init__(self, ceiling: Policy, above: Sources | None = None) -> None:
        self.ceilings: tuple[Policy, ...] = (_followed(ceiling), *(() if above is None else above.ceilings))

    def check(self, policy: Policy) -> None:
        """Raises PolicyError for a mount that leads beyond this ceiling, or one above it."""
        if not policy.mounts:
            return
        followed = _followed(policy)
        try:
            for ceiling in self.ceilings:
                ceiling.narrow(followed)
        except PolicyError as error:
            raise PolicyError(
                f"{error} (with links followed: {_ways(policy, followed)})",
                key=error.key,
                code="mount-leads-out",
                fix="mount folders that are no links; a manager's own must lead where they led when it was made",
            ) from None


def _followed(policy: Policy) -> Policy:
    """Its mounts alone, as they lead now. Two may lead to one place, so each gets a target of its own."""
    return Policy(
        mounts=[
            replace(mount, source=os.path.realpath(mount.source), target=f"/{index}")
            for index, mount in enumerate(policy.mounts)
        ]
    )


def _ways(policy: Policy, followed: Policy) -> str:
    pairs = zip(policy.mounts, followed.mounts, strict=True)
    return ", ".join(f"{mount.source!r} is {real.source!r}" for mount, real in pairs)  # guests may have named them
