"""Owns which host paths a command line shows inside (--ro, --rw, --copy, --hide), and where a guest then starts."""

from __future__ import annotations

import os

from ringfence.cli.console import Problem
from ringfence.policy.model import mount_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy import Mount
    from ringfence.values import MountMode

MODES: dict[str, MountMode] = {"--ro": "ro", "--rw": "rw", "--copy": "copy"}


def mounts_from(options: list[tuple[str, str]], base: tuple[Mount, ...]) -> tuple[Mount, ...]:
    """The policy's mounts with the options on top: one at the same place is replaced, --hide goes to all."""
    from ringfence.errors import PolicyError
    from ringfence.policy import Mount
    from ringfence.values import replace

    added: dict[str, Mount] = {}
    for name, raw in options:
        if name in MODES:
            source, target = _split(name, raw)
            try:
                mount = Mount(source, target, mode=MODES[name])
            except PolicyError as error:
                fix = error.fix if target is not None else "it is never shown; name the folder that is needed"
                raise Problem(f"{name} {raw}: {error}", fix=fix, code=error.code) from None
            if mount_path(mount) in added:
                raise Problem(f"{name} {raw}: {mount_path(mount)} is shown twice", fix="leave one of the two out")
            added[mount_path(mount)] = mount
    mounts = [mount for mount in base if mount_path(mount) not in added] + list(added.values())
    for name, raw in options:
        if name == "--hide":
            for index, relative in _holders(raw, mounts):
                mounts[index] = replace(mounts[index], hide=(*mounts[index].hide, relative))
    return tuple(mounts)


def source_of(mount: Mount) -> str:
    """The host path of a mount."""
    return os.fspath(mount.source)


def absolute(path: str) -> str:
    """A host path from the root on. Links stay as they are named, but where `..` would cross one they are followed,
    when nobody but root could have made them (L16)."""
    here = "/" if os.path.isabs(path) else working_folder()
    if here is None:
        raise Problem(f"{path}: the folder this shell is in was removed", fix="cd to one that is there, or write /…")
    whole = os.path.join(here, path)
    if ".." not in path.split("/"):
        return os.path.normpath(whole)
    from ringfence.policy.host_paths import LinkError, without_links

    try:
        return without_links(whole)
    except LinkError as error:
        raise Problem(f"{path}: {error.strerror}", fix=error.fix, code="link") from None
    except OSError:
        return os.path.normpath(whole)  # there is nothing, which is told where it is used


def working_folder() -> str | None:
    """The folder we were started in. None: somebody removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def beneath(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def inside(path: str, mounts: tuple[Mount, ...]) -> str | None:
    """Where the host's `path` is inside: below the deepest mount that holds it. None: it is not shown."""
    holders = [mount for mount in mounts if beneath(path, source_of(mount))]
    if not holders:
        return None
    mount = max(holders, key=lambda each: len(source_of(each)))
    if is_hidden(path, (mount,)):
        return None
    return os.path.normpath(os.path.join(mount_path(mount), os.path.relpath(path, source_of(mount))))


def is_hidden(path: str, mounts: tuple[Mount, ...]) -> bool:
    """Whether somebody said that the host's `path` is not to be seen."""
    return any(beneath(path, os.path.join(source_of(mount), hidden)) for mount in mounts for hidden in mount.hide)


def start_folder(mounts: tuple[Mount, ...]) -> str | None:
    """This folder as it is inside, if it, or something in it, is shown; else None, which is /workspace."""
    here = working_folder()
    if here is None:
        return None
    there = inside(here, mounts)
    if there is not None:
        return there
    return here if any(beneath(mount_path(mount), here) for mount in mounts) and here != "/" else None


def _split(name: str, raw: str) -> tuple[str, str | None]:
    if os.path.lexists(raw):
        return absolute(raw), None
    source, colon, target = raw.rpartition(":")
    if colon and source and os.path.lexists(source):
        if not target.startswith("/"):
            fix = f"the place inside starts with /: {name} {source}:/{target.lstrip('./') or 'data'}"
            raise Problem(f"{name} {raw}: {target!r} is not a whole path", fix=fix)
        return absolute(source), target
    missing = source if colon and target.startswith("/") else raw
    fix = f"check the name, or make it first: mkdir -p {missing}"
    if missing.startswith("~"):
        fix = f"the shell left ~ as it is: write {name} {missing} with a space between, or the whole path"
    raise Problem(f"{name} {missing}: there is no such file or folder on this machine", fix=fix, code="mount-missing")


def _holders(raw: str, mounts: list[Mount]) -> list[tuple[int, str]]:
    """Each mount that shows a path, and the path below it: one that was left out would show what is to be hidden."""
    path = absolute(raw)
    found = [(index, below) for index, mount in enumerate(mounts) if (below := _below(path, source_of(mount)))]
    if any(below == "." for _, below in found):
        raise Problem(f"--hide {raw}: the same path is shown", fix="leave one of the two options out")
    if not found:
        raise Problem(
            f"--hide {raw}: nothing that holds it is shown, so it is absent already",
            fix="leave it out, or show its folder: --ro, --rw or --copy FOLDER",
        )
    return [(index, below) for index, below in found if not _covered(index, below, mounts)]


def _below(path: str, folder: str) -> str | None:
    """`path` as it is below `folder`, by name or where links lead. None: it is not there."""
    if beneath(path, folder):
        return os.path.relpath(path, folder)
    parent, name = os.path.split(path)
    real, folder = os.path.join(os.path.realpath(parent), name), os.path.realpath(folder)
    return os.path.relpath(real, folder) if beneath(real, folder) else None


def _covered(index: int, below: str, mounts: list[Mount]) -> bool:
    """Whether another mount lies over that place, so that this one does not show it."""
    own = mount_path(mounts[index])
    place = os.path.normpath(os.path.join(own, below))
    over = [mount_path(mount) for mount in mounts if beneath(place, mount_path(mount))]
    return max(over, key=len) != own
