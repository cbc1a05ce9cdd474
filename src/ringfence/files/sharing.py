"""Stores a file once: what a new tree has in common with trees of the store becomes links to those.

Beside each tree lies a list of its files, a line each: SHA-256, mode, time and name. Such a list is a hint and is not
believed: what it names is read before it is linked, so that a damaged file does not come into another image.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.files.layers import file_digest, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.files.layers import Node, Tree


def share(tree: Tree, trees: str, listing: str) -> None:
    """Link what the trees below `trees` have already, and write the list of this one to `listing`."""
    wanted: dict[str, list[str]] = {}
    for name, node in walk(tree.root):
        if node.kind == "file" and node.size and "\n" not in name:
            wanted.setdefault(_key(node), []).append(name)
    lines = [f"{key}\t{name}\n" for key, names in wanted.items() for name in names]
    with open(listing, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("".join(lines))
    for digest in sorted(os.listdir(trees)):
        _share_with(tree, f"{trees}/{digest}", wanted)


def _key(node: Node) -> str:
    return f"{node.content}.{node.mode:o}.{node.mtime:x}"


def _share_with(tree: Tree, other: str, wanted: dict[str, list[str]]) -> None:
    """Takes out of `wanted` what was found there."""
    try:
        file = open(f"{other}/files", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115  # closed below
    except FileNotFoundError:
        return
    with file:
        for line in file:
            key, _, name = line.rstrip("\n").partition("\t")
            if key in wanted and _link(tree, key, wanted[key], f"{other}/root/{name}"):
                del wanted[key]


def _link(tree: Tree, key: str, names: list[str], stored: str) -> bool:
    """Whether the files `names` of the tree are links to `stored` now."""
    try:
        good = os.lstat(stored)
        there = [os.lstat(f"{tree.directory}/{name}") for name in names]
        if all(os.path.samestat(good, own) for own in there):
            return True
        content, mode, mtime = key.split(".")
        kept = (stat.S_IFREG | int(mode, 8), int(mtime, 16))
        if (good.st_mode, int(good.st_mtime)) != kept or file_digest(stored) != content:
            return False
        spare = f"{os.path.dirname(tree.directory)}/spare"
        for name, own in zip(names, there, strict=True):
            if not os.path.samestat(good, own):  # to rename one link of a file to another does nothing
                os.link(stored, spare, follow_symlinks=False)
                os.rename(spare, f"{tree.directory}/{name}")
    except OSError as error:
        if error.errno not in (errno.EMLINK, errno.ENOENT, errno.ENAMETOOLONG):
            raise
        return False  # a tree of somebody else's making keeps no other out
    return True
