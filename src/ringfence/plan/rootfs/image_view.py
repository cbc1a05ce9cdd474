"""Plans what a guest of a stored image sees: the image's root, read-only, with the policy's mounts placed into it.

Pure but for stat, readlink and listdir. The tree is not trusted: no operation's path goes through a link of the tree,
because the link would be followed before the sandbox has its own root (M10). Where a mount's target is deeper inside,
the directories on the way are made anew and their other entries bound one by one.
"""

from __future__ import annotations

import os
import stat

from ringfence.errors import ImageError, PolicyError, UnsupportedError
from ringfence.plan.model import Bind, Folder, SymbolicLink
from ringfence.plan.rootfs.host_view import SYSTEM_PATH, View, device_ops
from ringfence.plan.rootfs.mounts import PRIVATE, Surroundings, place, rooted
from ringfence.shared.paths import is_within
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import Op
    from ringfence.plan.rootfs.interpreter import Interpreter
    from ringfence.policy.model import Mount, Policy

_OURS = frozenset(("proc", "dev", "sys", "tmp", "workspace", ".mask", ".sources", ".disk"))  # never the image's
_MOST_ENTRIES = 512  # of a directory that is shown one by one: each is a mount


@final
class Root(Struct):
    """The tree of a stored image, as planners need it."""

    name: str
    tree: str  # path on the host
    python: str | None  # path of the image's Python, inside


def image_view(
    policy: Policy,
    root: Root,
    interpreter: Interpreter,
    *,
    uid: int,
    home: str,
    state: tuple[str, ...] = (),
    stored: tuple[str, ...] = (),
) -> View:
    """Return the guest's view of a stored image under `policy`; arguments are as for `host_view.view`.

    `interpreter` is the caller's: it is protected, not shown. Raises PolicyError for a mount that cannot be placed,
    UnsupportedError for a list of commands.
    """
    if policy.commands != "any":
        raise UnsupportedError(
            f'a list of commands is for the image "host"; image {root.name} shows all its programs',
            code="commands",
            fix='commands = "any", or build an image that holds only the programs wanted',
        )
    links = _top_links(root)
    targets = [_target(mount, links) for mount in policy.mounts]
    exposed = _Exposed(root, [target for target in targets if not _private(target)])
    exposed.directory("", depth=0)
    around = Surroundings(
        interpreter=interpreter,
        system=tuple((f"/{op.target}", op.source) for op in exposed.ops if isinstance(op, Bind)),
        links=links,
        uid=uid,
        home=home,
        state=state,
        stored=stored,
        shows_python=False,
    )
    placed = place(tuple(policy.mounts), around)
    return View(
        template=(Folder("sys"), *device_ops(), *exposed.ops, *placed.template),
        box=placed.box,
        shown=(f"/: image {root.name}, read-only", *placed.shown),
        path=SYSTEM_PATH,
        protected=placed.protected,
    )


def _private(target: str) -> bool:
    return any(is_within(target, path) for path in PRIVATE)


def _top_links(root: Root) -> tuple[tuple[str, str], ...]:
    """Return the links at the top of the tree that a mount's target may be spelled with: bin → usr/bin."""
    found = []
    for name in _listed(root, ""):
        path = f"{root.tree}/{name}"
        if name not in _OURS and os.path.islink(path):
            found.append((f"/{name}", rooted(os.readlink(path))))
    return (*found, ("/var/tmp", "/tmp"))


def _target(mount: Mount, links: tuple[tuple[str, str], ...]) -> str:
    """Return a mount's target as `place` will spell it. `place` also refuses what is no target."""
    text = os.path.abspath(os.fspath(mount.source)) if mount.target is None else str(mount.target)
    target = rooted(text)
    for link, meaning in links:
        if is_within(target, link):
            target = meaning + target[len(link) :]
    return target


def _listed(root: Root, path: str) -> list[str]:
    try:
        names = sorted(os.listdir(f"{root.tree}/{path}"))
    except OSError as error:
        raise ImageError(
            f"the files of image {root.name} cannot be read: {error.strerror}",
            code="image-damaged",
            fix="import or build it again",
        ) from None
    if len(names) > _MOST_ENTRIES:
        raise UnsupportedError(
            f"/{path} of image {root.name} has {len(names)} entries; {_MOST_ENTRIES} at most can be shown one by one",
            code="image-entries",
            fix="choose a target outside of it, such as /data",
        )
    return names


class _Exposed:
    """The operations that show the tree, with a way to each mount's target."""

    def __init__(self, root: Root, targets: list[str]) -> None:
        self._root = root
        self._targets = frozenset(target[1:] for target in targets)
        above = set()
        for target in self._targets:
            parts = target.split("/")
            above |= {"/".join(parts[:count]) for count in range(1, len(parts))}
        self._above = above
        self.ops: list[Op] = []

    def directory(self, path: str, *, depth: int) -> None:
        for name in _listed(self._root, path):
            inside = f"{path}/{name}" if path else name
            if (not path and name in _OURS) or inside in self._targets:
                continue
            mode = os.lstat(f"{self._root.tree}/{inside}").st_mode
            if inside in self._above:
                self._open(inside, mode, depth)
            elif stat.S_ISLNK(mode):
                self.ops.append(SymbolicLink(os.readlink(f"{self._root.tree}/{inside}"), inside))
            elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                self.ops.append(Bind(f"{self._root.tree}/{inside}", inside))

    def _open(self, inside: str, mode: int, depth: int) -> None:
        if not stat.S_ISDIR(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "a file"
            raise PolicyError(
                f"a mount's target lies below /{inside}, which is {kind} in image {self._root.name}",
                key="mounts",
                fix='choose another target, such as "/data"',
            )
        self.ops.append(Folder(inside))
        self.directory(inside, depth=depth + 1)
