"""The writable places of a container, /workspace and /tmp, and the user that its processes run as.

Both places are file systems in memory, with a size and a number of files. Docker takes the options of a tmpfs as they
are. Podman takes no number of files there; as root, /workspace is therefore a volume with these options, which we
remove. Podman puts file systems without any limit on /tmp, /var/tmp and /run where nothing else is mounted, so each of
them gets a mount.

Each container has a user number of its own, under the name `user`. A container shares the host's kernel, which counts
processes by user: with one number for all, a sandbox would meet the limits of another sandbox, and of the host's own
user of that number.
"""

from __future__ import annotations

import os
import shutil
import stat

from ringfence.host import process_id, state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.policy.model import Limits

LABEL = "ringfence.owner"
SECRETS = "/run/secrets"  # where a host's mounts.conf has Podman show secrets of the host
_MODES = {"/tmp": "1777", "/workspace": "0755"}  # inside
_FLAGS = "nosuid,nodev"
_FIRST_UID, _UIDS = 1 << 30, 1 << 28  # beyond what hosts give to people and to their containers
_FIRST_MAPPED, _MAPPED_UIDS = 20_000, 40_000  # inside a user namespace of 65536 users
_GUEST_UID = "1000"  # in the plan's files, and in every image
_LONGEST_FILE = 1 << 20
_USER_FILES = ("etc/passwd", "etc/group")


def counts_files(engine: Engine) -> bool:
    """Return whether this engine limits the number of files in every place that a guest can write to."""
    return engine.name == "docker"


class Disks:
    """The file systems in memory of one container, made before the container is."""

    def __init__(self, engine: Engine, limits: Limits, uid: int) -> None:
        self._uid = uid
        self._counts = counts_files(engine)
        self._api = engine.api
        self._limits = limits
        self._names: list[str] = []
        self.tmpfs: dict[str, str] = {}
        self.mounts: list[Any] = []
        if engine.name == "docker":
            self.tmpfs = {path: f"rw,exec,{_FLAGS},{self._room(mode)}" for path, mode in _MODES.items()}
            return
        bytes_alone = f"rw,exec,{_FLAGS},notmpcopyup,size={limits.disk},mode=1777"
        small = f"rw,noexec,{_FLAGS},notmpcopyup,size=64k"
        self.tmpfs = {"/tmp": bytes_alone, "/var/tmp": bytes_alone, "/run": small}
        self.tmpfs[SECRETS] = f"{small},mode=0755"
        if engine.rootless:
            self.tmpfs["/workspace"] = bytes_alone
        else:
            self._make_volume("/workspace")

    def with_shared(self, size: int) -> dict[str, str]:
        """Return the options of each tmpfs by its path; `size` is that of /dev/shm.

        /dev/shm is among them where files can be counted: the engine's own /dev/shm takes as many as memory holds.
        """
        if not self._counts:
            return self.tmpfs
        room = f"size={size},nr_inodes={self._limits.disk_files + 1},mode=1777"
        return {**self.tmpfs, "/dev/shm": f"rw,noexec,{_FLAGS},{room}"}

    def spelled(self, target: str) -> str:
        """Return a mount's target in the spelling that makes this engine mount in the right order.

        Podman mounts by depth, and equally deep targets in any order. A target below /tmp must come after the file
        system on /var/tmp, which is a link to /tmp: spelled by way of that link, the target is deeper.
        """
        return f"/var{target}" if "/var/tmp" in self.tmpfs and target.startswith("/tmp/") else target

    def _room(self, mode: str) -> str:
        owner = f"uid={self._uid},gid={self._uid}"
        return f"size={self._limits.disk},nr_inodes={self._limits.disk_files + 1},mode={mode},{owner}"

    def _make_volume(self, path: str) -> None:
        from docker.types import Mount

        name = f"ringfence-{os.getpid()}-{os.urandom(6).hex()}"
        # In pages: Podman takes `size` for a quota of the underlying file system.
        pages = -(-self._limits.disk // os.sysconf("SC_PAGE_SIZE"))
        room = self._room(_MODES[path]).replace(f"size={self._limits.disk},", f"nr_blocks={pages},")
        options = {"type": "tmpfs", "device": "tmpfs", "o": f"{_FLAGS},{room}"}
        self._api.create_volume(name, driver="local", driver_opts=options, labels={LABEL: process_id.name()})
        self._names.append(name)
        self.mounts.append(Mount(path, name, type="volume", no_copy=True))

    def remove(self) -> None:
        """Remove the volumes, after the container. Raises nothing for a volume that is gone."""
        import docker.errors
        import requests.exceptions

        names, self._names = self._names, []
        for name in names:
            try:
                self._api.remove_volume(name, force=True)
            except (docker.errors.APIError, requests.exceptions.RequestException):
                continue


def sweep(engine: Engine) -> None:
    """Remove the volumes of library processes that are gone."""
    import docker.errors

    if engine.name == "docker":
        return
    for found in engine.api.volumes(filters={"label": LABEL}).get("Volumes") or ():
        if process_id.is_dead((found.get("Labels") or {}).get(LABEL, "")):
            try:
                engine.api.remove_volume(found["Name"], force=True)
            except docker.errors.APIError:
                continue


class Account:
    """The user of a container. Its passwd and group files are below our state directory until `remove`."""

    def __init__(self, engine: Engine, made: Skeleton, writable: tuple[str, ...]) -> None:
        self.uid = _owner(writable) or _number(engine)
        self._folder = f"{state.disk_directory('accounts')}/{process_id.name()}_{os.urandom(4).hex()}"
        self._texts = {name: _with_uid(text, self.uid) for name, text in _texts(made)}
        os.mkdir(self._folder, 0o755)
        os.chmod(self._folder, 0o755)
        for name, text in self._texts.items():
            path = f"{self._folder}/{os.path.basename(name)}"
            with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            os.chmod(path, 0o644)

    def mounts(self) -> list[Any]:
        """Return the mounts that show the two files inside, in the Engine SDK's words."""
        from docker.types import Mount

        return [
            Mount(f"/{name}", f"{self._folder}/{os.path.basename(name)}", type="bind", read_only=True)
            for name in self._texts
        ]

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _texts(made: Skeleton) -> list[tuple[str, str]]:
    """Return path and text of the plan's passwd and group files, or of the files in the image's own /etc."""
    found = [(name, made.files[name]) for name in _USER_FILES if name in made.files]
    shown = [bind.source for bind in made.binds if bind.target == "/etc"]
    for name in _USER_FILES if shown else ():
        text = _read(shown[-1], os.path.basename(name))
        if text is not None:
            found.append((name, text))
    return found


def _read(folder: str, name: str) -> str | None:
    """Return the text of a file in an image, which is not trusted: no link is followed (K03).

    Returns None for a missing, long or irregular file.
    """
    try:
        fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST_FILE:
            return None
        return file.read(_LONGEST_FILE).decode("utf-8", "surrogateescape")


def _owner(writable: tuple[str, ...]) -> int:
    """Return the owner of the writable host folders; 0 when there are none or root owns them: no guest runs as root."""
    return os.stat(writable[0]).st_uid if writable else 0


def _number(engine: Engine) -> int:
    first, count = (_FIRST_MAPPED, _MAPPED_UIDS) if engine.mapped else (_FIRST_UID, _UIDS)
    return first + int.from_bytes(os.urandom(4), "little") % count


def _with_uid(text: str, uid: int) -> str:
    """Return the text of a passwd or group file with the guest's number replaced by `uid`."""
    rows = []
    for row in text.split("\n"):
        fields = row.split(":")
        if fields[2:3] == [_GUEST_UID]:
            fields[2:4] = [str(uid) if field == _GUEST_UID else field for field in fields[2:4]]
        rows.append(":".join(fields))
    return "\n".join(rows)


def sweep_account() -> None:
    """Remove the account folders of library processes that are gone."""
    root = state.disk_directory("accounts")
    for name in os.listdir(root):
        if process_id.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)
