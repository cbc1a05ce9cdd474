"""Compares a container, as its engine tells it, with what it was asked for. Before it is started: nothing ran in it.

An engine has settings of its own, which open what a request leaves unsaid: Podman's containers.conf can name devices
and folders of the host for every container, and an engine drops a limit that its host cannot hold.
"""

from __future__ import annotations

from ringfence.errors import UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.engine import Engine

_SAME = ("NetworkMode", "ReadonlyRootfs", "Privileged")
_LIMITS = {"memory": "Memory", "pids": "PidsLimit"}  # by controller
_NOTHING = ("CapAdd", "Devices", "DeviceRequests", "DeviceCgroupRules", "GroupAdd", "PortBindings", "VolumesFrom")
_OWN_NAMESPACE = ("PidMode", "UTSMode", "IpcMode")


def targets(asked: Any) -> list[str]:
    """Where that configuration mounts something."""
    return [*(str(mount["Target"]) for mount in asked["Mounts"]), *asked["Tmpfs"]]


def check(engine: Engine, identity: str, asked: Any) -> None:
    """`asked`: its host configuration. Raises UnsupportedError."""
    found = engine.api.inspect_container(identity)
    wrong = _wrong(engine, found, asked)
    if wrong is not None:
        raise UnsupportedError(
            f"{engine.name} made the container otherwise than it was asked to: {wrong}",
            code="engine-settings",
            fix=f'take it out of {engine.name}\'s own settings, such as containers.conf, or backend="process"',
        )


def _wrong(engine: Engine, found: Any, asked: Any) -> str | None:
    """What is not as it was asked for; None when all is."""
    host = found.get("HostConfig") or {}
    for word in (*_SAME, *(_LIMITS[name] for name in _LIMITS if name in engine.limits)):
        if host.get(word) != asked.get(word, False):
            return f"{word} is {host.get(word)!r:.60}, not {asked.get(word, False)!r:.60}"
    for word in _NOTHING:
        if host.get(word):
            return f"it has {word} {host[word]!r:.200}"
    for word in _OWN_NAMESPACE:
        if str(host.get(word) or "").startswith(("host", "container:", "ns:")):
            return f"{word} is {host[word]!r:.60}"
    meant = targets(asked)
    shown = [mount for mount in found.get("Mounts") or () if mount.get("Destination") not in meant]
    if shown:
        return f"it shows {shown[0].get('Source')!r:.200} at {shown[0].get('Destination')!r:.200}"
    return None
