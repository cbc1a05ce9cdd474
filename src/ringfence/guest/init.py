"""Owns PID 1 of a sandbox: it reaps orphans and, when the monitor says so, kills what is left of a process tree.

It is in no Landlock domain (every guest is in one), is not dumpable and has no signal handler, so that a guest can
neither write to it nor signal it (J17). Nothing it says decides a result.
"""

from __future__ import annotations

import os

from . import box, fence, kernel, lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket

    from .shapes import Kept, Plan

_PASSES = 200


def prepare_as_root(sock: socket, plan: Plan) -> None:
    """Real root inside the new pid namespace: /proc, then the user namespace whose map the monitor writes."""
    sys_directory = _mount_proc(plan)
    os.setgroups([])
    if plan["user_namespace"]:
        kernel.unshare(kernel.CLONE_NEWUSER)
    sock.send(b"unshared")
    sock.recv(16)
    become(plan["owner"], mapped=bool(plan["user_namespace"]))
    if plan["user_namespace"]:
        fence.limit_kernel_objects(sys_directory, plan["fence"])


def prepare_as_user(plan: Plan) -> None:
    fence.limit_kernel_objects(_mount_proc(plan), plan["fence"])


def _mount_proc(plan: Plan) -> int:
    """Returns /proc/sys as it was before it became read-only."""
    box.mount_proc()
    sys_directory = os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    box.restrict_proc(subset=bool(plan["proc_subset"]), mask=bool(plan["proc_masks"]))
    return sys_directory


def become(owner: int, *, mapped: bool) -> None:
    """The guest's uid: 1000 inside the user namespace. Capabilities there stay until they are dropped."""
    inside = 1000 if mapped else owner
    os.setresgid(inside, inside, inside)
    os.setresuid(inside, inside, inside)


def serve(sock: socket, plan: Plan) -> None:
    """Never returns. End of file: the monitor is gone, and so are we, and with us everything inside."""
    kernel.set_name("rf-init")
    kernel.die_with_parent()
    wire = os.dup(sock.fileno())
    os.dup2(wire, 3, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kernel.close_from(4)
    lean.ignore_signals(lean.SIGCHLD)  # the kernel reaps for us (D12)
    lean.default_signals(lean.SIGINT)
    fence.give_up_rights(plan["fence"], landlock=False)
    channel = lean.from_fd(3, lean.SOCK_SEQPACKET)
    channel.send(b"ready")
    while data := channel.recv(1 << 16):
        kept: Kept = lean.loads(data)
        left = _kill_all_but(kept)
        channel.send(b"%d" % left)
    os._exit(0)


def _kill_all_but(kept: Kept) -> int:
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
    for _ in range(_PASSES):
        seen = _victims(kept)
        if not seen:
            return 0
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
    parents = {pid: parent for pid, (parent, _) in living.items()}
    keep = set(kept["trees"])
    # What ran before the tree's own start cannot be of it: a server that an earlier command left running stays.
    ours = {1, os.getpid(), *kept["alone"]}  # orphans of any tree are children of PID 1
    keep |= {pid for pid, (_, started) in living.items() if started < kept["since"]} - ours
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in keep} - keep
        grown = bool(more)
        keep |= more
    return set(parents) - keep - ours


def _living() -> dict[int, tuple[int, int]]:
    """Living processes of this pid namespace: parent (0: the monitor) and start in clock ticks since boot.

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
            found[int(name)] = int(fields[1]), int(fields[19])
    return found
