"""The configuration of a new container: limits, mounts, writable places, its user; what an engine can close is closed.

No option opens any of it. `check` compares the container with this configuration before it is started: an engine has
settings of its own, which open what a request leaves unsaid. Podman's containers.conf can name devices and folders of
the host for every container, and an engine drops a limit that its host cannot enforce.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat

from ringfence.backends.engine import guestd_bundle
from ringfence.backends.engine.backend import own_kernel_room
from ringfence.backends.engine.rootfs import BoxBind
from ringfence.errors import UnsupportedError
from ringfence.host import process_id, state
from ringfence.plan.rootfs.mounts import mounts_of_host
from ringfence.shared.paths import is_below, is_within
from ringfence.shared.proc import PROC_SHOWN
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ringfence.backends.container.api import Engine
    from ringfence.backends.engine.rootfs import Skeleton
    from ringfence.plan.model import LinuxPlan
    from ringfence.policy.model import Limits

_RESOLVER = "etc/resolv.conf"
_FILES = 4096
_MOST_BELOW = 256  # mounts; a container is slow to start with more
_OURS = 12  # our processes inside, beside the guest's
_GUESTD_BYTES = 48 << 20  # what guestd itself takes
_SPLITTING = frozenset(',"\r\n')
LABEL = "ringfence.owner"
_SECRETS = "/run/secrets"  # where a host's mounts.conf has Podman show secrets of the host
_MODES = {"/tmp": "1777", "/workspace": "0755"}  # inside
_FLAGS = "nosuid,nodev"
_FIRST_UID, _UIDS = 1 << 30, 1 << 28  # beyond what hosts give to people and to their containers
_FIRST_MAPPED, _MAPPED_UIDS = 20_000, 40_000  # inside a user namespace of 65536 users
_GUEST_UID = "1000"  # in the plan's files, and in every image
_LONGEST_FILE = 1 << 20
_USER_FILES = ("etc/passwd", "etc/group")
_SAME = ("NetworkMode", "ReadonlyRootfs", "Privileged")
_LIMITS = {"memory": "Memory", "pids": "PidsLimit"}  # by controller
_NOTHING = ("CapAdd", "Devices", "DeviceRequests", "DeviceCgroupRules", "GroupAdd", "PortBindings", "VolumesFrom")
_OWN_NAMESPACE = ("PidMode", "UTSMode", "IpcMode")


@final
class Around(Struct):
    """The limits that the engine enforces around a whole container: the guest's, and room for our own processes."""

    memory: int
    processes: int


def shared_kernel(plan: LinuxPlan) -> Around:
    """Return the limits around a container that shares the host's kernel."""
    return Around(plan.memory_bytes + _GUESTD_BYTES, plan.processes + _OURS)


def own_kernel(plan: LinuxPlan) -> Around:
    """Return the limits around a container with a kernel of its own.

    They count that kernel and its processes on the host too. One process too few ends the whole container.
    """
    room = own_kernel_room(plan)
    return Around(room.memory_bytes + _GUESTD_BYTES, room.processes)


def host_config(
    engine: Engine,
    shown: list[Any],
    disks: Disks,
    plan: LinuxPlan,
    oci_runtime: str | None,
    around: Around,
) -> Any:
    """Return the host configuration of a container, as the Engine API takes it.

    Raises UnsupportedError for a path that this engine would misread.
    """
    for mount in shown:
        _check_spelling(engine, mount)
        mount["Target"] = disks.spelled(mount["Target"])
    taken = {mount["Target"] for mount in shown}
    if "/run" in taken:  # an image's, read-only
        taken.add(_SECRETS)
    memory = around.memory
    shm = min(64 << 20, plan.policy.limits.memory // 2)
    config = engine.api.create_host_config(
        network_mode="none",
        read_only=True,
        tmpfs={path: options for path, options in disks.with_shared(shm).items() if path not in taken},
        mounts=[*shown, *(mount for mount in disks.mounts if mount["Target"] not in taken)],
        shm_size=shm,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=around.processes,
        nano_cpus=int(min(plan.cpus, engine.cpus) * 1_000_000_000),  # Docker refuses more than there are
        ulimits=[
            {"Name": "core", "Soft": 1, "Hard": 1},
            {"Name": "nofile", "Soft": _FILES, "Hard": _FILES},  # for guestd; guests have limits.open_files
            {"Name": "nproc", "Soft": around.processes, "Hard": around.processes},
        ],
        log_config={"Type": "none", "Config": {}},
        ipc_mode="private",
        privileged=False,
        init=False,
        auto_remove=False,
        oom_kill_disable=False,
        # guestd listens for the gateway on ports of hosts, below 1024 too. The namespace has no network card.
        **({"sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"}} if plan.outlets is not None else {}),
        **({"runtime": oci_runtime} if oci_runtime else {}),
    )
    if engine.name == "docker":
        config["MaskedPaths"] = _masked_paths()
    else:
        config["SecurityOpt"] = [*config["SecurityOpt"], f"mask={':'.join(_masked_paths())}"]
    config["CgroupnsMode"] = "private"  # else /proc/self/cgroup shows the container's id and its place (B13)
    return config


def _masked_paths() -> list[str]:
    """Return what of /proc and /sys a container does not show: all that the process backend does not show either.

    An engine's own list names what its authors thought of; a new kernel's new file is not on it (B15).
    """
    names = sorted(name for name in os.listdir("/proc") if not name.isdigit() and name not in PROC_SHOWN)
    links = ("mounts", "net")  # to files of the process itself
    return [*(f"/proc/{name}" for name in names if name not in links), "/proc/sys/kernel/random/boot_id", "/sys"]


def _check_spelling(engine: Engine, mount: Any) -> None:
    """Raise UnsupportedError for a path with a character that Podman takes for a separator.

    Podman writes a mount as one line of comma-separated values and reads that line again, without quotes. A folder
    "x,source=etc" of an image would therefore be the host's /etc (M11).
    """
    for path in (mount["Source"], mount["Target"]):
        if engine.name == "podman" and not _SPLITTING.isdisjoint(path):
            raise UnsupportedError(
                f"Podman cannot show {path!r:.200}: it would take a part of the name for an option",
                code="mounts",
                fix='rename it (no comma, quote or line break), or engine="docker", or backend="process"',
            )


def mounts(made: Skeleton, guestd: str) -> list[Any]:
    """Return the mounts of a container, in the Engine SDK's words. `guestd`: the folder of guestd's own interpreter."""
    from docker.types import Mount

    hidden = [Mount(target, _empty(made, target), type="bind", read_only=True) for target in made.hidden]
    binds = [*made.binds, *_read_only_below(made)]
    shown = [Mount(bind.target, bind.source, type="bind", read_only=not bind.writable) for bind in binds]
    return [*shown, *hidden, Mount(guestd_bundle.INSIDE, guestd, type="bind", read_only=True)]


def resolver_mounts(plan: LinuxPlan, made: Skeleton) -> list[Any]:
    """Return the mount that shows the plan's resolver; none where the plan has no network.

    Engines put a file of their own over the image's, and theirs names no resolver.
    """
    text = made.files.get(_RESOLVER)
    if plan.outlets is None or text is None:
        return []
    from docker.types import Mount

    return [Mount(f"/{_RESOLVER}", _file_with(text), type="bind", read_only=True)]


def _file_with(text: str) -> str:
    """Return the path of our file on the host that holds this text. Writes the file where there is none yet."""
    path = f"{state.disk_directory('resolver')}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not os.path.exists(path):
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.rename(file.name, path)
    return path


def _read_only_below(made: Skeleton) -> list[BoxBind]:
    """Return a read-only bind for each file system that the host has mounted below a read-only bind.

    Engines make only the top of a bind read-only. Newer engines can do more by an option, which older engines accept
    and ignore. Engines mount by depth, so these binds come after the binds they lie in.
    Raises UnsupportedError for too many.
    """
    targets = {bind.target for bind in made.binds}
    found: dict[str, BoxBind] = {}
    for where, _ in mounts_of_host():
        for bind in made.binds:
            target = bind.target + where[len(bind.source.rstrip("/")) :]
            if where == bind.source or not is_within(where, bind.source) or target in targets:
                continue
            around = (each for each in made.binds if is_within(target, each.target))
            nearest = max(around, key=lambda each: len(each.target))
            if nearest == bind and not bind.writable and os.path.lexists(where):  # else another mount covers it
                found[target] = BoxBind(where, target, writable=False)
    if len(found) > _MOST_BELOW:
        raise UnsupportedError(
            f"{len(found)} file systems are mounted below what is shown read-only, such as {next(iter(found))}",
            code="mounts",
            fix='mount folders that do not contain them, or backend="process"',
        )
    return list(found.values())


def _empty(made: Skeleton, target: str) -> str:
    """Return the path of our own empty folder or file that hides `target`."""
    folder = state.disk_directory("empty")
    for bind in reversed(made.binds):
        if is_below(target, bind.target) and not os.path.isdir(bind.source + target[len(bind.target) :]):
            path = f"{folder}/file"
            with open(path, "ab"):
                return path
    os.makedirs(f"{folder}/folder", 0o555, exist_ok=True)
    return f"{folder}/folder"


# ── writable places ─────────────────────────────────────────────────────────────────────────────────


def counts_files(engine: Engine) -> bool:
    """Return whether this engine limits the number of files in every place that a guest can write to."""
    return engine.name == "docker"


class Disks:
    """The writable places of a container, /workspace and /tmp: file systems in memory, made before the container is.

    Both have a size and a number of files. Docker takes the options of a tmpfs as they are. Podman takes no number of
    files there; as root, /workspace is therefore a volume with these options, which we remove. Podman puts file systems
    without any limit on /tmp, /var/tmp and /run where nothing else is mounted, so each of them gets a mount.
    """

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
        self.tmpfs[_SECRETS] = f"{small},mode=0755"
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


def sweep_volumes(engine: Engine) -> None:
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


# ── the user ─────────────────────────────────────────────────────────────────────────────────────────


class Account:
    """The user of a container: a number of its own, under the name `user`, in passwd and group files of our own.

    A container shares the host's kernel, which counts processes by user: with one number for all, a sandbox would meet
    the limits of another sandbox, and of the host's own user of that number. The files are below our state directory
    until `remove`.
    """

    def __init__(self, engine: Engine, made: Skeleton, writable: tuple[str, ...]) -> None:
        self.uid = _owner_of(writable) or _new_uid(engine)
        self._folder = f"{state.disk_directory('accounts')}/{process_id.name()}_{os.urandom(4).hex()}"
        self._texts = {name: _with_uid(text, self.uid) for name, text in _user_files(made)}
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


def _user_files(made: Skeleton) -> list[tuple[str, str]]:
    """Return path and text of the plan's passwd and group files, or of the files in the image's own /etc."""
    found = [(name, made.files[name]) for name in _USER_FILES if name in made.files]
    shown = [bind.source for bind in made.binds if bind.target == "/etc"]
    for name in _USER_FILES if shown else ():
        text = _read_file(shown[-1], os.path.basename(name))
        if text is not None:
            found.append((name, text))
    return found


def _read_file(folder: str, name: str) -> str | None:
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


def _owner_of(writable: tuple[str, ...]) -> int:
    """Return the owner of the writable host folders; 0 when there are none or root owns them: no guest runs as root."""
    return os.stat(writable[0]).st_uid if writable else 0


def _new_uid(engine: Engine) -> int:
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


def sweep_accounts() -> None:
    """Remove the account folders of library processes that are gone."""
    root = state.disk_directory("accounts")
    for name in os.listdir(root):
        if process_id.is_dead(name.partition("_")[0]):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


# ── the check before the start ───────────────────────────────────────────────────────────────────────


def targets(wanted: Any) -> list[str]:
    """Return every path inside at which a host configuration mounts something."""
    return [*(str(mount["Target"]) for mount in wanted["Mounts"]), *wanted["Tmpfs"]]


def check(engine: Engine, identity: str, wanted: Any) -> None:
    """Raise UnsupportedError where a container that was not started yet is not what was asked for.

    `wanted`: the host configuration it was created with.
    """
    found = engine.api.inspect_container(identity)
    wrong = _wrong(engine, found, wanted)
    if wrong is not None:
        raise UnsupportedError(
            f"{engine.name} did not make the container as it was asked to: {wrong}",
            code="engine-settings",
            fix=f'remove this from {engine.name}\'s own settings, such as containers.conf, or backend="process"',
        )


def _wrong(engine: Engine, found: Any, wanted: Any) -> str | None:
    """Return the first difference from what was asked for; None when there is none."""
    host = found.get("HostConfig") or {}
    for word in (*_SAME, *(_LIMITS[name] for name in _LIMITS if name in engine.limits)):
        if host.get(word) != wanted.get(word, False):
            return f"{word} is {host.get(word)!r:.60}, not {wanted.get(word, False)!r:.60}"
    for word in _NOTHING:
        if host.get(word):
            return f"it has {word} {host[word]!r:.200}"
    for word in _OWN_NAMESPACE:
        if str(host.get(word) or "").startswith(("host", "container:", "ns:")):
            return f"{word} is {host[word]!r:.60}"
    meant = targets(wanted)
    shown = [mount for mount in found.get("Mounts") or () if mount.get("Destination") not in meant]
    if shown:
        return f"it shows {shown[0].get('Source')!r:.200} at {shown[0].get('Destination')!r:.200}"
    return None
