"""A: files of the host, read or written from inside. What concerns the host's own opening of guest files is last."""

from __future__ import annotations

import os
import stat
import time

from ringfence import Mount
from ringfence.attacks.arena import POLICY
from ringfence.attacks.case import (
    BARE,
    DOS,
    ESCAPE,
    OURS,
    READ,
    SPOOF,
    WRITE,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence.attacks.witnesses import status_of, waiting_process
from ringfence.values import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.attacks.arena import Arm
    from ringfence.plan.model import ProcessPlan


@attack("A01", "a host file is not read by its absolute path", READ, off="view")
def absolute_path(arm: Arm) -> Seen:
    told = arm.python(
        """
        for place in (path, "/mnt" + path, "/root/.ssh/id_rsa", "/home", "/etc/shadow"):
            steal(place)
        """,
        path=arm.host_file(),
    )
    return arm.stolen(told)


@attack("A02", "a host file is not read through the root links of /proc", READ, off="view")
def root_links(arm: Arm) -> Seen:
    told = arm.python(
        """
        pids = ["self", "thread-self", str(os.getppid())] + [name for name in os.listdir("/proc") if name.isdigit()]
        for pid in pids:
            for base in ("", "/..", "/mnt"):
                try:
                    loot(slurp(f"/proc/{pid}/root{base}{path}"))
                except OSError as error:
                    tell(tried=f"{pid}/root{base}", met=errno.errorcode[error.errno])
        """,
        path=arm.host_file(),
    )
    return arm.stolen(told)


@attack("A03", "a host file is not read by climbing from a directory that is open", READ, off="view")
def climbing(arm: Arm) -> Seen:
    told = arm.python(
        """
        up = "../" * 40
        for name, start in (("cwd", "/proc/self/cwd"), ("root", "/"), ("tmp", "/tmp")):
            directory = os.open(start, os.O_PATH | os.O_DIRECTORY)
            for below in ("", "mnt"):
                def read(directory=directory, below=below):
                    fd = os.open(up + below + path, os.O_RDONLY, dir_fd=directory)
                    loot(os.read(fd, 4096))
                attempt(f"{name} {below}", read)
                attempt(f"fd of {name} {below}", lambda: loot(slurp(f"/proc/self/fd/{directory}/{up}{below}{path}")))
        """,
        path=arm.host_file(),
    )
    return arm.stolen(told)


_CHROOT = """
os.mkdir("/workspace/jail")
attempt("chroot", call, 161, b"/workspace/jail")
attempt("write the new root", spill, "/proof", canary, os.O_CREAT)
attempt("pivot_root", call, 155, b".", b".")
"""


def _chroot(arm: Arm) -> Seen:
    """Seen by the host: the guest's `/` was the jail, because what it wrote to `/` lies there."""
    box = arm.sandbox()
    told = arm.python(_CHROOT, box=box, canary=arm.canary)
    return Seen(box.files.exists("jail/proof"), told.words())


A04 = attack(
    "A04", "the guest's root cannot be changed by chroot: filter", ESCAPE, off="seccomp:mounts", behind="capabilities"
)(_chroot)
A10 = attack(
    "A10", "the guest's root cannot be changed by chroot: rights", ESCAPE, off="capabilities", behind="seccomp:mounts"
)(_chroot)


@attack("A05", "no file is opened by a guessed handle", READ, off=BARE, needs="root")
def by_handle(arm: Arm) -> Seen:
    """Without root no process of the user may open by handle, so there is no arm that succeeds."""
    told = arm.python(
        """
        handle = ctypes.create_string_buffer(8 + 128)
        ctypes.c_uint.from_buffer(handle, 0).value = 128
        mount = ctypes.c_int()
        attempt("name_to_handle_at", call, 303, AT_FDCWD, path.encode(), handle, ctypes.byref(mount), 0)
        root = os.open(os.path.dirname(path), os.O_RDONLY)
        fd = attempt("open_by_handle_at", call, 304, root, handle, os.O_RDONLY)
        if fd is not None:
            loot(os.read(fd, 4096))
        """,
        path=arm.host_file() if arm.bare else "/etc/passwd",
    )
    return arm.met(told, "open_by_handle_at")


@attack("A06", "a read-only mount is not made writable again", WRITE, off="read-only")
def remount(arm: Arm) -> Seen:
    path = arm.host_file("shown/file", mode=0o666)
    told = arm.python(
        """
        attempt("remount", call, 165, None, os.path.dirname(path).encode(), None, 32 | 4096, None)
        attempt("mount_setattr", call, 442, AT_FDCWD, os.path.dirname(path).encode(), 0, bytes(8) + b"\\1" + bytes(23), 32)
        attempt("write", spill, path, "spoiled")
        """,
        path=path,
        policy=arm.shared("ro"),
    )
    return Seen(_text(path) != arm.canary, told.words())


_MOUNT_FENCES = ("seccomp:mounts", "seccomp:namespaces", "capabilities", "landlock-files")
_MOUNT = """
attempt("unshare", call, 272, 0x20000)  # as root the mount namespace belongs to somebody above: take a copy
os.mkdir("/workspace/m")
attempt("mount", call, 165, b"tmpfs", b"/workspace/m", b"tmpfs", 0, None)
spill("/workspace/m/proof", canary, os.O_CREAT)
for kind in (b"proc", b"sysfs", b"cgroup2"):
    attempt("mount " + kind.decode(), call, 165, kind, b"/tmp", kind, 0, None)
tell(done=True)
"""


def _mount(arm: Arm) -> Seen:
    """Seen by the host: what the guest wrote below /workspace/m is not there, so something was mounted over it."""
    box = arm.sandbox()
    told = arm.python(_MOUNT, box=box, canary=arm.canary)
    if told.said("done") is not True:
        raise AssertionError(f"the script did not end: {told.words()} {told.stderr[-300:]}")
    return Seen(not box.files.exists("m/proof"), told.words())


def _others(control: str) -> tuple[str, ...]:
    return tuple(name for name in _MOUNT_FENCES if name != control)


MOUNTS = [
    attack(name, f"nothing is mounted by the guest: {control} alone holds", ESCAPE, off=control, behind=_others(control))(
        _mount
    )
    for name, control in (
        ("A08", "seccomp:mounts"),
        ("A08-rights", "capabilities"),
        ("B05", "landlock-files"),
    )
]


@attack(
    "A07",
    "/proc is not taken away to uncover the one below it",
    READ,
    off="landlock-files",
    behind=("seccomp:mounts", "capabilities"),
    needs="user",
)
def uncover(arm: Arm) -> Seen:
    """As root the mounts belong to the initial user namespace, and nothing lies below /proc."""
    victim = arm.victim()
    told = arm.python(
        """
        for _ in range(40):
            if attempt("umount2", call, 166, b"/proc", 2) is None:
                break
            steal(f"/proc/{pid}/cmdline", "cmdline")
        """,
        pid=victim.pid,
    )
    return arm.stolen(told)


@attack("A09", "the new mount calls are refused", ESCAPE, off="seccomp:mounts")
def new_mount_calls(arm: Arm) -> Seen:
    told = arm.python(
        """
        attempt("open_tree", call, 428, AT_FDCWD, b"/usr", 0)
        attempt("fsopen", call, 430, b"tmpfs", 0)
        attempt("fspick", call, 433, AT_FDCWD, b"/workspace", 0)
        attempt("fsmount", call, 432, -1, 0, 0)
        attempt("move_mount", call, 429, AT_FDCWD, b"/tmp", AT_FDCWD, b"/workspace", 0)
        attempt("mount_setattr", call, 442, AT_FDCWD, b"/usr", 0, bytes(8) + b"\\1" + bytes(23), 32)
        """
    )
    return arm.met(told, "open_tree", "fsopen", "fspick")


@attack("A11", "a link that lay in a mount before the start is followed inside only", READ, off="view")
def planted_link(arm: Arm) -> Seen:
    secret = arm.host_file("secret/canary")
    os.mkdir(f"{arm.directory}/project")
    os.symlink("/", f"{arm.directory}/project/out")
    os.symlink(f"{arm.directory}/secret", f"{arm.directory}/project/secret")
    policy = POLICY.replace(mounts=[Mount(f"{arm.directory}/project")])
    told = arm.python(
        """
        for place in (f"{project}/out{secret}", f"{project}/out/mnt{secret}", f"{project}/secret/canary"):
            steal(place)
        """,
        policy=policy,
        project=f"{arm.directory}/project",
        secret=secret,
    )
    return arm.stolen(told)


def _repository(arm: Arm) -> str:
    arm.host_file(".git/config", "[core]\n", mode=0o666)
    arm.host_file(".git/HEAD", "ref: refs/heads/main\n", mode=0o666)
    os.mkdir(f"{arm.directory}/.git/hooks")
    for directory in (f"{arm.directory}/.git", f"{arm.directory}/.git/hooks"):
        os.chmod(directory, 0o777)
    return arm.directory


_RENAME = """
os.chdir(top)
attempt("rename .git", os.rename, ".git", ".git2")
attempt("mkdir .git", os.makedirs, ".git/hooks", exist_ok=True)
attempt("write a hook", spill, ".git/hooks/post-checkout", canary, os.O_CREAT)
attempt("rename hooks", os.rename, ".git/hooks", ".git/old")
attempt("exchange", call, 316, AT_FDCWD, b".git/hooks", AT_FDCWD, b".git/HEAD", 2)
"""


def _renaming(arm: Arm) -> Seen:
    top = _repository(arm)
    box = arm.sandbox(arm.shared())
    told = arm.python(_RENAME, box=box, top=top, canary=arm.canary)
    return Seen(_found(top, arm.canary), told.words())


A12 = attack("A12", "a protected folder is not renamed away", WRITE, off=("protect", "pin"))(_renaming)
A32 = attack("A32", "a folder above a protected one is not renamed away", WRITE, off="pin")(_renaming)


@attack("A13", "a protected path that does not exist is not made", WRITE, off="protect")
def made_anew(arm: Arm) -> Seen:
    arm.host_file(".git/HEAD", "ref: refs/heads/main\n", mode=0o666)
    os.chmod(f"{arm.directory}/.git", 0o777)
    box = arm.sandbox(arm.shared())
    told = arm.python(
        """
        os.chdir(top)
        for name in (".mcp.json", ".envrc", ".git/hooks/post-checkout", ".git/config", ".vscode/tasks.json"):
            attempt(name, spill, name, canary, os.O_CREAT)
        attempt("link", os.symlink, "/tmp/x", ".bashrc")
        """,
        box=box,
        top=arm.directory,
        canary=arm.canary,
    )
    return Seen(_found(arm.directory, arm.canary), told.words())


@attack("A14", "a host file that may only be read is not linked into a folder that may be written", WRITE, off=BARE)
def hard_link(arm: Arm) -> Seen:
    path = arm.host_file("shown/file", mode=0o666)
    out = f"{arm.directory}/out"
    os.mkdir(out)
    os.chmod(out, 0o777)
    policy = POLICY.replace(mounts=[Mount(f"{arm.directory}/shown"), Mount(out, mode="rw")])
    told = arm.python(
        """
        attempt("link", os.link, path, out + "/mine")
        fd = os.open(path, os.O_PATH)
        attempt("link by descriptor", os.link, f"/proc/self/fd/{fd}", out + "/mine2", follow_symlinks=True)
        attempt("write through it", spill, out + "/mine", "spoiled")
        """,
        policy=policy,
        path=path,
        out=out,
    )
    return Seen(os.stat(path).st_nlink > 1 or _text(path) != arm.canary, told.words())


@attack("A15", "no device node is made", ESCAPE, off="seccomp:devices")
def device_node(arm: Arm) -> Seen:
    """A character device 0:0 is the one the kernel lets anybody make: with it the filter's own verdict is seen."""
    box = arm.sandbox()
    told = arm.python(
        """
        attempt("c 0 0", os.mknod, "/workspace/whiteout", 0o20644, os.makedev(0, 0))
        attempt("kmem", os.mknod, "/workspace/mem", 0o20666, os.makedev(1, 1))
        attempt("disk", os.mknod, "/workspace/disk", 0o60666, os.makedev(8, 0))
        """,
        box=box,
    )
    kinds = {info.path: info.kind for info in box.files.list(".")}
    return Seen("other" in kinds.values(), told.words())


_GAIN = """
attempt("unshare", call, 272, 0x10000000)
attempt("setgroups", spill, "/proc/self/setgroups", "deny")
attempt("uid_map", spill, "/proc/self/uid_map", "0 1000 1")
call(126, (0x20080522).to_bytes(4, "little") + bytes(4), bytes(24))  # capset: none of our own
os.execv("/bin/sleep", [canary, "20"])
"""


@attack(
    "A16",
    "a program gains nothing by being executed, whatever its owner and bits",
    ESCAPE,
    off="no-new-privileges",
    behind=("seccomp:namespaces", "namespace-limits"),
)
def gain_by_exec(arm: Arm) -> Seen:
    """Every mount of ours is nosuid, so the gain is root's own at exec, in a user namespace that the guest made.

    Seen by the host: the capabilities of the process in /proc.
    """
    process = arm.spawn(_GAIN, box=arm.sandbox(), canary=arm.canary)
    pid = waiting_process(arm.canary)
    if pid is None:
        return Seen(False, f"it did not start: {process.kill().stderr[-200:]}")
    effective = status_of(pid)["CapEff"]
    return Seen(int(effective, 16) != 0, f"CapEff of the process: {effective}")


def _show_devices(plan: ProcessPlan, arm: Arm) -> ProcessPlan:
    del arm
    return replace(plan, template=(*plan.template, *(["dev", name] for name in _strange_devices()[:3])))


def _strange_devices() -> list[str]:
    names = ("kmsg", "kvm", "fuse", "loop-control", "vsock", "mem", "console", "ptmx", "hwrng", "tty0")
    return [name for name in names if os.path.exists(f"/dev/{name}") and not os.path.islink(f"/dev/{name}")]


@attack("A17", "/dev holds six harmless devices and the guest's terminals", ESCAPE, off=_show_devices, label="device nodes")
def devices(arm: Arm) -> Seen:
    if not _strange_devices():
        raise NotApplicable("this host's /dev has nothing else")
    told = arm.python(
        """
        import stat
        found = []
        for top, _, names in os.walk("/dev"):
            for name in names:
                info = os.lstat(f"{top}/{name}")
                if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
                    found.append(f"{top}/{name}"[5:])
        tell(found=sorted(found))
        for name in ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "loop-control", "net/tun", "vsock", "sda", "vda"):
            try:
                os.close(os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK))
                tell(tried=name, met="ok")
            except OSError as error:
                tell(tried=name, met=errno.errorcode[error.errno])
        """
    )
    found = told.said("found")
    if not isinstance(found, list):
        raise AssertionError(f"the script told nothing: {told.words()}")
    strange = set(map(str, found)) - {"null", "zero", "full", "random", "urandom", "tty", "pts/ptmx"}
    return Seen(bool(strange), f"devices: {', '.join(map(str, found))}; {told.words()}")


A18 = attack("A18", "no device of the kernel's own interfaces is there", ESCAPE, off=_show_devices, label="device nodes")(devices.play)

A19 = not_applicable(
    "A19",
    "native code that the guest brings runs with the guest's rights and no others",
    ESCAPE,
    "running code is what the sandbox is for: `commands` decides what is in the view, not what a guest may execute",
)

_PROGRAMS = """
fd = None
for name in names:
    def run(path=name):
        if os.fork() == 0:
            os.execv(path, ["sh", "-c", f"echo {canary} > /workspace/ran"])
    def run_by_descriptor(path=name):
        fd = os.open(path, os.O_PATH)
        if os.fork() == 0:
            argv = (ctypes.c_char_p * 4)(b"sh", b"-c", f"echo {canary} > /workspace/ran".encode(), None)
            call(322, fd, b"", argv, None, 0x1000)
            os._exit(1)
    attempt(f"execve {name}", slurp, name, 4)
    try:
        pid = os.fork()
        if pid == 0:
            os.execv(name, ["sh", "-c", f"echo {canary} > /workspace/ran"])
    except OSError as error:
        os._exit(0)
    attempt(f"execveat {name}", run_by_descriptor)
for _ in range(2 * len(names)):
    try:
        os.wait()
    except ChildProcessError:
        break
tell(done=True)
"""


def _programs(arm: Arm, names: tuple[str, ...]) -> Seen:
    """The program would leave a file that the host finds in the workspace."""
    policy = POLICY if arm.off else POLICY.replace(commands=["python3"])
    box = arm.sandbox(policy)
    told = arm.python(_PROGRAMS, box=box, names=names, canary=arm.canary)
    if told.said("done") is not True:
        raise AssertionError(f"the script did not end: {told.words()} {told.stderr[-300:]}")
    return Seen(box.files.exists("ran"), told.words())


@attack("A20", "a program that is not listed does not run by execveat either", ESCAPE, off=OURS, label="commands")
def by_descriptor(arm: Arm) -> Seen:
    return _programs(arm, ("/bin/sh",))


@attack("A21", "a program that is not listed has no other name", ESCAPE, off=OURS, label="commands")
def aliases(arm: Arm) -> Seen:
    names = ("//bin/sh", "/usr/bin/../bin/sh", "/bin/./dash", "/proc/self/root/usr/bin/sh", "/usr/bin/env", "/BIN/SH")
    return _programs(arm, names)


@attack("A22", "the files below a copy stay as they are", WRITE, off=OURS, label="copy layer")
def copy_layer(arm: Arm) -> Seen:
    path = arm.host_file("project/file", mode=0o666)
    os.chmod(f"{arm.directory}/project", 0o777)
    policy = POLICY.replace(mounts=[Mount(f"{arm.directory}/project", mode="rw" if arm.off else "copy")])
    told = arm.python(
        """
        attempt("write", spill, path, "spoiled", os.O_TRUNC)
        for place in ("/.disk", "/.disk/lower1", "/.disk/copy1/upper", "/.disk/copy1/work"):
            attempt(place, os.listdir, place)
        attempt("lower", spill, "/.disk/lower1/file", "spoiled", os.O_TRUNC)
        for name in ("trusted.overlay.redirect", "user.overlay.redirect", "trusted.overlay.opaque"):
            attempt(name, os.setxattr, os.path.dirname(path), name, b"/../../..")
        attempt("remove", os.unlink, path)
        attempt("link", os.link, os.path.dirname(path) + "/other", path)
        """,
        policy=policy,
        path=path,
    )
    whole = os.path.exists(path) and _text(path) == arm.canary
    return Seen(not whole, told.words())


@attack("A23", "attributes of a file that may only be read are not set", WRITE, off="read-only")
def attributes(arm: Arm) -> Seen:
    path = arm.host_file("shown/file", mode=0o666)
    told = arm.python(
        """
        attempt("user xattr", os.setxattr, path, "user.note", canary.encode())
        attempt("acl", os.setxattr, path, "system.posix_acl_access", b"\\2\\0\\0\\0\\1\\0\\7\\0\\xff\\xff\\xff\\xff")
        attempt("times", os.utime, path, (1, 1))
        """,
        policy=arm.shared("ro"),
        path=path,
        canary=arm.canary,
    )
    return Seen("user.note" in os.listxattr(path), told.words())


# set-id bits on the host


def _set_id(arm: Arm, code: str) -> Seen:
    """Seen by the host: the bits of the files in its own folder."""
    box = arm.sandbox(arm.shared())
    told = arm.python(code, box=box, top=arm.directory)
    marked = [name for name in os.listdir(arm.directory) if _is_set_id(f"{arm.directory}/{name}")]
    for name in marked:
        os.chmod(f"{arm.directory}/{name}", 0o600)
    return Seen(bool(marked), told.words())


@attack("A31", "no set-user-id or set-group-id file is made in a host folder", ESCAPE, off="seccomp:setid-bits")
def set_id_file(arm: Arm) -> Seen:
    return _set_id(
        arm,
        """
        os.chdir(top)
        os.umask(0)
        for name in ("a", "b", "c"):
            spill(name, "#!/bin/sh\\n", os.O_CREAT)
        attempt("chmod", os.chmod, "a", 0o4755)
        attempt("fchmod", lambda: os.fchmod(os.open("b", os.O_RDONLY), 0o2755))
        attempt("fchmodat2", call, 452, AT_FDCWD, b"c", 0o6755, 0)
        attempt("open", os.open, "d", os.O_CREAT | os.O_WRONLY, 0o4755)
        attempt("creat", call, 85, b"e", 0o4755)
        attempt("mknod", os.mknod, "f", 0o104755)
        attempt("high bits", call, 90, b"a", (1 << 32) | 0o4755)
        """,
    )


@attack("A31-openat2", "no set-user-id file is made by openat2", ESCAPE, off="seccomp:openat2")
def set_id_by_openat2(arm: Arm) -> Seen:
    return _set_id(
        arm,
        """
        os.umask(0)
        directory = os.open(top, os.O_RDONLY)
        how = (os.O_CREAT | os.O_WRONLY).to_bytes(8, "little") + (0o4755).to_bytes(8, "little") + bytes(8)
        attempt("openat2", call, 437, directory, b"g", how, 24)
        """,
    )


@attack("A31-layer", "guest code has one more filter than the worker that opens files", ESCAPE, off="last-layer")
def set_id_without_last_layer(arm: Arm) -> Seen:
    return set_id_by_openat2.play(arm)


@attack("A33", "when the host replaces a protected file, the sandbox is stopped at once", WRITE, off="watch")
def replaced_on_host(arm: Arm) -> Seen:
    """An editor on the host writes a new file and renames it over the protected one: the kernel then detaches the guest's
    read-only mount. Success is a write of the guest that lands later than the grace after it; what it can do before it is
    stopped is told, not judged: no order of events closes that window (docs/attacks.md)."""
    top = _repository(arm)
    box = arm.sandbox(arm.shared())
    process = arm.spawn(
        """
        tell(ready=True)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            attempt("write", spill, top + "/.git/config", canary)
            time.sleep(0.001)
        """,
        box=box,
        top=top,
        canary=arm.canary,
    )
    next(iter(process))
    _replace(top)
    time.sleep(_STOP_S)
    early = arm.canary in _text(f"{top}/.git/config")
    _replace(top)
    time.sleep(0.2)
    late = arm.canary in _text(f"{top}/.git/config")
    return Seen(late, f"a write landed within {_STOP_S * 1000:.0f} ms: {early}, after it: {late}")


_STOP_S = 0.25


def _replace(top: str) -> None:
    new = f"{top}/.git/config.lock"
    with open(new, "w", encoding="utf-8") as file:
        file.write("[core]\n")
    os.chmod(new, 0o666)
    os.rename(new, f"{top}/.git/config")


# how the host opens what the guest made (through `files`)


@attack("A24", "a FIFO where a file is expected does not hold the reader up", DOS, off=OURS, label="files: fstat")
def fifo(arm: Arm) -> Seen:
    box = arm.sandbox()
    arm.python('os.mkfifo("result.json")', box=box)
    started = time.monotonic()
    if arm.off:
        told = arm.exec(["cat", "result.json"], box=box, timeout_s=0.5)
        return Seen(told.status == "timeout", "an open without O_NONBLOCK waits for a writer")
    try:
        data = box.files.read("result.json")
    except OSError as error:
        return Seen(time.monotonic() - started > 2, f"files.read: {error.strerror}")
    return Seen(True, f"read {len(data)} bytes")


@attack("A25", "a link to an endless file is not copied out", DOS, off=OURS, label="files: regular files only")
def endless(arm: Arm) -> Seen:
    box = arm.sandbox()
    arm.python('os.symlink("/dev/zero", "result.bin")', box=box)
    if arm.off:
        told = arm.exec(["head", "-c", "20000000", "result.bin"], box=box)
        produced = told.result.usage.output_bytes if told.result else 0
        return Seen(produced == 20_000_000, f"{produced} bytes came")
    try:
        data = box.files.read("result.bin", size=20_000_000)
    except OSError as error:
        return Seen(False, f"files.read: {error.strerror}")
    return Seen(True, f"{len(data)} bytes came")


@attack("A26", "a sparse file of 4 GiB is not taken into the host's memory", DOS, off=OURS, label="files: byte cap")
def sparse(arm: Arm) -> Seen:
    """Read as ranges, it comes in pieces of the size asked for; as a whole it is refused before memory is taken."""
    box = arm.sandbox()
    arm.python('os.truncate(os.open("big", os.O_CREAT | os.O_WRONLY), 1 << 40)', box=box)
    if arm.off:
        told = arm.exec(["wc", "-c", "big"], box=box, timeout_s=3)
        return Seen("1099511627776" in told.stdout, f"its size reads {told.stdout.strip()}")
    before = _peak_kib()
    try:
        box.files.read("big")
    except OSError as error:
        grown = (_peak_kib() - before) >> 10
        return Seen(grown > 1600, f"files.read: {error.strerror}; the host's memory grew by {grown} MiB")
    return Seen(True, "it was read")


@attack("A27", "a tree of any depth is removed", DOS, off=OURS, label="files: no recursion")
def deep_tree(arm: Arm) -> Seen:
    box = arm.sandbox()
    arm.python(
        """
        for _ in range(1800):
            os.mkdir("d")
            os.chdir("d")
        """,
        box=box,
    )
    if arm.off:
        told = arm.python('import shutil; attempt("rmtree", shutil.rmtree, "/workspace/d")', box=box)
        return Seen(told.met.get("rmtree") not in (None, "ok"), told.words())
    box.files.remove("d", recursive=True)
    left = [info.path for info in box.files.list(".")]
    return Seen(bool(left), f"left: {left[:3]}")


@attack("A28", "a strange name is told as it is", SPOOF, off=OURS, label="files: JSON lines")
def strange_names(arm: Arm) -> Seen:
    names = ["a\nb", "\x1b]0;title\x07", "\u202egnp.exe", "-rf", "..%2f", "n" * 255, " ", "\\", "${HOME}", "'\""]
    box = arm.sandbox()
    told = arm.python(
        """
        for name in names:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        os.close(os.open(b"\\xff\\xfe", os.O_CREAT | os.O_WRONLY))
        """,
        box=box,
        names=names,
    )
    if told.status != "ok":
        raise AssertionError(told.stderr)
    wanted = sorted([*names, "\udcff\udcfe"])
    if arm.off:
        listed = sorted(arm.exec(["ls", "-1"], box=box).stdout.splitlines())
    else:
        listed = sorted(info.path for info in box.files.list("."))
    return Seen(listed != wanted, f"{len(listed)} names came of {len(wanted)}")


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _found(directory: str, canary: str) -> bool:
    for top, _, names in os.walk(directory):
        for name in names:
            path = f"{top}/{name}"
            if os.path.isfile(path) and not os.path.islink(path) and canary in _text(path):
                return True
    return False


def _is_set_id(path: str) -> bool:
    info = os.lstat(path)
    return stat.S_ISREG(info.st_mode) and bool(info.st_mode & 0o6000)


def _peak_kib() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CASES = cases(globals())
