"""Removes containers of ours that nobody holds any more, and what was made for them."""

from __future__ import annotations

import os
import threading
import time

from ringfence.backends.container import account, disks, door, skeletons
from ringfence.backends.container.wall import quietly
from ringfence.backends.process import owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence.backends.container.engine import Engine

_AGAIN_S = 10.0
_STEP_S = 0.05
_swept: set[str] = set()
_owed: dict[str, list[str]] = {}  # by engine: containers of ours that it could not remove, as it was gone


def remove(engine: Engine, identity: str) -> None:
    """Kills it too, where it runs. One that an engine cannot remove now is owed, and goes at a later start."""
    import docker.errors

    deadline = time.monotonic() + _AGAIN_S
    while True:
        try:
            engine.api.remove_container(identity, force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:  # Podman fails where a container ends just now
            if time.monotonic() > deadline:
                break
            time.sleep(_STEP_S)
        except Exception:  # noqa: BLE001  # the engine is gone; the SDK's errors are many
            break
        else:
            return
    _owed.setdefault(engine.socket, []).append(identity)


def name() -> str:
    """For a new container."""
    return f"ringfence-{os.getpid()}-{os.urandom(4).hex()}"


def _is_ours(names: Iterable[str], owner: str) -> bool:
    """By the name that `owner` gave it: a label may be an image's, and the container anybody's."""
    return any(found.lstrip("/").startswith(f"ringfence-{owner.partition('-')[0]}-") for found in names)


def sweep(engine: Engine) -> None:
    """Containers of processes that are gone, and those of ours that a lost engine could not remove."""
    for identity in _owed.pop(engine.socket, ()):
        # By the way: an engine that lost a container's end does not answer who removes it, and nobody is to wait.
        threading.Thread(target=remove, args=(engine, identity), daemon=True).start()
    if engine.socket in _swept:
        return
    _swept.add(engine.socket)
    for found in engine.api.containers(all=True, filters={"label": disks.LABEL}):
        owner = found.get("Labels", {}).get(disks.LABEL, "")
        if owners.is_dead(owner) and _is_ours(found.get("Names") or (), owner):
            if found.get("State") == "paused":
                quietly(engine.api.unpause, found["Id"])  # Podman removes none that stands still
            remove(engine, found["Id"])
    account.sweep()
    door.sweep()
    disks.sweep(engine)
    skeletons.sweep(engine)
