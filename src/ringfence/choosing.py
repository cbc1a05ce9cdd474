"""What "auto" takes when the process backend builds nothing here or cannot keep the policy, and why not the others.

Imported only then: a host on which the process backend serves never comes here.
"""

from __future__ import annotations

import os

from ringfence.errors import SandboxLostError, UnsupportedError
from ringfence.launching import NOT_CHOSEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.backends.contract import Box, Launcher
    from ringfence.launching import ProcessLauncher
    from ringfence.policy.model import Policy
    from ringfence.values import BackendName

ORDER: tuple[BackendName, ...] = ("container", "gvisor")  # after the process backend, by how fast they start
_SYS_ADMIN = 21
_refusals: list[UnsupportedError] = []  # why the process backend builds nothing for this process, once that was seen


def known_refusal() -> UnsupportedError | None:
    return _refusals[0] if _refusals else None


def remember(refused: UnsupportedError, policy: Policy) -> None:
    """That the host refuses what every sandbox of the process backend needs; what is the policy's is not kept, and a
    step that failed for no known reason may be its mounts' or programs'."""
    codes = (
        "userns-restricted",
        "proc-masked",
        "kernel",
        *(() if policy.mounts or policy.commands != "any" else ("build",)),
    )
    if refused.code in codes and not _refusals:
        _refusals.append(refused)


def refusal(process: ProcessLauncher) -> UnsupportedError | None:
    """Why the process backend does not serve. It is started only where something speaks against it."""
    try:
        process.plan()
        if _is_doubtful():
            process.launch(trial=True).close()
    except UnsupportedError as refused:
        remember(refused, process.policy)
        return refused
    return None


def _is_doubtful() -> bool:
    """What is known to forbid namespaces, to root or to this user."""
    from ringfence.host import kernel_refusals

    if os.geteuid() == 0:
        return not kernel_refusals.has_capability(_SYS_ADMIN)
    switches = ("user.max_user_namespaces", "kernel.unprivileged_userns_clone")
    off = any(kernel_refusals.sysctl(name) == "0" for name in switches)
    confined = kernel_refusals.apparmor_restricts() or kernel_refusals.apparmor_profile() is not None
    return off or confined or kernel_refusals.is_filtered() or kernel_refusals.container() is not None


class Others:
    """The backends after the process backend, for one policy. `make` gives a launcher by name, and the reasons."""

    def __init__(self, refused: UnsupportedError, make: Callable[[BackendName, dict[str, str]], Launcher]) -> None:
        self.rejected = {**NOT_CHOSEN, "process": str(refused)}
        self._errors = [refused]
        self._waiting = list(ORDER)
        self._next: Launcher | None = None
        self._make = make

    def planned(self) -> Launcher:
        """The first that can keep the policy, as far as that is known before a start. UnsupportedError: none can."""
        while self._next is None:
            if not self._waiting:
                raise self._none()
            name = self._waiting[0]
            try:
                launcher = self._make(name, self.rejected)
                launcher.plan()
            except UnsupportedError as error:
                self._reject(error)
            else:
                self.rejected.pop(name)
                self._next = launcher
        return self._next

    def launched(self) -> tuple[Launcher, Box]:
        """The first that can. One that failed for what may pass is tried once more, and then that is the answer: an
        engine that is gone says so the second time, which is a fact."""
        lost = False
        while True:
            launcher = self.planned()
            try:
                return launcher, launcher.launch()
            except UnsupportedError as error:
                self._reject(error)
                lost = False
            except SandboxLostError:
                if lost:
                    raise
                lost = True

    def _reject(self, error: UnsupportedError) -> None:
        self._next = None
        self.rejected[self._waiting.pop(0)] = str(error)
        self._errors.append(error)

    def _none(self) -> UnsupportedError:
        first = self._errors[0]
        others = "; ".join(f"{name}: {self.rejected[name]}" for name in ORDER)
        missing = [part for error in self._errors for part in getattr(error, "missing", ())]
        return UnsupportedError(
            f"{first} — nor can another backend: {others}", code=first.code, missing=missing, fix=first.fix
        )
