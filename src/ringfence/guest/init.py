"""Owns PID 1 of a sandbox: it reaps orphans and, when the monitor says so, kills what is left of a process tree.

It is in no Landlock domain (every guest is in one), is not dumpable and has no signal handler, so that a guest can
neither write to it nor signal it (J17). Nothing it says decides a result.
"""

from __future__ import annotations

import os
import select

from . import box, fence, kernel, lean, outlets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import NoReturn

    from .shapes import Kept, Plan

_PASSES = 200
_EAGER_PASSES = 20
_BETWEEN_PASSES_MS = 3  # a process of many threads, throttled by its cgroup, takes a while to die
# In the order they are gone through.
_DOORS = {
    "pid": kernel.CLONE_NEWPID,
    "user": kernel.CLONE_NEWUSER,
    "mnt": kernel.CLONE_NEWNS,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
}


def run(sock: socket, plan: Plan, outer_proc: int, listeners: int, disk: int) -> NoReturn:
    """The first process in new namespaces: build what belongs to this sandbox alone, give up all rights, serve."""
    kernel.set_name("rf-init")
    kernel.die_with_parent()  # and again when our uid has changed, which takes it back
    kernel.close_all_but(
        [sock.fileno(), outer_proc, listeners, disk]
    )  # with the forker's end open here, we would never see it go (D15)
    as_root, namespaces = plan["as_root"], plan["namespaces"]
    owner = plan["owner"] if as_root else 1000
    if not as_root:
        box.write(outer_proc, "self/uid_map", "1000 0 1")
        box.write(outer_proc, "self/gid_map", "1000 0 1")
    if namespaces & kernel.CLONE_NEWUTS:
        lean.set_host_name("ringfence")
    if namespaces & kernel.CLONE_NEWNET:
        box.bring_up_loopback()
        if plan["outlets"] is not None:
            outlets.make(plan["outlets"], listeners)  # while we may: the resolver's port is below 1024
    box.mount_proc()
    sys_directory = os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # before it becomes read-only
    box.mount_private(plan["sizes"], owner=owner, ops=plan["ops"], idmap=_idmapper(owner), disk=disk)
    box.restrict_proc(subset=plan["proc_subset"], mask=plan["proc_masks"])
    if as_root:
        _enter_user_namespace(sock, plan)
    if plan["user_namespace"]:
        fence.limit_kernel_objects(sys_directory, plan["fence"])
    serve(sock, plan)


def doors(plan: Plan) -> list[str]:
    """An ordinary user's spawner comes in by PID 1's namespaces: when that is not dumpable, its pidfd is no way.

    Names of them below /proc/<pid>/ns. None as root.
    """
    if plan["as_root"]:
        return []
    return [name for name, flag in _DOORS.items() if plan["namespaces"] & flag]


def _enter_user_namespace(sock: socket, plan: Plan) -> None:
    """Real root until here: all mounts belong to the initial user namespace. The forker writes the map."""
    os.setgroups([])
    if plan["user_namespace"]:
        kernel.unshare(kernel.CLONE_NEWUSER)
    sock.send(b"unshared")
    sock.recv(16)
    become(plan["owner"], mapped=plan["user_namespace"])


def _idmapper(owner: int) -> Callable[[int, int], int]:
    def idmap(uid: int, gid: int) -> int:
        """A user namespace in which files of `uid` belong to the guest: for mount_setattr."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                kernel.unshare(kernel.CLONE_NEWUSER)
                os.write(write_end, b"x")
                select.poll().poll()
            finally:
                os._exit(0)
        os.close(write_end)
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.read(read_end, 1)
            box.write(proc, f"{pid}/uid_map", f"{uid} {owner} 1")
            box.write(proc, f"{pid}/gid_map", f"{gid} {owner} 1")
            return os.open(f"{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        finally:
            os.close(read_end)
            os.close(proc)
            os.kill(pid, lean.SIGKILL)
            os.waitpid(pid, 0)

    return idmap


def become(owner: int, *, mapped: bool) -> None:
    """The guest's uid: 1000 inside the user namespace. Capabilities there stay until they are dropped."""
    inside = 1000 if mapped else owner
    os.setresgid(inside, inside, inside)
    os.setresuid(inside, inside, inside)


def serve(sock: socket, plan: Plan) -> NoReturn:
    """Never returns. End of file: the monitor is gone, and so are we, and with us everything inside."""
    kernel.die_with_parent()
    wire = os.dup(sock.fileno())
    os.dup2(wire, 3, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kernel.close_from(4)
    opened = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in doors(plan)]
    lean.ignore_signals(lean.SIGCHLD)  # the kernel reaps for us (D12)
    fence.give_up_rights(plan["fence"], landlock=False)
    channel = lean.from_fd(3, lean.SOCK_SEQPACKET)
    lean.send_fds(channel, b"ready", opened)
    for fd in opened:
        os.close(fd)
    while data := channel.recv(1 << 16):
        kept: Kept = lean.loads(data)
        left = kill_all_but(kept)
        channel.send(b"%d" % left)
    os._exit(0)


def kill_all_but(kept: Kept) -> int:
    """Kill every process but `alone`, `trees` with their descendants, and what is older than `since`.

    Returns how many are left.

    All victims are stopped before any is killed: a fork bomb runs into the process limit and stands still.
    """
    victims: set[int] = set()
    for _ in range(_PASSES):
        seen = _victims(kept)
        for pid in seen - victims:
            _signal(pid, lean.SIGSTOP)
        if seen <= victims:
            break
        victims = seen
    for number in range(_PASSES):
        seen = _victims(kept)
        if not seen:
            return 0
        if number > _EAGER_PASSES:
            select.poll().poll(_BETWEEN_PASSES_MS)
        for pid in seen:
            _signal(pid, lean.SIGKILL)
    return len(_victims(kept))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _victims(kept: Kept) -> set[int]:
    living = _living()
    parents = {pid: process.parent for pid, process in living.items()}
    keep = set(kept["trees"])
    # Each job leads a session of its own, and a session can be inherited and left but not joined: who is in it is of
    # that job, even when its parent has ended.
    keep |= {pid for pid, process in living.items() if process.session in kept["trees"]}
    # What ran before the tree's own start cannot be of it: a server that an earlier command left running stays.
    ours = {1, os.getpid(), *kept["alone"]}  # orphans of any tree are children of PID 1
    keep |= {pid for pid, process in living.items() if process.started < kept["since"]} - ours
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in keep} - keep
        grown = bool(more)
        keep |= more
    return set(parents) - keep - ours


class _Process:
    __slots__ = ("parent", "session", "started")

    def __init__(self, fields: list[bytes]) -> None:
        """From what follows the name in /proc/<pid>/stat. Parent 0: the monitor; start in clock ticks since boot."""
        self.parent, self.session, self.started = int(fields[1]), int(fields[3]), int(fields[19])


def _living() -> dict[int, _Process]:
    """Living processes of this pid namespace.

    One whose first thread has ended reads as a zombie and is none while it has other threads.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
            found[int(name)] = _Process(fields)
    return found


def living_children(pid: int) -> list[int]:
    """Processes, ended ones too, whose parent that is."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(name))
    return found
