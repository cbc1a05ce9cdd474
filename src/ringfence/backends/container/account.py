"""The user that a container's processes are: a number of its own for each, under the name `user`.

A container shares the host's kernel, which counts processes by user: with one number for all, a sandbox would meet the
limits of another, and of whoever has that number on the host.
"""

from __future__ import annotations

import os
import shutil
import stat

from ringfence.backends.process import owners, state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.engine import Engine
    from ringfence.backends.walled.skeleton import Skeleton

_FIRST, _MANY = 1 << 30, 1 << 28  # past what hosts give to people and to their containers
_FIRST_MAPPED, _MANY_MAPPED = 20_000, 40_000  # inside a user namespace that holds 65536
_INSIDE = "1000"  # in the plan's files, and in every image
_MOST_BYTES = 1 << 20
_NAMES = ("etc/passwd", "etc/group")


class Account:
    """Of one container. Its two files lie below our state directory until `remove`."""

    def __init__(self, engine: Engine, made: Skeleton, writable: tuple[str, ...]) -> None:
        self.uid = _owner(writable) or _number(engine)
        self._folder = f"{state.disk_directory('accounts')}/{owners.name()}_{os.urandom(4).hex()}"
        self._texts = {name: _with_uid(text, self.uid) for name, text in _texts(made)}
        os.mkdir(self._folder, 0o755)
        os.chmod(self._folder, 0o755)
        for name, text in self._texts.items():
            path = f"{self._folder}/{os.path.basename(name)}"
            with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            os.chmod(path, 0o644)

    def mounts(self) -> list[Any]:
        from docker.types import Mount

        return [
            Mount(f"/{name}", f"{self._folder}/{os.path.basename(name)}", type="bind", read_only=True)
            for name in self._texts
        ]

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _texts(made: Skeleton) -> list[tuple[str, str]]:
    """Of the plan, or of the image whose folder is shown there."""
    found = [(name, made.files[name]) for name in _NAMES if name in made.files]
    shown = [bind.source for bind in made.binds if bind.target == "/etc"]
    for name in _NAMES if shown else ():
        text = _read(shown[-1], os.path.basename(name))
        if text is not None:
            found.append((name, text))
    return found


def _read(folder: str, name: str) -> str | None:
    """A file of an image's, which is not trusted: no link is followed (K03), and a long one is not taken."""
    try:
        fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            return None
        return file.read(_MOST_BYTES).decode("utf-8", "surrogateescape")


def _owner(writable: tuple[str, ...]) -> int:
    """Whose the host's folders are that it may write to; 0 when they are root's, as whom no guest runs."""
    return os.stat(writable[0]).st_uid if writable else 0


def _number(engine: Engine) -> int:
    first, many = (_FIRST_MAPPED, _MANY_MAPPED) if engine.mapped else (_FIRST, _MANY)
    return first + int.from_bytes(os.urandom(4), "little") % many


def _with_uid(text: str, uid: int) -> str:
    """The line of the guest's user with another number."""
    rows = []
    for row in text.split("\n"):
        fields = row.split(":")
        if fields[2:3] == [_INSIDE]:
            fields[2:4] = [str(uid) if field == _INSIDE else field for field in fields[2:4]]
        rows.append(":".join(fields))
    return "\n".join(rows)


def sweep() -> None:
    """Folders of processes that are gone."""
    root = state.disk_directory("accounts")
    for name in os.listdir(root):
        if owners.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
