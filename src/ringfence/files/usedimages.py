"""Finds the image that a sandbox asks for, and keeps its tree from being removed while this process may use it."""

from __future__ import annotations

import os

from ringfence.errors import ImageError
from ringfence.files.imagestore import ImageInfo, Store
from ringfence.plan.imageview import Root
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.files.imagelocks import Held
    from ringfence.policy.image import Image


@final
class Used(Struct):
    """A stored image that this process holds."""

    info: ImageInfo
    root: Root
    held_by: int = 0  # this process: a fork holds nothing by itself


_held: dict[tuple[int, str], Held] = {}  # by process and tree; one lock is enough for all sandboxes of a process


def use(image: Image) -> Used:
    """Find and hold it. Raises ImageError when it is not in the store, or was not built with what it adds."""
    store = Store()
    name = stored_name(image)
    try:
        info = store.find(name)
    except ImageError as error:
        if name == image.name or error.code != "image-unknown":
            raise
        store.find(image.name)
        raise ImageError(
            f"image {image.name} with these packages is not built; running it never builds it",
            code="image-not-built",
            fix="ringfence.images.build(image)",
        ) from None
    key = (os.getpid(), info.digest)
    if key not in _held:
        _held[key] = store.hold(info.digest)
    return Used(info, Root(info.name, _held[key].root, info.python), os.getpid())


def release(digest: str) -> None:
    """Let go of a tree: no sandbox of this process uses it any more."""
    held = _held.pop((os.getpid(), digest), None)
    if held is not None:
        held.close()


def held() -> list[str]:
    """Digests of the trees that this process holds."""
    return [digest for pid, digest in _held if pid == os.getpid()]


def stored_name(image: Image) -> str:
    """The name in the store: of an image with packages added, that of its own build."""
    added = (image.pip, image.apt, image.npm)
    if not any(added):
        return image.name
    import hashlib
    import json

    text = json.dumps([sorted(part) for part in added])
    return f"{image.name}+{hashlib.sha256(text.encode()).hexdigest()[:12]}"
