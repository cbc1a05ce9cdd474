"""What a case works with in an arm: sandboxes with or without the control, canaries, witnesses on the host.

Everything that an arm makes is gone when the arm ends. Only this module and `engine_arena` make sandboxes from plans
without a control; no public name of Ringfence leads to such a sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import warnings

from ringfence import Limits, Mount, Policy, Sandbox
from ringfence._sync.process import completed
from ringfence.backends.auto import Launcher
from ringfence.core import arguments
from ringfence.plan.model import FoundImage
from ringfence.policy.image import Image
from ringfence.values import Struct, final, replace
from ringfence_attacks import witnesses
from ringfence_attacks.case import BARE, HOST_CODE, NotApplicable, Seen
from ringfence_attacks.controls import Lacking, without
from ringfence_attacks.guest_prelude import PRELUDE
from ringfence_attacks.tracer import host_pid, reported_pid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence._sync.process import Process
    from ringfence.images.store import Used
    from ringfence.plan.model import LinuxPlan
    from ringfence.results import Result
    from ringfence.values import Argv, MountMode, Workspace
    from ringfence_attacks.case import ArmName, Attack

# Small limits, so that an arm without one control cannot take much of the host; one policy, so that most cases get a
# spare sandbox.
LIMITS = Limits(timeout_s=10, cpu_time_s=10, memory="256M", processes=48, open_files=256, disk="8M", disk_files=2000)
POLICY = Policy(limits=LIMITS)
_BARE_S = 20.0


@final
class GuestReport(Struct):
    """How a guest script ended, and the lines that the script wrote. `stdout` and `stderr` are guest-made."""

    status: str
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    result: Result | None  # None for a plain process on the host

    @property
    def met(self) -> dict[str, str]:
        """What each attempt met: an errno's name or "ok"; for a repeated attempt, what the last try met."""
        return {str(said["tried"]): str(said.get("met")) for said in self._said() if "tried" in said}

    @property
    def looted(self) -> str:
        """All bytes that the guest reports as stolen."""
        return "\n".join(str(said["loot"]) for said in self._said() if "loot" in said)

    def said(self, key: str) -> object:
        """Return the value of `key` in the last line with that key; None when no line has it."""
        return next((said[key] for said in reversed(self._said()) if key in said), None)

    def _said(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for line in self.stdout.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    def words(self) -> str:
        """Return the errnos for `Seen.what`, or how the script ended when it reported nothing."""
        met = [f"{name}: {word}" for name, word in self.met.items()]
        if met:
            return "; ".join(met)
        ended = f"signal {self.signal}" if self.signal else f"exit {self.exit_code}"
        last = self.stderr.strip().splitlines()[-1:] or self.stdout.strip().splitlines()[-1:]
        return f"{self.status}, {ended}" + (f": {last[0][:160]}" if last else "")


class Arm:
    """An arm of an attack, as a context manager: it ends everything that it made."""

    backend: str = "process"

    def __init__(self, attack: Attack, name: ArmName) -> None:
        self.attack = attack
        self.name = name
        self.off = name == "off"  # whether the control is missing
        self.bare = self.off and attack.off == (BARE,)
        self.canary = os.urandom(16).hex()  # differs in every arm
        self._ends = contextlib.ExitStack()
        self._directory: str | None = None

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    # sandboxes

    def sandbox(
        self,
        policy: Policy = POLICY,
        *,
        whole: bool = False,
        workspace: Workspace = "auto",
        used: Used | None = None,
    ) -> Sandbox:
        """Start a sandbox of this arm; the arm closes the sandbox when it ends.

        `whole`: with every control, in every arm. `used`: a root file system that is not the host's.
        """
        if self.bare:
            raise AssertionError(f"{self.attack.id}: the off arm is a plain process, and has no sandbox")
        made = Sandbox(policy=policy, backend="process", workspace=workspace)
        launcher = made._launcher  # noqa: SLF001  # no public way leads to a plan without a control
        if used is not None:
            launcher = Launcher(("process",), policy, FoundImage(Image("attack"), used.root))
            made._launcher = launcher  # noqa: SLF001  # no public way leads to a root file system without a name
        if not whole and self._weakens:
            launcher.controls = Lacking(weaken=self.weaken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weaker limits are shown with the matrix, not with each of its rows
            return self._ends.enter_context(made)

    @property
    def _weakens(self) -> bool:
        return self.name != "on" and bool(self.missing or (self.off and self.attack.change))

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the controls that this arm leaves out."""
        if self.name == "on":
            return ()
        own = self.attack.off if self.off else ()
        return tuple(name for name in (*self.attack.behind, *own) if name not in (BARE, HOST_CODE))

    def weaken(self, plan: LinuxPlan) -> LinuxPlan:
        """Return `plan` without the controls that this arm leaves out."""
        plan = without(plan, *self.missing)
        if self.off and self.attack.change is not None:
            plan = self.attack.change(plan, self)
        return replace(plan, shared=False)

    def python(
        self,
        code: str,
        *,
        policy: Policy = POLICY,
        box: Sandbox | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 8,
        **values: object,
    ) -> GuestReport:
        """Run a guest script in a new sandbox, or in `box`; in a bare arm, as a plain process on the host.

        `values` are global variables of the script.
        """
        script = self.script(code, **values)
        if self.bare:
            return self._plain([sys.executable, "-I", "-c", script], env, timeout_s)
        place = box or self.sandbox(policy)
        return guest_report(self.run(place, script, env=env, timeout_s=timeout_s))

    def run(
        self, box: Sandbox, code: str, *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Result:
        """Run `code` in a process of its own, as `ringfence.run` does, but keep the sandbox.

        `Sandbox.run` keeps an interpreter alive between calls; what an attack does to that interpreter is another
        question.
        """
        place = box._running_place()  # noqa: SLF001  # no public call is one process in a sandbox that stays
        limits = box.policy.limits
        call = arguments.python_call(
            place.box,
            box.policy,
            arguments.check_code(code),
            stdin=None,
            env=arguments.check_env(env),
            timeout_s=arguments.check_timeout(timeout_s, limits),
            one_shot=False,
        )
        return completed(place, call)

    def script(self, code: str, **values: object) -> str:
        """Return the whole text of a guest script: prelude, values as literals, code."""
        given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        return PRELUDE + given + textwrap.dedent(code)

    def exec(
        self, argv: Argv, *, policy: Policy = POLICY, box: Sandbox | None = None, timeout_s: float = 8, stdin: str = ""
    ) -> GuestReport:
        """Run a command in a new sandbox, or in `box`; in a bare arm, as a plain process on the host."""
        if self.bare:
            return self._plain(list(argv), None, timeout_s)
        place = box or self.sandbox(policy)
        return guest_report(place.exec(list(argv), timeout_s=timeout_s, stdin=stdin))

    def spawn(self, code: str, *, box: Sandbox, **values: object) -> Process:
        """Start a guest script that runs while the host does something. The arm kills the script when it ends."""
        argv = ["python3", "-c", self.script(code, **values)]
        return self._ends.enter_context(box.spawn(argv))

    def waiting(self, code: str, *, box: Sandbox, **values: object) -> tuple[int, str]:
        """Run `code` in a guest that then sleeps, for the host to look at. Returns its pid on the host, and what the
        code's attempts met.

        Raises TimeoutError, with the guest's output, when the guest ended before it slept: that proves nothing.
        """
        script = f"{textwrap.dedent(code)}\ntell(pid=os.getpid())\ntime.sleep(8)\n"
        inner, said = reported_pid(self.spawn(script, box=box, **values))
        return host_pid(box, inner), attempts_met(said)

    def _plain(self, argv: list[str], env: Mapping[str, str] | None, timeout_s: float) -> GuestReport:
        base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        done = subprocess.run(
            argv,
            env={**base, **(env or {})},
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=min(timeout_s, _BARE_S),
            check=False,
            start_new_session=True,
        )
        code = done.returncode
        status = "ok" if code == 0 else "error"
        out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        return GuestReport(status, code if code >= 0 else None, -code if code < 0 else None, out, err, None)

    # canaries and witnesses

    @property
    def has_other_uid(self) -> bool:
        """Whether the guest is another user of the host than the caller."""
        return os.geteuid() == 0

    @property
    def directory(self) -> str:
        """A host directory of this arm, made on first use. Guests with another uid may enter: that their uid differs is
        the control of another attack."""
        if self._directory is None:
            self._directory = self._ends.enter_context(witnesses.host_folder())
            os.chmod(self._directory, 0o755 if self.has_other_uid else 0o700)
        return self._directory

    def host_file(self, name: str = "canary", text: str | None = None, *, mode: int = 0o644) -> str:
        """Make a host file that holds `text`, or this arm's canary, and return its path."""
        path = os.path.join(self.directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.canary if text is None else text)
        os.chmod(path, mode)
        return path

    def listen_tcp(self, *, ipv6: bool = False) -> witnesses.Listener:
        """Listen on a TCP port of the host's loopback. `received()` is the listener's log."""
        return self._ends.enter_context(witnesses.tcp(ipv6=ipv6))

    def listen_udp(self) -> witnesses.Listener:
        """Listen on a UDP port of the host's loopback."""
        return self._ends.enter_context(witnesses.udp())

    def listen_abstract(self) -> witnesses.Listener:
        """Listen on an abstract unix socket of the host; `address` is the name without the NUL."""
        return self._ends.enter_context(witnesses.abstract(self.canary))

    def listen_path(self) -> witnesses.Listener:
        """Listen on a unix socket with a path, in this arm's directory."""
        return self._ends.enter_context(witnesses.path(os.path.join(self.directory, "sock")))

    def victim(self) -> witnesses.Victim:
        """Start a process of the host that sleeps, with the canary in its environment and memory."""
        return self._ends.enter_context(witnesses.Victim(self.canary))

    def environ(self, name: str = "RINGFENCE_ATTACK_CANARY") -> str:
        """Put the canary into the environment of this process until the arm ends. Returns the variable's name."""
        self._ends.enter_context(witnesses.environment(name, self.canary))
        return name

    def host_key(self) -> int:
        """Put a key with the canary into the session keyring of this process, and return the key's number.

        Raises NotApplicable where the kernel has no keys.
        """
        try:
            return self._ends.enter_context(witnesses.session_key(self.canary))
        except OSError as error:
            raise NotApplicable(f"the host has no session keyring to put a key into: {error.strerror}") from None

    def stolen(self, report: GuestReport) -> Seen:
        """Judge an arm: the attack succeeded when the canary is in the guest's loot or output."""
        return Seen(self.canary in report.looted or self.canary in report.stdout, report.words())

    def shared(self, mode: MountMode = "rw") -> Policy:
        """Return a policy that mounts this arm's directory at the path that the directory has on the host."""
        os.chmod(self.directory, 0o777 if self.has_other_uid else 0o700)
        return POLICY.replace(mounts=[Mount(self.directory, mode=mode)])

    def workspace_bytes(self, box: Sandbox) -> int:
        """Return the bytes in use in the workspace; deleted files that are still open count."""
        return box.files.usage().bytes

    def enter(self, manager: contextlib.AbstractContextManager[witnesses.T]) -> witnesses.T:
        """Enter a context manager; the arm leaves the context when it ends."""
        return self._ends.enter_context(manager)


def attempts_met(said: str) -> str:
    """Return what the attempts of a running guest met, from its output until now, for `Seen.what`."""
    met = GuestReport("ok", None, None, said, "", None).met
    return "; ".join(f"{name}: {word}" for name, word in met.items())


def guest_report(result: Result) -> GuestReport:
    """Return a guest script's Result in the form that cases judge."""
    return GuestReport(result.status, result.exit_code, result.signal, result.stdout, result.stderr, result)
