"""Chooses a backend for a policy and makes its plan. Starts nothing before `launch`."""

from __future__ import annotations

import os
import sys
import time

from ringfence.errors import Missing, PolicyError, SandboxError, UnsupportedError
from ringfence.plan.controls import ALL_ON
from ringfence.plan.model import Plan, make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends import Backend
    from ringfence.backends.contract import Box, Launcher, Outlet
    from ringfence.backends.process.box import ProcessBox
    from ringfence.backends.process.pool import Pool
    from ringfence.choosing import Others
    from ringfence.images.store import Used
    from ringfence.plan.model import ProcessPlan
    from ringfence.plan.rootfs.host_view import View
    from ringfence.plan.rootfs.image_view import Root
    from ringfence.plan.rootfs.interpreter import Interpreter
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.values import BackendName, Workspace

_NAMES = ("auto", "process", "container", "gvisor", "vm", "wasm", "remote")
_LATER = "is not in this version"
# Why "auto" takes the process backend where that keeps the policy.
NOT_CHOSEN = {
    "container": "it shares the host's kernel too, and starts more slowly",
    "gvisor": "the policy asks for no kernel of its own, and this one starts more slowly",
    "vm": _LATER,
    "wasm": _LATER,
}
# Plans of policies that name no host files, by policy and what else decides them: the same policy gives the same plan
# object, and with it the same template and spares.
_plans: dict[object, ProcessPlan] = {}
_MOST_PLANS = 64
_ATTEMPTS = 3
_AGAIN_S = 0.02
_last: list[tuple[tuple[object, ...], ProcessPlan]] = []  # the last that was found there, of the host's image


def is_command() -> bool:
    """Whether this process is a command of ours that makes one sandbox for one thing."""
    spawn = sys.modules.get("ringfence.host.zygote_start")
    return spawn is not None and bool(spawn.is_command())


class ProcessLauncher:
    """The process backend for one policy and image."""

    name = "process"

    def __init__(
        self,
        policy: Policy,
        image: Image,
        *,
        fresh: bool,
        rejected: dict[str, str],
        used: Used | None = None,
        workspace: Workspace = "auto",
    ) -> None:
        self.workspace: Workspace = workspace
        self.policy = policy
        self.image = image
        self.used = used  # None: the host's own
        self.fresh = fresh
        self._rejected = rejected
        self._plan: ProcessPlan | None = None
        self.twin_of: Outlet | None = None  # a sandbox whose placeholders and authority this one shares
        self.controls = ALL_ON

    def plan(self) -> Plan:
        made = self.process_plan()
        from ringfence.plan.build import explain_lines

        return make_plan("process", made.enforcement, self._rejected, explain_lines(made, self.policy))

    def process_plan(self) -> ProcessPlan:
        if self._plan is None:
            on_disk = self.workspace == "disk"
            self._plan = process_plan(self.policy, self.image, fresh=self.fresh, used=self.used, on_disk=on_disk)
            _check_held(self.policy, self.image, self._plan)
        return self._plan

    def launch(self, *, trial: bool = False) -> ProcessBox:
        """A sandbox that has run nothing. Raises UnsupportedError, or a SandboxError for what may pass.

        `trial`: nothing will run in it, so nobody is warned.
        """
        from ringfence import early

        early.begin("process", "host" if self.used is None else None, self.policy)
        try:
            return self._launch_whole(trial)
        finally:
            early.end_unneeded()

    def _launch_whole(self, trial: bool) -> ProcessBox:
        made = self.controls.plan(self.process_plan())
        if not trial:
            _warn_if_weaker(made)
        if made.box["outlets"] is None:
            return self._launch(made)
        from ringfence.gateway.service import service

        gateway = service()
        gateway.start()  # its thread imports what it needs while the sandbox is built
        box = self._launch(made)
        try:
            listeners, box.listeners = box.listeners, []
            box.outlet = gateway.register(self.policy.network, self.policy.secrets, listeners, self.twin_of)
            box.env = {**box.outlet.defaults, **box.env, **box.outlet.env}
        except BaseException:
            box.close()
            raise
        return box

    def _launch(self, made: ProcessPlan) -> ProcessBox:
        if made.disk == "folder":
            return self._launch_in_folder(made)
        return self._launch_plan(made)

    def _launch_in_folder(self, made: ProcessPlan) -> ProcessBox:
        from ringfence.host import loop_disk
        from ringfence.plan.build import with_folder

        path = loop_disk.make_folder()
        try:
            box = self._launch_plan(with_folder(made, path))
        except BaseException:
            loop_disk.remove_folder(path)
            raise
        box.on_destroyed.append(lambda: loop_disk.remove_folder(path))
        return box

    def _launch_plan(self, made: ProcessPlan) -> ProcessBox:
        if self.policy.mounts:
            return self._launch_with_mounts(made)
        return _pool(self.image).take(made)

    def _launch_with_mounts(self, made: ProcessPlan) -> ProcessBox:
        """What the host's folders hold may change between the plan and the start: then both are made again."""
        from ringfence.host.mount_guard import launch_guarded
        from ringfence.host.programs import note_writable

        note_writable(made.writable)
        for attempt in range(_ATTEMPTS):
            try:
                return launch_guarded(_pool(self.image), made)
            except SandboxError as error:
                if attempt == _ATTEMPTS - 1 or error.code != "start" or made.disk == "folder":
                    raise
            time.sleep(_AGAIN_S * (attempt + 1))
            self._plan = None
            made = self.controls.plan(self.process_plan())
        raise AssertionError("unreachable")


class AutoLauncher:
    """The process backend where it serves; else the fastest that keeps the policy, and every later one at once.

    Another one is taken for a fact of the host alone, which is an UnsupportedError. What may pass is a SandboxError: a
    helper of ours that was killed, a full table, a name that went (O27).
    """

    def __init__(self, process: ProcessLauncher, make: Callable[[BackendName, dict[str, str]], Launcher]) -> None:
        self._process = process
        self._taken: Launcher = process
        self._make = make
        self._others: Others | None = None
        if "ringfence.choosing" in sys.modules:
            from ringfence import choosing

            refused = choosing.known_refusal()
            if refused is not None:
                self._others = choosing.Others(refused, make)
                self._turn_to(self._others.planned())

    def _turn_to(self, taken: Launcher) -> None:
        taken.twin_of = self._taken.twin_of
        self._taken = taken

    @property
    def name(self) -> str:
        return self._taken.name

    @property
    def image(self) -> Image:
        return self._taken.image

    @property
    def twin_of(self) -> Outlet | None:
        return self._taken.twin_of

    @twin_of.setter
    def twin_of(self, outlet: Outlet | None) -> None:
        self._taken.twin_of = outlet

    def plan(self) -> Plan:
        if self._taken is not self._process:
            return self._taken.plan()
        from ringfence import choosing

        refused = choosing.refusal(self._process)
        if refused is not None:
            self._others = choosing.Others(refused, self._make)
            self._turn_to(self._others.planned())
        return self._taken.plan()

    def launch(self) -> Box:
        if self._others is None:
            try:
                return self._process.launch()
            except UnsupportedError as error:
                if error.code == "memory":
                    raise  # too little to start in: what others take beside the guest, the guest would have
                from ringfence import choosing

                choosing.remember(error, self._process.policy)
                self._others = choosing.Others(error, self._make)
        taken, box = self._others.launched()
        self._turn_to(taken)
        return box


def ask(policy: Policy) -> None:
    """Have the sandbox of a command made, which a launcher for the same policy then finds. Raises as that does."""
    image = _image("host")
    made = ProcessLauncher(policy, image, fresh=False, rejected={}).process_plan()
    if made.shared:
        _pool(image).ask(made)


def check_policy(policy: object) -> None:
    from ringfence.policy.model import Policy

    if not isinstance(policy, Policy):
        raise TypeError(f"policy is a Policy, not {type(policy).__name__}; see Policy.load() and Policy.preset()")


def prepare(
    backend: BackendName | Backend, image: str | Image, policy: Policy, *, workspace: Workspace = "auto"
) -> Launcher:
    """Raises PolicyError for a wrong argument, UnsupportedError when no backend here keeps the policy."""
    chosen = _image(image)
    used = _used(chosen)
    name, fresh = _backend(backend)
    if workspace not in ("auto", "memory", "disk"):
        raise PolicyError(f"unknown workspace {workspace!r}", key="workspace", fix="auto, memory or disk")
    if policy.network.allow or policy.network.rules:
        from ringfence.gateway.rules import check_network

        check_network(policy)
    if name == "auto" and policy.isolation == "own-kernel":
        name = "gvisor"
    if name in ("gvisor", "container"):
        return _walled(name, backend, policy, chosen, used, workspace)
    if name not in ("auto", "process"):
        raise UnsupportedError(
            f"the {name} backend {_LATER}", missing=[Missing(name, f"the {name} backend", 'backend="process"')]
        )
    if policy.isolation == "own-kernel":
        raise _shared_kernel(name)
    rejected = dict(NOT_CHOSEN) if name == "auto" else {}
    process = ProcessLauncher(policy, chosen, fresh=fresh, rejected=rejected, used=used, workspace=workspace)
    if name == "process":
        return process
    return AutoLauncher(process, lambda other, why: _walled(other, other, policy, chosen, used, workspace, why))


def _walled(
    name: BackendName,
    backend: BackendName | Backend,
    policy: Policy,
    image: Image,
    used: Used | None,
    workspace: Workspace,
    rejected: dict[str, str] | None = None,
) -> Launcher:
    """`rejected` is kept, not copied: who chooses writes there why."""
    from ringfence import walls

    if workspace == "disk":
        raise UnsupportedError(f"{name} has no workspace on disk", code="workspace", fix='workspace="memory"')
    if name == "container" and policy.isolation == "own-kernel" and not walls.has_own_kernel(backend):
        raise _shared_kernel(name)
    shared = "it shares the host's kernel"
    if rejected is None:
        rejected = {"process": shared, "container": shared, "vm": _LATER, "wasm": _LATER} if backend == "auto" else {}
    if name == "gvisor":
        under = walls.GvisorLauncher(policy, image, used=used, rejected=rejected)
        under.platform = getattr(backend, "platform", None)
        return under
    contained = walls.ContainerLauncher(policy, image, used=used, rejected=rejected)
    for part in ("engine", "socket", "runtime"):
        setattr(contained, part, getattr(backend, part, None))
    return contained


def _shared_kernel(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the policy asks for a kernel of its own (isolation = own-kernel); the {name} backend shares the host's",
        code="isolation",
        missing=[Missing(name, "a kernel of its own", 'isolation = "shared-kernel"')],
    )


_host_image: list[Image] = []  # the usual one, checked once


def _image(image: str | Image) -> Image:
    from ringfence.policy.image import Image as ImageValue

    if image == "host":
        if not _host_image:
            _host_image.append(ImageValue())
        return _host_image[0]
    chosen = ImageValue(image) if isinstance(image, str) else image
    if not isinstance(chosen, ImageValue):
        raise TypeError(f"image is a str or an Image, not {type(image).__name__}")
    if chosen.name == "host" and (chosen.pip or chosen.apt or chosen.npm):
        raise UnsupportedError(
            'packages cannot be added to the image "host": it is this machine itself',
            code="image-host",
            fix="install them for the host's Python, or build an image: ringfence image build NAME RECIPE.toml",
        )
    return chosen


def _used(image: Image) -> Used | None:
    if image.name == "host":
        return None
    from ringfence.images.store import use

    if image.preload:
        raise UnsupportedError(
            f'preload is for the image "host": image {image.name} starts its own Python for each run',
            code="preload",
            fix="leave preload out",
        )
    return use(image)


def _backend(backend: BackendName | Backend) -> tuple[BackendName, bool]:
    name = backend if isinstance(backend, str) else getattr(backend, "name", None)
    if name not in _NAMES:
        raise PolicyError(f"unknown backend {backend!r}", key="backend", fix=f"one of: {', '.join(_NAMES)}")
    return name, bool(getattr(backend, "fresh", False))


def process_plan(
    policy: Policy, image: Image, *, fresh: bool = False, used: Used | None = None, on_disk: bool = False
) -> ProcessPlan:
    key = (policy, image, fresh, os.geteuid(), None if used is None else (used.root, used.info.env), on_disk)
    if used is None and _last and _same(_last[0][0], key):
        return _last[0][1]
    found = _plans.get(key)
    if found is not None:
        if used is None:
            _last[:] = [(key, found)]
        return found
    from ringfence.plan.build import plan_process
    from ringfence.plan.host_facts import host_facts

    by = _pool(image).held_by
    facts = host_facts(memory_by=by.memory, cpu_by=by.cpu, cpu_time_by=by.cpu_time, pids_by=by.processes)
    root = used.root if used is not None else None
    seen = _views.get((os.geteuid(), root)) if _is_plain(policy) else None
    if seen is None:
        seen = _view(policy, root)
    if _is_plain(policy):
        seen = _views.setdefault((os.geteuid(), root), seen)
    env = image.env if used is None else {**used.info.env, **image.env}
    made = plan_process(policy, facts, seen, image_env=env, fresh=fresh, root=root)
    if on_disk:
        from ringfence.plan.build import on_disk as with_disk

        made = with_disk(made, policy.limits)
    if made.shared:
        while len(_plans) >= _MOST_PLANS:
            del _plans[next(iter(_plans))]
        return _plans.setdefault(key, made)  # another thread may have made it meanwhile: one plan, one shelf of spares
    return made


def _check_held(policy: Policy, image: Image, made: ProcessPlan) -> None:
    """What the process backend itself must hold. Raises UnsupportedError."""
    if policy.strict and made.enforcement.weaker:
        raise _too_weak(made)
    check_pause(policy, image)


def check_pause(policy: Policy, image: Image) -> None:
    """Where a cgroup of ours is what pauses. Raises UnsupportedError."""
    if policy.limits.on_idle != "pause":
        return
    tree = _pool(image).tree
    if tree is None or not tree.has_freezer:
        raise UnsupportedError(
            'on_idle = "pause" needs a cgroup with a freezer, and there is none here',
            code="pause",
            missing=[Missing("process", "a cgroup with a freezer", 'on_idle = "close"')],
        )


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """The very same policy and image: no need to hash all that is in them."""
    return one[0] is other[0] and one[1] is other[1] and one[2:] == other[2:]


_views: dict[tuple[int, Root | None], View] = {}  # of policies that name no host files, by caller's uid and image


def _view(policy: Policy, root: Root | None) -> View:
    from ringfence.plan.build import through_sources
    from ringfence.plan.rootfs.interpreter import home_directory

    state, stored = _own_directories(policy)
    of = {"state": state, "stored": stored}
    if root is None:
        from ringfence.plan.rootfs.host_view import view

        return through_sources(view(policy, interpreter(), uid=os.geteuid(), home=home_directory(), **of))
    from ringfence.plan.rootfs.image_view import image_view

    seen = image_view(policy, root, interpreter(), uid=os.geteuid(), home=home_directory(), **of)
    return through_sources(seen)


def release_image(digest: str) -> bool:
    """Drop what is kept ready for sandboxes of an image. False while one of them is there."""
    from ringfence.images.store import release

    mine = [(key, seen) for key, seen in _views.items() if key[1] is not None and f"/{digest}/" in key[1].tree]
    for key, made in list(_plans.items()):
        if made.foreign and any(f"/{digest}/" in str(op[1]) for op in made.template if op[0] == "bind"):
            if not _pool_of(()).release(made.template):
                return False
            del _plans[key]
    for view_key, _ in mine:
        del _views[view_key]
    release(digest)
    return True


def _is_plain(policy: Policy) -> bool:
    return not policy.mounts and policy.commands == "any"


def _own_directories(policy: Policy) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Never shown to a guest, by whatever mount; and those of which a folder around them may be shown. Each by its name
    and by where links lead."""
    if not policy.mounts:
        return (), ()
    from ringfence.host.state import disk_root, state_dir
    from ringfence.images.store import PROTECTED, default_directory

    stored = disk_root()  # guestd for containers, snapshots with names (L19)
    workspaces = f"{stored}/workspaces"  # a guest that could write there would write in others' sandboxes
    ours = [state_dir(), *([workspaces] if os.path.isdir(workspaces) else [])]
    images = default_directory()  # a guest that could write there would choose what later sandboxes run (L04)
    if os.path.isdir(images):
        ours += [f"{images}/{name}" for name in PROTECTED]
    return _both(*ours), _both(stored)


def _both(*paths: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*paths, *map(os.path.realpath, paths))))


_interpreters: list[Interpreter] = []  # of this process: it does not change


def interpreter() -> Interpreter:
    if not _interpreters:
        from ringfence.plan.rootfs.interpreter import interpreter as found

        _interpreters.append(found())
    return _interpreters[0]


def _pool(image: Image) -> Pool:
    return _pool_of(tuple(image.preload))


def _pool_of(preload: tuple[str, ...]) -> Pool:
    from ringfence.backends.process.pool import pool

    return pool(interpreter(), preload)


def _too_weak(made: ProcessPlan) -> UnsupportedError:
    parts = []
    for name in made.enforcement.weaker:
        control = getattr(made.enforcement, name)
        parts.append(f"{name}: only {control.mechanism} ({control.note})")
    missing = [Missing("process", "a writable cgroup", "ringfence doctor --fix")]
    if made.enforcement.weaker == ("disk",):
        missing = [Missing("process", "a quota on the workspace, which on disk takes root", 'workspace="memory"')]
    return UnsupportedError(
        f"the policy is strict, and a weaker mechanism would hold {'; '.join(parts)}",
        code="strict",
        missing=missing,
    )


_warned: set[tuple[str, ...]] = set()


def _warn_if_weaker(made: ProcessPlan) -> None:
    weaker = made.enforcement.weaker
    if not weaker or weaker in _warned or is_command():  # a command tells it after the run, in the words of its options
        return
    _warned.add(weaker)
    from ringfence.errors import WeakerLimitWarning, warn

    names = ", ".join(f"{name} ({getattr(made.enforcement, name).note})" for name in weaker)
    warn(f"held by a weaker mechanism on this host: {names}", WeakerLimitWarning)
