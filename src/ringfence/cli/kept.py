"""Owns the snapshots a person gave a name: one file each, in the state folder of the user."""

from __future__ import annotations

import os

from ringfence.cli.console import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Sandbox, Snapshot

_ENDING = ".snapshot"
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def name(option: str, raw: str) -> str:
    """A check for a name that is a file's name and nothing else."""
    if not 0 < len(raw) <= 64 or not _LETTERS.issuperset(raw) or raw[0] in ".-":
        raise Problem(
            f"{option} {raw!r} is no name for a snapshot",
            fix=f"letters, digits, '.', '_' and '-', 64 at most: {option} before-upgrade",
        )
    return raw


def _folder() -> str:
    """By where links of the person's own lead: no guest can have made one, because none may write there (L19)."""
    from ringfence.host.state import disk_directory

    return os.path.realpath(disk_directory("named"))


def load(called: str) -> Snapshot:
    """Raises Problem when there is none of that name, SnapshotError when it was altered."""
    from ringfence import Snapshot

    path = f"{_folder()}/{called}{_ENDING}"
    if not os.path.exists(path):
        raise Problem(f"--from {called}: there is no such snapshot", fix=_which(called), code="snapshot-missing")
    return Snapshot.load(path)


def _which(called: str) -> str:
    from ringfence.cli.names import nearest

    known = sorted(entry.removesuffix(_ENDING) for entry in os.listdir(_folder()) if entry.endswith(_ENDING))
    near = nearest(called, known)
    if near:
        return f"did you mean --from {near}?"
    return f"there are: {', '.join(known)}" if known else f"make one: ringfence shell --keep {called}"


def save(box: Sandbox, called: str) -> int:
    """Under that name, in place of one that had it. The size in bytes of what was kept."""
    snapshot = box.snapshot()
    snapshot.export(f"{_folder()}/{called}{_ENDING}")
    return snapshot.size_bytes
