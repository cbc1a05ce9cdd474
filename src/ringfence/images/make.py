"""Makes an image of a tree that an import or a build fills, whole or not at all: the only way into the store."""

from __future__ import annotations

import errno
import os
import time

from ringfence.errors import ImageError
from ringfence.images.store import ImageInfo, ImageStore, free_space
from ringfence.images.tar_reader import ArchiveCaps, ArchiveEntry, TarError, TooLargeError
from ringfence.images.tree import ImageTree
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import TypeAlias

    from ringfence.images.store import Held
    from ringfence.images.tar_reader import Kind
    from ringfence.images.tree import Node, Path
    from ringfence.values import Json

    Progress: TypeAlias = Callable[[str], None]

_RESERVE = 256 << 20  # bytes of the disk that an import leaves free


def silent(message: str) -> None:
    """Report no progress."""
    del message


@final
class Wanted(Struct):
    """The properties of an image to be made, besides its files."""

    name: str
    source: str
    env: Mapping[str, str]
    config: Mapping[str, Json]
    notes: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    recipe: Mapping[str, Json] = {}
    user: str = "user"


class ImageWorkplace:
    """A workplace with an empty tree. Leaving `with` removes what was not kept, and words failures as ImageError."""

    def __init__(self, store: ImageStore, what: str, caps: ArchiveCaps | None = None) -> None:
        self._store = store
        self._what = what  # for messages
        self._place = store.workplace()
        self.scratch = f"{self._place.directory}/scratch"
        root = f"{self._place.directory}/root"
        os.mkdir(self.scratch, 0o700)
        os.mkdir(root, 0o755)
        self.tree = ImageTree(root, caps or caps_for(store))

    def __enter__(self) -> ImageWorkplace:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.tree.close()
        self._place.__exit__(None, None, None)
        if isinstance(exc, TooLargeError) and self.tree.caps.size < ArchiveCaps().size:
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
        """Outfit, store and name the tree. Other processes see the finished image or none."""
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
        """Store the tree as the result of a build's step, and return the tree held."""
        with self._store.exclusive():
            digest = self._store.keep(self.tree)
            self._store.set_step(key, digest)
            return self._store.hold(digest)


def caps_for(store: ImageStore) -> ArchiveCaps:
    """Return caps as large as the disk has room for: a bomb is then refused and does not fill the disk (F22)."""
    store.open()
    usual = ArchiveCaps()
    room = free_space(store.directory) - _RESERVE
    return replace(usual, size=max(0, min(usual.size, room)), reserve=_RESERVE)


# ── what every image has: fixed directories, our files in /etc, the user `user` ───────────────────

# All this is done to the tree before its digest is computed: every backend finds the same files in an image, and no
# backend changes the image later.

UID = 1000
HOME = "/workspace"
_EMPTY = ("dev", "proc", "sys", "tmp", "workspace")  # every sandbox mounts its own file systems there
_DIRECTORIES = (*_EMPTY, "run", "var", "etc", "root", "home", "mnt", "opt", "srv", "usr")
_FILES = {
    "hosts": "127.0.0.1 localhost ringfence\n::1 localhost ip6-localhost ip6-loopback\n",
    "hostname": "ringfence\n",
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
}
_ROOT_LINE = "root:x:0:0:root:/root:/bin/sh\n"
_NOBODY_LINE = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_PROGRAMS = ("usr/local/bin", "usr/bin", "bin", "opt/venv/bin", "opt/conda/bin")
_MOST_LINKS = 40


def outfit(tree: ImageTree, *, user: str = "user") -> list[str]:
    """Add what every image has. Returns the changes to the image's own files, in words. Raises TarError."""
    notes = [f"{count} {what} left out" for what, count in sorted(tree.dropped.items())]
    tree.begin_layer()
    for name in _DIRECTORIES:
        notes += _real_directory(tree, name)
    for name in _EMPTY:
        home = tree.find((name,))
        assert home is not None
        if home.children:
            notes.append(f"/{name}: {len(home.children)} entries left out, a sandbox has its own")
        for child in list(home.children):
            tree.remove((name, child))
    for name, text in _FILES.items():
        _file(tree, f"etc/{name}", text)
    _symlink(tree, "etc/mtab", "/proc/self/mounts")
    _symlink(tree, "var/tmp", "/tmp")
    notes += _accounts(tree, user)
    return notes


def _real_directory(tree: ImageTree, name: str) -> list[str]:
    node = tree.find((name,))
    if node is not None and node.kind == "dir":
        return []
    if node is not None and name in ("etc", "usr", "var"):
        raise TarError(f"/{name} is a {node.kind}, not a directory")
    mode = 0o1777 if name == "tmp" else 0o700 if name == "root" else 0o755
    tree.add(_entry(name, "dir", mode=mode), list)
    return [] if node is None else [f"/{name} was a {node.kind} and is an empty directory now"]


def _entry(name: str, kind: Kind, *, mode: int = 0o644, size: int = 0, link: str = "") -> ArchiveEntry:
    return ArchiveEntry(name, kind, mode=mode, size=size, mtime=0, link=link, extended=False)


def _file(tree: ImageTree, name: str, text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    tree.add(_entry(name, "file", size=len(data)), lambda: [data])


def _symlink(tree: ImageTree, name: str, text: str) -> None:
    tree.add(_entry(name, "symlink", link=text), list)


def _accounts(tree: ImageTree, user: str) -> list[str]:
    """Make `user` the name of uid 1000, whatever the image calls it: the first line with a name or number counts."""
    names = [user] if user == "user" else [user, "user"]
    notes = []
    for file, line, usual in (
        ("passwd", f"{{}}:x:{UID}:{UID}:{{}}:{HOME}:{_shell(tree)}\n", _ROOT_LINE + _NOBODY_LINE),
        ("group", f"{{}}:x:{UID}:\n", "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"),
    ):
        data = tree.read(("etc", file))
        node = tree.find(("etc", file))
        if node is not None and data is None:
            notes.append(f"/etc/{file} was a {node.kind}, which is not followed, and was replaced by ours")
        old = (data or b"").decode("utf-8", "surrogateescape").splitlines(keepends=True) or [usual]
        kept = "".join(one for one in old if one.partition(":")[0] not in names)
        if kept and not kept.endswith("\n"):
            kept += "\n"
        _file(tree, f"etc/{file}", "".join(line.format(name, name) for name in names) + kept)
    return notes


def _shell(tree: ImageTree) -> str:
    return "/bin/bash" if resolve(tree, ("bin", "bash")) is not None else "/bin/sh"


def find_python(tree: ImageTree, env: Mapping[str, str]) -> str | None:
    """Return the path inside of the image's own Python 3, found by the image's PATH or in the usual folders."""
    places = [place.strip("/") for place in env.get("PATH", "").split(":") if place.startswith("/")]
    for place in dict.fromkeys([*places, *_PROGRAMS]):
        path = (*(part for part in place.split("/") if part), "python3")
        node = resolve(tree, path)
        if node is not None and node.kind == "file" and node.mode & 0o111:
            return "/" + "/".join(path)
    return None


def resolve(tree: ImageTree, path: Path) -> Node | None:
    """Return the node at `path`; links are followed inside the root only. None: nothing is there, or a loop."""
    found = real_path(tree, path)
    return None if found is None else tree.find(found)


def real_path(tree: ImageTree, path: Path) -> Path | None:
    """Return `path` without links, resolved inside the root. Missing parts stay as they are. None: a loop."""
    left = list(path)
    at: list[str] = []
    links = 0
    while left:
        part = left.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            at = at[:-1]
            continue
        node = tree.find((*at, part))
        if node is None or node.kind != "symlink":
            at.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        if node.content.startswith("/"):
            at = []
        left = node.content.split("/") + left
    return tuple(at)
