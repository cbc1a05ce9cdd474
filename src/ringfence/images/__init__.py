"""Images: root file systems by name, in a store of this user. A public module.

    from ringfence import images

    images.import_image("tools", "tools.tar")          # or a folder, docker-save, OCI, docker:NAME, podman:NAME
    images.build("data", preset="data")                # or a recipe: images.build("mine", "mine.toml")
    ringfence.run("import numpy", image="data")

Running a sandbox never downloads or builds an image: a missing image is an ImageError that says so.
"""

from __future__ import annotations

import os

from ringfence.errors import ImageError
from ringfence.images.store import ImageInfo, ImageStore
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.images.builder import Recipe
    from ringfence.policy.image import Image
    from ringfence.values import HostPath

__all__ = [
    "Collected",
    "ImageInfo",
    "build",
    "directory",
    "export",
    "gc",
    "import_image",
    "inspect",
    "list_images",
    "remove",
    "verify",
]


@final
class Collected(Struct):
    """The trees and bytes that `gc` removed."""

    trees: int
    freed_bytes: int  # as the file system counts them


def directory() -> str:
    """Return the directory of this user's images. The first import or build makes it."""
    return ImageStore().directory


def list_images() -> list[ImageInfo]:
    """Return all images, sorted by name. Leaves out an image with a damaged record; `inspect` names the damage."""
    store = ImageStore()
    found = []
    for name in store.names():
        try:
            found.append(store.find(name))
        except ImageError:
            continue
    return found


def inspect(name: str) -> ImageInfo:
    """Return an image. Raises ImageError, with the nearest name, when no image has this name."""
    return ImageStore().find(name)


def import_image(name: str, source: HostPath, *, progress: Callable[[str], None] | None = None) -> ImageInfo:
    """Make an image of a folder, a tar, a `docker save` or OCI archive, or "docker:NAME" and "podman:NAME".

    Replaces an image of the same name; sandboxes that use the old image go on with it. Compressed archives are
    unpacked. Raises ImageError, and keeps nothing then, for an archive that is cut short, damaged or hostile, a digest
    that does not fit, or a full disk; FileNotFoundError for a missing source.
    """
    from ringfence.images.importer import import_source

    return import_source(ImageStore(), name, os.fspath(source), progress)


def build(
    image: str | Image,
    recipe: HostPath | Recipe | None = None,
    *,
    preset: str | None = None,
    use_cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ImageInfo:
    """Build a Debian root with mmdebstrap, from a recipe's file, a Recipe or a preset, under the name `image`.

    For an `Image` with packages, adds them to the image of the same name, which must have been built from a recipe.
    Takes half a minute or more, and uses the package registries that this host is configured for. Steps are cached.
    Raises PolicyError for a mistake in the recipe, with the line; ImageError when a step fails; UnsupportedError when
    this host cannot build. No half-made image stays.
    """
    from ringfence.images.builder import build_image

    return build_image(ImageStore(), image, recipe, preset=preset, use_cache=use_cache, progress=progress)


def export(name: str, path: HostPath) -> None:
    """Write an image as an archive that `docker load` and `import_image` read. Checks the tree's digest first.

    Raises ImageError when the image is unknown or damaged, and leaves no file then.
    """
    from ringfence.images.exporter import export_image

    export_image(ImageStore(), name, os.fspath(path))


def remove(*names: str) -> None:
    """Remove images in order.

    Raises ImageError at the first that is unknown or used by a sandbox; the images before are removed.
    """
    store = ImageStore()
    for name in names:
        _release(store, name)
        store.remove(name)


def _release(store: ImageStore, name: str) -> None:
    """Close what this process keeps ready for an image. Waits up to 2 s for sandboxes that are closing."""
    import time

    from ringfence.backends.process.backend import release_image

    if name not in store.names():
        return
    try:
        digest = store.find(name).digest
    except ImageError:
        return
    deadline = time.monotonic() + 2
    while not release_image(digest) and time.monotonic() < deadline:
        time.sleep(0.02)


def gc() -> Collected:
    """Remove what no image uses: trees of replaced or removed images, and steps of builds."""
    from ringfence.backends.process.backend import release_image
    from ringfence.images.store import held

    for digest in held():  # what this process keeps ready does not use the image
        release_image(digest)
    return Collected(*ImageStore().collect())


def verify(name: str) -> None:
    """Read all of an image and compare its digest. Raises ImageError when the files are not what was stored."""
    from ringfence.images.exporter import verify_image

    verify_image(ImageStore(), name)
