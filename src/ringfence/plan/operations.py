"""The steps that build a guest's root, one frozen type for each, and their form on the wire to the zygote.

Targets are relative to the new root. The far side (`guest/launch/mounts.py`) applies them in order and decides nothing.
"""

from __future__ import annotations

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias


@final
class Folder(Struct):
    """Make a folder with this mode."""

    target: str
    mode: int = 0o755


@final
class File(Struct):
    """Write a file that holds this text."""

    target: str
    text: str = ""
    mode: int = 0o644


@final
class Link(Struct):
    """Make a symbolic link at `target` that says `text`."""

    text: str
    target: str


@final
class Bind(Struct):
    """Show a host path at `target`, with what is mounted below it."""

    source: str
    target: str
    writable: bool = False
    idmap: bool = False  # the owner of the files is mapped to the guest's user
    inode: tuple[int, int] | None = None  # device and number that `source` must still have; None: not compared


@final
class Overlay(Struct):
    """Show a host path at `target` below a layer of this sandbox alone: a copy, or a view that lacks some names."""

    source: str
    target: str
    idmap: bool = False
    read_only: bool = False
    absent: tuple[str, ...] = ()  # paths below the source that the layer takes away
    inode: tuple[int, int] | None = None  # as for Bind


@final
class Device(Struct):
    """Show a device of the host at the same name in /dev."""

    name: str

    @property
    def target(self) -> str:
        return f"dev/{self.name}"


@final
class Hide(Struct):
    """Cover what is at `target` with an empty, read-only folder or file."""

    target: str


@final
class Pin(Struct):
    """Make `target` a mount point of its own, so that the guest cannot rename it away."""

    target: str


@final
class Protect(Struct):
    """Make `target`, which lies in a writable mount, read-only."""

    target: str


Op: TypeAlias = Folder | File | Link | Bind | Overlay | Device | Hide | Pin | Protect


def rows(ops: tuple[Op, ...]) -> list[list[object]]:
    """Return operations as the lists that the zygote takes."""
    return [_row(op) for op in ops]


def _row(op: Op) -> list[object]:
    if isinstance(op, Bind):
        shown: dict[str, object] = {"rw": op.writable, "idmap": op.idmap, "exec": True}
        return ["bind", op.source, op.target, shown if op.inode is None else {**shown, "inode": list(op.inode)}]
    if isinstance(op, Folder):
        return ["dir", op.target, op.mode]
    if isinstance(op, File):
        return ["file", op.target, op.text, op.mode]
    if isinstance(op, Link):
        return ["symlink", op.text, op.target]
    if isinstance(op, Overlay):
        layer: dict[str, object] = {"idmap": op.idmap}
        if op.read_only:
            layer["ro"] = True
        if op.absent:
            layer["absent"] = list(op.absent)
        if op.inode is not None:
            layer["inode"] = list(op.inode)
        return ["overlay", op.source, op.target, layer]
    if isinstance(op, Device):
        return ["dev", op.name]
    if isinstance(op, Hide):
        return ["hide", op.target]
    return ["pin" if isinstance(op, Pin) else "protect", op.target]
