"""The two places inside that can be written to: /workspace and /tmp, in memory, with a size and a number of files.

Docker takes the options of a tmpfs as they are. Podman takes no number of files there; as root it mounts a volume with
them for /workspace instead, which is ours to remove. Where nothing else is mounted it puts file systems without any
limit on /tmp, /var/tmp and /run, so something is.
"""

from __future__ import annotations

import os

from ringfence.backends.process import owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.engine import Engine
    from ringfence.policy.model import Limits

LABEL = "ringfence.owner"
SECRETS = "/run/secrets"  # where a host's mounts.conf has Podman show secrets of the host
_MODES = {"/tmp": "1777", "/workspace": "0755"}  # inside
_FLAGS = "nosuid,nodev"


def counts_files(engine: Engine) -> bool:
    """Everywhere that a guest can write."""
    return engine.name == "docker"


class Disks:
    """Of one container that is about to be made."""

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
        """The file systems in memory, and /dev/shm as one of them where files can be counted: the engine's own has
        as many as memory holds."""
        if not self._counts:
            return self.tmpfs
        room = f"size={size},nr_inodes={self._limits.disk_files + 1},mode=1777"
        return {**self.tmpfs, "/dev/shm": f"rw,noexec,{_FLAGS},{room}"}

    def spelled(self, target: str) -> str:
        """A mount's target as this engine is to be told it.

        Podman mounts by depth, and in any order what lies equally deep. What is below /tmp must come after the file
        system on /var/tmp, a link to it: by way of that link it lies deeper.
        """
        return f"/var{target}" if "/var/tmp" in self.tmpfs and target.startswith("/tmp/") else target

    def _room(self, mode: str) -> str:
        whose = f"uid={self._uid},gid={self._uid}"
        return f"size={self._limits.disk},nr_inodes={self._limits.disk_files + 1},mode={mode},{whose}"

    def _pages(self) -> int:
        return -(-self._limits.disk // os.sysconf("SC_PAGE_SIZE"))

    def _make_volume(self, path: str) -> None:
        from docker.types import Mount

        name = f"ringfence-{os.getpid()}-{os.urandom(6).hex()}"
        # In pages: Podman takes `size` for a quota of the file system below.
        room = self._room(_MODES[path]).replace(f"size={self._limits.disk},", f"nr_blocks={self._pages()},")
        options = {"type": "tmpfs", "device": "tmpfs", "o": f"{_FLAGS},{room}"}
        self._api.create_volume(name, driver="local", driver_opts=options, labels={LABEL: owners.name()})
        self._names.append(name)
        self.mounts.append(Mount(path, name, type="volume", no_copy=True))

    def remove(self) -> None:
        """After the container. Raises nothing for one that is gone."""
        import docker.errors
        import requests.exceptions

        names, self._names = self._names, []
        for name in names:
            try:
                self._api.remove_volume(name, force=True)
            except (docker.errors.APIError, requests.exceptions.RequestException):
                continue


def sweep(engine: Engine) -> None:
    """Volumes of processes that are gone."""
    import docker.errors

    if engine.name == "docker":
        return
    for found in engine.api.volumes(filters={"label": LABEL}).get("Volumes") or ():
        if owners.is_dead((found.get("Labels") or {}).get(LABEL, "")):
            try:
                engine.api.remove_volume(found["Name"], force=True)
            except docker.errors.APIError:
                continue
