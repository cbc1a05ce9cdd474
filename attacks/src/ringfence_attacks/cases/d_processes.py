"""D: descriptors, processes and signals, and what outlives a run or its supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time

import ringfence
from ringfence.host.zygote_start import own_package
from ringfence.values import replace
from ringfence_attacks.arena import LIMITS, POLICY, attempts_met
from ringfence_attacks.case import (
    BARE,
    DOS,
    ESCAPE,
    HOST_CODE,
    LEAK,
    PERSIST,
    READ,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence_attacks.host_programs import host_process
from ringfence_attacks.tracer import host_pid, inside, reported_pid
from ringfence_attacks.witnesses import descendants, processes_with, status_of, waiting_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence import Sandbox
    from ringfence_attacks.arena import Arm


@attack("D01", "a guest starts with its three streams and the report, and no other descriptor", LEAK, off=BARE)
def open_descriptors(arm: Arm) -> Seen:
    """Bare: a process that gets one more descriptor. Seen by the host, in /proc of the waiting process."""
    if arm.bare:
        with (
            open(arm.host_file(), encoding="utf-8") as file,
            subprocess.Popen(
                [arm.canary, "5"], executable=os.path.realpath("/bin/sleep"), pass_fds=[file.fileno()]
            ) as plain,
        ):
            found = _descriptors(plain.pid)
            plain.kill()
        return Seen(found != {0, 1, 2}, f"descriptors {sorted(found)}")
    process = arm.spawn("os.execv('/bin/sleep', [canary, '5'])", box=arm.sandbox(), canary=arm.canary)
    pid = waiting_process(arm.canary)
    if pid is None:
        raise AssertionError(f"it did not start: {process.kill().stderr[-200:]}")
    found = _descriptors(pid)
    for _ in range(20):  # the loader still has a library open for a moment; what was inherited stays
        if found == {0, 1, 2}:
            break
        time.sleep(0.01)
        found &= _descriptors(pid)
    return Seen(found != {0, 1, 2}, f"descriptors {sorted(found)}")


_TRY_ALL = (
    "\nfor fd in range(3, 256):\n    try:\n        loot(os.pread(fd, 4096, 0))\n    except OSError:\n        pass\n"
)


@attack("D02", "a file that the supervisor has open is not inherited", READ, off=BARE)
def inherited(arm: Arm) -> Seen:
    """A separate supervisor opens the canary's file, inheritable, before it starts Ringfence."""
    path = arm.host_file(mode=0o600)
    script = arm.script(_TRY_ALL)
    opening = f"import os, sys, subprocess\nfd = os.open({path!r}, os.O_RDONLY)\nos.set_inheritable(fd, True)\n"
    if arm.bare:
        body = f"subprocess.run([sys.executable, '-I', '-c', {script!r}], close_fds=False)\n"
    else:
        body = f"import ringfence\nsys.stdout.write(ringfence.run({script!r}).stdout)\n"
    done = host_process(opening + body)
    return Seen(arm.canary in done.stdout, f"exit {done.returncode}; {done.stderr[-200:]}")


D03 = not_applicable(
    "D03",
    "no descriptor is passed out over the control channel",
    ESCAPE,
    "a guest holds pipes and no socket: the monitor's is closed before guest code runs",
)


@attack("D04", "flags that a guest sets on its streams stay with the guest", DOS, off=BARE)
def stream_flags(arm: Arm) -> Seen:
    """The command passes its standard input on to the guest. The witness: the flags of the caller's open file."""
    read_end, write_end = os.pipe()
    set_flag = "import fcntl, os; [fcntl.fcntl(n, 4, fcntl.fcntl(n, 3) | os.O_NONBLOCK) for n in (0, 1, 2)]"
    argv = ["python3", "-I", "-c", set_flag]
    start = f"{own_package()}; from ringfence.__main__ import main; sys.exit(main())"
    command = argv if arm.bare else [sys.executable, "-I", "-c", start, "exec", "--", *argv]
    try:
        done = subprocess.run(
            command,
            stdin=read_end,
            capture_output=True,
            timeout=20,
            check=False,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": arm.directory},
        )
        flags = fcntl.fcntl(read_end, fcntl.F_GETFL)
    finally:
        os.close(read_end)
        os.close(write_end)
    if done.returncode != 0:
        raise AssertionError(done.stderr.decode(errors="replace")[-300:])
    return Seen(bool(flags & os.O_NONBLOCK), f"the caller's flags are {flags:#o}")


@attack("D07", "no process is read or driven by another", READ, off="seccomp:ptrace")
def tracing(arm: Arm) -> Seen:
    """The guest attacks a child process, where the kernel permits that; processes of the host have no pid inside."""
    report = arm.python(
        """
        secret = ctypes.create_string_buffer(canary.encode())
        pid = os.fork()
        if pid == 0:
            time.sleep(5)
            os._exit(0)
        buffer = ctypes.create_string_buffer(64)
        def vector(address, size):
            return address.to_bytes(8, "little") + size.to_bytes(8, "little")
        local, remote = vector(ctypes.addressof(buffer), 32), vector(ctypes.addressof(secret), 32)
        if attempt("process_vm_readv", call, 310, pid, local, 1, remote, 1, 0) is not None:
            loot(buffer.value)
        attempt("process_vm_writev", call, 311, pid, local, 1, remote, 1, 0)
        attempt("ptrace", call, 101, 0x4206, pid, 0, 0)
        attempt("kcmp", call, 312, os.getpid(), pid, 0, 0, 0)
        fd = os.pidfd_open(pid)
        attempt("pidfd_getfd", call, 438, fd, 0, 0)
        for other in (1, 2):
            attempt(f"process_vm_readv {other}", call, 310, other, local, 1, remote, 1, 0)
        os.kill(pid, 9)
        """,
        canary=arm.canary,
    )
    return arm.stolen(report)


@attack(
    "D07-user",
    "a process outside with the sandbox's own uid is not read",
    READ,
    off="user-namespace",
    behind=("view", "landlock-files", "landlock-scopes"),
    needs="root",
)
def same_uid_outside(arm: Arm) -> Seen:
    """Uids, /proc and Landlock are left out: the only control left is that the reader's user namespace is lower."""
    box = arm.sandbox()
    owner = uid_of(box)
    with subprocess.Popen(
        ["/bin/sleep", "5"], env={"CANARY": arm.canary}, user=owner, group=owner, extra_groups=[]
    ) as victim:
        report = arm.python('steal(f"/mnt/proc/{pid}/environ", "environ")', box=box, pid=victim.pid)
        victim.kill()
    return arm.stolen(report)


def uid_of(box: Sandbox) -> int:
    """Return the host uid of the guest."""
    claim = getattr(box._box, "_uid", None)  # noqa: SLF001  # no public name: callers have no use for the uid
    return int(claim.uid) if claim is not None else os.geteuid()


def _signalling(arm: Arm) -> Seen:
    """Send a signal to a process with the sandbox's own uid, so that the kernel's check of uids permits the signal."""
    box = arm.sandbox()
    owner = uid_of(box)
    with subprocess.Popen(["/bin/sleep", "5"], user=owner, group=owner, extra_groups=[]) as victim:
        report = arm.python(
            "attempt('kill', os.kill, pid, 9)\nattempt('again', os.kill, pid, 0)", box=box, pid=victim.pid
        )
        try:
            victim.wait(0.3)
        except subprocess.TimeoutExpired:
            victim.kill()
            return Seen(False, report.words())
    return Seen(True, report.words())


D08 = attack(
    "D08",
    "no process outside is signalled: pid namespace",
    ESCAPE,
    off="pid-namespace",
    behind="landlock-scopes",
    needs=("root", "landlock"),
)(_signalling)
D08_SCOPES = attack(
    "D08-scopes",
    "no process outside is signalled: Landlock",
    ESCAPE,
    off="landlock-scopes",
    behind="pid-namespace",
    needs=("root", "landlock"),
)(_signalling)


_STOP = """
for name in sorted(os.listdir("/proc")):
    if name.isdigit() and int(name) not in (1, os.getpid()):
        attempt(f"stop {name}", os.kill, int(name), 19)
"""


@attack("D09", "a guest that stops or kills the spawner does not stop the sandbox", DOS, off=HOST_CODE, label="monitor")
def stop_spawner(arm: Arm) -> Seen:
    """Off: the host sees that the attack reaches the spawner, which stands still. On: the sandbox still runs code: each
    of two later runs leaves a file."""
    box = arm.sandbox()
    before = _standing_spawners(box)
    report = arm.python(_STOP, box=box)
    if arm.off:
        deadline = time.monotonic() + 2
        while not (stopped := _standing_spawners(box) - before) and time.monotonic() < deadline:
            time.sleep(0.01)  # a stop arrives when its target next runs, which may be after the guest's end
        return Seen(bool(stopped), f"spawners that stand still: {len(stopped)}; {report.words()}")
    arm.python("spill('/workspace/next', canary, os.O_CREAT)\nos.kill(-1, 9)", box=box, canary=arm.canary)
    arm.python("spill('/workspace/after', canary, os.O_CREAT)", box=box, canary=arm.canary)
    done = [name for name in ("next", "after") if box.files.read_text(name) == arm.canary]
    return Seen(len(done) < 2, f"{report.words()}; runs that then did their work: {len(done)} of 2")


def _standing_spawners(box: Sandbox) -> set[int]:
    """Return the pids of the spawners that are stopped."""
    each = {pid: status_of(pid) for pid in inside(box)}
    return {
        pid for pid, status in each.items() if status.get("Name") == "rf-spawner" and status["State"].startswith("T")
    }


_DAEMON = """
import signal
if os.fork() == 0:
    os.setsid()
    {extra}
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        os.execv(sleep, [canary, "6"])
    os._exit(0)
os.wait()
time.sleep(0.2)
"""
_STUBBORN = """
    for number in (1, 2, 3, 15):
        signal.signal(number, signal.SIG_IGN)
    call(157, 36, 1, 0, 0, 0)
    call(157, 1, 0, 0, 0, 0)"""


def _daemon(arm: Arm, extra: str) -> Seen:
    """Run code that leaves a daemon. Seen by the host: whether a process with the canary as its name lives on."""
    code = _DAEMON.format(extra=extra.strip() or "pass")
    sleep = os.path.realpath("/bin/sleep")
    if arm.bare:
        arm.python(code, canary=arm.canary, sleep=sleep)
    else:
        result = ringfence.run(arm.script(code, canary=arm.canary, sleep=sleep), policy=POLICY)
        if result.status != "ok":
            raise AssertionError(result.stderr)
    left = processes_with(arm.canary)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Seen(bool(left), f"{len(left)} processes left")


@attack("D10", "a daemon does not outlive the run that started it", PERSIST, off=BARE)
def daemon(arm: Arm) -> Seen:
    return _daemon(arm, "")


@attack("D11", "a daemon that ignores signals and adopts its children does not outlive its run", PERSIST, off=BARE)
def stubborn_daemon(arm: Arm) -> Seen:
    return _daemon(arm, _STUBBORN)


_ZOMBIES = """
count = 0
try:
    while count < 150:
        if os.fork() == 0:
            os._exit(0)
        count += 1
except OSError as error:
    tell(tried="fork", met=errno.errorcode[error.errno])
"""


@attack("D12", "zombies count against the limit of processes", DOS, off="process-limit")
def zombies(arm: Arm) -> Seen:
    """Counted by the host, in /proc."""
    pid, words = arm.waiting(_ZOMBIES, box=arm.sandbox())
    dead = [child for child in descendants(pid) if status_of(child).get("State", "").startswith("Z")]
    if not dead:
        raise AssertionError(f"no zombie was left: {words}")
    return Seen(len(dead) > LIMITS.processes, f"{len(dead)} zombies, the limit is {LIMITS.processes}; {words}")


_CLASSES = """
import struct
tell(pid=os.getpid())
sys.stdin.readline()
for policy in (3, 1, 2):  # BATCH, which the kernel grants to all; FIFO and RR, which it grants up to a limit
    wanted = struct.pack("IIQiIQQQ", 48, policy, 0, os.nice(0), policy % 3 and 1, 0, 0, 0)
    attempt(f"sched_setattr {policy}", call, 314, 0, wanted, 0)
attempt("SCHED_FIFO", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
attempt("SCHED_RR", os.sched_setscheduler, 0, os.SCHED_RR, os.sched_param(1))
attempt("nice", os.setpriority, os.PRIO_PROCESS, 0, -20)
attempt("io class", call, 251, 1, 0, 1 << 13)
tell(tried="all", met="done")
time.sleep(8)
"""


@attack("D13", "no realtime scheduling class is taken", DOS, off="seccomp:realtime")
def scheduling(arm: Arm) -> Seen:
    """Seen by the host: the class of the waiting process. Where permitted, the host first raises the kernel's limit."""
    box = arm.sandbox()
    process = arm.spawn(_CLASSES, box=box)
    pid = host_pid(box, reported_pid(process)[0])
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_RTPRIO, (1, 1))
    process.write("go\n")
    said = ""
    for event in process:
        said += getattr(event, "text", "")
        if '"all"' in said:
            break
    found = os.sched_getscheduler(pid)
    return Seen(found != os.SCHED_OTHER, f"scheduling class {found}; {attempts_met(said)}")


@attack("D13-cpu", "CPU time is limited where no control group counts it", DOS, off="rlimit-cpu", behind="cgroup")
def processor_time(arm: Arm) -> Seen:
    """The limit of half a second is enforced by the kernel's rlimit. Off, the wall clock ends the run."""
    policy = POLICY.replace(limits=replace(LIMITS, cpu_time_s=0.5))
    report = arm.python("while True:\n    pass", policy=policy, timeout_s=2 if arm.off else 8)
    return Seen(report.status == "timeout", f"ended as {report.status}, signal {report.signal}")


@attack("D14", "no core file is written", LEAK, off="rlimit-core")
def core_file(arm: Arm) -> Seen:
    """Seen by the host: the limit in /proc of the process. No core is dumped: the pattern may name a host program."""
    return _core_limit(arm, 4096)


@attack("D14-program", "no program of the host is started for a core", ESCAPE, off="seccomp:core")
def core_program(arm: Arm) -> Seen:
    """The kernel starts the program, as root, unless the limit is exactly 1: even at 0."""
    return _core_limit(arm, 0)


def _core_limit(arm: Arm, wanted: int) -> Seen:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        raise NotApplicable("the host's own limit is 0")
    code = f"""
    import resource
    attempt("setrlimit", resource.setrlimit, resource.RLIMIT_CORE, ({wanted}, {wanted}))
    attempt("prlimit", resource.prlimit, 0, resource.RLIMIT_CORE, ({wanted}, {wanted}))
    os.execv("/bin/sleep", [canary, "5"])
    """
    process = arm.spawn(code, box=arm.sandbox(), canary=arm.canary)
    pid = waiting_process(arm.canary)
    if pid is None:
        raise AssertionError(f"it did not start: {process.kill().stderr[-200:]}")
    with open(f"/proc/{pid}/limits", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("Max core"))
    return Seen(line.split()[4:6] != ["1", "1"], " ".join(line.split()))


@attack("D15", "a guest does not outlive its supervisor", PERSIST, off=BARE)
def supervisor_killed(arm: Arm) -> Seen:
    sleep = os.path.realpath("/bin/sleep")
    if arm.bare:
        code = f"import subprocess\nsubprocess.run([{arm.canary!r}, '6'], executable={sleep!r})\n"
    else:
        inner = f"import os; os.execv({sleep!r}, [{arm.canary!r}, '6'])"
        code = _supervisor(f"box.exec(['python3', '-c', {inner!r}])")
    return _orphans(arm, code)


@attack("D16", "output that a grandchild holds open does not hold up the caller", DOS, off=BARE)
def held_pipe(arm: Arm) -> Seen:
    code = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(5)\n    os._exit(0)\ntell(done=True)"
    started = time.monotonic()
    try:
        arm.python(code, timeout_s=3)
    except subprocess.TimeoutExpired:
        return Seen(True, "the caller waited for the grandchild")
    took = time.monotonic() - started
    return Seen(took > 2.5, f"answered after {took:.1f} s")  # a start on a busy engine takes a second


@attack("D17", "a fork of the supervisor keeps no guest alive", PERSIST, off=BARE)
def forked_supervisor(arm: Arm) -> Seen:
    """The supervisor forks, then is killed: the fork still holds every pipe and socket that it had."""
    mark = f"{arm.directory}/forked"
    keep = f"if os.fork() == 0:\n    open({mark!r}, 'w').close()\n    time.sleep(4)\n    os._exit(0)\n"
    cat = os.path.realpath("/bin/cat")
    if arm.bare:
        start = f"subprocess.Popen([{arm.canary!r}], executable={cat!r}, stdin=subprocess.PIPE)"
    else:
        inner = f"import os; os.execv({cat!r}, [{arm.canary!r}])"
        start = f"ringfence.Sandbox().start().spawn(['python3', '-c', {inner!r}])"
    code = f"import os, ringfence, subprocess, time\nchild = {start}\n{keep}child.wait()\n"
    return _orphans(arm, code, mark)


_PAUSES = """
import ringfence, time
with ringfence.Sandbox() as box:
    guest = box.spawn(["python3", "-c", {inner!r}])
    next(iter(guest))
    time.sleep(0.2)  # for the exec that follows the first line of output
    box.pause()
    open({mark!r}, "w").close()
    time.sleep(6)
"""


@attack("D18", "a paused sandbox dies with its supervisor", PERSIST, off=BARE, needs="cgroup")
def paused(arm: Arm) -> Seen:
    """A process frozen by a cgroup v1 does not react to SIGKILL until it is thawed. Bare: a stopped child lives on."""
    sleep, mark = os.path.realpath("/bin/sleep"), f"{arm.directory}/paused"
    if arm.bare:
        code = (
            f"import os, signal, subprocess\nchild = subprocess.Popen([{arm.canary!r}, '6'], executable={sleep!r})\n"
            f"os.kill(child.pid, signal.SIGSTOP)\nopen({mark!r}, 'w').close()\nchild.wait()\n"
        )
    else:
        inner = f"import os; print('up', flush=True); os.execv({sleep!r}, [{arm.canary!r}, '6'])"
        code = _PAUSES.format(inner=inner, mark=mark)
    seen = _orphans(arm, code, mark)
    if not os.path.exists(mark):
        raise AssertionError("the sandbox was not paused")
    return seen


def _supervisor(body: str) -> str:
    return f"from ringfence import Sandbox\nwith Sandbox() as box:\n    {body}\n"


def _orphans(arm: Arm, code: str, mark: str | None = None) -> Seen:
    """Start a supervisor, wait for its guest and for the file `mark`, then kill the supervisor. The attack succeeds
    when the guest lives on."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", f"{own_package()}\n{code}"],
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": os.path.expanduser("~")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as supervisor:
        pid = waiting_process(arm.canary, 8)
        deadline = time.monotonic() + 8
        while mark is not None and not os.path.exists(mark) and time.monotonic() < deadline:
            time.sleep(0.01)
        supervisor.kill()
        supervisor.wait()
        if pid is None:
            assert supervisor.stderr is not None
            raise AssertionError(f"no guest was started: {supervisor.stderr.read()[-300:]!r}")
    deadline = time.monotonic() + (0.4 if arm.bare else 1.5)  # nothing ends the guest in a bare arm
    while processes_with(arm.canary) and time.monotonic() < deadline:
        time.sleep(0.02)
    states = {guest: status_of(guest).get("State", "gone") for guest in processes_with(arm.canary)}
    for guest in states:
        os.kill(guest, signal.SIGKILL)
    return Seen(bool(states), f"left: {', '.join(states.values()) or 'none'}")


def _descriptors(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


CASES = cases(globals())
