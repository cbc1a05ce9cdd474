"""Starts sandboxes in a container engine: an image with the plan's skeleton, hardened, guestd as PID 1."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import time

from ringfence.backends.container import engine as engines
from ringfence.backends.container.counters import Counters
from ringfence.backends.container.egress import RESOLVER, Egress
from ringfence.backends.container.stream import Stream
from ringfence.backends.process import owners, state
from ringfence.backends.walled import runtime
from ringfence.backends.walled.box import WalledBox
from ringfence.backends.walled.skeleton import skeleton
from ringfence.errors import SandboxLostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ringfence.backends.container.engine import Engine
    from ringfence.backends.walled.skeleton import Skeleton
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.model import Limits
    from ringfence.results import Enforcement, Usage

_START_S = 60.0
_END_S = 20.0
_OURS = 12  # processes of ours inside, beside the guest's
_GUESTD_BYTES = 48 << 20  # what guestd itself takes
LABEL = "ringfence.owner"
_OWN = ("proc", "dev", "tmp", "workspace", "sys", ".ringfence")


class ContainerWall:
    """One container."""

    def __init__(self, engine: Engine, identity: str, stream: Stream) -> None:
        self._engine = engine
        self._id = identity
        self._stream = stream
        self.channel = stream.ours
        self.pid = int(engine.api.inspect_container(identity)["State"].get("Pid") or 0)
        self._counters = Counters(self.pid)
        self._ended = threading.Lock()

    def said(self) -> str:
        return self._stream.said.rpartition("\n")[2][:300]

    def usage(self) -> tuple[Usage, int]:
        return self._counters.read()

    can_freeze = True

    def freeze(self) -> bool:
        try:
            self._engine.api.pause(self._id)
        except Exception as error:  # noqa: BLE001  # the SDK's errors are many; each means the same here
            return "already paused" in str(error).lower()
        return True

    def thaw(self) -> None:
        _quietly(self._engine.api.unpause, self._id)

    def kill(self) -> None:
        self._stream.close()
        _quietly(self._engine.api.kill, self._id)

    def remove(self) -> None:
        with self._ended:
            _quietly(self._engine.api.remove_container, self._id, force=True, v=True)


def _quietly(call: Any, *args: object, **kwargs: object) -> None:
    """For what may be gone already, or an engine that is: the sweep of the next start sees to the rest."""
    try:
        call(*args, **kwargs)
    except Exception:  # noqa: BLE001  # as above
        return


_swept: set[str] = set()


def sweep(engine: Engine) -> None:
    """Containers of processes that are gone."""
    if engine.socket in _swept:
        return
    _swept.add(engine.socket)
    for found in engine.api.containers(all=True, filters={"label": LABEL}):
        if owners.is_dead(found.get("Labels", {}).get(LABEL, "")):
            _quietly(engine.api.remove_container, found["Id"], force=True, v=True)


def launch(
    engine: Engine, plan: ProcessPlan, limits: Limits, enforcement: Enforcement, *, oci_runtime: str | None
) -> WalledBox:
    """A sandbox that has run nothing. Raises SandboxLostError when the engine fails, UnsupportedError, …"""
    made = skeleton(plan, "container")
    egress = Egress(plan, made.files.get(RESOLVER))
    try:
        return _launch(engine, made, plan, limits, enforcement, egress, oci_runtime=oci_runtime)
    finally:
        egress.close()


def _launch(
    engine: Engine,
    made: Skeleton,
    plan: ProcessPlan,
    limits: Limits,
    enforcement: Enforcement,
    egress: Egress,
    *,
    oci_runtime: str | None,
) -> WalledBox:
    import docker.errors
    import requests.exceptions

    try:
        sweep(engine)
        image = _image(engine, made)
        guestd = runtime.folder(state.disk_directory("runtime"))
        config = _host_config(engine.api, _mounts(made, guestd) + egress.mounts(), plan, limits, oci_runtime)
        wall = _start(engine, image, config)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        engines.forget(engine)
        raise SandboxLostError(
            f"{engine.name} failed: {str(error)[:300]}", code="engine", fix=f"is {engine.name} running?"
        ) from None
    box = WalledBox("container", wall, wall.channel, enforcement=enforcement, env=plan.env)
    try:
        box.begin(fence(plan), time.monotonic() + _START_S, outlets=egress.outlets, door=egress.door)
        box.listeners = egress.listeners(wall.pid, guestd)
    except BaseException:
        box.close()
        box.wait_destroyed(_END_S)
        raise
    return box


def _start(engine: Engine, image: str, config: Any) -> ContainerWall:
    api = engine.api
    identity = api.create_container(
        image,
        command=None,
        entrypoint=runtime.command(),
        user="1000:1000",
        working_dir="/",
        environment={"PATH": "/usr/bin:/bin", "HOME": "/workspace"},
        stdin_open=True,
        tty=False,
        hostname="ringfence",
        network_disabled=True,
        labels={LABEL: owners.name()},
        host_config=config,
        name=f"ringfence-{os.getpid()}-{os.urandom(4).hex()}",
    )["Id"]
    try:
        attached = api.attach_socket(identity, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        stream = Stream(attached)
        api.start(identity)
    except BaseException:
        _quietly(api.remove_container, identity, force=True, v=True)
        raise
    return ContainerWall(engine, identity, stream)


def _host_config(api: Any, mounts: list[Any], plan: ProcessPlan, limits: Limits, oci_runtime: str | None) -> Any:
    memory = plan.memory_bytes + _GUESTD_BYTES
    shm = min(64 << 20, limits.memory // 2)
    return api.create_host_config(
        network_mode="none",
        read_only=True,
        tmpfs={
            "/tmp": _tmpfs(limits, "1777"),  # inside
            "/workspace": _tmpfs(limits, "0755"),
        },
        mounts=mounts,
        shm_size=shm,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=plan.processes + _OURS,
        nano_cpus=int(plan.cpus * 1_000_000_000),
        ulimits=[{"Name": "core", "Soft": 0, "Hard": 0}],
        log_config={"Type": "none", "Config": {}},
        ipc_mode="private",
        privileged=False,
        init=False,
        auto_remove=False,
        oom_kill_disable=False,
        **({"runtime": oci_runtime} if oci_runtime else {}),
    )


def _tmpfs(limits: Limits, mode: str) -> str:
    inodes = limits.disk_files + 1
    return f"rw,exec,nosuid,nodev,size={limits.disk},nr_inodes={inodes},mode={mode},uid=1000,gid=1000"


def _mounts(made: Skeleton, guestd: str) -> list[Any]:
    from docker.types import Mount

    hidden = [Mount(target, _empty(made, target), type="bind", read_only=True) for target in made.hidden]
    shown = [Mount(bind.target, bind.source, type="bind", read_only=not bind.writable) for bind in made.binds]
    return [*shown, *hidden, Mount(runtime.INSIDE, guestd, type="bind", read_only=True)]


def _empty(made: Skeleton, target: str) -> str:
    """An empty folder or file of ours that hides it."""
    folder = state.disk_directory("empty")
    for bind in reversed(made.binds):
        if target.startswith(f"{bind.target}/") and not os.path.isdir(bind.source + target[len(bind.target) :]):
            path = f"{folder}/file"
            with open(path, "ab"):
                return path
    os.makedirs(f"{folder}/folder", 0o555, exist_ok=True)
    return f"{folder}/folder"


def _image(engine: Engine, made: Skeleton) -> str:
    """The skeleton as an image of the engine's own; made once."""
    data = _tar(made)
    tag = hashlib.sha256(data).hexdigest()[:24]
    name = f"ringfence-skeleton:{tag}"
    import docker.errors

    try:
        engine.api.inspect_image(name)
    except docker.errors.ImageNotFound:
        engine.api.import_image_from_data(data, repository="ringfence-skeleton", tag=tag)
    return name if engine.name == "docker" else f"localhost/{name}" if _is_local(engine, name) else name


def _is_local(engine: Engine, name: str) -> bool:
    import docker.errors

    try:
        engine.api.inspect_image(f"localhost/{name}")
    except docker.errors.ImageNotFound:
        return False
    return True


def _tar(made: Skeleton) -> bytes:
    """The same skeleton gives the same bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        folders = set(_OWN) | set(made.folders)
        for path in (*made.folders, *made.files, *made.links):
            parts = path.split("/")[:-1]
            folders |= {"/".join(parts[: n + 1]) for n in range(len(parts))}
        for path in sorted(folders):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, text in sorted(made.files.items()):
            entry = tarfile.TarInfo(path)
            content = text.encode()
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
        for path, target in sorted(made.links.items()):
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return file.getvalue()


def fence(plan: ProcessPlan) -> Mapping[str, object]:
    """What is left for guests to give up inside: the engine has dropped capabilities and made the namespaces."""
    own = {"capabilities": False, "namespace_limits": False, "cgroup_namespace": False, "affinity": []}
    return {**plan.fence, **own}
