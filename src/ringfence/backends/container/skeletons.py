"""The root of a container as an image of the engine's own: folders, small files and links, made once for each shape.

An image of the store is not copied into the engine: its tree is shown by read-only binds, and stored once.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from ringfence.backends.container import door
from ringfence.backends.walled import runtime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.engine import Engine
    from ringfence.backends.walled.skeleton import Skeleton

LABEL = "ringfence.skeleton"
_REPOSITORY = "ringfence-skeleton"
_KEPT = 32  # of other shapes; policies with mounts have one each
_OWN = ("proc", "dev", "tmp", "workspace", "sys", runtime.INSIDE[1:], door.INSIDE[1:])
_SAYING = ("Env", "Volumes", "Healthcheck", "Labels", "Shell", "OnBuild", "StopSignal", "Entrypoint", "Cmd", "User")
_known: dict[tuple[str, str], str] = {}  # by engine and digest: the id


def of(engine: Engine, made: Skeleton) -> str:
    """Its id in the engine. After `forget`, one that somebody removed meanwhile is made again."""
    data = _tar(made)
    digest = hashlib.sha256(data).hexdigest()
    tag = digest[:24]
    key = (engine.socket, tag)
    if key not in _known:
        _known[key] = _find(engine, tag, digest) or _import(engine, data, tag)
    return _known[key]


def forget(engine: Engine) -> None:
    """After a container could not be made of one."""
    for key in [key for key in _known if key[0] == engine.socket]:
        del _known[key]


def sweep(engine: Engine) -> None:
    """All but the newest; one that a container is made of stays by the engine's own refusal."""
    import docker.errors

    found = [image for image in engine.api.images() if any(_is_ours(tag) for tag in image.get("RepoTags") or ())]
    for image in sorted(found, key=lambda image: int(image.get("Created") or 0))[:-_KEPT]:
        try:
            engine.api.remove_image(image["Id"])
        except docker.errors.APIError:
            continue


def _is_ours(tag: str) -> bool:
    return tag.rpartition(":")[0].rpartition("/")[2] == _REPOSITORY


def _find(engine: Engine, tag: str, digest: str) -> str | None:
    import docker.errors

    try:
        found = engine.api.inspect_image(f"{_REPOSITORY}:{tag}")
    except docker.errors.ImageNotFound:
        return None
    return str(found["Id"]) if _is_as_imported(found, digest) else None


def _is_as_imported(found: Any, digest: str) -> bool:
    """A name is no proof: `docker load` gives an image the name that its archive says, and what such an image says
    of itself the engine does, ENV LD_PRELOAD in guestd's own environment and a HEALTHCHECK beside it (M10)."""
    layers = (found.get("RootFS") or {}).get("Layers")
    config = found.get("Config") or {}
    return layers == [f"sha256:{digest}"] and not any(config.get(word) for word in _SAYING)


def _import(engine: Engine, data: bytes, tag: str) -> str:
    said = engine.api.import_image_from_data(data, repository=_REPOSITORY, tag=tag)
    identity = str(json.loads(str(said).strip().rpartition("\n")[2])["status"])
    engine.api.tag(identity, _REPOSITORY, tag)  # Podman's import takes no tag
    return identity


def _tar(made: Skeleton) -> bytes:
    """The same skeleton gives the same bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        folders = set(_OWN) | set(made.folders)
        for path in (*made.folders, *made.files, *made.links):
            parts = path.split("/")[:-1]
            folders |= {"/".join(parts[: n + 1]) for n in range(len(parts))}
        for path in sorted(folders):
            entry = tarfile.TarInfo(path)
            # Podman's tmpfs takes the mode of what it covers.
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if path == "tmp" else 0o755
            tar.addfile(entry)
        for path, text in sorted(made.files.items()):
            entry = tarfile.TarInfo(path)
            content = text.encode()
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
        for path, target in sorted(made.links.items()):
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return file.getvalue()
