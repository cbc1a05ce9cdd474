"""Owns how the forker makes the two fixed processes of a sandbox: programs that are written once for each kind of plan.

PID 1 and the spawner are clones with the monitor as their parent, and do all that they do before their first order
without Python. A program returns in each process that it made: `where` tells which one it is.
"""

from __future__ import annotations

import os
import struct

from . import init, spawner
from . import kernel as k
from .program import Hole, Program, Slot, address_of, room, routine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .box import Listing
    from .program import Room
    from .shapes import Plan

_NR_SENDMSG, _NR_EXIT, _NR_DUP3 = 46, 231, 292
_SIGCHLD = 17
_CLONE = k.CLONE_PARENT | k.CLONE_PIDFD | _SIGCHLD
_NR_CLONE3, _CLONE_INTO_CGROUP = 435, 0x200000000
_ARGS = struct.Struct("<11Q")  # flags, pidfd, child_tid, parent_tid, exit_signal, stack and size, tls, set_tid, cgroup
_CGROUP = 80  # where the last one begins
_OWN_MEMORY = k.CLONE_CHILD_SETTID | k.CLONE_CHILD_CLEARTID  # the thread id that glibc keeps is set by the kernel
_INIT_PIDFD, _PID_DOOR, _ANSWER = "PID 1's pidfd", "pid namespace", "the helper's answer"


class Forker:
    """What programs need to know of the process that runs them."""

    def __init__(self, proc: int, listing: Callable[[], Listing]) -> None:
        self.proc = proc
        self.listing = listing
        self.pidfd = os.pidfd_open(os.getpid())
        self.reserved = k.high(proc)  # a number, for the pidfd of the PID 1 that a spawner is made for
        self.routine = routine()
        self.thread_id = k.thread_id_address()


class Birth:
    """A program that makes processes. `run` returns in all of them."""

    def __init__(self, forker: Forker, plan: Plan) -> None:
        self.forker, self.plan = forker, plan
        self.program = Program(forker.routine)
        self._clones: dict[int, Slot] = {}  # rows, and where each puts the pidfd
        self._into: Room | None = None  # arguments of a clone into a cgroup
        self.end = 0  # the forker's last row; those after it are of the processes it makes

    def clone(self, flags: int, pidfd: Slot) -> int:
        """Row of a clone with memory of its own; 0 in the child."""
        flags |= _CLONE | _OWN_MEMORY
        row = self.program.call(k.NR_CLONE, flags, 0, pidfd, self.forker.thread_id, 0, what="clone")
        self._clones[row] = pidfd
        return row

    def clone_spawner(self, pidfd: Slot, *, into: bool) -> list[int]:
        """Rows of a clone that has a cgroup to join: 0 in the child. With `into` first one that is born there.

        Only cgroup v2 has that. Who writes to its `cgroup.procs` after a quiet moment waits 5 to 20 ms for the kernel;
        where it refuses (a filter around us that knows no clone3), that is the way that is left.
        """
        program = self.program
        born = []
        if into:
            self._into = room(_ARGS.size)
            flags = (_CLONE & ~_SIGCHLD) | _OWN_MEMORY | _CLONE_INTO_CGROUP  # its parent's signal, as CLONE_PARENT says
            where = program.address_of(pidfd)
            _ARGS.pack_into(self._into, 0, flags, where, self.forker.thread_id, *[0] * 8)
            born.append(program.call(_NR_CLONE3, self._into, _ARGS.size, what="clone3"))
            program.if_failed(born[0], program.next + 1)
            program.jump(program.next + 2)
        return [*born, self.clone(0, pidfd)]

    def begin_at(self, cloned: list[int], written: spawner.Written) -> None:
        """Where the children of those rows go on."""
        self.program.if_zero(cloned[-1], written.first)
        if len(cloned) > 1:
            self.program.if_zero(cloned[0], written.joined)

    def fill_cgroup(self, directory: int) -> None:
        if self._into is not None:
            struct.pack_into("<Q", self._into, _CGROUP, directory)

    def run(self) -> int:
        """The row where this process ended."""
        for slot in self._clones.values():
            self.program.put(slot, 0)
        where = self.program.run()
        if where in self._clones:  # it failed, and the kernel may have written a number before it did
            self.program.put(self._clones[where], 0)
        return where

    def check(self, where: int) -> None:
        """Raises OSError when a row failed there."""
        error = self.program.failure(where)
        if error is not None:
            raise error

    def forget_routine(self) -> None:
        """In a process where a guest will be."""
        if self.forker.routine is not None:
            self.forker.routine.unmap()

    def made(self, pidfd: Slot) -> int:
        """-1: none."""
        return (self.program.value(pidfd) & 0x7FFFFFFF) or -1


class InitBirth(Birth):
    """PID 1 alone, for an ordinary user; as root with the spawner right after it, which joins its cgroup meanwhile."""

    def __init__(self, forker: Forker, plan: Plan, joins: int, *, into: bool, with_disk: bool) -> None:
        super().__init__(forker, plan)
        self.one = init.Made(with_disk=with_disk)
        program = self.program
        self.spawner_pidfd = Slot(0, 0, room(8))
        self._spawner: spawner.Written | None = None
        begun = program.next
        self.init_pidfd = Slot(begun + 1, 0)
        self.clone(plan["namespaces"], self.init_pidfd)
        self._init_pid = Slot(0, 0, room(8))
        program.store(begun, self._init_pid)
        cloned: list[int] = []
        program.call(_NR_DUP3, 0, forker.reserved, os.O_CLOEXEC, what="dup3")
        if plan["as_root"]:
            cloned = _write_clone_beside(self, self.spawner_pidfd, into=into)
        self.end = program.stop()
        self._init = init.Written(program, plan, forker.proc, forker.listing(), self.one)
        program.if_zero(begun, self._init.first)
        if cloned:
            self._spawner = spawner.Written(program, plan, joins, [forker.reserved])
            self.begin_at(cloned, self._spawner)
        program.seal()

    def fill(self, init_sock: int) -> None:
        """After `one` is."""
        self._init.fill(init_sock)

    def fill_spawner(self, sock: int, join: list[int], affinity: list[int], limits: dict[str, bytes]) -> None:
        if self._spawner is not None:
            self._spawner.fill(sock, join, affinity, limits)

    @property
    def init_pid(self) -> int:
        """As we see it."""
        return self.program.value(self._init_pid)

    def is_spawner(self, where: int) -> bool:
        """Not PID 1."""
        return self._spawner is not None and where >= self._spawner.first


class SpawnerBirth(Birth):
    """The spawner alone: for an ordinary user, and where a guest ended the first one."""

    def __init__(self, forker: Forker, plan: Plan, joins: int, *, into: bool) -> None:
        super().__init__(forker, plan)
        program = self.program
        self.spawner_pidfd = Slot(0, 0, room(8))
        self.helper_pidfd: Slot | None = None
        self._doors = [name for name in init.doors(plan) if name != "pid"]
        if plan["as_root"]:
            program.call(_NR_DUP3, Hole(_INIT_PIDFD), forker.reserved, os.O_CLOEXEC, what="dup3")
            cloned = _write_clone_beside(self, self.spawner_pidfd, into=into)
            self.end = program.stop()
            doors: list[object] = [forker.reserved]
        else:
            cloned = self._write_helper(into=into)
            doors = [Hole(name) for name in self._doors]
        self._spawner = spawner.Written(program, plan, joins, doors)
        self.begin_at(cloned, self._spawner)
        program.seal()

    def _write_helper(self, *, into: bool) -> list[int]:
        """An ordinary user may enter a pid namespace of his but not come back: a helper enters it, and clones.

        Where the routine runs, it has our memory while we stand still: it needs none of its own.
        """
        program, forker = self.program, self.forker
        self.helper_pidfd = Slot(0, 0, room(8))
        flags = _CLONE | (k.CLONE_VM | k.CLONE_VFORK if program.native else _OWN_MEMORY)
        begun = program.call(k.NR_CLONE, flags, 0, self.helper_pidfd, forker.thread_id, 0, what="clone")
        self._clones[begun] = self.helper_pidfd
        self.end = program.stop()
        program.if_zero(begun, program.next)
        steps = []
        if "pid" in init.doors(self.plan):
            steps.append(program.call(k.NR_SETNS, Hole(_PID_DOOR), k.CLONE_NEWPID, what="setns"))
        rights = room(24)
        struct.pack_into("<QII", rights, 0, 20, 1, 1)  # SOL_SOCKET, SCM_RIGHTS; the kernel adds the descriptor
        cloned = self.clone_spawner(Slot(0, 16, rights), into=into)
        piece = program.keep(struct.pack("<QQ", program.keep(b"made"), 4))
        packet = struct.pack("<QIxxxxQQQQi4x", 0, 0, piece, 1, address_of(rights), 24, 0)
        program.call(_NR_SENDMSG, Hole(_ANSWER), packet, 0, what="sendmsg")
        end = program.call(_NR_EXIT, 0, what="exit")
        for row in (*steps, cloned[-1]):
            program.if_failed(row, end)
        return cloned

    def fill(self, sock: int, join: list[int], affinity: list[int], limits: dict[str, bytes]) -> None:
        self._spawner.fill(sock, join, affinity, limits)

    def fill_doors(self, doors: dict[str, int], answer: int) -> None:
        for name in self._doors:
            self.program.fill(name, doors[name])
        self.program.fill(_PID_DOOR, doors.get("pid", -1))
        self.program.fill(_ANSWER, answer)

    def fill_init(self, pidfd: int) -> None:
        self.program.fill(_INIT_PIDFD, pidfd)


def _write_clone_beside(birth: Birth, pidfd: Slot, *, into: bool) -> list[int]:
    """A clone in the pid namespace of the PID 1 whose pidfd has the reserved number. Returns its rows."""
    program, forker = birth.program, birth.forker
    program.call(k.NR_SETNS, forker.reserved, k.CLONE_NEWPID, what="setns")
    cloned = birth.clone_spawner(pidfd, into=into)
    program.call(k.NR_SETNS, forker.pidfd, k.CLONE_NEWPID, what="setns")
    return cloned
