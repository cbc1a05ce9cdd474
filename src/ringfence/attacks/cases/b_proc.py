"""B: /proc and /sys."""

from __future__ import annotations

import hashlib
import os
import shutil

from ringfence.attacks.case import (
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.attacks.arena import Arm

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
    """As an ordinary user the kernel refuses a fresh /proc without a pid namespace, and with it the sandbox."""
    return arm.stolen(arm.python(_LOOK, pid=arm.victim().pid))


_KNOBS = """
for name in ("kernel/core_pattern", "kernel/modprobe", "kernel/hotplug", "kernel/sysrq", "vm/panic_on_oom",
             "fs/binfmt_misc/register", "net/ipv4/ip_forward"):
    attempt(name, spill, "/proc/sys/" + name, "0")
for name in ("sysrq-trigger", "fs", "irq", "bus", "scsi"):
    attempt(name, spill, "/proc/" + name, "0")
name = "user/max_inotify_watches"
before = slurp("/proc/sys/" + name)
attempt(name, spill, "/proc/sys/" + name, "77")
tell(changed=slurp("/proc/sys/" + name) != before)
"""


def _knobs(arm: Arm) -> Seen:
    """Whoever has capabilities in a user namespace may set that namespace's own limits: the witness here."""
    told = arm.python(_KNOBS)
    if not isinstance(told.said("changed"), bool):
        raise AssertionError(f"the script told nothing: {told.words()} {told.stderr[-300:]}")
    return Seen(told.said("changed") is True, told.words())


B02 = attack(
    "B02", "kernel settings are not written: read-only /proc/sys", WRITE, off="proc-masks", behind="capabilities"
)(_knobs)
B12 = attack("B12", "kernel settings are not written: rights", WRITE, off="capabilities", behind="proc-masks")(_knobs)


@attack("B03", "what /proc tells about the kernel is masked", LEAK, off="proc-masks")
def kernel_files(arm: Arm) -> Seen:
    """The witness is the host's own text of the same file."""
    told = arm.python(
        """
        for name in ("cmdline", "kcore", "kallsyms", "keys", "timer_list", "sched_debug", "slabinfo", "vmallocinfo",
                     "iomem", "ioports", "interrupts", "modules", "diskstats", "partitions", "swaps"):
            steal("/proc/" + name, name)
        """
    )
    with open("/proc/cmdline", encoding="utf-8", errors="replace") as file:
        here = file.read()
    return Seen(here.strip() in told.looted if here.strip() else bool(told.looted.strip()), told.words())


@attack("B04", "there is no /sys", LEAK, off=BARE, label="no /sys in the view")
def sys_files(arm: Arm) -> Seen:
    path = next((p for p in ("/sys/devices/system/cpu/online", "/sys/kernel/uevent_seqnum") if os.path.exists(p)), None)
    if path is None:
        raise NotApplicable("this host has no /sys to see")
    told = arm.python(
        """
        steal(path)
        for name in ("firmware", "kernel/debug", "kernel/tracing", "kernel/security", "fs/cgroup", "class/net"):
            attempt(f"/sys/{name}", os.listdir, f"/sys/{name}")
        """,
        path=path,
    )
    with open(path, encoding="utf-8") as file:
        return Seen(file.read().strip() in told.looted.split(), told.words())


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
    told = arm.python(
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
    return Seen(_digest(program) != before, told.words())


@attack("B08", "memory and environment of the host's processes are not read", READ, off=BARE, label="user namespace")
def memory_of_others(arm: Arm) -> Seen:
    """A process in a user namespace below is refused even where uids and /proc would permit it."""
    told = arm.python(
        """
        for base in ("/proc", "/mnt/proc"):
            for name in ("environ", "mem", "maps"):
                steal(f"{base}/{pid}/{name}")
        """,
        pid=arm.victim().pid,
    )
    return arm.stolen(told)


@attack("B09", "a process does not take itself out of the memory killer's sight", DOS, off=BARE)
def memory_killer(arm: Arm) -> Seen:
    """Bare, it may come back down to where it was; inside, /proc/self of the guest starts above and stays there."""
    told = arm.python(
        """
        here = int(slurp("/proc/self/oom_score_adj"))
        attempt("lower", spill, "/proc/self/oom_score_adj", str(here - 1))
        for name, text in (("uid_map", "0 0 1"), ("gid_map", "0 0 1"), ("setgroups", "allow"), ("loginuid", "0"),
                           ("attr/current", "unconfined")):
            attempt(name, spill, "/proc/self/" + name, text)
        tell(lowered=int(slurp("/proc/self/oom_score_adj")) < here)
        """
    )
    if arm.bare and told.said("lowered") is not True:
        raise NotApplicable("this user may not lower it outside a sandbox either")
    return Seen(told.said("lowered") is not False, told.words())


@attack("B10", "no control group of the host is seen", ESCAPE, off=BARE, label="no /sys in the view")
def control_groups(arm: Arm) -> Seen:
    told = arm.python(
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
    return Seen(" ".join(os.listdir("/sys/fs/cgroup")[:1]) in told.looted.split(), told.words())


@attack("B11", "the supervisor is not seen in /proc", LEAK, off="pid-namespace", needs="root")
def supervisor(arm: Arm) -> Seen:
    told = arm.python(
        """
        steal(f"/proc/{pid}/cmdline", "cmdline")
        attempt("fd", os.listdir, f"/proc/{pid}/fd")
        attempt("signal 0", os.kill, pid, 0)
        """,
        pid=os.getpid(),
    )
    with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
        return Seen(file.read() in told.looted and bool(told.looted), told.words())


@attack(
    "B13", "the guest's place in the host's control groups has no name", LEAK, off="cgroup-namespace", needs="cgroup"
)
def group_names(arm: Arm) -> Seen:
    """Host paths of the image "host" do stand in /proc/self/mountinfo: see docs/attacks.md."""
    told = arm.python('steal("/proc/self/cgroup")')
    return Seen("ringfence" in told.looted, told.looted.replace("\n", " ")[:200])


B14 = not_applicable(
    "B14",
    "the outer /proc is never shown instead of a fresh one",
    READ,
    "no operation can name it: a plan refuses /proc as a source, and a refused fresh one stops the start",
)


@attack("B15", "an entry of /proc that is not on the list is masked", LEAK, off="proc-masks")
def unknown_entries(arm: Arm) -> Seen:
    """By listing what there is, not by asking for names: an entry of a newer kernel would be found."""
    told = arm.python(
        """
        known = "self thread-self cpuinfo filesystems loadavg meminfo mounts net stat sys sysvipc uptime version"
        shown = []
        for name in os.listdir("/proc"):
            if name.isdigit() or name in known.split():
                continue
            try:
                if os.path.isdir("/proc/" + name) and os.listdir("/proc/" + name):
                    shown.append(name)
                elif not os.path.isdir("/proc/" + name) and slurp("/proc/" + name, 64):
                    shown.append(name)
            except OSError:
                pass
        tell(shown=sorted(shown))
        """
    )
    shown = told.said("shown")
    if not isinstance(shown, list):
        raise AssertionError(f"the script told nothing: {told.words()}")
    return Seen(bool(shown), f"shown: {', '.join(map(str, shown)) or 'nothing'}")


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


CASES = cases(globals())
