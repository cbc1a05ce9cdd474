"""The gVisor backend: `runsc` on an OCI bundle, inside a cgroup of our own, with guestd inside."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time

from ringfence.backends.engine import guestd_bundle, mount_identity
from ringfence.backends.engine.backend import (
    engine_plan,
    guarded,
    network_control,
    own_kernel_fence,
    own_kernel_room,
    with_enforcement,
)
from ringfence.backends.engine.box import EngineBox
from ringfence.backends.engine.rootfs import skeleton
from ringfence.backends.gvisor import bundle, runsc
from ringfence.backends.linux import check_pause, facts_with, interpreter
from ringfence.errors import Missing, UnsupportedError
from ringfence.host import cgroups, lifecycle, process_id, state
from ringfence.plan.controls import ALL_ON
from ringfence.results import Control, Usage
from ringfence.shared import fast_stdlib
from ringfence.values import Struct, final, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from ringfence.backends.contract import BackendReport
    from ringfence.host.cgroups.base import Group
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import FoundImage, HostFacts, LinuxPlan
    from ringfence.policy.model import Policy
    from ringfence.results import Enforcement
    from ringfence.values import Isolation

_START_S = 30.0
_CHANNEL = 1 << 21  # room for one piece of the relay
_END_S = 10.0
_JOIN = 'for fd in $JOIN; do echo 0 > "/proc/self/fd/$fd" || exit 125; done; unset JOIN; '
_MOUNT = 'mount -n -a -T "$FSTAB" || exit 125; unset FSTAB; '
_OWN_MOUNTS = ("/usr/bin/unshare", "--mount", "--propagation=slave")


@final
class GvisorFacts(Struct):
    """The facts of this host that the gVisor backend plans with."""

    host: HostFacts
    runsc: str  # the path of the program


@final
class Gvisor(Struct):
    """A user-space kernel: `runsc`, directly on an OCI bundle."""

    platform: Literal["kvm", "systrap", "ptrace"] | None = None

    @property
    def name(self) -> str:
        return "gvisor"

    @property
    def isolation(self) -> Isolation:
        return "own-kernel"

    def facts(self) -> GvisorFacts:
        """Return what this host can do. The first launch tries which platform works."""
        return GvisorFacts(facts_with(_tree_for_facts()), runsc.installed())

    def plan(self, policy: Policy, image: FoundImage, facts: GvisorFacts) -> LinuxPlan:
        """Return what a launch would do. Raises PolicyError or UnsupportedError for what cannot be kept here."""
        plan = engine_plan(self.name, policy, image, facts.host)
        if not facts.host.as_root and any(mount.mode == "rw" for mount in policy.mounts):
            raise UnsupportedError(
                "without root the guest of gVisor has no rights on the host, and can write to no folder there",
                code="mounts",
                missing=[Missing("gvisor", "root, for a writable mount", 'backend="process"')],
            )
        check_pause(policy, facts.host)
        return with_enforcement(self.name, plan, _enforcement(plan))

    def launch(self, plan: LinuxPlan, *, controls: Controls = ALL_ON) -> EngineBox:
        """Start a sandbox that has run nothing. Raises UnsupportedError, StartTimeoutError or SandboxLostError."""
        made = controls.plan(plan)
        found = runsc.find(self.platform)

        # The caller's Python runs guestd there: a second interpreter would double the time of a start.
        return guarded(made, lambda: _start(made, found, plan.enforcement, controls), starts_python_anew=made.foreign)

    def doctor(self) -> BackendReport:
        """Look for runsc and run a sandbox. Takes a second or two where no platform is known to work."""
        from ringfence.doctor.engines import examine_gvisor

        return examine_gvisor()


def _enforcement(plan: LinuxPlan) -> Enforcement:
    if plan.policy.strict and plan.as_root:
        disk = Control("gVisor: tmpfs of the host, size and inodes", "full")
    else:
        how = "bytes; files are counted where the policy is strict, as root"
        disk = Control("gVisor: size of its file systems", "weaker", how)
    return replace(
        plan.enforcement,
        files=Control("gVisor: gofer limited to the image, read-only root", "full"),
        network=network_control("gVisor: no network stack but loopback", plan),
        processes=Control("gVisor: its pids controller", "full"),
        syscalls=Control("gVisor: a kernel of its own in user space", "full"),
        privileges=Control("gVisor: uid 1000, no capabilities, no_new_privs", "full"),
        time=Control("clock of guestd inside, and of the host behind it", "full"),
        disk=disk,
    )


class GvisorWall:
    """A runsc container, as `EngineBox` uses it."""

    def __init__(self, found: runsc.Runsc, folder: str, group: Group | None, made: bundle.MadeBundle) -> None:
        self._found = found
        self._folder = folder
        self._group = group
        self._made = made
        self._id = os.path.basename(folder)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by remove()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start runsc in its cgroup and mounts. Return the host's end of the channel to guestd."""
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
        try:
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
        except BaseException:  # no process left, or no memory
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in joins:
                os.close(fd)
        return ours

    def said(self) -> str:
        """Return the last line that runsc wrote to its error stream."""
        self._errors.seek(0)
        text = self._errors.read(1 << 14).decode("utf-8", "replace").strip()
        return text.rpartition("\n")[2][:300]

    def how_it_ended(self) -> str:
        status = self._process.poll() if self._process is not None else None
        return "runsc still runs, and its stream is cut" if status is None else f"runsc ended with status {status}"

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
        """Kill runsc, and with it the sentry and the gofer. Removing the cgroup kills what is left."""
        if self._group is not None:
            self._group.thaw()
        if self._process is not None and self._process.poll() is None:
            try:
                os.killpg(self._process.pid, 9)
            except ProcessLookupError:
                return

    def after_fork(self) -> None:
        self._errors.close()

    def remove(self) -> None:
        try:
            self._end_process()
        finally:
            self._errors.close()
            if self._group is not None:
                self._group.remove()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end_process(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)


_lock = threading.Lock()
_trees: dict[str, cgroups.Tree | None] = {}  # by the name of this process, which is another after a fork


def _tree() -> cgroups.Tree | None:
    """Return the cgroups of this process's sandboxes; they are removed when it exits."""
    name = process_id.name()
    with _lock:
        if name not in _trees:
            sweep()
            _trees[name] = cgroups.find()
            lifecycle.at_exit(lifecycle.SANDBOXES, _close_tree)
        return _trees[name]


def _tree_for_facts() -> cgroups.Tree | None:
    """Return the cgroups that a launch would use. It uses no systemd scope: only the process backend's zygote can."""
    name = process_id.name()
    return _trees[name] if name in _trees else cgroups.find()


def _close_tree() -> None:
    tree = _trees.pop(process_id.name(), None)
    if tree is not None:
        tree.close()


def _root() -> str:
    return state.disk_directory("gvisor")


def sweep() -> None:
    """Remove the bundles of library processes that are gone: a sandbox ends with its process."""
    root = _root()
    for name in os.listdir(root):
        owner = name.partition("_")[0]
        if process_id.is_dead(owner):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


def _start(plan: LinuxPlan, found: runsc.Runsc, enforcement: Enforcement, controls: Controls) -> EngineBox:
    """Start a box that has run nothing. Raises UnsupportedError, StartTimeoutError or SandboxLostError."""
    policy = plan.policy
    made = skeleton(plan, "gvisor")
    tree = _tree()
    name = f"{process_id.name()}_{os.urandom(4).hex()}"
    folder = f"{_root()}/{name}"
    guestd = guestd_bundle.folder(state.disk_directory("runtime"))
    group = None
    wall: GvisorWall | None = None
    box: EngineBox | None = None
    meaning: mount_identity.Meaning | None = None
    try:
        bundled = bundle.make(
            folder,
            made,
            policy.limits,
            guestd=guestd,
            python=interpreter().executable if policy.commands == "any" and not plan.foreign else None,
            env={"PATH": "/usr/bin:/bin", "HOME": "/workspace", "LC_ALL": "C"},  # LC_ALL spares a search for a locale
            network=plan.outlets is not None,
            mounted=os.geteuid() == 0,
            shares=bool(policy.mounts),
            exact=policy.strict,
            controls=controls,
        )
        meaning = mount_identity.Meaning(bundled.binds, flags=False)
        if tree is not None and plan.cgroup:
            group = tree.create(name.replace("_", "-"), own_kernel_room(plan))
        wall = GvisorWall(found, folder, group, bundled)
        box = EngineBox("gvisor", wall, wall.start(), enforcement=enforcement, env=plan.env)
        box.begin(own_kernel_fence(plan), time.monotonic() + _START_S, outlets=plan.outlets, gvisor=True)
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
