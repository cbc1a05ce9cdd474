"""Carries every control of a sandbox that is launched to the places that apply them. Production makes them all stand.

A control is one thing that holds a sandbox: a namespace, a filter, a limit, a flag of a mount, a check of what an
engine made. An attack proves nothing until it has succeeded where its one control is missing: each stage of a launch
therefore passes what it is about to apply through `Controls`. The stages:

* `plan`: namespaces, filters, Landlock, capabilities, limits and mounts of the plan, on every backend;
* `container`: what a container engine is asked for;
* `bundle`: the OCI configuration that runsc gets;
* the fields: checks of what an engine made of it.

`Controls` itself returns each of them unchanged and turns every check on; no policy key, argument of the public API,
variable or command option leads to another one. Subclasses that leave something out belong to the distribution
`ringfence-attacks` and to tests, which hand the object to a launcher in Python.
"""

from __future__ import annotations

from ringfence.values import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.plan.model import LinuxPlan


class Controls(Struct):
    """The controls of one launch. Every field on, every method the identity: nothing is left out."""

    engine_settings: bool = True  # a container is compared with what was asked for, before it starts
    mount_flags: bool = True  # what an engine mounted is compared by its flags too, and nothing else may be mounted
    guestd_user: bool = True  # who opens a container's channel is guestd by its uid, not by its key alone

    def plan(self, plan: LinuxPlan) -> LinuxPlan:
        """Return the plan that is launched."""
        return plan

    def container(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what a container is created with: arguments of the Engine SDK's `create_container`."""
        return settings

    def bundle(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a bundle's config.json."""
        return config


ALL_ON = Controls()
