"""Turns a plan's operations into what every engine understands: a tree of folders, small files and links, and binds.

The plan is the one of the process backend: the same image, the same programs, the same mounts. What an engine cannot do
with a mount is refused here, never left out.
"""

from __future__ import annotations

import os

from ringfence.errors import UnsupportedError
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.plan.model import ProcessPlan

RESERVED = (".ringfence", ".ringfence-door")  # at the top of every box
_OWN = ("proc", "dev", "tmp", "workspace", "sys")  # every box has its own
_FOLDER = 0o755


@final
class Bind(Struct):
    """A host path shown inside."""

    source: str
    target: str  # absolute, inside
    writable: bool
    inode: tuple[int, int] | None = None  # device and number, where the plan looked at it


@final
class Skeleton(Struct):
    """The root of a box before anything is bound into it."""

    folders: tuple[str, ...]
    files: Mapping[str, str]  # path → text
    links: Mapping[str, str]  # path → where it leads
    binds: tuple[Bind, ...]
    hidden: tuple[str, ...]  # covered by an empty folder or file


def skeleton(plan: ProcessPlan, backend: str) -> Skeleton:
    """Raises UnsupportedError for a mount that this way cannot keep its promises for."""
    sources = {f"/{op[2]}": op for op in plan.template if op[0] == "bind" and _is_source(op[2])}
    making = _Making(backend)
    for op in (*plan.template, *plan.box_ops):
        if op[0] == "bind" and _is_source(op[2]):
            continue
        kept = sources.get(str(op[1])) if op[0] in ("bind", "overlay") else None
        if kept is not None:
            making.do([op[0], kept[1], op[2], {**_options(op), "inode": _options(kept).get("inode")}])
        else:
            making.do(op)
    return making.made()


def _is_source(target: object) -> bool:
    return str(target).startswith(".sources/")


def _options(op: list[object]) -> dict[str, object]:
    assert isinstance(op[3], dict)
    return op[3]


class _Making:
    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._folders: dict[str, None] = {}
        self._files: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._binds: list[Bind] = []
        self._hidden: list[str] = []

    def do(self, op: list[object]) -> None:
        name, target = str(op[0]), str(op[2] if op[0] in ("bind", "overlay", "symlink") else op[1])
        if name == "dev" or target.split("/", maxsplit=1)[0] in ("proc", "dev"):
            return
        self._check_name(target)
        if name == "dir":
            self._folders[target] = None
        elif name == "file":
            self._files[target] = str(op[2])
        elif name == "symlink":
            self._links[target] = str(op[1])
        elif name == "bind":
            options = _options(op)
            self._bind(str(op[1]), target, writable=bool(options.get("rw")), inode=options.get("inode"))
        elif name == "hide":
            self._hidden.append(f"/{target}")
        elif name in ("protect", "pin"):
            self._bind(self._behind(target), target, writable=name == "pin")
        else:
            raise UnsupportedError(
                f"the {self._backend} backend cannot show {target} as this policy asks ({name})",
                code="mounts",
                fix='backend="process" can',
            )

    def _check_name(self, target: str) -> None:
        """Of an image's or a mount's: it is written into JSON and tables of mounts."""
        if target.split("/", maxsplit=1)[0] in RESERVED:
            raise UnsupportedError(
                f"the {self._backend} backend has something of its own at /{target}: no image or mount can have it",
                code="mounts",
                fix='take it out of the image, choose another target, or backend="process"',
            )
        try:
            target.encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"the {self._backend} backend cannot show {target!r}: the name is not UTF-8",
                code="mounts",
                fix='rename it, or backend="process"',
            ) from None

    def _bind(self, source: str, target: str, *, writable: bool, inode: object = None) -> None:
        device_and_number = (inode[0], inode[1]) if isinstance(inode, list) else None
        self._binds.append(Bind(source, f"/{target}", writable, device_and_number))
        covered = any(f"/{target}".startswith(f"{bind.target}/") for bind in self._binds[:-1])
        if not covered and target.split("/", maxsplit=1)[0] not in _OWN:
            if os.path.isdir(source):
                self._folders[target] = None
            else:
                self._files.setdefault(target, "")

    def _behind(self, target: str) -> str:
        """The host path of something below a bind that was made before."""
        for bind in reversed(self._binds):
            if f"/{target}" == bind.target or f"/{target}".startswith(f"{bind.target}/"):
                return bind.source + f"/{target}"[len(bind.target) :]
        raise AssertionError(f"{target} lies in no mount")

    def made(self) -> Skeleton:
        shown = tuple(bind for bind in self._binds if bind.target not in self._hidden)  # nothing is mounted twice
        return Skeleton(tuple(self._folders), self._files, self._links, shown, tuple(self._hidden))


def write(made: Skeleton, root: str) -> None:
    """The tree as a folder of the host's."""
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
    if os.stat(root).st_mode & 0o777 != _FOLDER:  # the caller's umask: guests are another user
        _open_to_all(root)


def _open_to_all(root: str) -> None:
    for directory, _, files in os.walk(root):
        os.chmod(directory, _FOLDER)
        for name in files:
            if not os.path.islink(f"{directory}/{name}"):
                os.chmod(f"{directory}/{name}", 0o644)
