"""The choice of a sandbox's backend, the plan and the start, with the reasons against other backends.

"auto" takes the first backend of the registry that keeps the policy and is as strong as its isolation. Only a fact of
the host, an UnsupportedError, makes it turn to the next backend. A failure that may pass is a SandboxError and does
not: one of our processes was killed, a table was full, a name disappeared (O27).
"""

from __future__ import annotations

import os

from ringfence.backends import registry
from ringfence.errors import Missing, PolicyError, SandboxLostError, UnsupportedError
from ringfence.plan.controls import ALL_ON
from ringfence.plan.model import FoundImage, make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.contract import Backend, Box, Outlet
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import Plan, SandboxPlan
    from ringfence.policy.image import Image
    from ringfence.policy.model import Policy
    from ringfence.values import Isolation, Workspace

SHARED_KERNEL = "it shares the host's kernel"
_SYS_ADMIN = 21
_ALWAYS = ("userns-restricted", "proc-masked", "kernel")  # refusals that every sandbox of the process backend meets


class Launcher:
    """The start of one sandbox: the candidate backends, and the backend that is taken."""

    def __init__(
        self, backends: tuple[str | Backend, ...], policy: Policy, found: FoundImage, *, chooses: bool = False
    ) -> None:
        """`chooses`: a backend that does not keep the policy is passed over, and `rejected` says why."""
        self.policy = policy
        self.found = found
        self.twin_of: Outlet | None = None  # the new box shares this sandbox's placeholders and certificate authority
        self.controls: Controls = ALL_ON
        self._chooses = chooses
        self._waiting = list(backends)  # the first is taken, unless it refuses
        self._refusals: dict[str, UnsupportedError] = {}  # by backend
        self._backend: Backend | None = None
        self._plan: SandboxPlan | None = None

    @property
    def name(self) -> str:
        """The name of the backend that is taken, as far as known."""
        first = self._waiting[0]
        return first if isinstance(first, str) else first.name

    @property
    def image(self) -> Image:
        return self.found.image

    @property
    def rejected(self) -> dict[str, str]:
        """The reason against each of our backends that "auto" did not take. Empty where the caller named a backend."""
        if not self._chooses:
            return {}
        taken = self.name if self._waiting else None
        why = {name: self._passed_over(name) for name in registry.BUILT_IN if name != taken}
        return why | {name: str(error) for name, error in self._refusals.items()}

    def _passed_over(self, name: str) -> str:
        if not registry.is_as_strong(registry.BUILT_IN[name].isolation, self.policy.isolation):
            return SHARED_KERNEL
        return not_chosen(name)

    def plan(self) -> Plan:
        """Return what `launch` would do, as far as known before a start. Starts nothing.

        Raises UnsupportedError when no backend here keeps the policy.
        """
        made = self.sandbox_plan()
        return make_plan(self.name, made.enforcement, self.rejected, made.lines())

    def sandbox_plan(self) -> SandboxPlan:
        """Return the plan of the first backend that can keep the policy."""
        while self._plan is None:
            try:
                self._plan = self._planned()
            except UnsupportedError as error:
                self._pass_over(error)
        return self._plan

    def _planned(self) -> SandboxPlan:
        if not self._waiting:
            raise self._none()
        if self._chooses and self.name == "process" and _known.refusal is not None:
            raise _known.refusal
        if self._backend is None:
            self._backend = registry.get(self._waiting[0])
        return registry.planned(self._backend, self.policy, self.found)

    def _pass_over(self, error: UnsupportedError) -> None:
        """Turn to the next backend. Raises the error where no next backend exists."""
        if not self._chooses or not self._waiting:
            raise error
        self._refusals[self.name] = error
        del self._waiting[0]
        self._backend = self._plan = None
        if not self._waiting:
            raise self._none()

    def _none(self) -> UnsupportedError:
        """Return the refusal of the first backend, with the reasons against the other backends."""
        (_, first), *others = self._refusals.items()
        missing = [part for error in self._refusals.values() for part in getattr(error, "missing", ())]
        reasons = "; ".join(f"{name}: {error}" for name, error in others)
        whole = f"{first} — nor can another backend: {reasons}" if reasons else str(first)
        return UnsupportedError(whole, code=first.code, missing=missing, fix=first.fix)

    def preflight(self) -> None:
        """Start and end a sandbox where the process backend may be forbidden, so that `plan` knows the answer."""
        if not self._chooses or _known.refusal is not None or not _is_doubtful():
            return
        try:
            made = self.sandbox_plan()
            if self.name != "process":
                return
            from ringfence.backends.process.backend import Process, start

            start(Process(), made).close()  # type: ignore[arg-type]  # made by that backend, by its name
        except UnsupportedError as error:
            remember(error, self.policy)
            if error.code != "memory":
                self._pass_over(error)

    def launch(self) -> Box:
        """Start a sandbox that has run nothing, and connect it to the gateway where the policy has a network.

        Raises UnsupportedError, StartTimeoutError or SandboxLostError. A backend that was taken in place of another and
        was lost is tried once more: an engine that is gone says so the second time.
        """
        lost = False
        while True:
            made = self.sandbox_plan()
            assert self._backend is not None
            try:
                return self._launched(self._backend, made)
            except UnsupportedError as error:
                if self._chooses and self.name == "process":
                    if error.code == "memory":
                        raise  # too small a limit: another backend adds room for itself, which the guest could use
                    remember(error, self.policy)
                self._pass_over(error)
                lost = False
            except SandboxLostError:
                if lost or not self._refusals:
                    raise
                lost = True

    def _launched(self, backend: Backend, made: SandboxPlan) -> Box:
        network = self.policy.network
        if not network.allow and not network.rules:
            return registry.launched(backend, made, self.controls)
        from ringfence.gateway.service import service

        gateway = service()
        gateway.start()  # its thread imports what it needs while the sandbox is built
        box = registry.launched(backend, made, self.controls)
        try:
            if box.listeners:
                listeners, box.listeners = box.listeners, []
                outlet = gateway.register(network, self.policy.secrets, listeners, self.twin_of)
            else:
                outlet, box.channel = gateway.register_relayed(
                    network, self.policy.secrets, box.channel, box.kill, self.twin_of
                )
            box.outlet = outlet
            box.env = {**outlet.defaults, **box.env, **outlet.env}
        except BaseException:
            box.close()
            raise
        return box


def prepare(backend: str | Backend, image: str | Image, policy: Policy, *, workspace: Workspace = "auto") -> Launcher:
    """Return the start of one sandbox, checked as far as possible without a backend.

    Raises PolicyError for a wrong argument, ImageError for a missing image, UnsupportedError for a backend whose
    isolation is weaker than the policy asks for.
    """
    if workspace not in ("auto", "memory", "disk"):
        raise PolicyError(f"unknown workspace {workspace!r}", key="workspace", fix="auto, memory or disk")
    found = find_image(image, on_disk=workspace == "disk")
    if policy.network.allow or policy.network.rules:
        from ringfence.gateway.rules import check_network

        check_network(policy)
    if backend == "auto":
        strong = [name for name, each in registry.BUILT_IN.items() if _keeps(each.isolation, policy)]
        return Launcher(tuple(strong), policy, found, chooses=True)
    if not isinstance(backend, str) or backend not in registry.BUILT_IN:
        chosen = registry.get(backend)
        name, isolation = registry.asked(chosen, "a look at it", lambda: (chosen.name, chosen.isolation))
        backend = chosen
    else:
        name, isolation = backend, registry.BUILT_IN[backend].isolation
    if not _keeps(isolation, policy):
        raise _too_weak(name, isolation, policy.isolation)
    return Launcher((backend,), policy, found)


def _too_weak(name: str, isolation: Isolation, wanted: Isolation) -> UnsupportedError:
    """Return the refusal of a backend whose isolation is weaker than the policy asks for."""
    if (isolation, wanted) == ("shared-kernel", "own-kernel"):
        text = f"the policy asks for a kernel of its own (isolation = own-kernel); the {name} backend shares the host's"
    else:
        text = f"the policy asks for isolation = {wanted}; the {name} backend has {isolation} alone"
    what = "a kernel of its own" if wanted == "own-kernel" else f"isolation = {wanted}"
    return UnsupportedError(text, code="isolation", missing=[Missing(name, what, f'isolation = "{isolation}"')])


def _keeps(isolation: Isolation, policy: Policy) -> bool:
    return registry.is_as_strong(isolation, policy.isolation)


def not_chosen(name: str) -> str:
    """Return why "auto" takes a faster backend than `name` where the faster backend keeps the policy."""
    if registry.BUILT_IN[name].isolation == "own-kernel":
        return "the policy asks for no kernel of its own, and this one starts more slowly"
    return "it shares the host's kernel too, and starts more slowly"


def is_only_slower(name: str, why: str | None) -> bool:
    """Return whether "auto" passed over a backend only because another is faster."""
    return why is None or (name in registry.BUILT_IN and why == not_chosen(name))


# ── the image ────────────────────────────────────────────────────────────────────────────────────────


def find_image(image: str | Image, *, on_disk: bool = False) -> FoundImage:
    """Return an image as found on this host. A stored image cannot be removed while this process may use it."""
    from ringfence.policy.image import Image as ImageValue

    if image == "host" and not on_disk:
        if _known.host_image is None:
            _known.host_image = FoundImage(ImageValue())
        return _known.host_image
    chosen = ImageValue(image) if isinstance(image, str) else image
    if not isinstance(chosen, ImageValue):
        raise TypeError(f"image is a str or an Image, not {type(image).__name__}")
    if chosen.name == "host":
        if chosen.pip or chosen.apt or chosen.npm:
            raise UnsupportedError(
                'packages cannot be added to the image "host": it is this machine itself',
                code="image-host",
                fix="install them for the host's Python, or build an image: ringfence image build NAME RECIPE.toml",
            )
        return FoundImage(chosen, env=chosen.env, on_disk=on_disk)
    from ringfence.images.store import use

    if chosen.preload:
        raise UnsupportedError(
            f'preload is for the image "host": image {chosen.name} starts its own Python for each run',
            code="preload",
            fix="leave preload out",
        )
    used = use(chosen)
    return FoundImage(chosen, used.root, {**used.info.env, **chosen.env}, on_disk=on_disk)


# ── what is known of the process backend on this host ────────────────────────────────────────────────


class _Known:
    """Facts that this process has found out."""

    def __init__(self) -> None:
        self.refusal: UnsupportedError | None = None  # of the process backend, once a start has shown it
        self.host_image: FoundImage | None = None  # the image "host" without options, checked once


_known = _Known()


def known_refusal() -> UnsupportedError | None:
    """Return why the process backend builds nothing here, once a start has shown it."""
    return _known.refusal


def remember(refused: UnsupportedError, policy: Policy) -> None:
    """Remember a refusal that every sandbox of the process backend would meet.

    A refusal that is due to the policy is not remembered. Where the policy has mounts or programs, a step that failed
    for no known reason may be due to them.
    """
    own = policy.mounts or policy.commands != "any"
    if refused.code in (_ALWAYS if own else (*_ALWAYS, "build")) and _known.refusal is None:
        _known.refusal = refused


def _is_doubtful() -> bool:
    """Return whether something is known to forbid namespaces, to root or to this user."""
    from ringfence.host import kernel_refusals

    if os.geteuid() == 0:
        return not kernel_refusals.has_capability(_SYS_ADMIN)
    switches = ("user.max_user_namespaces", "kernel.unprivileged_userns_clone")
    off = any(kernel_refusals.sysctl(name) == "0" for name in switches)
    confined = kernel_refusals.apparmor_restricts() or kernel_refusals.apparmor_profile() is not None
    return off or confined or kernel_refusals.is_filtered() or kernel_refusals.container() is not None
