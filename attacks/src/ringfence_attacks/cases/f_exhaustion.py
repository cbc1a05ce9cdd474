"""F: exhaustion of memory, processes, time, disk and descriptors.

Bombs are bounded in every arm: at most 300 MB, 120 processes and a few seconds beyond the limits.
"""

from __future__ import annotations

import os
import time

from ringfence import Limits, Policy
from ringfence.errors import RingfenceError
from ringfence.values import replace
from ringfence_attacks.case import DOS, HOST_CODE, NotApplicable, Seen, attack, cases, not_applicable
from ringfence_attacks.tracer import host_pid, inside, reported_pid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import LinuxPlan
    from ringfence_attacks.arena import Arm, GuestReport

_MB = 1 << 20


_BASE = Limits(timeout_s=10, cpu_time_s=10, memory="64M", processes=48, open_files=256, disk="8M", disk_files=2000)


def _limits(**changed: object) -> Policy:
    return Policy(limits=replace(_BASE, **changed))


_SMALL = _limits()  # its cgroup has 64 MiB, and for its file systems 2 times 8 + 32 MiB


def _peak(report: GuestReport) -> str:
    usage = report.result.usage if report.result is not None else None
    peak = usage.memory_peak_bytes if usage is not None else None
    return f"{report.status}, exit {report.exit_code}, signal {report.signal}, peak {peak and peak // _MB} MB"


def _took_all_memory(arm: Arm, code: str, policy: Policy = _SMALL) -> Seen:
    """Run a script that exits with 0 only when all the wanted memory was in use at once."""
    report = arm.python(code, policy=policy)
    if arm.name == "on" and report.status != "oom":
        return Seen(report.exit_code == 0, f"expected oom: {_peak(report)}; {report.words()}")
    return Seen(report.exit_code == 0, _peak(report))


@attack("F01", "memory beyond the limit ends in oom", DOS, off="cgroup", needs="cgroup")
def anonymous_memory(arm: Arm) -> Seen:
    return _took_all_memory(arm, "held = bytearray(240 << 20)\nheld[::4096] = bytes(len(held[::4096]))")


_CHILDREN = """
children = []
read, write = os.pipe()
for _ in range(16):
    pid = os.fork()
    if pid == 0:
        held = bytearray(14 << 20)
        held[::4096] = bytes(len(held[::4096]))
        os.write(write, b"x")
        time.sleep(6)
        os._exit(0)
    children.append(pid)
os.close(write)
got = 0
while got < 16:
    part = os.read(read, 16)
    got += len(part)
    if not part or any(os.waitpid(pid, os.WNOHANG)[0] for pid in children):
        os._exit(1)
for pid in children:
    os.kill(pid, 9)
os._exit(0)
"""


@attack("F02", "many small processes together stay within the memory limit", DOS, off="cgroup", needs="cgroup")
def memory_of_children(arm: Arm) -> Seen:
    report = arm.python(_CHILDREN, policy=_SMALL)
    return Seen(report.exit_code == 0, _peak(report))


@attack("F03", "memory files count against the memory limit", DOS, off="cgroup", needs="cgroup")
def memory_files(arm: Arm) -> Seen:
    return _took_all_memory(arm, "fd = os.memfd_create('x')\nfor _ in range(240): os.write(fd, bytes(1 << 20))")


_SYSV_BOMB = """
kept = []
for _ in range(15):
    number = call(29, 0, 16 << 20, 0o1600)
    address = call(30, number, 0, 0)
    call(31, number, 0, 0)
    ctypes.memset(address, 1, 16 << 20)
"""


@attack("F03-sysv", "System V shared memory counts against the memory limit", DOS, off="cgroup", needs="cgroup")
def shared_memory(arm: Arm) -> Seen:
    return _took_all_memory(arm, _SYSV_BOMB)


_BUFFERS = """
import socket
kept = []
for _ in range(60):
    ends = socket.socketpair()
    kept.append(ends)
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        try:
            while True:
                end.send(bytes(1 << 15))
        except BlockingIOError:
            pass
"""


@attack("F04", "buffers in the kernel count against the memory limit", DOS, off="cgroup", needs="cgroup")
def kernel_memory(arm: Arm) -> Seen:
    return _took_all_memory(arm, _BUFFERS, _limits(memory="16M", disk="4M"))


@attack("F05", "memory does not go to the host's swap", DOS, off="cgroup", needs="cgroup")
def swap(arm: Arm) -> Seen:
    with open("/proc/swaps", encoding="ascii") as file:
        if len(file.readlines()) < 2:
            raise NotApplicable("the host has no swap")
    report = arm.python("held = bytearray(240 << 20)\nheld[::4096] = bytes(len(held[::4096]))", policy=_SMALL)
    return Seen(report.exit_code == 0, _peak(report))


_FORKS = """
made = 0
try:
    while made < 110:
        pid = os.fork()
        if pid == 0:
            time.sleep(6)
            os._exit(0)
        made += 1
except OSError as error:
    tell(tried="fork", met=errno.errorcode[error.errno])
tell(pid=os.getpid())
time.sleep(6)
"""
_THREADS = """
import threading
threading.stack_size(1 << 16)  # 110 stacks of the usual size are more than the memory limit of an ordinary user
try:
    for _ in range(110):
        threading.Thread(target=time.sleep, args=(6,), daemon=True).start()
except RuntimeError as error:
    tell(tried="thread", met=str(error))
tell(pid=os.getpid())
time.sleep(6)
"""


@attack("F06", "a fork bomb ends at limits.processes", DOS, off="process-limit")
def fork_bomb(arm: Arm) -> Seen:
    return _tasks_inside(arm, _FORKS)


@attack("F06-threads", "a thread bomb ends at limits.processes", DOS, off="process-limit")
def thread_bomb(arm: Arm) -> Seen:
    return _tasks_inside(arm, _THREADS)


def _tasks_inside(arm: Arm, code: str) -> Seen:
    box = arm.sandbox()
    reported_pid(arm.spawn(code, box=box))
    count = sum(_tasks(pid) for pid in inside(box))
    return Seen(count > 100, f"{count} tasks in the sandbox, limit 48")


def _tasks(pid: int) -> int:
    """Return the number of tasks of a process, as the host sees them; 0 when the process has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def no_reserve(plan: LinuxPlan, arm: Arm) -> LinuxPlan:
    """Return the plan with a cgroup that has room for the guest's processes and none for Ringfence's own."""
    del arm
    from ringfence.shared import framing

    return replace(plan, processes=plan.processes - framing.OURS - framing.RESERVE)


@attack("F07", "a guest at its process limit does not stop exec and files", DOS, off=no_reserve, needs="cgroup")
def at_the_limit(arm: Arm) -> Seen:
    box = arm.sandbox()
    reported_pid(arm.spawn(_FORKS, box=box))
    try:
        code = box.exec(["true"]).exit_code
        box.files.write("note", "works")
        works = code == 0 and box.files.read("note") == b"works"
    except (OSError, RingfenceError) as error:
        return Seen(succeeded=True, what=f"{type(error).__name__}: {error}")
    return Seen(not works, f"exec {code}, files work")


_SPIN = """
end = time.monotonic() + 0.9
for _ in range(3):
    if os.fork() == 0:
        while time.monotonic() < end: pass
        os._exit(0)
while time.monotonic() < end: pass
for _ in range(3): os.wait()
"""


@attack("F08", "a tree of spinning processes gets its share of CPU time and no more", DOS, off="cgroup", needs="cgroup")
def spin(arm: Arm) -> Seen:
    before = time.monotonic()
    report = arm.python(_SPIN, policy=_limits(cpus=0.05))
    used = report.result.usage.cpu_s if report.result is not None else None
    share = (used or 0.0) / (time.monotonic() - before)
    sibling = time.monotonic()
    arm.run(arm.sandbox(whole=True), "1")
    return Seen(share > 0.1, f"{share:.2f} CPUs of 0.05; a sibling answers in {time.monotonic() - sibling:.2f} s")


_LONG_S = 1.6  # the time that the scripts below take when no clock ends them


@attack("F09", "code that sleeps is ended by the wall clock", DOS, off=HOST_CODE)
def sleep_forever(arm: Arm) -> Seen:
    return _outlives(arm, f"time.sleep({_LONG_S})")


@attack("F18", "code that drips output forever is ended by the wall clock", DOS, off=HOST_CODE)
def slow_drip(arm: Arm) -> Seen:
    return _outlives(arm, f"for n in range(40):\n    print(n, flush=True)\n    time.sleep({_LONG_S / 40})")


_DEAF = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
if os.fork() == 0: os.setsid()
time.sleep(1.6)
"""


@attack(
    "F32",
    "code that ignores every signal is ended by the wall clock, and the caller gets the answer in time",
    DOS,
    off=HOST_CODE,
)
def deaf_to_signals(arm: Arm) -> Seen:
    return _outlives(arm, _DEAF)


def _outlives(arm: Arm, code: str) -> Seen:
    """Run a script that takes `_LONG_S`. Off: with a longer limit. On: with a limit of 0.3 s, and the answer must come
    soon after."""
    limit = 8.0 if arm.off else 0.3
    box = arm.sandbox(whole=True)
    before = time.monotonic()
    report = arm.python(code, box=box, timeout_s=limit)
    took = time.monotonic() - before
    return Seen(took > 1.4, f"{report.status} after {took:.2f} s of {limit:g}")


_RELAY = """
for _ in range(5):
    if os.fork() == 0:
        end = time.process_time() + 0.2
        while time.process_time() < end: {work}
        os._exit(0)
    os.wait()
"""


@attack("F10", "CPU time of short-lived children counts against the limit", DOS, off="cgroup", needs="cgroup")
def short_lived_children(arm: Arm) -> Seen:
    report = arm.python(_RELAY.format(work="pass"), policy=_limits(cpu_time_s=0.5), timeout_s=10)
    return Seen(report.exit_code == 0, f"{report.status}, limit 0.5 s, {_peak(report)}")


@attack("F11", "time in the kernel counts against the limit of CPU time", DOS, off="cgroup", needs="cgroup")
def kernel_time(arm: Arm) -> Seen:
    report = arm.python(_RELAY.format(work="os.listdir('/proc/self/fd')"), policy=_limits(cpu_time_s=0.5), timeout_s=10)
    return Seen(report.exit_code == 0, f"{report.status}, limit 0.5 s, {_peak(report)}")


_FILL = """
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
try:
    for _ in range(24): os.write(fd, bytes(1 << 20))
except OSError as error:
    tell(tried="write", met=errno.errorcode[error.errno])
"""


@attack("F12", "the workspace holds as many bytes as limits.disk says", DOS, off="tmpfs-size")
def fill_workspace(arm: Arm) -> Seen:
    return _filled(arm, "/workspace/big")


@attack("F14", "/tmp is no way around the disk limit", DOS, off="tmpfs-size")
def fill_tmp(arm: Arm) -> Seen:
    return _filled(arm, "/tmp/big")


def _filled(arm: Arm, path: str) -> Seen:
    box = arm.sandbox()
    report = arm.python(_FILL, box=box, path=path)
    size = box.files.stat(path).size
    return Seen(size > 8 * _MB, f"{size // _MB} MB of 8; {report.words()}")


_MANY_FILES = """
made = 0
try:
    for made in range(2600):
        os.mkdir(f"/workspace/{made}") if made % 2 else open(f"/workspace/{made}", "w").close()
except OSError as error:
    tell(tried="create", met=errno.errorcode[error.errno])
"""


@attack("F12-inodes", "the workspace holds as many files as limits.disk_files says", DOS, off="tmpfs-size")
def fill_inodes(arm: Arm) -> Seen:
    box = arm.sandbox()
    report = arm.python(_MANY_FILES, box=box)
    files = box.files.usage().files
    return Seen(files > 2000, f"{files} files of 2000; {report.words()}")


@attack("F13", "a deleted file that is still open counts against limits.disk", DOS, off="tmpfs-size")
def deleted_files(arm: Arm) -> Seen:
    box = arm.sandbox()
    script = _FILL.replace("0o644)", "0o644)\nos.unlink(path)") + "tell(pid=os.getpid())\ntime.sleep(8)"
    reported_pid(arm.spawn(script, box=box, path="/workspace/gone"))
    used = arm.workspace_bytes(box)
    return Seen(used > 9 * _MB, f"{used // _MB} MB of 8")


_DESCRIPTORS = """
made = []
try:
    while len(made) < 700: made += os.pipe()
except OSError as error:
    tell(tried="pipe", met=errno.errorcode[error.errno])
tell(pid=os.getpid())
time.sleep(8)
"""


@attack("F15", "a process has as many descriptors as limits.open_files says", DOS, off="rlimit-nofile")
def descriptors(arm: Arm) -> Seen:
    box = arm.sandbox()
    pid = host_pid(box, reported_pid(arm.spawn(_DESCRIPTORS, box=box))[0])
    count = len(os.listdir(f"/proc/{pid}/fd"))
    return Seen(count > 256, f"{count} descriptors of 256")


@attack("F31", "running out of memory is reported as such, and the sandbox goes on", DOS, off=HOST_CODE, needs="cgroup")
def oom_and_after(arm: Arm) -> Seen:
    """Off: PID 1 is killed, which the kernel could choose to do if PID 1 were in the guest's cgroup."""
    box = arm.sandbox(_SMALL, whole=True)
    result = arm.run(box, "held = bytearray(240 << 20)\nheld[::4096] = bytes(len(held[::4096]))")
    if arm.off:
        os.kill(host_pid(box, 1), 9)
        time.sleep(0.2)
    try:
        after = arm.run(box, "print('still here')").stdout.strip()
    except (RingfenceError, OSError) as error:
        after = str(error)
    return Seen(result.status != "oom" or after != "still here", f"{result.status}, {result.reason}; then: {after}")


_PENDING = """
import signal
number = signal.SIGRTMIN + 1
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
info = ctypes.create_string_buffer(128)
ctypes.c_int.from_buffer(info, 0).value = number
ctypes.c_int.from_buffer(info, 8).value = -1
try:
    for _ in range(3000): call(129, os.getpid(), number, info)
except OSError as error:
    tell(tried="rt_sigqueueinfo", met=errno.errorcode[error.errno])
tell(pid=os.getpid())
time.sleep(8)
"""


@attack(
    "F33", "a guest gets only few of the pending signals that the host's user may have", DOS, off="rlimit-sigpending"
)
def pending_signals(arm: Arm) -> Seen:
    box = arm.sandbox()
    pid = host_pid(box, reported_pid(arm.spawn(_PENDING, box=box))[0])
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        queued = next(line for line in file if line.startswith("SigQ:")).split()[1]
    return Seen(int(queued.split("/")[0]) > 1024, f"SigQ {queued}")


@attack(
    "F33-inotify", "a guest leaves inotify instances for the host's user", DOS, off="namespace-limits", needs="user"
)
def inotify_of_the_user(arm: Arm) -> Seen:
    import ctypes

    box = arm.sandbox()
    code = "try:\n    while True: call(294, 0)\nexcept OSError: pass\ntell(pid=os.getpid())\ntime.sleep(8)"
    reported_pid(arm.spawn(code, box=box))
    made = ctypes.CDLL(None, use_errno=True).inotify_init1(0)
    if made >= 0:
        os.close(made)
    return Seen(made < 0, "the host's user has none left" if made < 0 else "the host's user still gets one")


def no_room_for_files(plan: LinuxPlan, arm: Arm) -> LinuxPlan:
    """Return the plan with a cgroup that has room for the policy's memory and none for files."""
    del arm
    return replace(plan, memory_bytes=32 * _MB)


@attack("F34", "a full disk gives the guest ENOSPC and does not end it", DOS, off=no_room_for_files, needs="cgroup")
def full_disk(arm: Arm) -> Seen:
    fill = "import os\nfd = os.open('/workspace/x', 65)\nos.write(fd, b'x')\ntry:\n"
    fill += "    while True: os.write(fd, bytes(1 << 20))\nexcept OSError as e: print(e.errno)"
    box = arm.sandbox(_limits(memory="32M", disk="64M"))
    result = arm.run(box, fill)
    return Seen(result.status == "oom", f"{result.status}; the guest met {result.stdout.strip() or 'nothing'}")


ELSEWHERE = [
    not_applicable(
        "F25",
        "one sandbox does not starve others of disk",
        DOS,
        "its files are in memory; a workspace on disk is asked for, and has limits of bytes and files, not of speed",
    ),
    not_applicable("F28", "an audit log stays within its size", DOS, "there is no audit log in this version"),
    not_applicable("F29", "WebAssembly has fuel", DOS, "not this backend"),
    not_applicable("F30", "virtual devices are no lever", DOS, "not this backend"),
]

CASES = cases(globals())
