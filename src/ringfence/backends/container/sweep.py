"""Our objects in an engine, made and removed: the images of containers' roots, and containers.

The root of a container is an image of the engine's own: folders, small files and links, made once for each shape. An
image of the store is not copied into the engine: its tree is shown by read-only binds, and stored once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import time

from ringfence.backends.container import channel, config
from ringfence.backends.container.container import quietly
from ringfence.backends.engine import guestd_bundle
from ringfence.host import process_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.engine.rootfs import Skeleton

_AGAIN_S = 10.0
_STEP_S = 0.05
_REPOSITORY = "ringfence-skeleton"
_KEPT = 32  # images of other shapes; each policy with mounts has its own shape
_OWN = ("proc", "dev", "tmp", "workspace", "sys", guestd_bundle.INSIDE[1:], channel.INSIDE[1:])
_SETTINGS = ("Env", "Volumes", "Healthcheck", "Labels", "Shell", "OnBuild", "StopSignal", "Entrypoint", "Cmd", "User")
_known: dict[tuple[str, str], str] = {}  # by engine and digest: the image's id
_swept: set[str] = set()
_owed: dict[str, list[str]] = {}  # by engine: our containers that it could not remove, because it was gone


def of(engine: Engine, made: Skeleton) -> str:
    """Return the id of the engine's image of this root; make the image where there is none.

    After `forget`, an image that another process removed meanwhile is made again.
    """
    data = _tar(made)
    digest = hashlib.sha256(data).hexdigest()
    tag = digest[:24]
    key = (engine.socket, tag)
    if key not in _known:
        _known[key] = _find(engine, tag, digest) or _import(engine, data, tag)
    return _known[key]


def forget(engine: Engine) -> None:
    """Drop what is known of this engine's images, after a container could not be made of an image."""
    for key in [key for key in _known if key[0] == engine.socket]:
        del _known[key]


def sweep_skeletons(engine: Engine) -> None:
    """Remove all but the newest images of roots. The engine itself refuses to remove an image in use."""
    import docker.errors

    found = [image for image in engine.api.images() if any(_is_root(tag) for tag in image.get("RepoTags") or ())]
    for image in sorted(found, key=lambda image: int(image.get("Created") or 0))[:-_KEPT]:
        try:
            engine.api.remove_image(image["Id"])
        except docker.errors.APIError:
            continue


def _is_root(tag: str) -> bool:
    return tag.rpartition(":")[0].rpartition("/")[2] == _REPOSITORY


def _find(engine: Engine, tag: str, digest: str) -> str | None:
    import docker.errors

    try:
        found = engine.api.inspect_image(f"{_REPOSITORY}:{tag}")
    except docker.errors.ImageNotFound:
        return None
    return str(found["Id"]) if _is_as_imported(found, digest) else None


def _is_as_imported(found: Any, digest: str) -> bool:
    """Return whether an image has exactly the layer that we imported, and no settings. Its name is no proof.

    `docker load` gives an image the name that its archive says, and the engine obeys such an image's settings: ENV
    LD_PRELOAD in guestd's own environment, and a HEALTHCHECK that runs beside guestd (M10).
    """
    layers = (found.get("RootFS") or {}).get("Layers")
    settings = found.get("Config") or {}
    return layers == [f"sha256:{digest}"] and not any(settings.get(word) for word in _SETTINGS)


def _import(engine: Engine, data: bytes, tag: str) -> str:
    answer = engine.api.import_image_from_data(data, repository=_REPOSITORY, tag=tag)
    identity = str(json.loads(str(answer).strip().rpartition("\n")[2])["status"])
    engine.api.tag(identity, _REPOSITORY, tag)  # Podman's import takes no tag
    return identity


def _tar(made: Skeleton) -> bytes:
    """Return the root as a tar archive. The same skeleton gives the same bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        folders = set(_OWN) | set(made.folders)
        for path in (*made.folders, *made.files, *made.links):
            parts = path.split("/")[:-1]
            folders |= {"/".join(parts[: n + 1]) for n in range(len(parts))}
        for path in sorted(folders):
            entry = tarfile.TarInfo(path)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if path == "tmp" else 0o755  # Podman's tmpfs takes the mode of the folder it covers
            tar.addfile(entry)
        for path, text in sorted(made.files.items()):
            entry = tarfile.TarInfo(path)
            content = text.encode()
            entry.size = len(content)
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(content))
        for path, target in sorted(made.links.items()):
            entry = tarfile.TarInfo(path)
            entry.type = tarfile.SYMTYPE
            entry.linkname = target
            tar.addfile(entry)
    return file.getvalue()


def remove(engine: Engine, identity: str) -> None:
    """Kill a container and remove it. Where the engine cannot, the sweep of a later start tries again."""
    import docker.errors

    deadline = time.monotonic() + _AGAIN_S
    while True:
        try:
            engine.api.remove_container(identity, force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:  # Podman fails while a container is ending
            if time.monotonic() > deadline:
                break
            time.sleep(_STEP_S)
        except Exception:  # noqa: BLE001  # the engine is gone; the SDK raises many kinds of errors
            break
        else:
            return
    _owed.setdefault(engine.socket, []).append(identity)


def name() -> str:
    """Return a name for a new container."""
    return f"ringfence-{os.getpid()}-{os.urandom(4).hex()}"


def _is_ours(names: Iterable[str], owner: str) -> bool:
    """Return whether one of these names is from `owner`. A label may come from an image and proves nothing."""
    return any(found.lstrip("/").startswith(f"ringfence-{owner.partition('-')[0]}-") for found in names)


def sweep(engine: Engine) -> None:
    """Remove the containers of library processes that are gone, and our own that a lost engine could not remove.

    What belonged to such containers goes too: folders, volumes, old images of roots.
    """
    for identity in _owed.pop(engine.socket, ()):
        # In a thread: an engine that missed a container's end does not answer the removal, and no start is to wait.
        threading.Thread(target=remove, args=(engine, identity), daemon=True).start()
    if engine.socket in _swept:
        return
    _swept.add(engine.socket)
    for found in engine.api.containers(all=True, filters={"label": config.LABEL}):
        owner = found.get("Labels", {}).get(config.LABEL, "")
        if process_id.is_dead(owner) and _is_ours(found.get("Names") or (), owner):
            if found.get("State") == "paused":
                quietly(engine.api.unpause, found["Id"])  # Podman does not remove a paused container
            remove(engine, found["Id"])
    config.sweep_accounts()
    channel.sweep()
    config.sweep_volumes(engine)
    sweep_skeletons(engine)
