"""The trials: each does in a child process what building a sandbox would do, and reports how far it came.

The script `trial` runs this program, after an exec of the launcher, by an interpreter without site-packages. Every
trial prints one line of JSON and leaves nothing behind: its namespaces and mounts end with its child.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

if __name__ == "__main__":
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))
    import ringfence.guest  # noqa: F401  # from this folder alone, which is no place to find anything else (L12)

    sys.path.pop()

from ringfence.guest.launch import fence, mounts
from ringfence.shared import syscalls as k
from ringfence.shared.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_TRIAL_S = 5.0
_MOUNT_POINTS = ("/tmp", "/var/tmp", "/mnt", "/run")


def mount_point() -> str:
    """Return an existing folder to mount over that holds no code of this process, which may yet import some."""
    code = [os.path.realpath(entry) for entry in (*sys.path, __file__, sys.prefix) if entry]
    for folder in _MOUNT_POINTS:
        if os.path.isdir(folder) and not any(is_within(path, folder) for path in code):
            return folder
    raise OSError(f"code lies below each folder to mount over: {', '.join(_MOUNT_POINTS)}")


def user_namespace() -> str:
    """Make a namespace and mount inside it: Ubuntu lets unshare succeed and denies the rest."""
    _enter(k.CLONE_NEWNS)
    place = mount_point()
    k.mount("tmpfs", place, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "size=64k")
    k.mount_setattr(k.AT_FDCWD, place, k.AT_RECURSIVE, add=k.MOUNT_ATTR_RDONLY)
    if os.geteuid() == 0 and _outside_uid() == 0:
        _map_a_guest()
        return "a tmpfs was mounted, and a user namespace took a sandbox's uid"
    return "a tmpfs was mounted inside a user namespace and made read-only"


def namespaces() -> str:
    """Make every kind of namespace, a user namespace inside another: a template's and a sandbox's."""
    if os.geteuid() != 0:
        _enter(k.CLONE_NEWNS)
    every = k.CLONE_NEWNS | k.CLONE_NEWUTS | k.CLONE_NEWIPC | k.CLONE_NEWNET | k.CLONE_NEWCGROUP
    _enter(every, inside=1000)
    mounts.bring_up_loopback()
    k.unshare(k.CLONE_NEWPID)
    _in_child(lambda: _expect(os.getpid() == 1, "the first process of a pid namespace is PID 1"))
    return "user, pid, mount, net, ipc, uts, cgroup"


def fresh_proc() -> str:
    """Mount a /proc of a new pid namespace."""
    _enter(k.CLONE_NEWNS)
    k.unshare(k.CLONE_NEWPID)
    _in_child(mounts.mount_proc)
    return "mounted in a new pid namespace"


def landlock() -> str:
    """Restrict a process with Landlock as a guest is restricted."""
    abi = k.syscall(444, 0, 0, 1, what="landlock_create_ruleset")
    k.no_new_privileges()
    fence.restrict_with_landlock(abi, scopes=True, files=True)
    return f"ABI {abi}"


def seccomp() -> str:
    """Install the guest's system call filter; check a permitted and a refused call."""
    program = bytes.fromhex(os.environ["RINGFENCE_TRIAL_FILTER"])
    k.no_new_privileges()
    k.Filter(program).install()
    _expect(os.getppid() > 0, "a permitted call works under the filter")
    try:
        k.unshare(k.CLONE_NEWUTS)
    except OSError:
        return f"the guest's filter, {len(program) // 8} instructions"
    raise OSError("the filter was installed and refuses nothing")


def idmapped_mounts() -> str:
    """Make an idmapped mount, by which the caller's files appear as the guest's. Root needs it for writable mounts."""
    _enter(k.CLONE_NEWNS)
    tree = k.open_tree_clone("/var/tmp")
    pid, go = _waiting_child()
    _write_maps(pid, f"0 {_guest_uid()} 1")
    fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        k.mount_setattr(tree, "", k.AT_EMPTY_PATH, add=k.MOUNT_ATTR_IDMAP, idmap_fd=fd)
    finally:
        os.close(go)
        os.waitpid(pid, 0)
    return "on the file system of /var/tmp"


def overlay() -> str:
    """Mount an overlay, as for `copy` mounts: the host's files below, the sandbox's disk above."""
    _enter(k.CLONE_NEWNS)
    place = mount_point()
    k.mount("tmpfs", place, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "size=64k")
    os.chdir(place)
    for name in ("lower", "upper", "work", "shown"):
        os.mkdir(name)
    layers = "lowerdir=lower,upperdir=upper,workdir=work,userxattr"
    k.mount("overlay", "shown", "overlay", k.MS_NOSUID | k.MS_NODEV, layers)
    os.mkdir("shown/new")
    _expect(os.path.isdir("upper/new"), "writes go to the upper layer")
    return "mounted, and a write went to the upper layer"


def openat2() -> str:
    """Open a path by openat2, which keeps the path below a root."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    fd = k.openat2(root, "../../etc", os.O_PATH, 0, k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS)
    os.close(fd)
    return "kept to its root"


def pidfd() -> str:
    """Signal a child by its pidfd and wait for the end."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    fd = os.pidfd_open(pid)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    _expect(os.waitid(os.P_PIDFD, fd, os.WEXITED) is not None, "a pidfd can be waited for")
    return "opened, signalled, waited for"


def memfd() -> str:
    """Make a file in memory that can be sealed."""
    fd = os.memfd_create("ringfence-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.close(fd)
    return "made"


TRIALS: dict[str, Callable[[], str]] = {
    "user namespaces": user_namespace,
    "all namespaces": namespaces,
    "fresh /proc": fresh_proc,
    "seccomp": seccomp,
    "Landlock": landlock,
    "openat2": openat2,
    "pidfd": pidfd,
    "memfd": memfd,
    "idmapped mounts": idmapped_mounts,
    "overlay": overlay,
}


def _expect(true: bool, what: str) -> None:
    if not true:
        raise OSError(f"not so: {what}")


def _outside_uid() -> int:
    """Return the uid outside of this user namespace that is 0 inside."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return int(file.readline().split()[1])


def _enter(flags: int, *, inside: int = 0) -> None:
    """Enter new namespaces as the backend does: directly as root, otherwise inside a user namespace of one uid."""
    uid, gid = os.geteuid(), os.getegid()
    as_root = uid == 0 and inside == 0
    k.unshare(flags if as_root else flags | k.CLONE_NEWUSER)
    if not as_root:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{inside} {uid} 1")
        _write("/proc/self/gid_map", f"{inside} {gid} 1")
    k.mount(None, "/", None, k.MS_REC | k.MS_PRIVATE)  # otherwise root's mounts would appear on the host


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} [write {path}]") from None


def _guest_uid() -> int:
    return int(os.environ["RINGFENCE_TRIAL_UID"])


def _map_a_guest() -> None:
    """Give a new user namespace one of the uids that root gives to sandboxes."""
    pid, go = _waiting_child()
    try:
        _write_maps(pid, f"1000 {_guest_uid()} 1")
    finally:
        os.close(go)
        os.waitpid(pid, 0)


def _waiting_child() -> tuple[int, int]:
    """Return a child in a new user namespace, and the descriptor that ends the child when it is closed."""
    made, report = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(go)
            k.unshare(k.CLONE_NEWUSER)
            os.write(report, b"x")
            os.read(wait, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(report)
    os.close(wait)
    ready = os.read(made, 1)
    os.close(made)
    if not ready:
        os.close(go)
        os.waitpid(pid, 0)
        raise OSError("a child could not make a user namespace")
    return pid, go


def _write_maps(pid: int, text: str) -> None:
    _write(f"/proc/{pid}/uid_map", text)
    _write(f"/proc/{pid}/gid_map", text)


def _in_child(work: Callable[[], None]) -> None:
    """Call `work` in a child, which is PID 1 of this process's new pid namespace. Raises the child's OSError."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except OSError as error:
            os.write(write_end, json.dumps([error.errno, error.strerror or str(error)]).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        failure = pipe.read()
    os.waitpid(pid, 0)
    if failure:
        number, text = json.loads(failure)
        raise OSError(number, text) if number is not None else OSError(text)


def attempt(work: Callable[[], str], timeout_s: float = _TRIAL_S) -> dict[str, object]:
    """Run one trial in a child, with a deadline. Returns {"ok", "detail", "errno"}."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _answer(work, write_end)
    os.close(write_end)
    deadline = time.monotonic() + timeout_s
    report = b""
    late = False
    while (left := deadline - time.monotonic()) > 0 and select.select([read_end], [], [], left)[0]:
        part = os.read(read_end, 4096)
        if not part:
            break
        report += part
    else:
        late = True
        os.kill(pid, signal.SIGKILL)
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    if report:
        answer: dict[str, object] = json.loads(report)
        return answer
    ended = f"the trial ended with status {os.waitstatus_to_exitcode(status)}"
    return {"ok": False, "detail": f"no answer in {timeout_s:g} s" if late else ended, "errno": None}


def _answer(work: Callable[[], str], fd: int) -> None:
    status = 1
    try:
        try:
            answer: dict[str, object] = {"ok": True, "detail": work(), "errno": None}
        except OSError as error:
            answer = {"ok": False, "detail": str(error), "errno": error.errno}
        os.write(fd, json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    os.chdir("/")
    for name, work in TRIALS.items():
        print(json.dumps({"trial": name, **attempt(work)}), flush=True)


if __name__ == "__main__":
    main()
