"""Translation of a plan's operations for engines: a tree of folders, small files and links, and binds.

The plan is the process backend's: the same image, the same programs, the same mounts. A mount that an engine cannot
make is refused here, never left out.
"""

from __future__ import annotations

import os

from ringfence.errors import UnsupportedError
from ringfence.plan.model import Bind, File, Folder, Hide, Overlay, Pin, Protect, SymbolicLink
from ringfence.shared.paths import is_below, is_within
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

    from ringfence.plan.model import LinuxPlan, Op

RESERVED = (".ringfence", ".ringfence-door")  # at the top of every box
_OWN = ("proc", "dev", "tmp", "workspace", "sys")  # every box has its own
_FOLDER = 0o755


@final
class BoxBind(Struct):
    """A host path that is shown inside."""

    source: str
    target: str  # absolute, inside
    writable: bool
    inode: tuple[int, int] | None = None  # device and number, where the plan looked at it


@final
class Skeleton(Struct):
    """The root of a box, and what is bound into it."""

    folders: tuple[str, ...]
    files: Mapping[str, str]  # path → text
    links: Mapping[str, str]  # path → where it leads
    binds: tuple[BoxBind, ...]
    hidden: tuple[str, ...]  # covered by an empty folder or file


def skeleton(plan: LinuxPlan, backend: str) -> Skeleton:
    """Return the root that the plan describes.

    Raises UnsupportedError for a mount that an engine cannot make as the plan promises.
    """
    kept = {f"/{op.target}": op for op in plan.template if _is_source(op)}
    making = _Making(backend)
    for op in (*plan.template, *plan.ops):
        if _is_source(op):
            continue
        if isinstance(op, Bind | Overlay) and op.source in kept:
            source = kept[op.source]
            op = replace(op, source=source.source, inode=source.inode)
        making.do(op)
    return making.made()


def _is_source(op: Op) -> TypeGuard[Bind]:
    return isinstance(op, Bind) and op.target.startswith(".sources/")


class _Making:
    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._folders: dict[str, None] = {}
        self._files: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._binds: list[BoxBind] = []
        self._hidden: list[str] = []

    def do(self, op: Op) -> None:
        target = op.target
        if target.split("/", maxsplit=1)[0] in ("proc", "dev"):
            return
        self._check_name(target)
        if isinstance(op, Folder):
            self._folders[target] = None
        elif isinstance(op, File):
            self._files[target] = op.text
        elif isinstance(op, SymbolicLink):
            self._links[target] = op.text
        elif isinstance(op, Bind):
            self._bind(op.source, target, writable=op.writable, inode=op.inode)
        elif isinstance(op, Hide):
            self._hidden.append(f"/{target}")
        elif isinstance(op, Protect | Pin):
            self._bind(self._behind(target), target, writable=isinstance(op, Pin))
        else:
            raise UnsupportedError(
                f"the {self._backend} backend cannot show {target} as this policy asks (a copy, or without some names)",
                code="mounts",
                fix='backend="process" can',
            )

    def _check_name(self, target: str) -> None:
        """Raise UnsupportedError for a name from an image or a mount that we use, or that is not UTF-8.

        Such names are written into JSON and into tables of mounts.
        """
        if target.split("/", maxsplit=1)[0] in RESERVED:
            raise UnsupportedError(
                f"the {self._backend} backend needs /{target} for itself: no image or mount can have this name",
                code="mounts",
                fix='remove the name from the image, choose another target, or backend="process"',
            )
        try:
            target.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"the {self._backend} backend cannot show {target!r}: the name is not UTF-8",
                code="mounts",
                fix='rename it, or backend="process"',
            ) from None

    def _bind(self, source: str, target: str, *, writable: bool, inode: tuple[int, int] | None = None) -> None:
        self._binds.append(BoxBind(source, f"/{target}", writable, inode))
        covered = any(is_below(f"/{target}", bind.target) for bind in self._binds[:-1])
        if not covered and target.split("/", maxsplit=1)[0] not in _OWN:
            if os.path.isdir(source):
                self._folders[target] = None
            else:
                self._files.setdefault(target, "")

    def _behind(self, target: str) -> str:
        """Return the host path that an earlier bind shows at `target`."""
        for bind in reversed(self._binds):
            if is_within(f"/{target}", bind.target):
                return bind.source + f"/{target}"[len(bind.target) :]
        raise AssertionError(f"{target} lies in no mount")

    def made(self) -> Skeleton:
        shown = tuple(bind for bind in self._binds if bind.target not in self._hidden)  # nothing is mounted twice
        return Skeleton(tuple(self._folders), self._files, self._links, shown, tuple(self._hidden))


def write(made: Skeleton, root: str) -> None:
    """Write the tree as a folder of the host."""
    os.makedirs(root, 0o755)
    for path in (*made.folders, *_OWN, ".ringfence"):
        os.makedirs(f"{root}/{path}", 0o755, exist_ok=True)
    for path, text in made.files.items():
        os.makedirs(os.path.dirname(f"{root}/{path}"), 0o755, exist_ok=True)
        with open(f"{root}/{path}", "w", encoding="utf-8") as file:
            file.write(text)
    for path, target in made.links.items():
        os.makedirs(os.path.dirname(f"{root}/{path}"), 0o755, exist_ok=True)
        os.symlink(target, f"{root}/{path}")
    if os.stat(root).st_mode & 0o777 != _FOLDER:  # because of the caller's umask; guests are another user
        _open_to_all(root)


def _open_to_all(root: str) -> None:
    for directory, _, files in os.walk(root):
        os.chmod(directory, _FOLDER)
        for name in files:
            if not os.path.islink(f"{directory}/{name}"):
                os.chmod(f"{directory}/{name}", 0o644)
