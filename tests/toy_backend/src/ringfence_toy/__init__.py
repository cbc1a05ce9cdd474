"""A backend for Ringfence made of util-linux: namespaces by `unshare`, files by `mount`, rights by `setpriv`.

It shows the image "host", read-only host files, and no network. It shares the host's kernel, and makes no cgroup: CPU
and memory are limited for each process alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from ringfence.backends import engine
from ringfence.backends.contract import BackendReport, Finding
from ringfence.errors import Missing, RingfenceError, UnsupportedError
from ringfence.plan.controls import ALL_ON
from ringfence.plan.model import LinuxPlan
from ringfence.results import Control, Usage
from ringfence.values import Struct, final, replace

if TYPE_CHECKING:
    from ringfence.backends.contract import Box
    from ringfence.plan.controls import Controls
    from ringfence.plan.model import FoundImage, HostFacts
    from ringfence.policy.model import Policy
    from ringfence.results import Enforcement
    from ringfence.values import Isolation

# What `ringfence.testing.conformance` is not to ask of this backend, each with the reason.
WITHOUT = {
    "commands": "its own start needs programs of the image",
    "cpu-share": "there is no cgroup",
    "cpu-time": "RLIMIT_CPU counts for each process, not for the tree",
    "memory-limit": "RLIMIT_DATA counts for each process, not for the tree",
    "pause": "there is no cgroup with a freezer",
    "usage": "nothing outside counts CPU time and memory",
}

_PROGRAMS = ("unshare", "mount", "umount", "pivot_root", "setpriv", "env")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_NOBODY = 65_534  # the host's user that guests are, where the caller is root
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_END_S = 10.0


@final
class ToyFacts(Struct):
    """What this backend found out about the host."""

    host: HostFacts
    unshare: str  # the path of the program


class Toy(Struct):
    """Namespaces made by util-linux around guestd."""

    @property
    def name(self) -> str:
        return "toy"

    @property
    def isolation(self) -> Isolation:
        return "shared-kernel"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that a sandbox has of its own."""
        return ("mount", "pid", "net", "ipc", "uts", "cgroup")

    def facts(self) -> ToyFacts:
        """Return what this host can do. Raises UnsupportedError where a program is missing. Starts nothing."""
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
        if missing:
            parts = [Missing(self.name, name, "apt-get install util-linux mount coreutils") for name in missing]
            raise UnsupportedError(f"there is no {', no '.join(missing)}", code="toy-missing", missing=parts)
        return ToyFacts(engine.linux_facts(), shutil.which("unshare", path=_PATH) or "")

    def plan(self, policy: Policy, image: FoundImage, facts: ToyFacts) -> LinuxPlan:
        """Return what `launch` would do. Raises UnsupportedError for what this backend does not keep."""
        for refused, what, fix in (
            (image.root is not None, "images but the host's", 'image="host"'),
            (policy.commands != "any", "a list of commands", 'commands = "any"'),
            (policy.network.allow or policy.network.rules, "a network", "allow no host"),
            (any(mount.mode != "ro" for mount in policy.mounts), "mounts that can be changed", 'mode = "ro"'),
            (policy.limits.on_idle == "pause", "on_idle = 'pause'", 'on_idle = "close"'),
            (any("\n" in f"{m.source}{m.target}" for m in policy.mounts), "names with a line break", "rename it"),
        ):
            if refused:
                raise UnsupportedError(
                    f"the toy backend does not keep {what}",
                    code="toy",
                    missing=[Missing(self.name, what, f'{fix}, or backend="auto"')],
                )
        plan = engine.engine_plan(self.name, policy, image, facts.host)
        enforcement = _enforcement(plan.enforcement)
        if policy.strict and enforcement.weaker:
            raise UnsupportedError(
                f"the policy is strict, and the toy backend enforces {', '.join(enforcement.weaker)} less well",
                code="strict",
                fix="strict = false",
            )
        return replace(plan, enforcement=enforcement)

    def launch(self, plan: LinuxPlan, *, controls: Controls = ALL_ON) -> Box:
        """Start a sandbox that has run nothing. Raises StartTimeoutError or SandboxLostError."""
        made = controls.plan(plan)
        shown = engine.skeleton(made, self.name)

        def start() -> tuple[engine.Wall, socket.socket]:
            wall = Unshared(engine.box_folder(self.name))
            try:
                return wall, wall.start(made, shown, self.namespaces)
            except BaseException:
                wall.kill()
                wall.remove()
                raise

        return engine.start_box(self.name, made, start, binds=shown.binds)

    def doctor(self) -> BackendReport:
        """Look for the programs, and run a whole sandbox. Takes less than a second."""
        try:
            found = self.facts()
        except UnsupportedError as error:
            lacking = tuple(Finding(part.what, "missing", str(error), part.fix) for part in error.missing)
            return BackendReport(self.name, works=False, findings=lacking)
        ran = self._run()
        return BackendReport(self.name, ran.state == "ok", (Finding("util-linux", "ok", found.unshare), ran))

    def _run(self) -> Finding:
        from ringfence import Sandbox

        begun = time.monotonic()
        try:
            with Sandbox(backend=self) as box:
                box.exec(["true"], timeout_s=20).check()
        except RingfenceError as error:
            fix = error.fix or "allow this user user namespaces: sysctl user.max_user_namespaces"
            return Finding("a whole sandbox", "missing", str(error)[:300], fix)
        return Finding("a whole sandbox", "ok", f"ran true, {(time.monotonic() - begun) * 1000:.0f} ms")


def _enforcement(held: Enforcement) -> Enforcement:
    """Return what enforces each promise here. guestd's filter of system calls and its cap on output stay."""
    by = "util-linux"
    return replace(
        held,
        files=Control(f"{by}: mount namespace, read-only root", "full"),
        network=Control(f"{by}: empty network namespace", "full"),
        processes=Control(f"{by}: pid namespace, RLIMIT_NPROC in a user namespace", "full"),
        privileges=Control(f"{by}: user namespace, no capabilities, no_new_privs", "full"),
        time=Control("clock of guestd inside, and of the host behind it", "full"),
        cpu=Control("RLIMIT_CPU", "weaker", "CPU time for each process, and no share of a CPU"),
        memory=Control("RLIMIT_DATA", "weaker", "for each process, not for the tree; shared memory is not counted"),
        disk=Control("tmpfs size and inodes", "full"),
    )


class Unshared:
    """One sandbox: a process of `unshare`, whose only child is guestd, and a folder on the host."""

    can_freeze = False

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by remove()

    def start(self, plan: LinuxPlan, shown: engine.Skeleton, namespaces: tuple[str, ...]) -> socket.socket:
        """Start guestd in new namespaces. Returns our end of its channel."""
        as_root = os.geteuid() == 0
        self._write(plan, shown, owner=_NOBODY if as_root else 0)
        flags = [f"--{name}" for name in namespaces] + ([] if as_root else ["--map-root-user"])
        script = os.path.join(os.path.dirname(__file__), "isolate.sh")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ["unshare", *flags, "--fork", "--", "sh", script, *engine.guestd_command()],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                env={
                    "PATH": _PATH,
                    "LC_ALL": "C",
                    "HOLDS": self._folder,
                    "PYTHON": sys.executable,
                    "OWNER": str(_NOBODY) if as_root else "",
                },
                start_new_session=True,
            )
        return ours

    def _write(self, plan: LinuxPlan, shown: engine.Skeleton, *, owner: int) -> None:
        """Write the root folder, and the tables of what is mounted in it."""
        root = f"{self._folder}/root"
        engine.write_skeleton(shown, root)
        os.mkdir(f"{self._folder}/empty", 0o555)
        for name in ("pts", "shm"):
            os.mkdir(f"{root}/dev/{name}")
        for name in _DEVICES:
            with open(f"{root}/dev/{name}", "w"):
                pass
        for name, target in _LINKS.items():
            os.symlink(target, f"{root}/dev/{name}")
        memory = f"nosuid,nodev,uid={owner},gid={owner}"
        own = [
            _line("proc", f"{root}/proc", "proc", "nosuid,nodev,noexec,subset=pid"),
            *(_line(f"/dev/{name}", f"{root}/dev/{name}", "none", "bind") for name in _DEVICES),
            _line("devpts", f"{root}/dev/pts", "devpts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620"),
            _line("tmpfs", f"{root}/dev/shm", "tmpfs", f"{memory},mode=1777,{plan.sizes.shm}"),
            _line("tmpfs", f"{root}/tmp", "tmpfs", f"{memory},mode=1777,{plan.sizes.tmp}"),
            _line("tmpfs", f"{root}/workspace", "tmpfs", f"{memory},mode=0755,{plan.sizes.disk}"),
        ]
        binds = (*shown.binds, engine.BoxBind(engine.guestd_folder(), engine.INSIDE, writable=False))
        files = [
            f"{root}{bind.target}\n"
            for bind in binds
            if bind.target.startswith(("/tmp/", "/workspace/")) and not os.path.isdir(bind.source)
        ]
        host = [
            *(_line(bind.source, root + bind.target, "none", "rbind,X-mount.mkdir") for bind in binds),
            *(_line(f"{self._folder}/empty", root + hidden, "none", "bind") for hidden in shown.hidden),
        ]
        for name, lines in (("own", own), ("files", files), ("shown", host)):
            with open(f"{self._folder}/{name}", "w", encoding="utf-8") as file:
                file.writelines(lines)

    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read(1 << 14).decode("utf-8", "replace").strip().rpartition("\n")[2][:300]

    def how_it_ended(self) -> str:
        status = None if self._process is None else self._process.poll()
        return "unshare runs on, and the channel is cut" if status is None else f"unshare ended with status {status}"

    def usage(self) -> tuple[Usage, int]:
        return Usage(), 0

    def freeze(self) -> bool:
        return False

    def thaw(self) -> None:
        """Nothing was frozen."""

    def kill(self) -> None:
        """Kill guestd: the kernel then kills all else in its pid namespace, and `unshare` ends.

        While unshare stands still, the number of its child is no other process's.
        """
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGSTOP)
        with open(f"/proc/{self._process.pid}/task/{self._process.pid}/children", encoding="ascii") as file:
            for child in map(int, file.read().split()):
                os.kill(child, signal.SIGKILL)
        self._process.kill()

    def remove(self) -> None:
        if self._process is not None:
            self._process.wait(_END_S)
        self._errors.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def after_fork(self) -> None:
        self._errors.close()


def _line(what: str, where: str, kind: str, options: str) -> str:
    """Return a line of an fstab, in which a space within a name is written by its number."""
    sign = {ord(each): f"\\{ord(each):03o}" for each in "\\ \t\n#"}
    return " ".join(word.translate(sign) for word in (what, where, kind, options)) + " 0 0\n"
