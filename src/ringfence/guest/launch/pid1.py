"""Owns PID 1 of a sandbox, which reaps orphans and, on the monitor's order, kills what is left of a process tree.

PID 1 is in no Landlock domain (every guest is in one), is not dumpable and has no signal handler, so that a guest can
neither write to PID 1 nor signal it (J17). No result depends on what PID 1 says.
"""

from __future__ import annotations

import os
import select
import struct

from ringfence.guest.guestd import listeners
from ringfence.guest.launch import fence, mounts
from ringfence.guest.launch.syscall_rows import Closing, Hole, Slot, room
from ringfence.shared import fast_stdlib, proc, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from ringfence.guest.guestd.protocols import PlanForm, SparedProcesses
    from ringfence.guest.launch.syscall_rows import RowProgram

_PASSES = 200
_EAGER_PASSES = 20
_BETWEEN_PASSES_MS = 3  # a process of many threads, throttled by its cgroup, takes a while to die
# In the order in which they are used.
_DOORS = {
    "pid": syscalls.CLONE_NEWPID,
    "user": syscalls.CLONE_NEWUSER,
    "mnt": syscalls.CLONE_NEWNS,
    "net": syscalls.CLONE_NEWNET,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
}


# holes of the program
SOCK, OWNER = "PID 1's socket", "owner"
_CLOSED = "PID 1 closes"
_NR_WRITE, _NR_CLOSE, _NR_SIGACTION, _NR_DUP2, _NR_SENDTO, _NR_RECVFROM, _NR_SENDMSG = 1, 3, 13, 33, 44, 45, 46
_NR_SETGROUPS, _NR_SETRESUID, _NR_SETRESGID, _NR_SETHOSTNAME, _NR_EXIT, _NR_OPENAT = 116, 117, 119, 170, 231, 257
_NR_FCNTL, _NR_DUP3 = 72, 292
_F_DUPFD_CLOEXEC, _HIGH = 1030, 16
_OPEN_NS = os.O_RDONLY | os.O_CLOEXEC
_HOST_NAME = b"ringfence"
_IGNORED = struct.pack("<QQQQ", 1, 0, 0, 0)  # a signal's disposition
_PEEK = 2


class Pid1Rows:
    """The first steps of PID 1 in new namespaces: build what belongs to this sandbox alone, give up all rights.

    The forker writes the steps as rows of its program; `fill` fills in a sandbox.
    """

    def __init__(
        self, program: RowProgram, plan: PlanForm, proc: int, listing: mounts.Listing, made: Pid1Values
    ) -> None:
        self._program, self._plan, self._proc, self._made = program, plan, proc, made
        self.first = program.next
        _call(program, "prctl PR_SET_NAME", syscalls.NR_PRCTL, syscalls.PR_SET_NAME, b"rf-init")
        # Done again after the change of uid, which undoes it.
        _call(program, "prctl PR_SET_PDEATHSIG", syscalls.NR_PRCTL, syscalls.PR_SET_PDEATHSIG, fast_stdlib.SIGKILL)
        # With the forker's end open here, its end would never be seen (D15).
        self._closing = Closing(program, _CLOSED, 4)
        if not plan["as_root"]:
            for name in ("uid_map", "gid_map"):
                _write_file(program, proc, f"self/{name}", b"1000 0 1")
        self._write_network()
        self._write_mounts(listing)
        if plan["as_root"]:
            self._enter_user_namespace()
        if plan["user_namespace"]:
            fence.limit_kernel_objects(program, self._limits)
        self._write_end()

    def _write_network(self) -> None:
        program, namespaces = self._program, self._plan["namespaces"]
        if namespaces & syscalls.CLONE_NEWUTS:
            _call(program, "sethostname", _NR_SETHOSTNAME, _HOST_NAME, len(_HOST_NAME))
        if namespaces & syscalls.CLONE_NEWNET:
            mounts.write_loopback(program)
            if self._plan["outlets"] is not None:
                program.stop(self._make_outlets)

    def _make_outlets(self) -> None:
        """Write the listeners, while PID 1 has the right: the resolver's port is below 1024."""
        assert self._plan["outlets"] is not None
        listeners.make(self._plan["outlets"], self._made.listeners)

    def _write_mounts(self, listing: mounts.Listing) -> None:
        program = self._program
        plan = self._plan
        mounts.write_proc(program)
        self._limits = fence.open_kernel_limits(program, plan["fence"]) if plan["user_namespace"] else []
        further, with_workspace = mounts.needs_further(plan["ops"], disk=self._made.with_disk)
        mounts.write_private(program, workspace=not with_workspace)
        if further:
            program.stop(self._mount_further)
        mounts.write_restrict_proc(program, subset=plan["proc_subset"], mask=plan["proc_masks"], listing=listing)

    def _mount_further(self) -> None:
        owner = self._made.owner
        plan = self._plan
        mounts.mount_further(
            self._made.sizes, owner=owner, ops=plan["ops"], idmap=_idmapper(owner), disk=self._made.disk
        )

    def _enter_user_namespace(self) -> None:
        """Write the change from real root into a user namespace, whose map the forker writes.

        Until here all mounts belong to the initial user namespace.
        """
        program = self._program
        mapped = self._plan["user_namespace"]
        _call(program, "setgroups", _NR_SETGROUPS, 0, 0)
        if mapped:
            what = f"unshare {syscalls.CLONE_NEWUSER:#x}"
            _call(program, what, syscalls.NR_UNSHARE, syscalls.CLONE_NEWUSER)
        _call(program, "report to the forker", _NR_SENDTO, Hole(SOCK), b"unshared", 8, 0, 0, 0)
        program.call(_NR_RECVFROM, Hole(SOCK), room(16), 16, 0, 0, 0, what="hear the forker", least=1)
        write_become(program, mapped=mapped)

    def _write_end(self) -> None:
        """Write that only the socket stays, as descriptor 3, and that the standard streams read and write nothing."""
        program = self._program
        plan = self._plan
        _call(program, "prctl PR_SET_PDEATHSIG", syscalls.NR_PRCTL, syscalls.PR_SET_PDEATHSIG, fast_stdlib.SIGKILL)
        write_streams(program, Hole(SOCK), 3)
        opened = [
            _call(program, f"open {name}", _NR_OPENAT, syscalls.AT_FDCWD, f"/proc/self/ns/{name}".encode(), _OPEN_NS)
            for name in doors(plan)
        ]
        _call(
            program, "ignore SIGCHLD", _NR_SIGACTION, fast_stdlib.SIGCHLD, _IGNORED, 0, 8
        )  # the kernel reaps the children (D12)
        fence.write_rights(program, plan["fence"], landlock=False)
        _write_ready(program, opened)
        _call(program, "close_range", syscalls.NR_CLOSE_RANGE, 4, 0x7FFFFFFF)
        waits = _call(program, "wait for the monitor", _NR_RECVFROM, 3, room(8), 1, _PEEK, 0, 0)
        self.last = program.stop()
        program.if_zero(waits, _call(program, "exit", _NR_EXIT, 0))

    def fill(self, sock: int) -> None:
        program, made, as_root = self._program, self._made, self._plan["as_root"]
        program.fill(SOCK, sock)
        self._closing.fill([sock, self._proc, made.listeners, made.disk])
        if as_root:
            program.fill(OWNER, 1000 if self._plan["user_namespace"] else made.owner)
        for target, text in mounts.options_of(made.sizes, owner=made.owner, as_root=as_root).items():
            program.fill(mounts.options_hole(target), text.encode())


class Pid1Values:
    """The values that differ between the sandboxes of a kind."""

    def __init__(self, *, with_disk: bool) -> None:
        self.with_disk = with_disk
        self.owner = 1000
        self.listeners = -1
        self.disk = -1
        self.sizes: dict[str, str] = {}


def _call(program: RowProgram, what: str, number: int, *arguments: object) -> int:
    return program.call(number, *arguments, what=what)


def _write_file(program: RowProgram, directory: int, path: str, text: bytes) -> None:
    """Write rows that write to a file. What they open is closed later, with all the rest."""
    file = _call(program, path, _NR_OPENAT, directory, path.encode(), os.O_WRONLY | os.O_CLOEXEC, 0)
    written = program.call(_NR_WRITE, 0, text, len(text), what=path, least=len(text))
    program.store(file, Slot(written, 0))


def write_become(program: RowProgram, *, mapped: bool) -> None:
    """Write the change to the guest's uid: 1000 inside the user namespace. Capabilities stay until they are dropped."""
    inside: object = 1000 if mapped else Hole(OWNER)
    _call(program, "setresgid", _NR_SETRESGID, inside, inside, inside)
    _call(program, "setresuid", _NR_SETRESUID, inside, inside, inside)


def write_streams(program: RowProgram, sock: object, number: int) -> None:
    """Write that `number` becomes the socket, lower descriptors read and write nothing, others close (D01, D02)."""
    wire = _call(program, "fcntl F_DUPFD", _NR_FCNTL, sock, _F_DUPFD_CLOEXEC, _HIGH)
    null = _call(program, "/dev/null", _NR_OPENAT, syscalls.AT_FDCWD, b"/dev/null", os.O_RDWR | os.O_CLOEXEC, 0)
    program.store(null, Slot(_call(program, "dup2", _NR_DUP2, 0, 1), 0))
    for fd in (0, 2):
        _call(program, "dup2", _NR_DUP2, 1, fd)
    for fd in range(3, number):
        _call(program, "dup3", _NR_DUP3, 1, fd, os.O_CLOEXEC)
    program.store(wire, Slot(_call(program, "dup3", _NR_DUP3, 0, number, os.O_CLOEXEC), 0))
    _call(program, "close_range", syscalls.NR_CLOSE_RANGE, number + 1, 0x7FFFFFFF)


def _write_ready(program: RowProgram, opened: list[int]) -> None:
    """Write a message to the forker that PID 1 is ready, with the namespaces that were opened."""
    if not opened:
        _call(program, "report to the forker", _NR_SENDTO, 3, b"ready", 5, 0, 0, 0)
        return
    rights = room(16 + 4 * len(opened) + 12)  # a header, then the descriptors; the last is written as a long
    struct.pack_into("<QII", rights, 0, 16 + 4 * len(opened), 1, 1)  # SOL_SOCKET, SCM_RIGHTS
    for place, row in enumerate(opened):
        program.store(row, Slot(0, 16 + 4 * place, rights))  # in order: each repairs what the one before overwrote
    word = program.keep(b"ready")
    piece = program.keep(struct.pack("<QQ", word, 5))
    size = (16 + 4 * len(opened) + 7) // 8 * 8
    packet = struct.pack("<QIxxxxQQQQi4x", 0, 0, piece, 1, program.keep(rights), size, 0)
    _call(program, "report to the forker", _NR_SENDMSG, 3, packet, 0)


def obey() -> NoReturn:
    """Obey orders as PID 1. At the end of the file the monitor is gone: PID 1 ends, and all processes with it."""
    channel = fast_stdlib.from_fd(3, fast_stdlib.SOCK_SEQPACKET)
    while data := channel.recv(1 << 16):
        kept: SparedProcesses = fast_stdlib.loads(data)
        left = kill_all_but(kept)
        channel.send(b"%d" % left)
    os._exit(0)


def doors(plan: PlanForm) -> list[str]:
    """Return which of PID 1's namespaces an ordinary user's spawner has to enter by name; none as root.

    The names are below /proc/<pid>/ns. The pidfd of a process that is not dumpable does not let an ordinary user in.
    """
    if plan["as_root"]:
        return []
    return [name for name, flag in _DOORS.items() if plan["namespaces"] & flag]


def _idmapper(owner: int) -> Callable[[int, int], int]:
    def idmap(uid: int, gid: int) -> int:
        """Return a user namespace in which files of `uid` belong to the guest, for mount_setattr."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                syscalls.unshare(syscalls.CLONE_NEWUSER)
                os.write(write_end, b"x")
                select.poll().poll()
            finally:
                os._exit(0)
        os.close(write_end)
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.read(read_end, 1)
            mounts.write(proc, f"{pid}/uid_map", f"{uid} {owner} 1")
            mounts.write(proc, f"{pid}/gid_map", f"{gid} {owner} 1")
            return os.open(f"{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        finally:
            os.close(read_end)
            os.close(proc)
            os.kill(pid, fast_stdlib.SIGKILL)
            os.waitpid(pid, 0)

    return idmap


def kill_all_but(kept: SparedProcesses) -> int:
    """Kill every process but what `kept` spares: some with their descendants, and processes of earlier jobs.

    Return how many are left.

    All victims are stopped before any is killed, so that a fork bomb runs into the process limit and stops.
    """
    victims: set[int] = set()
    for _ in range(_PASSES):
        seen = _victims(kept)
        for pid in seen - victims:
            _signal(pid, fast_stdlib.SIGSTOP)
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
            _signal(pid, fast_stdlib.SIGKILL)
    return len(_victims(kept))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _victims(kept: SparedProcesses) -> set[int]:
    living = _living()
    parents = {pid: process.parent for pid, process in living.items()}
    keep = set(kept["trees"])
    # Each job leads a session of its own, and a session can be inherited and left but not joined. A process in it
    # belongs to the job, even when its parent has ended.
    keep |= {pid for pid, process in living.items() if process.session in kept["trees"]}
    # A process older than the tree cannot belong to it: a server that an earlier command left running stays.
    ours = {1, os.getpid(), *kept["alone"]}  # orphans of any tree are children of PID 1
    keep |= {pid for pid, process in living.items() if process.started < kept["since"]} - ours
    # A tick has 10 ms: an earlier command may have left a process in the tick in which this tree was requested.
    keep |= {p for p, each in living.items() if each.started == kept["since"] and each.session in kept["sessions"]}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in keep} - keep
        grown = bool(more)
        keep |= more
    return set(parents) - keep - ours


def _living() -> dict[int, proc.ProcessStat]:
    """Return the living processes of this pid namespace.

    A process whose first thread has ended looks like a zombie, but lives while it has other threads.
    """
    return {pid: found for pid, found in proc.processes().items() if not found.has_ended or found.threads > 1}
