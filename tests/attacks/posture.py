"""Read the posture of a running sandbox, as plain data: each process from outside, the guest from inside.

A script of its own, so that it runs as an ordinary user too: prints JSON. What differs from host to host is put into
words that do not: uids, host paths, kernel-dependent masks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence import Sandbox

STATUS = (
    *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Seccomp_filters", "Threads", "SigCgt"),
)
LIMITS = {
    "Max cpu time": "CPU",
    "Max core file size": "CORE",
    "Max processes": "NPROC",
    "Max open files": "NOFILE",
    "Max pending signals": "SIGPENDING",
    "Max msgqueue size": "MSGQUEUE",
    "Max nice priority": "NICE",
    "Max realtime priority": "RTPRIO",
}
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
FLAGS = ("ro", "rw", "nosuid", "nodev", "noexec")
OUTSIDE = frozenset(["rf-monitor", "rf-init"])  # in no control group of the guest, and not limited
OWN = frozenset(["/", "/proc", "/tmp", "/workspace", "/dev/shm", "/dev/pts"])

INSIDE = """
import json, os
status = dict(line[:-1].split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
said = {
    "status": {name: status.get(name) for name in STATUS},
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) < 3),
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "hostname": os.uname().nodename,
    "session leader": os.getsid(0) == os.getpid(),
    "umask": oct(os.umask(0o022)),
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "root": sorted(os.listdir("/")),
    "dev": sorted(os.listdir("/dev")),
    "etc/passwd": open("/etc/passwd").read().splitlines(),
    "proc": sorted(n for n in os.listdir("/proc") if not n.isdigit() and shown(n)),
    "network": [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line],
    "cgroup": sorted({line.rstrip().rsplit(":", 1)[1] for line in open("/proc/self/cgroup")}),
    "pids": sorted(int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) < 3),
}
print(json.dumps(said), flush=True)
os.execv("/bin/sleep", ["posture", "30"])
"""
SHOWN = """
def shown(name):
    path = "/proc/" + name
    try:
        return bool(os.listdir(path)) if os.path.isdir(path) else bool(open(path, "rb").read(1))
    except OSError:
        return False
"""


def status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def from_outside(pid: int, names: dict[str, str]) -> dict[str, object]:
    seen = status(pid)
    if seen["Name"] == "rf-monitor" and os.geteuid() != 0:
        seen["CapBnd"] = "the host's"  # an ordinary user has no right to give it up, and none of it
    return {
        "status": {
            name: _ids(seen.get(name, ""), names) if name in ("Uid", "Gid") else seen.get(name) for name in STATUS
        },
        "pid namespaces": len(seen["NSpid"].split()),
        "namespaces": {name: _namespace(pid, name) for name in NAMESPACES},
        "limits": _limits(pid) if seen["Name"] not in OUTSIDE else "the host's",
        "oom_score_adj": _read(f"/proc/{pid}/oom_score_adj"),
        "descriptors": _descriptors(pid, exact=seen["Name"] != "rf-monitor"),
        "environment": _environment(pid),
    }


def _ids(text: str, names: dict[str, str]) -> list[str]:
    return [names.get(one, one) for one in text.split()]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except PermissionError:
        return "closed"


def _namespace(pid: int, name: str) -> str:
    try:
        return "own" if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}") else "the host's"
    except PermissionError:
        return "closed"


def _limits(pid: int) -> dict[str, list[str]]:
    found = {}
    for line in _read(f"/proc/{pid}/limits").splitlines():
        name = line[:26].strip()
        if name in LIMITS:
            found[LIMITS[name]] = line[26:].split()[:2]
    return found


def _descriptors(pid: int, *, exact: bool) -> object:
    """Return the open descriptors by number; not `exact`: only the kinds, as the monitor's numbers depend on the host's
    control groups."""
    try:
        found = {one: _kind(os.readlink(f"/proc/{pid}/fd/{one}")) for one in os.listdir(f"/proc/{pid}/fd")}
    except PermissionError:
        return "closed"
    return found if exact else sorted(set(found.values()) - {"control group"})


def _kind(link: str) -> str:
    if link.startswith("/sys/fs/cgroup/"):
        return "control group"
    return re.sub(r":?\[?\d+\]?", "", link)


def _environment(pid: int) -> object:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return sorted(part.split(b"=")[0].decode() for part in file.read().split(b"\0") if part)
    except PermissionError:
        return "closed"


def mounts(pid: int) -> dict[str, object]:
    """Return flags by mount point. Mounts whose number depends on the host share an entry, with all flags seen."""
    found: dict[str, object] = {}
    binds: set[str] = set()
    masks: set[str] = set()
    for line in _read(f"/proc/{pid}/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point, options = before.split()[4:6]
        flags = " ".join(flag for flag in FLAGS if flag in options.split(","))
        if point in OWN or (point.startswith("/dev/") and point.count("/") == 2):
            found[point] = f"{after.split()[0]}: {flags}" if point in OWN else flags
        elif point.startswith("/proc/"):
            masks.add(flags)
        else:
            binds.add(flags.replace(" noexec", ""))  # as the host has it
    return {**found, "masks in /proc": sorted(masks), "host folders": sorted(binds)}


def inner_status(said: dict[str, object]) -> dict[str, object]:
    """Return the guest's own report, without everything that names this host."""
    environment, root = said["environment"], said["root"]
    assert isinstance(environment, dict)
    assert isinstance(root, list)
    said["environment"] = {name: value for name, value in environment.items() if name != "PATH"}
    left_out = _of_the_interpreter() | {".sources"}  # there when that is below /tmp
    said["root"] = [name for name in root if not name.startswith("lib") and name not in left_out]
    return said


def _of_the_interpreter() -> set[str]:
    """Return the top folders of the caller's Python, which may be anywhere."""
    from ringfence.plan.rootfs.interpreter import interpreter

    return {root.split("/")[1] for root in interpreter().roots} - {
        "usr",
        "opt",
        "home",
        "root",
        "srv",
        "var",
        "mnt",
        "tmp",
    }


def posture(*, copied: bool) -> dict[str, object]:
    """Return the posture of a sandbox with a session and a command; `copied`: of a copy of a copy of that sandbox."""
    from ringfence import Limits, Policy, Sandbox

    policy = Policy(limits=Limits(processes=64, open_files=512, cpu_time_s=20))
    with Sandbox(policy=policy, backend="process") as box:
        box.run("held = 6 * 7").check()
        if not copied:
            return _posture_of(box)
        with box.fork() as first, first.fork() as second:
            if second.run("held").value != "42":
                raise AssertionError("this is no copy")
            return _posture_of(second)


def _posture_of(box: Sandbox) -> dict[str, object]:
    code = f"import os\nSTATUS = {STATUS!r}\n{SHOWN}{INSIDE}"
    with box.spawn(["python3", "-I", "-c", code]) as guest:
        text = getattr(next(iter(guest)), "text", "")
        if not text.startswith("{"):
            raise AssertionError(f"the guest said {guest.wait().stderr}")
        said = json.loads(text)
        pid = _named("posture")
        monitor = int(status(pid)["PPid"])
        children = [one for one in _pids() if _parent(one) == monitor]
        names = {"guest": pid, "monitor": monitor, "session": box.session()._inbox.pid}  # type: ignore[union-attr]  # it runs
        mine = [
            one for one in children if one not in names.values() and status(one)["Uid"] == status(pid)["Uid"]
        ]  # not a spare's
        mine = [one for one in mine if _same_namespace(one, pid)]  # an ordinary user's sandboxes all have his uid
        names |= {status(one)["Name"]: one for one in mine if status(one)["Name"] in ("rf-init", "rf-spawner")}
        ids = {status(pid)["Uid"].split()[0]: "the sandbox's", str(os.geteuid()): "the caller's"}
        outside = {name: from_outside(one, ids) for name, one in sorted(names.items())}
        return {"inside": inner_status(said), "outside": outside, "mounts": mounts(pid)}


def _same_namespace(one: int, other: int) -> bool:
    """Return whether both processes are in one pid namespace; True when this user must not look."""
    try:
        return os.readlink(f"/proc/{one}/ns/pid") == os.readlink(f"/proc/{other}/ns/pid")
    except OSError:
        return True


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(status(pid)["PPid"])
    except (OSError, KeyError):
        return -1


def _named(argument: str) -> int:
    """Wait for a sleeping process below this process with that first argument, and return its pid."""
    import time

    for _ in range(200):
        for pid in _pids():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    begun = file.read().split(b"\0")[0] == argument.encode() and _descends(pid)
                if begun and _sleeps(pid):
                    return pid
            except OSError:
                continue
        time.sleep(0.01)
    raise TimeoutError("the guest did not come to sleep")


def _sleeps(pid: int) -> bool:
    """Return whether a process sleeps. Before that the process opens and closes files to start."""
    import time

    for _ in range(5):
        if not status(pid)["State"].startswith("S"):
            return False
        time.sleep(0.01)
    return True


def _descends(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(posture(copied="copy" in sys.argv), sys.stdout, indent=2, sort_keys=True)
