"""Starts sandboxes under runsc: a bundle, a cgroup of our own around the whole of gVisor, and guestd inside."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time

from ringfence.backends.engine import guestd_bundle, mount_identity
from ringfence.backends.engine.box import WalledBox
from ringfence.backends.engine.rootfs import skeleton
from ringfence.backends.gvisor import bundle, runsc
from ringfence.host import process_id, state
from ringfence.host.cgroups import find
from ringfence.host.cgroups.base import GroupLimits
from ringfence.plan.controls import ALL_ON
from ringfence.results import Usage
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.host.cgroups.base import Group
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import ProcessPlan
    from ringfence.policy.model import Limits
    from ringfence.results import Enforcement

_START_S = 30.0
_CHANNEL = 1 << 21  # one piece of the relay's
_END_S = 10.0
_KERNEL_BYTES = 160 << 20  # what the sentry and its gofer take themselves, beside the guest
# gVisor's own threads, and its stand-ins on the host: a process for each address space inside and a thread of it for
# each thread of the sentry that ran it. One too few is a panic of the whole sandbox; the guest's are counted inside.
_KERNEL_PROCESSES = 512
_STAND_INS = 16
_RLIMITS = ("CORE", "MEMLOCK", "NOFILE", "CPU", "DATA")  # that gVisor lets one set; its others are 0 or its own
_JOIN = 'for fd in $JOIN; do echo 0 > "/proc/self/fd/$fd" || exit 125; done; unset JOIN; '
_MOUNT = 'mount -n -a -T "$FSTAB" || exit 125; unset FSTAB; '
_OWN_MOUNTS = ("/usr/bin/unshare", "--mount", "--propagation=slave")


class GvisorWall:
    """One runsc container."""

    def __init__(self, found: runsc.Runsc, folder: str, group: Group | None, made: bundle.Made) -> None:
        self._found = found
        self._folder = folder
        self._group = group
        self._made = made
        self._id = os.path.basename(folder)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by remove()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        fast_stdlib.widen(ours, theirs, room=_CHANNEL)
        joins = self._group.join_fds() if self._group is not None else []
        first = f'{_JOIN}{_MOUNT if self._made.mounted else ""}exec "$@"'
        command = [
            *(_OWN_MOUNTS if self._made.mounted else ()),
            *("/bin/sh", "-c", first, "sh", self._found.path, f"--root={self._folder}/state"),
            *(f"--platform={self._found.platform}", f"--network={self._made.network}", "--ignore-cgroups"),
            *runsc.rootless(),
            *("run", f"--bundle={self._folder}", self._id),
        ]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "JOIN": " ".join(map(str, joins)),
                    "FSTAB": f"{self._folder}/fstab",
                },
                pass_fds=joins,
                start_new_session=True,
            )
        for fd in joins:
            os.close(fd)
        return ours

    def said(self) -> str:
        self._errors.seek(0)
        text = self._errors.read(1 << 14).decode("utf-8", "replace").strip()
        return text.rpartition("\n")[2][:300]

    def how_it_ended(self) -> str:
        status = self._process.poll() if self._process is not None else None
        return "runsc runs on, and its stream is cut" if status is None else f"runsc ended with status {status}"

    def usage(self) -> tuple[Usage, int]:
        if self._group is None:
            return Usage(), 0
        used = self._group.usage()
        return Usage(cpu_s=used.cpu_s, memory_peak_bytes=used.memory_peak_bytes), used.oom_kills or 0

    @property
    def can_freeze(self) -> bool:
        return self._group is not None and self._group.can_freeze

    def freeze(self) -> bool:
        return self._group is not None and self._group.freeze()

    def thaw(self) -> None:
        if self._group is not None:
            self._group.thaw()

    def kill(self) -> None:
        """The sentry and the gofer die with `runsc run`; the cgroup takes what would not."""
        if self._group is not None:
            self._group.thaw()
        if self._process is not None and self._process.poll() is None:
            try:
                os.killpg(self._process.pid, 9)
            except ProcessLookupError:
                return

    def forget(self) -> None:
        self._errors.close()

    def remove(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._errors.close()
        if self._group is not None:
            self._group.remove()
        shutil.rmtree(self._folder, ignore_errors=True)


_lock = threading.Lock()
_trees: list[find.Tree | None] = []


def _tree() -> find.Tree | None:
    with _lock:
        if not _trees:
            sweep()
            _trees.append(find.find())
        return _trees[0]


def _root() -> str:
    return state.disk_directory("gvisor")


def sweep() -> None:
    """Bundles of processes that are gone. Their sandboxes ended with them."""
    root = _root()
    for name in os.listdir(root):
        owner = name.partition("_")[0]
        if process_id.is_dead(owner):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


def launch(
    plan: ProcessPlan,
    limits: Limits,
    enforcement: Enforcement,
    *,
    platform: str | None,
    python: str | None,
    env: Mapping[str, str],
    shares: bool = False,
    exact: bool = False,
    controls: Controls = ALL_ON,
) -> WalledBox:
    """A sandbox that has run nothing.

    `python`: that guestd runs in, as `runtime.command` takes it. `shares`: it sees host files that others may change.
    `exact`: its files are counted, which takes root.
    Raises UnsupportedError, StartTimeoutError or SandboxLostError.
    """
    found = runsc.find(platform)
    made = skeleton(plan, "gvisor")
    tree = _tree()
    name = f"{process_id.name()}_{os.urandom(4).hex()}"
    folder = f"{_root()}/{name}"
    guestd = guestd_bundle.folder(state.disk_directory("runtime"))
    group = None
    wall: GvisorWall | None = None
    box: WalledBox | None = None
    meaning: mount_identity.Meaning | None = None
    try:
        own = {"PATH": "/usr/bin:/bin", "HOME": "/workspace", "LC_ALL": "C"}  # guestd's, which looks for no locale then
        network = plan.box["outlets"] is not None
        bundled = bundle.make(
            folder,
            made,
            limits,
            guestd=guestd,
            python=python,
            env=own,
            network=network,
            mounted=os.geteuid() == 0,
            shares=shares,
            exact=exact,
            controls=controls,
        )
        meaning = mount_identity.Meaning(bundled.binds, flags=False)
        if tree is not None and plan.cgroup:
            group = tree.create(name.replace("_", "-"), room_for(plan))
        wall = GvisorWall(found, folder, group, bundled)
        box = WalledBox("gvisor", wall, wall.start(), enforcement=enforcement, env=env)
        box.begin(fence(plan), time.monotonic() + _START_S, outlets=plan.box["outlets"])
        if meaning.meant is not None:
            meaning.check(mount_identity.gofer_of(name))
    except BaseException:
        if box is not None:
            box.close()
            box.wait_destroyed(_END_S)
        elif wall is not None:
            wall.kill()
            wall.remove()
        else:
            if group is not None:
                group.remove()
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if meaning is not None:
            meaning.close()
    return box


def room_for(plan: ProcessPlan) -> GroupLimits:
    """What the guest and gVisor itself may use on the host, together."""
    return GroupLimits(plan.memory_bytes + _KERNEL_BYTES, plan.processes * _STAND_INS + _KERNEL_PROCESSES, plan.cpus)


def fence(plan: ProcessPlan) -> dict[str, object]:
    """What is left for guests to give up inside: the engine has dropped capabilities and made the namespaces."""
    limits = plan.fence["rlimits"]
    assert isinstance(limits, dict)
    kept = {name: value for name, value in limits.items() if name in _RLIMITS}
    own = {"capabilities": False, "namespace_limits": False, "cgroup_namespace": False, "affinity": []}
    return {**plan.fence, **own, "rlimits": kept}
