"""Makes an image out of a tree that somebody fills, all of it or nothing: the one way into the store."""

from __future__ import annotations

import errno
import os
import time

from ringfence.errors import ImageError
from ringfence.images.outfit import find_python, outfit
from ringfence.images.store import ImageInfo, Store, free_space
from ringfence.images.tar_reader import Caps, TarError, TooLargeError
from ringfence.images.tree import Tree
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import TypeAlias

    from ringfence.images.store import Held
    from ringfence.values import Json

    Progress: TypeAlias = Callable[[str], None]

_RESERVE = 256 << 20  # bytes of the disk that no import takes


def silent(message: str) -> None:
    """The progress of a caller that wants none."""
    del message


@final
class Wanted(Struct):
    """What the image is to be besides its files."""

    name: str
    source: str
    env: Mapping[str, str]
    config: Mapping[str, Json]
    notes: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    recipe: Mapping[str, Json] = {}
    user: str = "user"


class Making:
    """A workplace with an empty tree in it. Leaving `with` removes what was not kept, and puts failures in words."""

    def __init__(self, store: Store, what: str, caps: Caps | None = None) -> None:
        self._store = store
        self._what = what  # for messages
        self._place = store.workplace()
        self.scratch = f"{self._place.directory}/scratch"
        root = f"{self._place.directory}/root"
        os.mkdir(self.scratch, 0o700)
        os.mkdir(root, 0o755)
        self.tree = Tree(root, caps or caps_for(store))

    def __enter__(self) -> Making:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.tree.close()
        self._place.__exit__(None, None, None)
        if isinstance(exc, TooLargeError) and self.tree.caps.size < Caps().size:
            raise self._disk_full() from None
        if isinstance(exc, TarError):
            raise ImageError(
                f"{self._what}: {exc}; nothing was kept", code="archive", fix="make or download the archive again"
            ) from None
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise self._disk_full() from None

    def _disk_full(self) -> ImageError:
        return ImageError(
            f"{self._what}: no space left on the disk of {self._store.directory}; nothing was kept",
            code="disk-full",
            fix="free some (ringfence image gc), or set XDG_DATA_HOME to a larger disk",
        )

    def keep(self, wanted: Wanted) -> ImageInfo:
        """Outfit the tree, store it and give it its name, at once for whoever looks."""
        notes = (*wanted.notes, *outfit(self.tree, user=wanted.user))
        python = find_python(self.tree, wanted.env)
        info = ImageInfo(
            name=wanted.name,
            digest="0" * 64,
            size=self.tree.size,
            files=self.tree.count,
            created_at=float(int(time.time())),
            source=wanted.source,
            env=wanted.env,
            python=python,
            preload=wanted.preload,
            notes=notes,
            config=wanted.config,
            recipe=wanted.recipe,
        )
        with self._store.exclusive():
            info = replace(info, digest=self._store.keep(self.tree))
            self._store.name(info)
        return info

    def keep_step(self, key: str) -> Held:
        """Store the tree as what a step of a build came to, and hold it."""
        with self._store.exclusive():
            digest = self._store.keep(self.tree)
            self._store.set_step(key, digest)
            return self._store.hold(digest)


def caps_for(store: Store) -> Caps:
    """As large as the disk has room for, so that a bomb ends in a refusal and not in a full disk (F22)."""
    store.open()
    usual = Caps()
    room = free_space(store.directory) - _RESERVE
    return replace(usual, size=max(0, min(usual.size, room)), reserve=_RESERVE)
