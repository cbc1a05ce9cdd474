"""Carries every control of a launch to the stages that apply the controls. In production every control is on.

A control is one thing that confines a sandbox: a namespace, a filter, a limit, a flag of a mount, a check of what an
engine made. An attack proves nothing until it has succeeded without the control that should stop it: each stage of a
launch therefore passes what it is about to apply through `Controls`. The stages:

* `plan`: namespaces, filters, Landlock, capabilities, limits and mounts of the plan, on every backend;
* `container`: what a container engine is asked for;
* `bundle`: the OCI configuration that runsc gets;
* the fields: checks of what an engine made of that configuration.

`Controls` itself returns what each stage passes unchanged and turns every check on; no policy key, argument of the
public API, variable or command option leads to another object. Subclasses that leave something out belong to the
distribution `ringfence-attacks` and to tests, which hand the object to a launcher in Python.
"""

from __future__ import annotations

from ringfence.values import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.plan.model import LinuxPlan


class Controls(Struct):
    """The controls of a launch. Every field is True and every method returns its argument: nothing is left out."""

    engine_settings: bool = True  # compare a container with what was asked for, before it starts
    mount_flags: bool = True  # compare the flags of an engine's mounts too, and refuse further mounts
    guestd_user: bool = True  # know guestd, when it opens a container's channel, by its uid and not by its key alone

    def plan(self, plan: LinuxPlan) -> LinuxPlan:
        """Return the plan that is launched."""
        return plan

    def container(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a container: arguments of the Engine SDK's `create_container`."""
        return settings

    def bundle(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a bundle's config.json."""
        return config


ALL_ON = Controls()
