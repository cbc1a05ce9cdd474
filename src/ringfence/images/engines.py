"""Fetches an image from a running Docker or Podman, as the archive that `save` writes. Runs no container."""

from __future__ import annotations

import os

from ringfence.errors import ImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ENGINES = ("docker", "podman")
_SAVE_S = 1800.0
# By which the caller says which engine, and how it is reached.
_SETTINGS = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "XDG_*", "SSH_AUTH_SOCK", "STORAGE_DRIVER")
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/:@")


def split(source: str) -> tuple[str, str] | None:
    """("docker", "NAME") of "docker:NAME"; None for a path."""
    engine, colon, name = source.partition(":")
    return (engine, name) if colon and engine in ENGINES else None


def save(engine: str, name: str, path: str, progress: Callable[[str], None]) -> None:
    """Write the archive of `name` to `path`. Raises ImageError, with what the engine said."""
    import subprocess

    from ringfence.backends import host_programs

    if not name or name.startswith("-") or not _NAME.issuperset(name) or len(name) > 300:
        raise ImageError(f"{name!r:.80} is no name of an image", code="image-source", fix=f"such as {engine}:debian:12")
    found = host_programs.look_up(engine)
    if found.path is None:
        raise ImageError(
            f"there is no {engine} that may be used{found.remark}",
            code="engine-missing",
            fix=f"install it, or import a file: {engine} save NAME",
        )
    progress(f"{engine} save {name}")
    form = ["--format", "docker-archive"] if engine == "podman" else []
    try:
        done = subprocess.run(
            [found.path, "save", *form, "--output", os.path.abspath(path), name],
            env=host_programs.environment(found.path, *_SETTINGS),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SAVE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{engine} save took longer than {_SAVE_S:g} s", code="engine-failed") from None
    if done.returncode != 0:
        raise _failed(engine, name, done.stderr.decode("utf-8", "replace"))


def _failed(engine: str, name: str, said: str) -> ImageError:
    text = " ".join(said.split())[-300:]
    low = text.lower()
    if "permission denied" in low:
        return ImageError(
            f"this user may not use {engine}: {text}",
            code="engine-permission",
            fix="sudo usermod -aG docker $USER, then log in again; who is in that group can become root",
        )
    if "no such image" in low or "image not known" in low or "reference does not exist" in low:
        return ImageError(
            f"{engine} has no image {name!r}", code="image-unknown", fix=f"{engine} pull {name}; then import it again"
        )
    if "cannot connect" in low or "connection refused" in low or "no such file or directory" in low:
        return ImageError(f"{engine} does not run: {text}", code="engine-missing", fix="start it: ringfence doctor")
    return ImageError(f"{engine} save failed: {text}", code="engine-failed", fix=f"try by hand: {engine} save {name}")
