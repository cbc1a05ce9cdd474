"""A: files of the host, read or written from inside a sandbox. The host's own reads of guest files: a_host_reads."""

from __future__ import annotations

import os
import stat

from ringfence import Mount
from ringfence.plan.model import Device
from ringfence.values import replace
from ringfence_attacks.arena import POLICY
from ringfence_attacks.case import (
    BARE,
    ESCAPE,
    HOST_CODE,
    READ,
    WRITE,
    NotApplicable,
    Seen,
    attack,
    cases,
    not_applicable,
)
from ringfence_attacks.witnesses import handle_of, status_of, text_of, waiting_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import LinuxPlan
    from ringfence_attacks.arena import Arm


@attack("A01", "a host file is not read by its absolute path", READ, off="view")
def absolute_path(arm: Arm) -> Seen:
    report = arm.python(
        """
        for place in (path, "/mnt" + path, "/root/.ssh/id_rsa", "/home", "/etc/shadow"):
            steal(place)
        """,
        path=arm.host_file(),
    )
    return arm.stolen(report)


@attack("A02", "a host file is not read through the root links of /proc", READ, off="view")
def root_links(arm: Arm) -> Seen:
    report = arm.python(
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
    return arm.stolen(report)


@attack("A03", "a host file is not read by climbing from a directory that is open", READ, off="view")
def climbing(arm: Arm) -> Seen:
    report = arm.python(
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
    return arm.stolen(report)


_CHROOT = """
os.mkdir("/workspace/jail")
attempt("chroot", call, 161, b"/workspace/jail")
attempt("write the new root", spill, "/proof", canary, os.O_CREAT)
attempt("pivot_root", call, 155, b".", b".")
"""


def _chroot(arm: Arm) -> Seen:
    """Seen by the host: the guest's `/` was the jail when the file that it wrote to `/` is in the jail."""
    box = arm.sandbox()
    report = arm.python(_CHROOT, box=box, canary=arm.canary)
    return Seen(box.files.exists("jail/proof"), report.words())


A04 = attack(
    "A04", "the guest's root cannot be changed by chroot: filter", ESCAPE, off="seccomp:mounts", behind="capabilities"
)(_chroot)
A10 = attack(
    "A10", "the guest's root cannot be changed by chroot: rights", ESCAPE, off="capabilities", behind="seccomp:mounts"
)(_chroot)


_SHOWN_HANDLE = """
directory = os.open(top, os.O_RDONLY)
buffer = ctypes.create_string_buffer(bytes.fromhex(handle), len(handle) // 2)
fd = attempt("open_by_handle_at", call, 304, directory, buffer, os.O_RDONLY)
if fd is not None:
    loot(os.read(fd, 4096))
for number in range(1, 64):  # then by guessing: the first inodes of the same file system
    guess = bytes.fromhex(handle)[:8] + number.to_bytes(4, "little") + bytes(len(handle) // 2 - 12)
    try:
        call(304, directory, ctypes.create_string_buffer(guess, len(guess)), os.O_RDONLY)
    except OSError:
        pass
"""


@attack("A05", "no file is opened by its handle", READ, off=BARE, needs="root")
def by_handle(arm: Arm) -> Seen:
    """The guest gets the best handle possible: the host makes the handle of a file beside a folder that is shown.

    The off arm is bare, because no single control stops this: the kernel requires a capability of the initial user
    namespace. Without root no process of the user may open by handle, therefore no arm would succeed.
    """
    secret = arm.host_file("secret/canary")
    top = f"{arm.directory}/shown"
    os.mkdir(top)
    policy = POLICY.replace(mounts=[Mount(top)])
    report = arm.python(_SHOWN_HANDLE, policy=policy, top=top, handle=handle_of(secret).hex())
    return arm.stolen(report)


@attack("A06", "a read-only mount is not made writable again", WRITE, off="read-only")
def remount(arm: Arm) -> Seen:
    path = arm.host_file("shown/file", mode=0o666)
    report = arm.python(
        """
        top = os.path.dirname(path).encode()
        attempt("remount", call, 165, None, top, None, 32 | 4096, None)
        attempt("mount_setattr", call, 442, AT_FDCWD, top, 0, bytes(8) + b"\\1" + bytes(23), 32)
        attempt("write", spill, path, "spoiled")
        """,
        path=path,
        policy=arm.shared("ro"),
    )
    return Seen(text_of(path) != arm.canary, report.words())


_MOUNT_CONTROLS = ("seccomp:mounts", "seccomp:namespaces", "capabilities", "landlock-files")
_MOUNT = """
attempt("unshare", call, 272, 0x20000)  # as root the mount namespace belongs to a user namespace above: take a copy
os.mkdir("/workspace/m")
attempt("mount", call, 165, b"tmpfs", b"/workspace/m", b"tmpfs", 0, None)
spill("/workspace/m/proof", canary, os.O_CREAT)
for kind in (b"proc", b"sysfs", b"cgroup2"):
    attempt("mount " + kind.decode(), call, 165, kind, b"/tmp", kind, 0, None)
tell(done=True)
"""


def _mount(arm: Arm) -> Seen:
    """Seen by the host: something was mounted when the file that the guest wrote below /workspace/m is not there."""
    box = arm.sandbox()
    report = arm.python(_MOUNT, box=box, canary=arm.canary)
    if report.said("done") is not True:
        raise AssertionError(f"the script did not end: {report.words()} {report.stderr[-300:]}")
    return Seen(not box.files.exists("m/proof"), report.words())


def _other_mount_controls(control: str) -> tuple[str, ...]:
    return tuple(name for name in _MOUNT_CONTROLS if name != control)


MOUNTS = [
    attack(
        name,
        f"nothing is mounted by the guest: {control} alone holds",
        ESCAPE,
        off=control,
        behind=_other_mount_controls(control),
    )(_mount)
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
    """Needs an ordinary user: as root the mounts belong to the initial user namespace, and nothing is below /proc."""
    victim = arm.victim()
    report = arm.python(
        """
        for _ in range(40):
            if attempt("umount2", call, 166, b"/proc", 2) is None:
                break
            steal(f"/proc/{pid}/cmdline", "cmdline")
        """,
        pid=victim.pid,
    )
    return arm.stolen(report)


_NEW_MOUNT = """
attempt("unshare", call, 272, 0x20000)  # as root the mount namespace belongs to a user namespace above: take a copy
os.mkdir("/workspace/new")
for name, number, args in (("open_tree", 428, (AT_FDCWD, b"/usr", 0)), ("fspick", 433, (AT_FDCWD, b"/workspace", 0)),
                           ("mount_setattr", 442, (AT_FDCWD, b"/usr", 0, bytes(8) + b"\\1" + bytes(23), 32))):
    attempt(name, call, number, *args)
made = attempt("fsopen", call, 430, b"tmpfs", 0)
if made is not None:
    attempt("fsconfig", call, 431, made, 1, b"source", canary.encode(), 0)
    attempt("create", call, 431, made, 6, None, None, 0)
    tree = attempt("fsmount", call, 432, made, 0, 0)
    if tree is not None:
        attempt("move_mount", call, 429, tree, b"", AT_FDCWD, b"/workspace/new", 4)
if os.fork() == 0:  # keeps the mount namespace alive for the host to look at
    os.setsid()
    os.execv("/bin/sleep", [canary, "5"])
"""


@attack(
    "A09",
    "nothing is mounted by the new mount calls",
    ESCAPE,
    off="seccomp:mounts",
    behind=_other_mount_controls("seccomp:mounts"),
)
def new_mount_calls(arm: Arm) -> Seen:
    """Seen by the host: a mount of that name in /proc/<pid>/mountinfo."""
    report = arm.python(_NEW_MOUNT, box=arm.sandbox(), canary=arm.canary)
    pid = waiting_process(arm.canary)
    if pid is None:
        raise AssertionError(f"no process waits for the host to look at: {report.words()} {report.stderr[-300:]}")
    return Seen(arm.canary in text_of(f"/proc/{pid}/mountinfo"), report.words())


@attack("A11", "a link that lay in a mount before the start is followed inside only", READ, off="view")
def planted_link(arm: Arm) -> Seen:
    secret = arm.host_file("secret/canary")
    os.mkdir(f"{arm.directory}/project")
    os.symlink("/", f"{arm.directory}/project/out")
    os.symlink(f"{arm.directory}/secret", f"{arm.directory}/project/secret")
    policy = POLICY.replace(mounts=[Mount(f"{arm.directory}/project")])
    report = arm.python(
        """
        for place in (f"{project}/out{secret}", f"{project}/out/mnt{secret}", f"{project}/secret/canary"):
            steal(place)
        """,
        policy=policy,
        project=f"{arm.directory}/project",
        secret=secret,
    )
    return arm.stolen(report)


@attack("A14", "a host file mounted read-only is not linked into a folder mounted read-write", WRITE, off=BARE)
def hard_link(arm: Arm) -> Seen:
    path = arm.host_file("shown/file", mode=0o666)
    out = f"{arm.directory}/out"
    os.mkdir(out)
    os.chmod(out, 0o777)
    policy = POLICY.replace(mounts=[Mount(f"{arm.directory}/shown"), Mount(out, mode="rw")])
    report = arm.python(
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
    return Seen(os.stat(path).st_nlink > 1 or text_of(path) != arm.canary, report.words())


@attack("A15", "no device node is made", ESCAPE, off="seccomp:devices")
def device_node(arm: Arm) -> Seen:
    """The kernel lets every user make the character device 0:0: only the filter refuses that device."""
    box = arm.sandbox()
    report = arm.python(
        """
        attempt("c 0 0", os.mknod, "/workspace/whiteout", 0o20644, os.makedev(0, 0))
        attempt("kmem", os.mknod, "/workspace/mem", 0o20666, os.makedev(1, 1))
        attempt("disk", os.mknod, "/workspace/disk", 0o60666, os.makedev(8, 0))
        spill("/workspace/moved", "", os.O_CREAT)
        attempt("left by a rename", call, 316, -100, b"/workspace/moved", -100, b"/workspace/there", 4)
        """,
        box=box,
    )
    kinds = {info.path: info.kind for info in box.files.list(".")}
    return Seen("other" in kinds.values(), report.words())


_GAIN = """
attempt("unshare", call, 272, 0x10000000)
attempt("setgroups", spill, "/proc/self/setgroups", "deny")
attempt("uid_map", spill, "/proc/self/uid_map", "0 1000 1")
call(126, (0x20080522).to_bytes(4, "little") + bytes(4), bytes(24))  # capset: give up all capabilities
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
    """Every mount of a sandbox is nosuid: a program can gain only what root gains at exec, in a user namespace that the
    guest made.

    Seen by the host: the capabilities of the process in /proc.
    """
    process = arm.spawn(_GAIN, box=arm.sandbox(), canary=arm.canary)
    pid = waiting_process(arm.canary)
    if pid is None:
        return Seen(False, f"it did not start: {process.kill().stderr[-200:]}")
    effective = status_of(pid)["CapEff"]
    return Seen(int(effective, 16) != 0, f"CapEff of the process: {effective}")


def _show_devices(plan: LinuxPlan, arm: Arm) -> LinuxPlan:
    del arm
    return replace(plan, template=(*plan.template, *(Device(name) for name in _strange_devices()[:3])))


def _strange_devices() -> list[str]:
    names = ("kmsg", "kvm", "fuse", "loop-control", "vsock", "mem", "console", "ptmx", "hwrng", "tty0")
    return [name for name in names if os.path.exists(f"/dev/{name}") and not os.path.islink(f"/dev/{name}")]


@attack(
    "A17", "/dev holds six harmless devices and the guest's terminals", ESCAPE, off=_show_devices, label="device nodes"
)
def devices(arm: Arm) -> Seen:
    """Seen by the host: every node below /proc/<pid>/root/dev."""
    if not _strange_devices():
        raise NotApplicable("this host's /dev has no device that could be shown")
    pid, words = arm.waiting(
        """
        for name in ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "loop-control", "net/tun", "vsock", "sda", "vda"):
            attempt(name, lambda: os.close(os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK)))
        """,
        box=arm.sandbox(),
    )
    found = _nodes(f"/proc/{pid}/root/dev")
    if "null" not in found:
        raise AssertionError(f"the guest's /dev could not be listed: {found}")
    strange = found - {"null", "zero", "full", "random", "urandom", "tty", "pts/ptmx"}
    return Seen(bool(strange), f"devices: {', '.join(sorted(found))}; {words}")


def _nodes(top: str) -> set[str]:
    """Return the device nodes below `top`, as paths relative to `top`."""
    found = set()
    for folder, _, names in os.walk(top):
        for name in names:
            mode = os.lstat(f"{folder}/{name}").st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                found.add(os.path.relpath(f"{folder}/{name}", top))
    return found


A18 = attack(
    "A18", "/dev holds no device of the kernel's own interfaces", ESCAPE, off=_show_devices, label="device nodes"
)(devices.play)

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
    """Try to run the programs. A program that runs leaves a file, which the host finds in the workspace."""
    policy = POLICY if arm.off else POLICY.replace(commands=["python3"])
    box = arm.sandbox(policy)
    report = arm.python(_PROGRAMS, box=box, names=names, canary=arm.canary)
    if report.said("done") is not True:
        raise AssertionError(f"the script did not end: {report.words()} {report.stderr[-300:]}")
    return Seen(box.files.exists("ran"), report.words())


@attack("A20", "a program that is not listed is not run by execveat", ESCAPE, off=HOST_CODE, label="commands")
def by_descriptor(arm: Arm) -> Seen:
    return _programs(arm, ("/bin/sh",))


@attack("A21", "a program that is not listed is not run under another name", ESCAPE, off=HOST_CODE, label="commands")
def aliases(arm: Arm) -> Seen:
    names = ("//bin/sh", "/usr/bin/../bin/sh", "/bin/./dash", "/proc/self/root/usr/bin/sh", "/usr/bin/env", "/BIN/SH")
    return _programs(arm, names)


@attack("A22", "the host files below a copy of a folder stay as they are", WRITE, off=HOST_CODE, label="copy layer")
def copy_layer(arm: Arm) -> Seen:
    path = arm.host_file("project/file", mode=0o666)
    os.chmod(f"{arm.directory}/project", 0o777)
    policy = POLICY.replace(mounts=[Mount(f"{arm.directory}/project", mode="rw" if arm.off else "copy")])
    report = arm.python(
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
    whole = os.path.exists(path) and text_of(path) == arm.canary
    return Seen(not whole, report.words())


_SEARCH = """
for top, folders, files in os.walk("/"):
    if top == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys", "usr")]
    if ".env" in files:
        steal(f"{top}/.env")
tell(done=True)
"""


@attack(
    "A22-hidden", "a file that is hidden in a mount is not reached by another name", READ, off=HOST_CODE, label="hide"
)
def hidden(arm: Arm) -> Seen:
    """Try a sandbox for each way to mount: as root, a folder that other users cannot read is mounted differently."""
    folders = [os.path.dirname(arm.host_file(f"{name}/.env")) for name in ("open", "closed")]
    os.chmod(folders[1], 0o700)
    mounts = [Mount(folder, "/data", mode, hide=[".env"]) for folder in folders for mode in ("ro", "copy", "rw")]
    seen = []
    for mount in mounts:
        shown = replace(mount, hide=()) if arm.off else mount
        report = arm.python(_SEARCH, policy=POLICY.replace(mounts=[shown]))
        if report.said("done") is not True:
            raise AssertionError(f"the search did not end: {report.words()} {report.stderr[-300:]}")
        seen.append(arm.stolen(report))
    got = [each.succeeded for each in seen]
    return Seen(all(got) if arm.off else any(got), " ".join(each.what for each in seen if each.what))


@attack("A23", "attributes of a file that may only be read are not set", WRITE, off="read-only")
def attributes(arm: Arm) -> Seen:
    path = arm.host_file("shown/file", mode=0o666)
    report = arm.python(
        """
        attempt("user xattr", os.setxattr, path, "user.note", canary.encode())
        attempt("acl", os.setxattr, path, "system.posix_acl_access", b"\\2\\0\\0\\0\\1\\0\\7\\0\\xff\\xff\\xff\\xff")
        attempt("times", os.utime, path, (1, 1))
        """,
        policy=arm.shared("ro"),
        path=path,
        canary=arm.canary,
    )
    return Seen("user.note" in os.listxattr(path), report.words())


CASES = cases(globals())
