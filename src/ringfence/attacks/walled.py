"""Attacks on sandboxes whose wall is an engine's: containers and gVisor. Two arms each, judged from outside.

The arm "off" has the same sandbox with one control of its wall left out, by what it is created with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time

from ringfence import Limits, Mount, Policy, Sandbox
from ringfence.attacks.arena import Arm, told
from ringfence.attacks.case import DOS, ESCAPE, OURS, READ, WRITE, Attack, NotApplicable, Seen
from ringfence.attacks.report import Matrix, Row
from ringfence.guest.alone import NOT_FIRST
from ringfence.plan.mutate import without
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from ringfence.attacks.arena import Told
    from ringfence.attacks.case import ArmName, Outcome
    from ringfence.walls import WalledLauncher

    Loosen: TypeAlias = Callable[[dict[str, Any]], None]
    Progress: TypeAlias = Callable[[int, int, str], None]
    Play: TypeAlias = Callable[["WalledArm"], Seen]

BACKENDS = ("container", "gvisor")
_LIMITS = Limits(timeout_s=20, cpu_time_s=20, memory="96M", processes=24, disk="4M", disk_files=500)
_POLICY = Policy(limits=_LIMITS)


@final
class Case(Struct):
    """One attack, and the backends it is for."""

    id: str
    title: str
    outcome: Outcome
    control: str
    play: Play
    backends: tuple[str, ...] = BACKENDS

    def as_attack(self) -> Attack:
        """For its row and its arms."""

        def nothing(_: Arm) -> Seen:
            raise NotApplicable("an arm of a wall plays it")

        return Attack(self.id, self.title, self.outcome, (OURS,), nothing, label=self.control)


class WalledArm(Arm):
    """One arm of one case on one backend."""

    def __init__(self, case: Case, name: ArmName, backend: str) -> None:
        super().__init__(case.as_attack(), name)
        self.backend = backend

    @property
    def contained(self) -> bool:
        return self.backend == "container"

    def box(self, policy: Policy = _POLICY, *, loosen: Loosen | None = None, lacks: tuple[str, ...] = ()) -> Sandbox:
        """Started, and closed with the arm. `loosen` changes what it is created with; `lacks`: controls of the plan."""
        made = Sandbox(policy=policy, backend=self.backend)  # type: ignore[arg-type]  # one of BACKENDS
        launcher: WalledLauncher = made._launcher  # type: ignore[assignment]  # noqa: SLF001  # no public way leads to it
        launcher.loosen = loosen
        if lacks:
            launcher._made = without(launcher._plan(), *lacks)  # noqa: SLF001  # as above
        return self.enter(made)

    def play_in(self, box: Sandbox, code: str, **values: object) -> Told:
        return told(box.exec(["python3", "-c", self.script(code, **values)], timeout_s=15))

    def bind(self, source: str, target: str, *, writable: bool) -> Loosen:
        """Shows a host path inside, in the words of the backend."""

        def contained(settings: dict[str, Any]) -> None:
            from docker.types import Mount as Shown

            settings["host_config"]["Mounts"].append(Shown(target, source, type="bind", read_only=not writable))

        def under_gvisor(config: dict[str, Any]) -> None:
            options = ["rbind", "rw" if writable else "ro"]
            config["mounts"].append({"destination": target, "type": "bind", "source": source, "options": options})

        return contained if self.contained else under_gvisor


def _read(arm: WalledArm) -> Seen:
    path = arm.host_file()
    shown = arm.bind(arm.directory, arm.directory, writable=False) if arm.off else None
    return arm.stolen(arm.play_in(arm.box(loosen=shown), "steal(path)", path=path))


def _write(arm: WalledArm) -> Seen:
    """A mount that is to be read-only; every way to its file that a guest has."""
    path = arm.host_file(mode=0o666)
    os.chmod(arm.directory, 0o777)
    policy = _POLICY.replace(mounts=[Mount(arm.directory, target="/shown", mode="ro")])
    code = """
    attempt("write", spill, "/shown/canary", "taken")
    attempt("proc", spill, "/proc/self/root/shown/canary", "taken")
    attempt("link", lambda: (os.symlink("/shown/canary", "/workspace/l"), spill("/workspace/l", "taken")))
    """
    seen = arm.play_in(arm.box(policy, loosen=_writable_again(arm) if arm.off else None), code)
    with open(path, encoding="utf-8") as file:
        return Seen(file.read() != arm.canary, seen.words())


def _writable_again(arm: WalledArm) -> Loosen:
    def contained(settings: dict[str, Any]) -> None:
        for mount in settings["host_config"]["Mounts"]:
            if mount["Target"] == "/shown":
                mount["ReadOnly"] = False

    def under_gvisor(config: dict[str, Any]) -> None:
        for mount in config["mounts"]:
            if mount["destination"] == "/shown":
                mount["options"] = ["rbind", "rw"]

    return contained if arm.contained else under_gvisor


def _overwrite_ours(arm: WalledArm) -> Seen:
    """B07, CVE-2019-5736: guestd's own files and interpreter, which the next sandbox would start."""
    from ringfence.backends.process import state
    from ringfence.backends.walled import runtime

    copy = os.path.join(arm.directory, "guestd")
    shutil.copytree(runtime.folder(state.disk_directory("runtime")), copy, symlinks=True)
    target = os.path.join(copy, "ringfence", "guest", "within.py")
    os.chmod(target, 0o666)
    for parent, folders, _ in os.walk(copy):
        for name in folders:
            os.chmod(os.path.join(parent, name), 0o777)  # the control is the mount, not the mode
    with open(target, encoding="utf-8") as file:
        before = file.read()

    def ours(settings: dict[str, Any]) -> None:
        shown = settings["host_config"]["Mounts"] if arm.contained else settings["mounts"]
        for mount in shown:
            if mount["Target" if arm.contained else "destination"] != runtime.INSIDE:
                continue
            if arm.contained:
                mount["Source"], mount["ReadOnly"] = copy, not arm.off
            else:
                mount["source"], mount["options"] = copy, ["rbind", "rw" if arm.off else "ro"]

    code = """
    for path in ("/proc/1/exe", "/proc/self/exe", "/.ringfence/bin/python3", "/.ringfence/lib/ld.so"):
        attempt(path, spill, path, "taken")
    attempt("guestd", spill, "/.ringfence/ringfence/guest/within.py", "# taken")
    """
    seen = arm.play_in(arm.box(loosen=ours), code)
    with open(target, encoding="utf-8") as file:
        return Seen(file.read() != before, seen.words())


def _take_memory(arm: WalledArm) -> Seen:
    policy = Policy(limits=Limits(timeout_s=20, memory="64M", processes=24, disk="1M", disk_files=500))

    def more(settings: dict[str, Any]) -> None:
        settings["host_config"].update(Memory=1 << 30, MemorySwap=1 << 30)

    box = arm.box(policy, loosen=more if arm.off else None)
    seen = arm.play_in(
        box, "held = bytearray(400 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\ntell(held=1)"
    )
    return Seen(seen.said("held") == 1, f"{seen.status}, said {seen.said('held')}")


def _take_processes(arm: WalledArm) -> Seen:
    """A bounded fork bomb: 60 sleepers where 24 may be. The engine's own count is the witness."""

    def more(settings: dict[str, Any]) -> None:
        settings["host_config"]["PidsLimit"] = 200
        for limit in settings["host_config"]["Ulimits"]:
            if limit["Name"] == "nproc":
                limit["Soft"] = limit["Hard"] = 4000

    box = arm.box(loosen=more, lacks=("process-limit",)) if arm.off else arm.box()
    code = """
    for i in range(60):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            time.sleep(5); os._exit(0)
    time.sleep(0.5)
    """
    with box.spawn(["python3", "-c", arm.script(code)]) as process:
        time.sleep(1.5)
        count = _inside(box)
        process.kill()
    return Seen(count > _LIMITS.processes + 8, f"{count} processes")


def _inside(box: Sandbox) -> int:
    """Processes of a container, as the host's cgroup counts them."""
    from ringfence.backends.container.counters import processes

    wall = box._box._wall  # type: ignore[union-attr]  # noqa: SLF001  # started
    return processes(wall.pid)


def _reach_host(arm: WalledArm) -> Seen:
    listener = arm.listen_tcp()

    def open_network(settings: dict[str, Any]) -> None:
        settings["network_disabled"] = False
        settings["host_config"]["NetworkMode"] = "host"

    code = """
    import socket
    def reach():
        with socket.create_connection(("127.0.0.1", port), 1) as sock: sock.send(b"here")
    attempt("connect", reach)
    """
    seen = arm.play_in(arm.box(loosen=open_network if arm.off else None), code, port=listener.port)
    came = listener.received()
    return Seen(bool(came), f"{len(came)} connections; {seen.words()}")


def _ask_engine(arm: WalledArm) -> Seen:
    """M09: whoever speaks with the engine is root on the host."""
    from ringfence.backends.container import engine as engines

    at = engines.find().socket

    def shown(settings: dict[str, Any]) -> None:
        from docker.types import Mount as Shown

        settings["host_config"]["Mounts"].append(Shown("/run/engine.sock", at, type="bind"))
        settings["user"] = "0:0"

    code = """
    import socket
    def ask(path):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2); sock.connect(path)
            sock.sendall(b"GET /_ping HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n")
            loot(sock.recv(64))
    for path in ("/run/engine.sock", "/var/run/docker.sock", "/run/podman/podman.sock", at):
        attempt(path, ask, path)
    """
    seen = arm.play_in(arm.box(loosen=shown if arm.off else None), code, at=at)
    return Seen("200 OK" in seen.looted, seen.words())


def _end_guestd(arm: WalledArm) -> Seen:
    """Signals to its parent, its memory, its descriptors. Witness: whether the sandbox still works for the host."""

    def not_first(settings: dict[str, Any]) -> None:
        settings["entrypoint"] = ["/bin/sh", "-c", '"$0" "$@"; exit 0', *settings["entrypoint"], NOT_FIRST]

    box = arm.box(loosen=not_first, lacks=("landlock-scopes",)) if arm.off else arm.box()
    code = """
    import signal
    up = os.getppid()
    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
        attempt(number.name, os.kill, up, number)
    for name in ("mem", "environ", "fd/0", "fd/3"):
        attempt(name, slurp, f"/proc/{up}/{name}")
    """
    seen = arm.play_in(box, code)
    try:
        lives = box.exec(["echo", "here"], timeout_s=5).stdout == "here\n"
    except Exception as error:  # noqa: BLE001  # however it is gone
        return Seen(succeeded=True, what=type(error).__name__)
    read = any(seen.met.get(name) == "ok" for name in ("mem", "environ", "fd/0", "fd/3"))
    return Seen(not lives or read, seen.words())


CASES = (
    Case("A01", "a host file outside the view is not read", READ, "nothing but the view is mounted", _read),
    Case("A02", "a mount that is read-only is not written", WRITE, "read-only binds", _write),
    Case("B07", "guestd's own files are not overwritten", ESCAPE, "guestd is mounted read-only", _overwrite_ours),
    Case(
        "D14",
        "guestd is not ended, stopped or read by a guest",
        DOS,
        "guestd is PID 1, and Landlock",
        _end_guestd,
        ("container",),
    ),
    Case("F01", "a fork bomb ends at limits.processes", DOS, "pids limit", _take_processes, ("container",)),
    Case("F02", "memory ends at limits.memory", DOS, "memory limit", _take_memory, ("container",)),
    Case("G01", "no connection reaches the host", ESCAPE, "network none", _reach_host, ("container",)),
    Case("M09", "the engine's socket is not reached", ESCAPE, "no socket is mounted", _ask_engine, ("container",)),
)


def run(backend: str, ids: list[str], progress: Progress | None) -> Matrix:
    """The cases of one backend. Raises LookupError for an id it has none of."""
    known = {case.id: case for case in CASES if backend in case.backends}
    chosen = [known[name] for name in ids if name in known] if ids else list(known.values())
    if ids and not chosen:
        raise LookupError(f"no attack on {backend} is named {', '.join(ids)}")
    rows = []
    for done, case in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), case.id)
        rows.append(run_one(case, backend))
    return Matrix(backend, "root" if os.geteuid() == 0 else "user", os.uname().release, tuple(rows))


def run_one(case: Case, backend: str) -> Row:
    from ringfence.attacks.harness import judged, proven

    started = time.monotonic()
    seen = {"off": proven(lambda: _play(case, "off", backend)), "on": _play(case, "on", backend)}
    return judged(case.as_attack(), seen, started)


def _play(case: Case, name: ArmName, backend: str) -> Seen:
    with contextlib.ExitStack() as ends:
        arm = WalledArm(case, name, backend)
        ends.push(arm.__exit__)
        try:
            return case.play(arm)
        except Exception as error:  # noqa: BLE001  # a broken arm is a result: its row says so and the run goes on
            return Seen(succeeded=False, what=f"broken: {type(error).__name__}: {error}")
