"""Starts sandboxes in a container engine: an image with the plan's skeleton, hardened, guestd as PID 1."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ringfence.backends.container import account, disks, hardening, skeletons
from ringfence.backends.container import engine as engines
from ringfence.backends.container.counters import Counters
from ringfence.backends.container.egress import RESOLVER, Egress
from ringfence.backends.container.stream import Stream
from ringfence.backends.process import owners, state
from ringfence.backends.walled import runtime
from ringfence.backends.walled.box import WalledBox
from ringfence.backends.walled.skeleton import skeleton
from ringfence.errors import SandboxLostError
from ringfence.results import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    from ringfence.backends.container.engine import Engine
    from ringfence.backends.walled.skeleton import Skeleton
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.model import Limits
    from ringfence.results import Enforcement

    Loosen: TypeAlias = Callable[[dict[str, Any]], None]

_START_S = 60.0
_END_S = 20.0


class ContainerWall:
    """One container."""

    def __init__(self, engine: Engine, identity: str, stream: Stream, undo: contextlib.ExitStack) -> None:
        self._undo = undo
        self._engine = engine
        self._id = identity
        self._stream = stream
        self.channel = stream.ours
        self._pid = 0
        self._paused = False
        self._counters: Counters | None = None
        self._ended = threading.Lock()

    @property
    def pid(self) -> int:
        """guestd's, as this host counts. Asked for once, when it is needed: it costs a request."""
        if not self._pid:
            self._pid = int(self._state().get("Pid") or 0)
        return self._pid

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._engine.api.inspect_container(self._id)["State"]
        return found

    def said(self) -> str:
        return self._stream.said.rpartition("\n")[2][:300]

    def how_it_ended(self) -> str:
        """Asked for when the channel is gone."""
        try:
            state = self._state()
        except Exception:  # noqa: BLE001  # as in `freeze`
            return f"{self._engine.name} does not answer any more, or has forgotten the container"
        if state.get("OOMKilled"):
            return f"{self._engine.name} says that its memory limit ended it"
        if state.get("Running"):
            return f"{self._engine.name} cut the stream to it"
        return f"{self._engine.name} says that it ended with status {int(state.get('ExitCode') or 0)}"

    def usage(self) -> tuple[Usage, int]:
        if self._counters is None:
            try:
                self._counters = Counters(self.pid)
            except Exception:  # noqa: BLE001  # as in `freeze`
                return Usage(), 0
        return self._counters.read()

    can_freeze = True

    def freeze(self) -> bool:
        try:
            self._engine.api.pause(self._id)
        except Exception as error:  # noqa: BLE001  # the SDK's errors are many; each means the same here
            self._paused = "already paused" in str(error).lower()
            return self._paused
        self._paused = True
        return True

    def thaw(self) -> None:
        self._paused = False
        _quietly(self._engine.api.unpause, self._id)

    def kill(self) -> None:
        self._stream.close()
        if self._paused:
            self.thaw()  # Podman kills none that stands still
        _quietly(self._engine.api.kill, self._id)

    def remove(self) -> None:
        with self._ended:
            self._undo.close()


def _quietly(call: Any, *args: object, **kwargs: object) -> None:
    """For what may be gone already, or an engine that is: the sweep of the next start sees to the rest."""
    try:
        call(*args, **kwargs)
    except Exception:  # noqa: BLE001  # as above
        return


_swept: set[str] = set()
_owed: dict[str, list[str]] = {}  # by engine: containers of ours that it could not remove, as it was gone


def _remove(engine: Engine, identity: str) -> None:
    import docker.errors

    try:
        engine.api.remove_container(identity, force=True, v=True)
    except docker.errors.NotFound:
        return
    except Exception:  # noqa: BLE001  # as in `freeze`
        _owed.setdefault(engine.socket, []).append(identity)


def sweep(engine: Engine) -> None:
    """Containers of processes that are gone, and those of ours that a lost engine could not remove."""
    for identity in _owed.pop(engine.socket, ()):
        _remove(engine, identity)
    if engine.socket in _swept:
        return
    _swept.add(engine.socket)
    for found in engine.api.containers(all=True, filters={"label": disks.LABEL}):
        if owners.is_dead(found.get("Labels", {}).get(disks.LABEL, "")):
            if found.get("State") == "paused":
                _quietly(engine.api.unpause, found["Id"])  # Podman removes none that stands still
            _quietly(engine.api.remove_container, found["Id"], force=True, v=True)
    account.sweep()
    disks.sweep(engine)
    skeletons.sweep(engine)


def launch(
    engine: Engine,
    plan: ProcessPlan,
    limits: Limits,
    enforcement: Enforcement,
    *,
    oci_runtime: str | None,
    writable: tuple[str, ...] = (),
    loosen: Loosen | None = None,
) -> WalledBox:
    """A sandbox that has run nothing. `writable`: host paths that the guest may write to.

    `loosen` is for our own attacks, which leave out one control: it changes what the container is created with.

    Raises SandboxLostError when the engine fails, UnsupportedError, …
    """
    made = skeleton(plan, "container")
    egress = Egress(plan, made.files.get(RESOLVER))
    try:
        return _launch(
            engine, made, plan, limits, enforcement, egress, oci_runtime=oci_runtime, writable=writable, loosen=loosen
        )
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
    writable: tuple[str, ...],
    loosen: Loosen | None,
) -> WalledBox:
    import docker.errors
    import requests.exceptions

    try:
        sweep(engine)
        image = skeletons.of(engine, made)
        guestd = runtime.folder(state.disk_directory("runtime"))
        shown = hardening.mounts(made, guestd) + egress.mounts()
        wall = _start(engine, image, made, plan, limits, shown, oci_runtime, writable, loosen)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        engines.forget(engine)
        skeletons.forget(engine)
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


def _start(
    engine: Engine,
    image: str,
    made: Skeleton,
    plan: ProcessPlan,
    limits: Limits,
    shown: list[Any],
    oci_runtime: str | None,
    writable: tuple[str, ...],
    loosen: Loosen | None,
) -> ContainerWall:
    with contextlib.ExitStack() as undo:
        user = account.Account(engine, made.files, writable)
        undo.callback(user.remove)
        room = disks.Disks(engine, limits, user.uid)
        undo.callback(room.remove)
        config = hardening.host_config(engine, [*shown, *user.mounts()], room, plan, limits, oci_runtime)
        identity = _create(engine.api, image, config, user.uid, loosen)
        undo.callback(_remove, engine, identity)
        attached = engine.api.attach_socket(identity, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        stream = Stream(attached)
        undo.callback(stream.close)
        engine.api.start(identity)
        return ContainerWall(engine, identity, stream, undo.pop_all())


def _create(api: Any, image: str, config: Any, uid: int, loosen: Loosen | None) -> str:
    settings: dict[str, Any] = {
        "command": None,
        "entrypoint": runtime.command(),
        "user": f"{uid}:{uid}",
        "working_dir": "/",
        "environment": {"PATH": "/usr/bin:/bin", "HOME": "/workspace"},
        "stdin_open": True,
        "tty": False,
        "hostname": "ringfence",
        "network_disabled": True,
        "labels": {disks.LABEL: owners.name()},
        "host_config": config,
        "name": f"ringfence-{os.getpid()}-{os.urandom(4).hex()}",
    }
    if loosen is not None:
        loosen(settings)
    return str(api.create_container(image, **settings)["Id"])


def fence(plan: ProcessPlan) -> Mapping[str, object]:
    """What is left for guests to give up inside: the engine has dropped capabilities and made the namespaces."""
    own = {"capabilities": False, "namespace_limits": False, "cgroup_namespace": False, "affinity": []}
    return {**plan.fence, **own}
