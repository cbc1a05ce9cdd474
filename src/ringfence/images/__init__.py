"""Images: root file systems by name, in a store of this user. Public.

    from ringfence import images

    images.import_image("tools", "tools.tar")          # or a folder, docker-save, OCI, docker:NAME, podman:NAME
    images.build("data", preset="data")                # or a recipe: images.build("mine", "mine.toml")
    ringfence.run("import numpy", image="data")

Nothing is downloaded or built by running a sandbox: an image that is not there is an ImageError that says so.
"""

from __future__ import annotations

import os

from ringfence.errors import ImageError
from ringfence.images.store import ImageInfo, Store
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
    """What `gc` removed."""

    trees: int
    freed_bytes: int  # of the disk, by its own count


def directory() -> str:
    """Where the images of this user are. Made by the first import or build."""
    return Store().directory


def list_images() -> list[ImageInfo]:
    """All images, by name. One whose record is damaged is left out; `inspect` says what is wrong with it."""
    store = Store()
    found = []
    for name in store.names():
        try:
            found.append(store.find(name))
        except ImageError:
            continue
    return found


def inspect(name: str) -> ImageInfo:
    """One image. Raises ImageError when there is none of that name, with the nearest names."""
    return Store().find(name)


def import_image(name: str, source: HostPath, *, progress: Callable[[str], None] | None = None) -> ImageInfo:
    """Make an image of a folder, a tar, a `docker save` or OCI archive, or "docker:NAME" and "podman:NAME".

    An image of that name is replaced; sandboxes that use the old one go on with it. Compressed archives are unpacked.
    Raises ImageError, and nothing is kept then: an archive that is cut short, damaged or hostile, a digest that does
    not fit, a full disk. FileNotFoundError for a source that is not there.
    """
    from ringfence.images.importer import import_source

    return import_source(Store(), name, os.fspath(source), progress)


def build(
    image: str | Image,
    recipe: HostPath | Recipe | None = None,
    *,
    preset: str | None = None,
    use_cache: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ImageInfo:
    """Build a Debian root with mmdebstrap, from a recipe's file, a Recipe or a preset, under the name `image`.

    An `Image` with packages builds what it adds to the image of its name, which must have been built from a recipe.
    Takes half a minute or more, and asks the package registries that this host is configured for. Steps are cached.
    Raises PolicyError for a mistake in the recipe, with its line, ImageError when a step fails, UnsupportedError when
    this host cannot build; nothing half-made stays.
    """
    from ringfence.images.builder import build_image

    return build_image(Store(), image, recipe, preset=preset, use_cache=use_cache, progress=progress)


def export(name: str, path: HostPath) -> None:
    """Write an image as an archive that `docker load` and `import_image` read. Checks the tree's digest on the way.

    Raises ImageError when the image is unknown or damaged; then no file is left.
    """
    from ringfence.images.exporter import export_image

    export_image(Store(), name, os.fspath(path))


def remove(*names: str) -> None:
    """Remove images. Raises ImageError at the first that is unknown or used by a sandbox; those before it are gone."""
    store = Store()
    for name in names:
        _let_go(store, name)
        store.remove(name)


def _let_go(store: Store, name: str) -> None:
    """What this process itself keeps ready for the image is no use of it. A sandbox that is closing gets a moment."""
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
    """Remove what no image uses: trees of images that were replaced or removed, and steps of builds."""
    from ringfence.backends.process.backend import release_image
    from ringfence.images.store import held

    for digest in held():  # what this process keeps ready is no use
        release_image(digest)
    return Collected(*Store().collect())


def verify(name: str) -> None:
    """Read all of an image and compare it with its digest. Raises ImageError when it is not what was stored."""
    from ringfence.images.exporter import verify_image

    verify_image(Store(), name)
