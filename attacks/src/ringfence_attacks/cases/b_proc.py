"""B: attacks through /proc and /sys."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

from ringfence_attacks.case import (
    BARE,
    DOS,
    ESCAPE,
    LEAK,
    READ,
    WRITE,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence_attacks.witnesses import setting_of, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm

_LOOK = """
for base in ("/proc", "/mnt/proc"):
    for name in ("cmdline", "environ", "maps", "fd"):
        place = f"{base}/{pid}/{name}"
        attempt(place, os.listdir, place) if name == "fd" else steal(place)
"""


@attack("B01", "processes of the host are not seen: fresh /proc", READ, off="view")
def host_processes(arm: Arm) -> Seen:
    return arm.stolen(arm.python(_LOOK, pid=arm.victim().pid))


@attack("B01-pids", "processes of the host are not seen: pid namespace", READ, off="pid-namespace", needs="root")
def shared_pids(arm: Arm) -> Seen:
    """Needs root: to an ordinary user the kernel refuses a fresh /proc without a pid namespace; no sandbox starts."""
    return arm.stolen(arm.python(_LOOK, pid=arm.victim().pid))


_KNOBS = """
for name in ("kernel/core_pattern", "kernel/modprobe", "kernel/hotplug", "kernel/sysrq", "vm/panic_on_oom",
             "fs/binfmt_misc/register", "net/ipv4/ip_forward"):
    attempt(name, spill, "/proc/sys/" + name, "0")
for name in ("sysrq-trigger", "fs", "irq", "bus", "scsi"):
    attempt(name, spill, "/proc/" + name, "0")
attempt("user/max_inotify_watches", spill, "/proc/sys/user/max_inotify_watches", "77")
"""


def _knobs(arm: Arm) -> Seen:
    """Write kernel settings. With capabilities in a user namespace a process may set the limits of that namespace: the
    witness is one of these limits, read by a process of the host.

    The guest's own code tries, not a program that it executes: exec would drop the rights.
    """
    box = arm.sandbox()
    report = arm.python(_KNOBS, box=box)
    pid, _ = arm.waiting("", box=box)
    value = setting_of(pid, "user/max_inotify_watches")
    return Seen(value == "77", f"max_inotify_watches reads {value}; {report.words()}")


B02 = attack(
    "B02", "kernel settings are not written: read-only /proc/sys", WRITE, off="proc-masks", behind="capabilities"
)(_knobs)
B12 = attack("B12", "kernel settings are not written: rights", WRITE, off="capabilities", behind="proc-masks")(_knobs)


@attack("B03", "files of /proc that describe the kernel are masked", LEAK, off="proc-masks")
def kernel_files(arm: Arm) -> Seen:
    """The witness is the text that the host reads in the same file."""
    report = arm.python(
        """
        for name in ("cmdline", "kcore", "kallsyms", "keys", "timer_list", "sched_debug", "slabinfo", "vmallocinfo",
                     "iomem", "ioports", "interrupts", "modules", "diskstats", "partitions", "swaps"):
            steal("/proc/" + name, name)
        """
    )
    with open("/proc/cmdline", encoding="utf-8", errors="replace") as file:
        here = file.read()
    return Seen(here.strip() in report.looted if here.strip() else bool(report.looted.strip()), report.words())


@attack("B04", "the sandbox has no /sys", LEAK, off=BARE, label="no /sys in the view")
def sys_files(arm: Arm) -> Seen:
    path = next((p for p in ("/sys/devices/system/cpu/online", "/sys/kernel/uevent_seqnum") if os.path.exists(p)), None)
    if path is None:
        raise NotApplicable("this host has no /sys to see")
    report = arm.python(
        """
        steal(path)
        for name in ("firmware", "kernel/debug", "kernel/tracing", "kernel/security", "fs/cgroup", "class/net"):
            attempt(f"/sys/{name}", os.listdir, f"/sys/{name}")
        """,
        path=path,
    )
    with open(path, encoding="utf-8") as file:
        return Seen(file.read().strip() in report.looted.split(), report.words())


B06 = not_applicable(
    "B06",
    "masks are not raced while they are made",
    ESCAPE,
    "every mask is made before the first guest process exists, from an empty file of the sandbox's own read-only root",
)


@attack("B07", "a program of the host is not overwritten through /proc/<pid>/exe", WRITE, off="read-only")
def running_program(arm: Arm) -> Seen:
    program = f"{arm.directory}/shown/sleep"
    os.mkdir(os.path.dirname(program))
    shutil.copyfile(os.path.realpath("/bin/sleep"), program)
    os.chmod(program, 0o777)
    before = _digest(program)
    report = arm.python(
        """
        import subprocess
        started = subprocess.Popen([program, "0.05"])
        time.sleep(0.02)
        fd = os.open(f"/proc/{started.pid}/exe", os.O_RDONLY)
        started.wait()
        attempt("the program", spill, f"/proc/self/fd/{fd}", canary)
        for place in ("/proc/self/exe", "/proc/1/exe"):
            attempt(place, spill, place, canary)
        """,
        policy=arm.shared("ro"),
        program=program,
        canary=arm.canary,
    )
    return Seen(_digest(program) != before, report.words())


@attack("B08", "memory and environment of the host's processes are not read", READ, off=BARE, label="user namespace")
def memory_of_others(arm: Arm) -> Seen:
    """The kernel refuses a process in a lower user namespace even where uids and /proc would permit the read."""
    report = arm.python(
        """
        for base in ("/proc", "/mnt/proc"):
            for name in ("environ", "mem", "maps"):
                steal(f"{base}/{pid}/{name}")
        """,
        pid=arm.victim().pid,
    )
    return arm.stolen(report)


_LOWER = """
here = int(slurp("/proc/self/oom_score_adj"))
attempt("lower", spill, "/proc/self/oom_score_adj", str(here - 1))
for name, text in (("uid_map", "0 0 1"), ("gid_map", "0 0 1"), ("setgroups", "allow"), ("loginuid", "0"),
                   ("attr/current", "unconfined")):
    attempt(name, spill, "/proc/self/" + name, text)
"""


@attack("B09", "a process does not make itself a less likely victim of the memory killer", DOS, off=BARE)
def memory_killer(arm: Arm) -> Seen:
    """In the bare arm a process may lower its score to the value at its start. Inside, the score starts at the host's
    value or above, and does not fall.

    Seen by the host, in /proc of the waiting process.
    """
    mine = int(text_of("/proc/self/oom_score_adj"))
    if not arm.bare:
        box = arm.sandbox()
        first, _ = arm.waiting("", box=box)
        pid, words = arm.waiting(_LOWER, box=box)
        before, after = (int(text_of(f"/proc/{one}/oom_score_adj")) for one in (first, pid))
        return Seen(after < before, f"oom_score_adj {before}, then {after}; {words}")
    code = arm.script(f"{_LOWER}\nprint(flush=True)\nsys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as plain:
        assert plain.stdout is not None
        words = next((line for line in plain.stdout if "lower" in line), "")
        after = int(text_of(f"/proc/{plain.pid}/oom_score_adj"))
        plain.kill()
    if after >= mine:
        raise NotApplicable("this user may not lower the score outside a sandbox either")
    return Seen(after < mine, f"oom_score_adj {mine}, then {after}; {words.strip()}")


@attack("B10", "no control group of the host is seen", ESCAPE, off=BARE, label="no /sys in the view")
def control_groups(arm: Arm) -> Seen:
    report = arm.python(
        """
        names = attempt("list", os.listdir, "/sys/fs/cgroup")
        if names:
            loot(" ".join(names))
        for place in places:
            attempt(f"write {place}", spill, f"/sys/fs/cgroup/{place}", "0")
        """,
        places=() if arm.bare else ("release_agent", "cgroup.procs", "cgroup.kill", "memory/release_agent"),
    )
    if not os.path.isdir("/sys/fs/cgroup") or not os.listdir("/sys/fs/cgroup"):
        raise NotApplicable("this host has no /sys/fs/cgroup")
    return Seen(" ".join(os.listdir("/sys/fs/cgroup")[:1]) in report.looted.split(), report.words())


@attack("B11", "the supervisor is not seen in /proc", LEAK, off="pid-namespace", needs="root")
def supervisor(arm: Arm) -> Seen:
    report = arm.python(
        """
        steal(f"/proc/{pid}/cmdline", "cmdline")
        attempt("fd", os.listdir, f"/proc/{pid}/fd")
        attempt("signal 0", os.kill, pid, 0)
        """,
        pid=os.getpid(),
    )
    with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
        return Seen(file.read() in report.looted and bool(report.looted), report.words())


@attack(
    "B13", "a guest cannot read its place in the host's control groups", LEAK, off="cgroup-namespace", needs="cgroup"
)
def group_names(arm: Arm) -> Seen:
    """Host paths of the image "host" are shown in /proc/self/mountinfo: see docs/attacks.md."""
    report = arm.python('steal("/proc/self/cgroup")')
    return Seen("ringfence" in report.looted, report.looted.replace("\n", " ")[:200])


B14 = not_applicable(
    "B14",
    "the outer /proc is never shown instead of a fresh one",
    READ,
    "no operation can name it: a plan refuses /proc as a source, and a refused fresh one stops the start",
)


_KNOWN = frozenset(
    [
        *("self", "thread-self", "cpuinfo", "filesystems", "loadavg", "meminfo", "mounts"),
        *("net", "stat", "sys", "sysvipc", "uptime", "version"),
    ]
)


@attack("B15", "an entry of /proc that is not on the list is masked", LEAK, off="proc-masks")
def unknown_entries(arm: Arm) -> Seen:
    """List the guest's /proc from outside, instead of trying known names: an entry of a newer kernel is found too."""
    pid, _ = arm.waiting("", box=arm.sandbox())
    top = f"/proc/{pid}/root/proc"
    names = os.listdir(top)
    if not {"self", "stat"}.issubset(names):
        raise AssertionError(f"the guest's /proc could not be listed: {names[:20]}")
    shown = [name for name in names if not name.isdigit() and name not in _KNOWN and _has_content(f"{top}/{name}")]
    return Seen(bool(shown), f"shown: {', '.join(sorted(shown)) or 'nothing'}")


def _has_content(path: str) -> bool:
    """Return whether a folder has entries, or a file bytes; False when it cannot be read."""
    try:
        if os.path.isdir(path):
            return bool(os.listdir(path))
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(os.read(fd, 64))
    except OSError:
        return False
    finally:
        os.close(fd)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


CASES = cases(globals())
