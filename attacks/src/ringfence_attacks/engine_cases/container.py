"""Attacks on the settings that a container is created with: user, namespaces, limits, devices; and on the engine."""

from __future__ import annotations

import os
import time

from ringfence import Limits, Mount, Policy, PolicyError, Sandbox, UnsupportedError
from ringfence.values import replace
from ringfence_attacks.arena import POLICY
from ringfence_attacks.case import DOS, ESCAPE, LEAK, WRITE, NotApplicable, Seen, attack, cases
from ringfence_attacks.engine_arena import engine_arm, wall_of
from ringfence_attacks.tracer import inside
from ringfence_attacks.witnesses import status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm
    from ringfence_attacks.case import Attack

_BURST = "/proc/sys/kernel/printk_ratelimit_burst"  # a change does no harm, and is undone
# Without no_new_privs an ordinary user must not install a filter or a Landlock domain.
_PRIVILEGES = ("seccomp", "landlock-files", "landlock-scopes")


@attack("E25-user", "from outside: no guest is root", ESCAPE, off="own-user")
def not_root(arm: Arm) -> Seen:
    pid, _ = arm.waiting("", box=arm.sandbox())
    uids = status_of(pid).get("Uid", "").split()
    return Seen("0" in uids, f"Uid {' '.join(uids)}")


@attack(
    "E25-privileges",
    "from outside: no_new_privs is set",
    ESCAPE,
    off=("no-new-privileges-flag", "no-new-privileges"),
    behind=_PRIVILEGES,
)
def no_new_privileges(arm: Arm) -> Seen:
    pid, _ = arm.waiting("", box=arm.sandbox())
    seen = status_of(pid).get("NoNewPrivs")
    return Seen(seen == "0", f"NoNewPrivs {seen}")


def _engines_filter() -> Attack:
    """Return the attack E05, a call that both engines refuse, with Ringfence's own filter left out."""
    from ringfence_attacks.cases import e_kernel

    perf = next(each for each in e_kernel.CASES if each.id == "E05")
    title = "the engine's filter holds alone"
    return replace(perf, id="E05-engine", title=title, off=("engine-seccomp",), behind=("seccomp",))


@attack("B02-sysctl", "a setting of the host's kernel is not written", WRITE, off="read-only-paths", behind="own-user")
def write_setting(arm: Arm) -> Seen:
    with open(_BURST, encoding="ascii") as file:
        before = file.read()
    report = arm.python('attempt("write", spill, path, value)', path=_BURST, value=str(int(before) + 1))
    with open(_BURST, encoding="ascii") as file:
        after = file.read()
    if after != before:
        with open(_BURST, "w", encoding="ascii") as file:
            file.write(before)
    return Seen(after != before, report.words())


@attack("B13-cgroup", "a guest cannot read the container's id and place", LEAK, off="own-cgroups")
def tell_place(arm: Arm) -> Seen:
    box = arm.sandbox()
    identity = wall_of(box)._id  # noqa: SLF001  # no public name leads there
    if wall_of(box)._engine.name == "podman" and not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):  # noqa: SLF001  # as above
        raise NotApplicable("Podman gives no cgroup namespace on cgroup v1")
    report = arm.python('steal("/proc/self/cgroup")', box=box)
    return Seen(identity in report.looted, report.words())


@attack(
    "A18-device", "no device of the host is opened", ESCAPE, off="no-devices", behind=("own-user", "landlock-files")
)
def open_device(arm: Arm) -> Seen:
    box = arm.sandbox()
    pid, met = arm.waiting('held = attempt("open", os.open, "/dev/fuse", os.O_RDWR)', box=box)
    opened = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return Seen("/dev/fuse" in opened, f"{met}; open: {', '.join(sorted(set(opened)))}")


@attack("F08-quota", "CPU time ends at limits.cpus", DOS, off="cpu-quota")
def take_cpu(arm: Arm) -> Seen:
    """Spin for a second; the cgroup counts the CPU time. Without the quota the use is far above 4 times the share, even
    on a busy host."""
    share = 0.03
    box = arm.sandbox(POLICY.replace(limits=replace(POLICY.limits, cpus=share)))
    with box.spawn(["sh", "-c", "while :; do :; done"]):
        time.sleep(0.3)
        begun, before = time.monotonic(), _cpu_s(box)
        time.sleep(1.0)
        used = (_cpu_s(box) - before) / (time.monotonic() - begun)
    return Seen(used > 4 * share, f"{used:.2f} CPUs of {share}")


def _cpu_s(box: Sandbox) -> float:
    """Return the CPU seconds of the container's cgroup."""
    return float(wall_of(box).usage()[0].cpu_s or 0.0)


_FORKS = """
for i in range(60):
    try:
        pid = os.fork()
    except OSError as error:
        tell(tried="fork", met=error.errno)
        break
    if pid == 0:
        time.sleep(6); os._exit(0)
tell(pid=os.getpid())
time.sleep(6)
"""


def _forks(arm: Arm) -> Seen:
    """Start 60 processes where 24 are permitted. The host counts the processes below the container's first."""
    from ringfence_attacks.tracer import reported_pid

    limits = Limits(timeout_s=20, memory="128M", processes=24, disk="1M", disk_files=500)
    box = arm.sandbox(Policy(limits=limits))
    reported_pid(arm.spawn(_FORKS, box=box))
    count = len(inside(box))
    return Seen(count > 24 + 12, f"{count} processes")


@attack("F06-engine", "a fork bomb ends at the engine's limit alone", DOS, off="pids-limit", behind=("process-limit",))
def fork_bomb(arm: Arm) -> Seen:
    return _forks(arm)


@attack(
    "F06-ulimit",
    "a fork bomb ends at the ulimit alone",
    DOS,
    off="ulimit-nproc",
    behind=("process-limit", "pids-limit"),
)
def fork_bomb_again(arm: Arm) -> Seen:
    return _forks(arm)


@attack("D14-ulimit", "no process dumps core, by the ulimit alone", LEAK, off="ulimit-core", behind="rlimit-core")
def core_size(arm: Arm) -> Seen:
    pid, _ = arm.waiting("", box=arm.sandbox())
    with open(f"/proc/{pid}/limits", encoding="ascii") as file:
        row = next(line for line in file if line.startswith("Max core file size"))
    return Seen(row.split()[5] != "1", " ".join(row.split()))


@attack("D12-reaped", "orphans are reaped", DOS, off="guestd-first")
def orphans(arm: Arm) -> Seen:
    """Leave thirty orphans. Judged by the number of zombies when all have ended."""
    box = arm.sandbox(POLICY)
    code = """
    for i in range(30):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.2)
            os._exit(0)
        os.wait()
    """
    arm.python(code, box=box)
    deadline = time.monotonic() + 5
    states: list[str] = []
    while time.monotonic() < deadline:
        states = [status_of(pid).get("State", "?")[0] for pid in inside(box)]
        if states.count("Z") > 20 or ("Z" not in states and len(states) < 8):
            break
        time.sleep(0.1)
    dead = states.count("Z")
    return Seen(dead > 10, f"{dead} zombies")


_ASK = """
import socket
def ask(path):
    body = b'{"Name": "' + canary.encode() + b'"}'
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5); sock.connect(path)
        head = b"POST /v1.40/volumes/create HTTP/1.0\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
        sock.sendall(head + b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
        sock.recv(64)
for path in ("/run/engine.sock", "/var/run/docker.sock", "/run/podman/podman.sock", at):
    attempt(path, ask, path)
"""


@attack("M09", "the engine's socket is not reached", ESCAPE, off="no-engine-socket", behind="own-user")
def ask_engine(arm: Arm) -> Seen:
    """A process that reaches the engine's socket is root on the host. Witness: a volume that the engine then has."""
    from ringfence.backends.container import api

    found = api.find()
    report = arm.python(_ASK, canary=arm.canary, at=found.socket)
    names = [each["Name"] for each in found.api.volumes().get("Volumes") or ()]
    if arm.canary in names:
        found.api.remove_volume(arm.canary, force=True)
    return Seen(arm.canary in names, report.words())


@attack("M03", "no argument of the API leads to a privileged container", ESCAPE, off="not-privileged")
def privileged(arm: Arm) -> Seen:
    """On: every request of a caller that would lead there is refused. Off: the container has devices of the host."""
    refused = [] if arm.off else _refusals()
    box = arm.sandbox()
    devices = os.listdir(f"/proc/{wall_of(box).pid}/root/dev")
    settings = engine_arm(arm).inspect(box)["HostConfig"]
    wide = bool(settings["Privileged"]) or "kmsg" in devices
    return Seen(wide or "accepted" in refused, f"Privileged {settings['Privileged']}; {', '.join(refused)}")


def _refusals() -> list[str]:
    from ringfence.backends.container import api

    at = api.find().socket
    words = []
    for source in (at, "/proc", "/sys", "/dev", "/"):
        try:
            Sandbox(policy=Policy(mounts=[Mount(source, target="/x", mode="rw")]), backend="container").plan()
            words.append("accepted")
        except (PolicyError, UnsupportedError, OSError) as error:
            words.append(type(error).__name__)
    for name in ("privileged", "cap_add", "network_mode", "devices", "pid_mode"):
        try:
            Sandbox(**{name: True})  # type: ignore[arg-type]  # the case tries that there is no such argument
            words.append("accepted")
        except TypeError:
            words.append(f"no {name}")
    return words


CASES = (*cases(globals()), _engines_filter())
