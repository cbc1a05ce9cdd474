"""L: persistence: what stays after a run or a sandbox has ended, or reaches the next sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import ringfence
from ringfence import UnsupportedError
from ringfence.host import cgroups
from ringfence.host.zygote_start import own_package
from ringfence_attacks.arena import POLICY
from ringfence_attacks.case import (
    BARE,
    DOS,
    ESCAPE,
    HOST_CODE,
    LEAK,
    PERSIST,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence_attacks.host_programs import host_process
from ringfence_attacks.witnesses import descendants, text_of, waiting_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm

_RUN_LATER = (
    *(".bashrc", ".profile", ".zshrc", ".envrc", ".mcp.json", ".git/hooks/post-checkout", ".git/config"),
    *(".git/commondir", ".vscode/tasks.json", ".idea/workspace.xml", ".claude/settings.json"),
    *("tools/hooks/post-checkout", ".gitconfig-project"),  # named by the configuration, and not there yet
)
_CONFIG = "[core]\nhooksPath = tools/hooks\n[include]\npath = ../.gitconfig-project\n"


@attack("L01", "files that programs of the host run later are not written in a shared folder", PERSIST, off="protect")
def run_later(arm: Arm) -> Seen:
    arm.host_file(".git/HEAD", "ref: refs/heads/main\n", mode=0o666)
    arm.host_file(".git/config", _CONFIG, mode=0o666)
    os.mkdir(f"{arm.directory}/.git/hooks")
    for directory in (".git", ".git/hooks"):
        os.chmod(f"{arm.directory}/{directory}", 0o777)
    box = arm.sandbox(arm.shared())
    report = arm.python(
        """
        os.chdir(top)
        for name in names:
            try:
                os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            except OSError:
                pass
            attempt(name, spill, name, canary, os.O_CREAT)
        """,
        box=box,
        top=arm.directory,
        names=_RUN_LATER,
        canary=arm.canary,
    )
    written = [name for name in _RUN_LATER if arm.canary in text_of(f"{arm.directory}/{name}")]
    return Seen(bool(written), report.words())


@attack(
    "L01-report",
    "a new file deeper in a shared folder that programs run later is reported at the end",
    PERSIST,
    off=HOST_CODE,
    label="end scan",
)
def told_at_the_end(arm: Arm) -> Seen:
    """Off: no scan; the file is written and no denial names it."""
    box = arm.sandbox(arm.shared())
    arm.python(
        """
        os.makedirs(top + "/sub/.git/hooks")
        spill(top + "/sub/.git/hooks/post-checkout", canary, os.O_CREAT)
        """,
        box=box,
        top=arm.directory,
        canary=arm.canary,
    )
    there = os.path.exists(f"{arm.directory}/sub/.git/hooks/post-checkout")
    if arm.off:
        return Seen(there, "written" if there else "not written")
    box.close()
    reported = [denial.target for denial in box.denials()]
    return Seen(
        there and not any("sub/.git" in target for target in reported), f"reported: {', '.join(reported) or 'nothing'}"
    )


_BOMB = """
if os.fork() == 0:
    os.setsid()
    fd = os.open(path, os.O_WRONLY)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        os.pwrite(fd, b"%020d" % time.monotonic_ns(), 0)
    os._exit(0)
time.sleep(0.05)
"""


@attack("L02", "no process of a run acts after the call has returned", PERSIST, off=BARE)
def time_bomb(arm: Arm) -> Seen:
    """A process left behind writes the time to a host file in a loop; the host compares that with its own clock."""
    path = arm.host_file("shown/clock", "0" * 20, mode=0o666)
    late: list[float] = []
    for _ in range(1 if arm.bare else 10):
        if arm.bare:
            subprocess.run(
                [sys.executable, "-I", "-c", arm.script(_BOMB, path=path)],
                timeout=5,
                check=True,
                start_new_session=True,
            )
        else:
            policy = POLICY.replace(mounts=[ringfence.Mount(os.path.dirname(path), mode="rw")])
            ringfence.run(arm.script(_BOMB, path=path), policy=policy).check()
        returned = time.monotonic_ns()
        time.sleep(0.1)
        late.append((int(text_of(path) or 0) - returned) / 1e6)
    return Seen(max(late) > 0, f"last write {max(late):+.2f} ms after the return, of {len(late)} tries")


@attack("L03", "a sandbox starts clean, whatever ran before", LEAK, off=HOST_CODE, label="nothing is used twice")
def poisoned(arm: Arm) -> Seen:
    """Off: the second owner is given the first one's sandbox."""
    box = arm.sandbox()
    arm.python(
        """
        for path in ("/workspace/left", "/tmp/left", "/dev/shm/left"):
            spill(path, canary, os.O_CREAT)
        import json
        json.dumps = lambda *_, **__: canary
        os.environ["LEFT"] = canary
        os.umask(0o777)
        """,
        box=box,
        canary=arm.canary,
    )
    second = box if arm.off else arm.sandbox()
    report = arm.python(
        """
        for path in ("/workspace/left", "/tmp/left", "/dev/shm/left"):
            steal(path)
        loot(os.environ.get("LEFT", "") + json.dumps("x") + oct(os.umask(0)))
        """,
        box=second,
    )
    return arm.stolen(report)


@attack("L04", "a cache that is shared is not written", PERSIST, off="read-only")
def shared_cache(arm: Arm) -> Seen:
    path = arm.host_file("cache/module.py", "value = 1\n", mode=0o666)
    os.chmod(os.path.dirname(path), 0o777)
    report = arm.python(
        """
        attempt("change", spill, path, canary)
        attempt("add", spill, os.path.dirname(path) + "/json.py", canary, os.O_CREAT)
        """,
        policy=arm.shared("ro"),
        path=path,
        canary=arm.canary,
    )
    return Seen(text_of(path) != "value = 1\n" or len(os.listdir(os.path.dirname(path))) > 1, report.words())


@attack("L05", "no helper is looked up in PATH", ESCAPE, off=BARE)
def planted_helper(arm: Arm) -> Seen:
    """A planted program leaves a mark. Bare: a supervisor that finds its interpreter by PATH."""
    planted = f"{arm.directory}/planted"
    os.mkdir(planted)
    for name in (
        "python3",
        "python",
        "bwrap",
        "newuidmap",
        "newgidmap",
        "systemd-run",
        "mount",
        "unshare",
        "git",
        "sh",
    ):
        path = f"{planted}/{name}"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\necho {arm.canary} >> {arm.directory}/mark\n")
        os.chmod(path, 0o755)
    run = "import subprocess; subprocess.run(['python3', '-c', '1'])"
    if not arm.bare:
        run = "import ringfence; r = ringfence.run('print(1)'); assert r.ok, r; ringfence.Sandbox().plan()"
    done = host_process(run, path=f"{planted}:/usr/bin:/bin")
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    return Seen(
        os.path.exists(f"{arm.directory}/mark"),
        "it ran" if os.path.exists(f"{arm.directory}/mark") else "it did not run",
    )


L06 = not_applicable("L06", "a guest cannot ask for a weaker sandbox", ESCAPE, "no API is reachable from inside yet")


_STUBBORN = """
os.chdir(top)
for _ in range(1200):
    os.mkdir("d", 0o700)
    os.chdir("d")
os.mkdir("locked", 0)
spill("busy", "x", os.O_CREAT)
tell(done=True)
"""


_REMOVE = """
import resource, shutil
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
try:
    shutil.rmtree({!r})
except (OSError, RecursionError) as error:
    print(type(error).__name__)
"""


@attack("L07", "files that are hard to remove do not keep a sandbox from being removed", DOS, off=BARE)
def stubborn_files(arm: Arm) -> Seen:
    """Bare: shutil.rmtree on a host folder, with as many descriptors as a process usually has. Up to Python 3.12 it
    calls itself for each level, since then it keeps each level open. In a sandbox the whole file system is removed.
    """
    if arm.bare:
        report = arm.python(_STUBBORN, top=arm.directory)
        met = host_process(_REMOVE.format(f"{arm.directory}/d")).stdout.strip()
        subprocess.run(["/bin/rm", "-rf", f"{arm.directory}/d"], check=True)
        return Seen(met != "", f"rmtree: {met or 'removed it'}")
    box = arm.sandbox()
    report = arm.python(_STUBBORN, box=box, top="/workspace")
    if report.said("done") is not True:
        raise AssertionError(report.stderr[-300:])
    inner = box._box  # noqa: SLF001  # no public call says whether a closed sandbox is gone
    assert inner is not None
    box.close()
    gone = inner.wait_destroyed(0)
    return Seen(not gone, "all gone" if gone else "something is left")


@attack(
    "L08",
    "what a dead supervisor left is swept at the next start",
    PERSIST,
    off=HOST_CODE,
    label="sweep",
    needs="cgroup",
)
def left_by_the_dead(arm: Arm) -> Seen:
    """Off: before the next start. The start of another program on this host sweeps too, therefore the off arm is tried
    several times."""
    if cgroups.find() is None:
        raise NotApplicable("the groups are scopes of a systemd user manager, which removes them itself")
    owner = _killed_supervisor(arm)
    for _ in range(3):
        if not arm.off or _groups_of(owner):
            break
        owner = _killed_supervisor(arm)
    if not arm.off:
        host_process("import ringfence; ringfence.run('1')")
    left = _groups_of(owner)
    return Seen(bool(left), f"{len(left)} control groups left")


def _killed_supervisor(arm: Arm) -> int:
    """Return the pid of a supervisor that was started and killed. All its processes are stopped first, and none can
    clean up."""
    sleep = os.path.realpath("/bin/sleep")
    inner = f"import os; os.execv({sleep!r}, [{arm.canary!r}, '6'])"
    code = f"import ringfence\nwith ringfence.Sandbox() as box:\n    box.exec(['python3', '-c', {inner!r}])\n"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", f"{own_package()}\n{code}"],
        env={"PATH": "/usr/bin:/bin", "HOME": os.path.expanduser("~")},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as supervisor:
        pid = waiting_process(arm.canary, 8)
        every = [supervisor.pid, *descendants(supervisor.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in every:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, number)
    if pid is None:
        raise AssertionError("no guest was started")
    return supervisor.pid


@attack("L09", "shared memory of one sandbox is not seen by the next", LEAK, off="ipc-namespace")
def shared_memory(arm: Arm) -> Seen:
    """The segment is open to all users: no check of uids protects it. Off: the host removes the segment afterwards."""
    first = arm.python(
        """
        number = call(29, 0, 4096, 0o1666)
        _libc.shmat.restype = ctypes.c_void_p
        address = _libc.shmat(number, None, 0)
        ctypes.memmove(address, canary.encode(), 32)
        tell(number=number)
        """,
        canary=arm.canary,
    )
    number = first.said("number")
    if not isinstance(number, int):
        raise AssertionError(f"no segment was made: {first.words()} {first.stderr[-300:]}")
    report = arm.python(
        """
        _libc.shmat.restype = ctypes.c_void_p
        ctypes.set_errno(0)
        address = _libc.shmat(number, None, 0o10000)
        tell(tried="shmat", met="ok" if address < 1 << 63 else errno.errorcode[ctypes.get_errno()])
        if address < 1 << 63:
            loot(ctypes.string_at(address, 32))
        """,
        number=number,
    )
    if arm.off:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.shmctl(number, 0, None) != 0 and os.geteuid() == 0:
            raise AssertionError("a segment of shared memory is left on the host")
    return arm.stolen(report)


L10 = not_applicable("L10", "the control plane is not flooded", DOS, "there is no server in this version")

_MEDDLES = """
import os
for path in ("/workspace/f", "/tmp/f", "/dev/shm/f"):
    open(path, "w").write("meddled")
for pid in range(1, 400):
    try:
        os.kill(pid, 9) if pid != os.getpid() else None
    except OSError:
        pass
n = 0
"""
_FORKS = """
open("f", "w").write("own")
if os.fork() == 0:
    open("f", "w").write("meddled")
    os.kill(os.getppid(), 9)
    os._exit(0)
time.sleep(5)
"""


@attack("L11", "a copy and its original do not touch each other", ESCAPE, off=BARE)
def copy_and_original(arm: Arm) -> Seen:
    """Each of the two sandboxes writes where the other has a file, kills every pid it can, and changes a variable that
    both have; then the copy ends. Bare: a fork, which has the files of its parent and can signal it."""
    if arm.bare:
        report = arm.python(_FORKS)
        with open(f"{arm.directory}/f", encoding="utf-8") as file:
            return Seen(file.read() == "meddled" and report.signal == signal.SIGKILL, report.words())
    box = arm.sandbox()
    box.run("n = 41\nopen('/workspace/f', 'w').write('own')")
    try:
        copy = arm.enter(box.fork())
    except UnsupportedError as error:
        raise NotApplicable(str(error)) from None
    copy.run("n = 42")
    harmed = []
    for name, one, other, number in (("original", copy, box, 41), ("copy", box, copy, 42)):
        one.run(_MEDDLES)
        if other.files.read_text("/workspace/f") != "own" or other.run("n").value != str(number):
            harmed.append(name)
        one.run(f"n = {number + 1 if one is copy else number - 1}\nopen('/workspace/f', 'w').write('own')")
    copy.close()
    if box.run("n").value != "41":
        harmed.append("original, by the copy's end")
    return Seen(bool(harmed), f"harmed: {', '.join(harmed) or 'none'}")


_SPIN = """
os.chdir(top)
tell(ready=True)
end = time.monotonic() + 6
while time.monotonic() < end:
    for name in names:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            continue
        os.write(fd, canary.encode())
        os.close(fd)
"""
_COUNTED = (".envrc", ".bashrc", ".profile")


@attack(
    "L13",
    "a placeholder stays while any sandbox needs it",
    PERSIST,
    off=HOST_CODE,
    label="ledger of who needs a placeholder",
)
def placeholder_taken_away(arm: Arm) -> Seen:
    """A caller has three sandboxes on a folder; the third is hostile. The first starts, the second starts, the first
    ends, the third starts, the second ends. Off: when the second ends, its placeholders are removed though the third
    needs them; what the third can write before its watch stops it stays in the folder.
    """
    policy = arm.shared()
    first, second = arm.sandbox(policy), arm.sandbox(policy)
    first.close()
    third = arm.sandbox(policy)
    process = arm.spawn(_SPIN, box=third, top=arm.directory, names=_COUNTED, canary=arm.canary)
    next(iter(process))
    for _ in range(20 if arm.off else 0):  # removed placeholders are put back, unless the guest was faster
        for name in _COUNTED:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{arm.directory}/{name}")
        time.sleep(0.03)
        if not process.running:
            break
    second.close()
    time.sleep(0.3)
    lives = process.running
    third.close()
    written = [name for name in _COUNTED if arm.canary in text_of(f"{arm.directory}/{name}")]
    return Seen(bool(written) or not lives, f"written: {', '.join(written) or 'none'}; the third lived: {lives}")


_HELPERS = (
    *("docker", "podman", "runsc", "mmdebstrap", "npm", "node", "qemu-system-x86_64", "zstd", "unshare", "newuidmap"),
    *("newgidmap", "mkfs.ext4", "systemd-run", "python3", "git", "tar", "rm", "sh"),
)
# A careless program: runs whatever comes first in PATH.
_BY_PATH = """
import shutil, subprocess
for name in {names!r}:
    subprocess.run([shutil.which(name)], check=False)
"""
# Every way in which Ringfence starts a program, as far as each goes on this host.
_EVERY_ROAD = """
import os, subprocess, tempfile
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(dir={directory!r})
from ringfence import images
from ringfence.host import programs as host_programs
from ringfence.backends.container import api as engine
from ringfence.backends.gvisor import runsc
from ringfence.host import loop_disk as disk
from ringfence.errors import RingfenceError
from ringfence.images import store as imagelocks
from ringfence.images import packages, importer as unpacking

def unpack():
    pieces = [bytes.fromhex("28b52ffd") + bytes(64)]
    unpacked = unpacking.Unpacked(lambda _: pieces.pop() if pieces else b"")
    unpacked.close()

roads = (runsc.find, lambda: engine.find("podman"), packages.check_host, packages._python_with_pip, disk._formatter,
    unpack, lambda: imagelocks.run_as_root(["rm", "--version"], 5),
    lambda: images.import_image("one", "docker:ringfence-attack-none"),
    lambda: images.import_image("one", "podman:ringfence-attack-none"))
for road in roads:
    try:
        road()
    except (RingfenceError, OSError, ValueError, AssertionError):
        pass  # not installed here, or the planted program gave no useful answer
for name in {names!r}:
    found = host_programs.find(name)
    if found is not None and found.startswith({directory!r}):
        subprocess.run([found], check=False)
"""


@attack(
    "L18", "Ringfence runs no program that a guest could have put there", PERSIST, off=HOST_CODE, label="one look-up"
)
def planted_for_us(arm: Arm) -> Seen:
    """The guest has a folder to write to, and that folder comes first in the PATH of the next command, as a virtual
    environment of a project does. Each planted program leaves a mark.

    The control knows the folders that guests of this process and of earlier processes could write to. A way past the
    control could be a link to such a folder, another name of the folder, or a program that the system does not have.
    """
    mark = f"{arm.directory}/mark"
    box = arm.sandbox(arm.shared())
    report = arm.python(
        """
        os.makedirs(top + "/bin", exist_ok=True)
        for name in names:
            spill(top + "/bin/" + name, "#!/bin/sh\\necho " + canary + " " + name + " >> " + mark + "\\n", os.O_CREAT)
            os.chmod(top + "/bin/" + name, 0o755)
        spill(mark, "", os.O_CREAT)
        os.chmod(mark, 0o666)
        """,
        box=box,
        top=arm.directory,
        names=_HELPERS,
        canary=arm.canary,
        mark=mark,
    )
    box.close()
    os.symlink(f"{arm.directory}/bin", f"{arm.directory}/link")
    code = (_BY_PATH if arm.off else _EVERY_ROAD).format(names=_HELPERS, directory=arm.directory)
    done = host_process(code, path=f"{arm.directory}/link:{arm.directory}/bin:/usr/bin:/bin", timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(f"{report.words()} {done.stderr[-300:]}")
    ran = sorted({line.split()[1] for line in text_of(mark).splitlines() if line.startswith(arm.canary)})
    return Seen(bool(ran), f"ran: {', '.join(ran) or 'none of them'}")


def _groups_of(pid: int) -> list[str]:
    """Return Ringfence's control groups that name `pid` as owner."""
    found: list[str] = []
    for top in ("/sys/fs/cgroup", *(entry.path for entry in os.scandir("/sys/fs/cgroup") if entry.is_dir())):
        ours = f"{top}/ringfence"
        if os.path.isdir(ours):
            found += [name for name in os.listdir(ours) if name.startswith(f"{pid}-")]
    if not found and not os.path.isdir("/sys/fs/cgroup"):
        raise NotApplicable("this host has no control groups")
    return found


CASES = cases(globals())
