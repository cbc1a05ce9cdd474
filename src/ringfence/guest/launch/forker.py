"""Owns the forker: the process, with a view's root, that every sandbox of the view is forked from.

The forker never sees guest data. It is a child of the monitor and clones with CLONE_PARENT: the monitor is the parent
of all processes and waits for them, while nothing that passed through the monitor is in their memory (H06). For each
sandbox the forker makes PID 1 in new namespaces, and the spawner, which joins its cgroup while PID 1 still builds.

Before their first order both work without Python: as rows of a program that is written once for each kind of plan
(`Birth`). A program ends in each process that it made; `process_at` says which process that is.
"""

from __future__ import annotations

import os
import select
import struct
import sys

from ringfence.guest import job_modules
from ringfence.guest.launch import fence, mounts, pid1, spawner
from ringfence.guest.launch.syscall_rows import Hole, RowProgram, Slot, address_of, room, routine
from ringfence.shared import fast_stdlib, framing, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import Literal, NoReturn

    from ringfence.guest.guestd.protocols import Order, PlanForm, TemplateForm
    from ringfence.guest.launch.mounts import Listing
    from ringfence.guest.launch.syscall_rows import Room

    Where = Literal["forker", "PID 1", "spawner"]  # a process in which a program ends

_MAX_PACKET = 1 << 17
_MAX_FDS = 16
_PAGE = 4096
_ROOM = 1 << 18  # the memory of a process before it runs anything
_REHEARSALS = 10  # until the interpreter has specialised its instructions

# ── the programs that make PID 1 and the spawner ─────────────────────────────────────────────────

_NR_SENDMSG, _NR_EXIT, _NR_DUP3 = 46, 231, 292
_SIGCHLD = 17
_CLONE = syscalls.CLONE_PARENT | syscalls.CLONE_PIDFD | _SIGCHLD
_NR_CLONE3, _CLONE_INTO_CGROUP = 435, 0x200000000
_ARGS = struct.Struct("<11Q")  # flags, pidfd, child_tid, parent_tid, exit_signal, stack and size, tls, set_tid, cgroup
_CGROUP = 80  # where the cgroup begins
# For a clone with memory of its own: the kernel sets the thread id that glibc keeps.
_OWN_MEMORY = syscalls.CLONE_CHILD_SETTID | syscalls.CLONE_CHILD_CLEARTID
_INIT_PIDFD, _PID_DOOR, _ANSWER = "PID 1's pidfd", "pid namespace", "the helper's answer"


class ForkerProcess:
    """The facts that programs need of the process that runs them."""

    def __init__(self, proc: int, listing: Callable[[], Listing]) -> None:
        self.proc = proc
        self.listing = listing
        self.pidfd = os.pidfd_open(os.getpid())
        self.reserved = syscalls.high(proc)  # the number of the pidfd of the PID 1 that a spawner is made for
        self.routine = routine()
        self.thread_id = syscalls.thread_id_address()


class Birth:
    """A program that makes processes. `run` returns in every process."""

    def __init__(self, forker: ForkerProcess, plan: PlanForm) -> None:
        self.forker = forker
        self.plan = plan
        self.program = RowProgram(forker.routine)
        self._clones: dict[int, Slot] = {}  # rows, and where each puts the pidfd
        self._into: Room | None = None  # arguments of a clone into a cgroup
        self.end = 0  # the forker's last row; later rows belong to the processes that it makes

    def clone(self, flags: int, pidfd: Slot) -> int:
        """Write a clone with its own copy of the memory. Return the clone's row, whose result is 0 in the child."""
        flags |= _CLONE | _OWN_MEMORY
        row = self.program.call(syscalls.NR_CLONE, flags, 0, pidfd, self.forker.thread_id, 0, what="clone")
        self._clones[row] = pidfd
        return row

    def clone_spawner(self, pidfd: Slot, *, into: bool) -> list[int]:
        """Write a clone for a process that joins a cgroup. Return the clone's rows, whose result is 0 in the child.

        With `into` the first row makes a process that is born in the cgroup, which only cgroup v2 can: a process that
        writes to `cgroup.procs` after a quiet moment waits 5 to 20 ms for the kernel. Where the kernel refuses (a
        filter around us that knows no clone3), the second row makes a process that joins by writing.
        """
        program = self.program
        born = []
        if into:
            self._into = room(_ARGS.size)
            flags = (_CLONE & ~_SIGCHLD) | _OWN_MEMORY | _CLONE_INTO_CGROUP  # CLONE_PARENT sets the signal
            where = program.address_of(pidfd)
            _ARGS.pack_into(self._into, 0, flags, where, self.forker.thread_id, *[0] * 8)
            born.append(program.call(_NR_CLONE3, self._into, _ARGS.size, what="clone3"))
            program.if_failed(born[0], program.next + 1)
            program.jump(program.next + 2)
        return [*born, self.clone(0, pidfd)]

    def begin_at(self, cloned: list[int], written: spawner.SpawnerRows) -> None:
        """Make the children of the rows `cloned` go on at the rows that were written for the spawner."""
        self.program.if_zero(cloned[-1], written.first)
        if len(cloned) > 1:
            self.program.if_zero(cloned[0], written.joined)

    def fill_cgroup(self, directory: int) -> None:
        if self._into is not None:
            struct.pack_into("<Q", self._into, _CGROUP, directory)

    def run(self) -> int:
        """Run the program, and return the row where it ended in this process."""
        for slot in self._clones.values():
            self.program.put(slot, 0)
        where = self.program.run()
        if where in self._clones:  # the clone failed, and the kernel may have written a number before
            self.program.put(self._clones[where], 0)
        return where

    def process_at(self, where: int) -> Where:
        """Return which process this is, by the row where `run` ended in it."""
        return "forker" if where <= self.end else "spawner"

    def check(self, where: int) -> None:
        """Raise OSError if the row at which a run ended has failed."""
        error = self.program.failure(where)
        if error is not None:
            raise error

    def forget_routine(self) -> None:
        """Unmap the machine code, in a process where a guest will be."""
        if self.forker.routine is not None:
            self.forker.routine.unmap()

    def made(self, pidfd: Slot) -> int:
        """Return the pidfd that a clone put into that slot; -1: none."""
        return (self.program.value(pidfd) & 0x7FFFFFFF) or -1


class InitBirth(Birth):
    """Make PID 1; as root also the spawner, right after PID 1, which joins a cgroup meanwhile."""

    def __init__(self, forker: ForkerProcess, plan: PlanForm, joins: int, *, into: bool, with_disk: bool) -> None:
        super().__init__(forker, plan)
        self.one = pid1.Pid1Values(with_disk=with_disk)
        program = self.program
        self.spawner_pidfd = Slot(0, 0, room(8))
        self._spawner: spawner.SpawnerRows | None = None
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
        self._init = pid1.Pid1Rows(program, plan, forker.proc, forker.listing(), self.one)
        program.if_zero(begun, self._init.first)
        if cloned:
            self._spawner = spawner.SpawnerRows(program, plan, joins, [forker.reserved])
            self.begin_at(cloned, self._spawner)
        program.seal()

    def fill(self, init_sock: int) -> None:
        """Fill in what differs between sandboxes, after `one` was filled."""
        self._init.fill(init_sock)

    def fill_spawner(self, sock: int, join: list[int], affinity: list[int], limits: dict[str, bytes]) -> None:
        if self._spawner is not None:
            self._spawner.fill(sock, join, affinity, limits)

    @property
    def init_pid(self) -> int:
        """PID 1's number, as the forker sees it."""
        return self.program.value(self._init_pid)

    def process_at(self, where: int) -> Where:
        if where <= self.end:
            return "forker"
        return "spawner" if self._spawner is not None and where >= self._spawner.first else "PID 1"


class SpawnerBirth(Birth):
    """Make the spawner alone: for an ordinary user, and where a guest ended the first spawner."""

    def __init__(self, forker: ForkerProcess, plan: PlanForm, joins: int, *, into: bool) -> None:
        super().__init__(forker, plan)
        program = self.program
        self.spawner_pidfd = Slot(0, 0, room(8))
        self.helper_pidfd: Slot | None = None
        self._doors = [name for name in pid1.doors(plan) if name != "pid"]
        if plan["as_root"]:
            program.call(_NR_DUP3, Hole(_INIT_PIDFD), forker.reserved, os.O_CLOEXEC, what="dup3")
            cloned = _write_clone_beside(self, self.spawner_pidfd, into=into)
            self.end = program.stop()
            doors: list[object] = [forker.reserved]
        else:
            cloned = self._write_helper(into=into)
            doors = [Hole(name) for name in self._doors]
        self._spawner = spawner.SpawnerRows(program, plan, joins, doors)
        self.begin_at(cloned, self._spawner)
        program.seal()

    def _write_helper(self, *, into: bool) -> list[int]:
        """Write a helper process, which enters PID 1's pid namespace and clones the spawner there.

        An ordinary user may enter a pid namespace of his own, but not come back. Where the routine runs, the helper
        shares our memory while we stand still, and needs none of its own.
        """
        program = self.program
        forker = self.forker
        self.helper_pidfd = Slot(0, 0, room(8))
        flags = _CLONE | (syscalls.CLONE_VM | syscalls.CLONE_VFORK if program.native else _OWN_MEMORY)
        begun = program.call(syscalls.NR_CLONE, flags, 0, self.helper_pidfd, forker.thread_id, 0, what="clone")
        self._clones[begun] = self.helper_pidfd
        self.end = program.stop()
        program.if_zero(begun, program.next)
        steps = []
        if "pid" in pid1.doors(self.plan):
            steps.append(program.call(syscalls.NR_SETNS, Hole(_PID_DOOR), syscalls.CLONE_NEWPID, what="setns"))
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
    """Write a clone in the pid namespace of the PID 1 whose pidfd has the reserved number. Return the clone's rows."""
    program = birth.program
    forker = birth.forker
    program.call(syscalls.NR_SETNS, forker.reserved, syscalls.CLONE_NEWPID, what="setns")
    cloned = birth.clone_spawner(pidfd, into=into)
    program.call(syscalls.NR_SETNS, forker.pidfd, syscalls.CLONE_NEWPID, what="setns")
    return cloned


# ── the process ──────────────────────────────────────────────────────────────────────────────────


class ZygoteInterpreter:
    """The interpreter of the zygote, which the forker and its processes are forks of."""

    __slots__ = ("preloaded", "warm")

    def __init__(self, *, preloaded: bool) -> None:
        self.preloaded = preloaded  # modules were imported for the policy, which may have hooks for a fork
        self.warm = False  # whether common modules are loaded: for several sandboxes, of which some wait


def run(monitor: socket, request: TemplateForm, interpreter: ZygoteInterpreter) -> NoReturn:
    """Build the view's root, then make sandboxes until the monitor is gone."""
    syscalls.set_name("rf-forker")
    syscalls.die_with_parent()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fence.stand_back(proc)
        as_root = request["as_root"]
        if as_root:
            syscalls.unshare(syscalls.CLONE_NEWNS)
        else:
            _own_user_namespace(proc)
        if request["foreign"]:
            _import_no_more()
        mounts.build_template(request["ops"], keep_outer_proc=not as_root)
    except (OSError, ValueError, ImportError) as error:
        monitor.send(fast_stdlib.dumps(failure(error)))
        os._exit(1)
    monitor.send(b'{"ok":true}')
    Forker(monitor, proc, interpreter).serve()


def _import_no_more() -> None:
    """Import what jobs import late, then forbid imports from files.

    A file that is imported later would be the image's, run by a process with rights (J19).
    """
    job_modules.load_late()
    for found in (sys.meta_path, sys.path_hooks, sys.path):
        found.clear()
    sys.path_importer_cache.clear()


def failure(error: Exception) -> dict[str, object]:
    return {"error": str(error), "errno": error.errno if isinstance(error, OSError) else None}


def _own_user_namespace(proc: int) -> None:
    uid = os.geteuid()
    gid = os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    mounts.write(proc, "self/setgroups", "deny")
    mounts.write(proc, "self/uid_map", f"0 {uid} 1")
    mounts.write(proc, "self/gid_map", f"0 {gid} 1")


class PlanPrograms:
    """A plan and its programs. `kind`: a number that plans share if they differ in limits alone."""

    def __init__(self, plan: PlanForm, kind: int) -> None:
        self.plan = plan
        self.kind = kind
        self.limits = spawner.limits_of(plan["fence"])


class SandboxRecord:
    """A sandbox from its order until the monitor says that the sandbox is gone."""

    def __init__(self, order: Order, known: PlanPrograms, join: list[int], into: int, *, warm: bool) -> None:
        self.number = order["box"]
        self.kind = known.kind
        self.limits = known.limits
        plan = known.plan
        self.owner = order["owner"]
        self.affinity = order["affinity"]
        self.rehearses = warm and order["waits"] and bool(sys.path)  # else guests have their own interpreter
        self.plan = plan
        self.join = join
        self.into = into
        self.init_pid = 0
        self.init_pidfd = -1
        self.init: socket | None = None
        self.spawner: socket | None = None
        self.spawner_fds: list[int] = []  # pidfd, and in a user namespace the helper's
        self.doors: dict[str, int] = {}  # for an ordinary user: PID 1's namespaces, by name

    def close(self) -> None:
        for fd in (*self.join, self.into, self.init_pidfd, *self.spawner_fds, *self.doors.values()):
            if fd >= 0:
                os.close(fd)
        for sock in (self.init, self.spawner):
            if sock is not None:
                sock.close()


class Forker:
    def __init__(self, monitor: socket, proc: int, interpreter: ZygoteInterpreter) -> None:
        self._monitor = monitor
        self._interpreter = interpreter
        self._orders = fast_stdlib.Receiver(monitor, _MAX_PACKET, _MAX_FDS)
        self._plans: dict[int, PlanPrograms] = {}  # the plans of policies that share this view
        self._kinds: list[object] = []
        self._proc = proc
        self._us = ForkerProcess(proc, self._listing)
        self._inits: dict[tuple[int, int, bool, bool], InitBirth] = {}
        self._spawners: dict[tuple[int, int, bool], SpawnerBirth] = {}
        self._made: dict[int, SandboxRecord] = {}
        self._poll = select.poll()
        self._cold = interpreter.warm and bool(sys.path)

    def serve(self) -> NoReturn:
        self._poll.register(self._monitor, select.POLLIN)
        building: dict[int, SandboxRecord] = {}
        while True:
            ready = self._poll.poll(framing.QUIET_S * 1000 if self._cold else None)
            if not ready:
                self._warm_up()
            for fd, _ in ready:
                if fd == self._monitor.fileno():
                    self._take_order(building)
                elif fd in building:
                    self._hear_init(fd, building)

    def _warm_up(self) -> None:
        """Do what every run would do first, in a quiet moment, so that every fork has the interpreter's caches warm."""
        from ringfence.guest.interpreter import runner

        self._cold = False
        for _ in range(_REHEARSALS):
            runner.rehearse()
        runner.forget_early()

    def _take_order(self, building: dict[int, SandboxRecord]) -> None:
        data, fds = self._orders.receive()
        if not data:
            os._exit(0)
        order: Order = fast_stdlib.loads(data)
        number = order["box"]
        if order["op"] == "forget":
            self._made.pop(number).close()
        elif order["op"] == "spawner":
            self._replace_spawner(self._made[number])
        elif order["op"] == "protect":
            self._protect_again(self._made.get(number), order["protect"], fds)
        else:
            self._begin(order, fds, building)

    def _begin(self, order: Order, fds: list[int], building: dict[int, SandboxRecord]) -> None:
        if order["plan"] is not None:
            self._plans[order["plan_id"]] = PlanPrograms(order["plan"], self._kind_of(order["plan"]))
            fence.prepare(order["plan"]["fence"])
        into = fds.pop() if order["into"] else -1
        listeners = fds.pop() if order["listeners"] else -1
        disk = fds.pop() if order["disk"] else -1
        making = SandboxRecord(order, self._plans[order["plan_id"]], fds, into, warm=self._interpreter.warm)
        if making.rehearses and self._cold:
            self._warm_up()  # no caller waits
        self._made[making.number] = making
        try:
            self._check_room(making.plan["fence"]["rlimits"].get("DATA"))
            self._make_init(making, listeners, disk)
        except OSError as error:
            self._say_failed(making, failure(error))
            return
        finally:
            for fd in (listeners, disk):
                if fd >= 0:
                    os.close(fd)
        assert making.init is not None
        building[making.init.fileno()] = making
        self._poll.register(making.init, select.POLLIN)

    def _check_room(self, limit: int | None) -> None:
        """Raise OSError for a memory limit that a fork of this process would exceed at its start.

        The guest's first process would fail.
        """
        if limit is None:
            return
        fd = os.open("self/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            has = int(os.read(fd, 200).split()[5]) * _PAGE
        finally:
            os.close(fd)
        if limit < has + _ROOM:
            raise OSError(f"limits.memory is too small: {limit >> 10} KiB, and a process here starts with {has >> 10}")

    def _kind_of(self, plan: PlanForm) -> int:
        held = plan["fence"]
        kind = {**plan, "sizes": None, "fence": {**held, "processes": 0, "rlimits": list(held["rlimits"])}}
        if kind not in self._kinds:
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def _make_init(self, making: SandboxRecord, listeners: int, disk: int) -> None:
        """Make PID 1, and as root the spawner. A page touched between two forks is copied twice, so none is touched."""
        joins = len(making.join)
        into = making.into >= 0
        key = (making.kind, joins, into, disk >= 0)
        birth = self._inits.get(key)
        if birth is None:
            birth = InitBirth(self._us, making.plan, joins, into=into, with_disk=disk >= 0)
            self._inits[key] = birth
        making.init, inner = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
        outer, spawner_end = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
        one = birth.one
        one.owner, one.listeners, one.disk, one.sizes = making.owner, listeners, disk, making.plan["sizes"]
        birth.fill(inner.fileno())
        birth.fill_spawner(spawner_end.fileno(), making.join, making.affinity, making.limits)
        birth.fill_cgroup(making.into)
        where = self._run(birth)
        match birth.process_at(where):
            case "spawner":
                _child(lambda: self._begin_spawner(birth, where, making), spawner_end)
            case "PID 1":
                _child(lambda: _obey(birth, where), inner)
            case "forker":
                pass
        inner.close()
        spawner_end.close()
        making.init_pid = birth.init_pid
        making.init_pidfd = birth.made(birth.init_pidfd)
        if making.plan["as_root"]:
            making.spawner = outer
            made = birth.made(birth.spawner_pidfd)
            making.spawner_fds = [made] if made >= 0 else []
        else:
            outer.close()
        birth.check(where)

    def _make_spawner(self, making: SandboxRecord) -> None:
        """Make a spawner in PID 1's pid namespace, as a child of the monitor.

        The spawner enters the other namespaces itself.
        """
        joins = len(making.join)
        into = making.into >= 0
        key = (making.kind, joins, into)
        birth = self._spawners.get(key)
        if birth is None:
            birth = self._spawners[key] = SpawnerBirth(self._us, making.plan, joins, into=into)
        making.spawner, inner = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
        answers, answer = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
        if making.plan["as_root"]:
            birth.fill_init(making.init_pidfd)
        else:
            birth.fill_doors(making.doors, answer.fileno())
        birth.fill(inner.fileno(), making.join, making.affinity, making.limits)
        birth.fill_cgroup(making.into)
        where = self._run(birth)
        match birth.process_at(where):
            case "spawner":
                _child(lambda: self._begin_spawner(birth, where, making), inner)
            case "forker":
                pass
        inner.close()
        answer.close()
        try:
            birth.check(where)
            making.spawner_fds = self._spawner_made(birth, answers)
        finally:
            answers.close()

    def _spawner_made(self, birth: SpawnerBirth, answers: socket) -> list[int]:
        if birth.helper_pidfd is None:
            return [birth.made(birth.spawner_pidfd)]
        helper = birth.made(birth.helper_pidfd)
        _, fds = fast_stdlib.recv_fds(answers, 64, 1)
        if not fds:
            os.close(helper)
            raise OSError("the spawner could not be made: its helper ended")
        return [fds[0], helper]

    def _run(self, birth: Birth) -> int:
        """Run the program. Returns in this process and in every process that is made, with the row where each ended."""
        if self._interpreter.preloaded:
            syscalls.before_fork()
        where = birth.run()
        if birth.process_at(where) != "forker":
            return where
        if self._interpreter.preloaded:
            syscalls.after_fork_in_parent()
        if where < birth.end and birth.plan["as_root"]:
            syscalls.setns(self._us.pidfd, syscalls.CLONE_NEWPID)  # a row may have failed before the way back
        return where

    def _begin_spawner(self, birth: Birth, where: int, making: SandboxRecord) -> None:
        """Be the spawner, after its rows are done or a row has failed."""
        birth.check(where)
        birth.forget_routine()
        if self._interpreter.preloaded:
            syscalls.after_fork_in_child()
        spawner.begin(making.plan["fence"], rehearse=making.rehearses)

    def _listing(self) -> mounts.Listing:
        """Return the entries of /proc. PID 1 handles entries that were added since."""
        return mounts.Listing(self._proc)

    def _hear_init(self, fd: int, building: dict[int, SandboxRecord]) -> None:
        making = building[fd]
        assert making.init is not None
        try:
            word, fds = fast_stdlib.recv_fds(making.init, 256, _MAX_FDS)
            making.doors = dict(zip(pid1.doors(making.plan), fds, strict=False))
        except OSError:
            word = b""
        if word == b"unshared":
            self._map_user(making)
            return
        self._poll.unregister(fd)
        del building[fd]
        if word != b"ready":
            said = word.decode("utf-8", "replace").lstrip("!") or "it ended"
            self._say_failed(making, {"error": f"PID 1 could not be set up: {said}", "errno": _errno_in(said)})
            return
        try:
            if making.spawner is None:
                self._make_spawner(making)
            self._hand_over(making)
        except OSError as error:
            self._say_failed(making, failure(error))

    def _map_user(self, making: SandboxRecord) -> None:
        owner = making.owner
        pid = making.init_pid
        assert making.init is not None
        if making.plan["user_namespace"]:
            mounts.write(self._proc, f"{pid}/uid_map", f"1000 {owner} 1")
            mounts.write(self._proc, f"{pid}/gid_map", f"1000 {owner} 1")
        making.init.send(b"mapped")

    def _hand_over(self, making: SandboxRecord) -> None:
        """Let the spawner go in, and give the monitor both processes and their sockets."""
        assert making.init is not None
        assert making.spawner is not None
        making.spawner.send(b"go")
        fds = [making.init_pidfd, making.init.fileno(), *self._spawner_parts(making)]
        fast_stdlib.send_fds(self._monitor, fast_stdlib.dumps({"box": making.number, "init": making.init_pid}), fds)
        making.init.close()
        making.init = None

    def _spawner_parts(self, making: SandboxRecord) -> list[int]:
        assert making.spawner is not None
        return [making.spawner.fileno(), *making.spawner_fds]

    def _replace_spawner(self, making: SandboxRecord) -> None:
        for fd in making.spawner_fds:
            os.close(fd)
        making.spawner_fds = []
        making.rehearses = False  # a caller waits for the sandbox
        if making.spawner is not None:
            making.spawner.close()
        try:
            self._make_spawner(making)
            assert making.spawner is not None
            making.spawner.send(b"go")
        except OSError as error:
            fast_stdlib.send_fds(self._monitor, fast_stdlib.dumps({"box": making.number, **failure(error)}), [])
            return
        answer = fast_stdlib.dumps({"box": making.number, "spawner": True})
        fast_stdlib.send_fds(self._monitor, answer, self._spawner_parts(making))

    def _protect_again(self, making: SandboxRecord | None, paths: list[tuple[str, int, int]], fds: list[int]) -> None:
        """Protect paths again, in a process that has run no guest code.

        That process writes "done", or the reason of a failure, to the descriptor.
        """
        pid = os.fork() if making is not None and fds else 0
        if pid == 0 and making is not None and fds:
            try:
                _enter_mounts(making)
                for target, device, inode in paths:
                    mounts.protect_again(target, device, inode)
                os.write(fds[0], b"done")
            except OSError as error:
                os.write(fds[0], str(error).encode()[:200])
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        if pid:
            os.waitpid(pid, 0)

    def _say_failed(self, making: SandboxRecord, said: dict[str, object]) -> None:
        """Report a failure, with what was made of the sandbox, which the monitor ends and reaps."""
        fds = [fd for fd in (making.init_pidfd, *making.spawner_fds) if fd >= 0]
        fast_stdlib.send_fds(self._monitor, fast_stdlib.dumps({"box": making.number, **said}), fds)


def _enter_mounts(making: SandboxRecord) -> None:
    """Enter the sandbox's mount namespace, with the rights by which its mounts were made."""
    if making.plan["as_root"]:
        syscalls.setns(making.init_pidfd, syscalls.CLONE_NEWNS)
        return
    syscalls.setns(making.doors["user"], syscalls.CLONE_NEWUSER)
    syscalls.setns(making.doors["mnt"], syscalls.CLONE_NEWNS)


def _child(work: Callable[[], object], report: socket) -> NoReturn:
    """Do the work of a new process: never return into the forker's loop, and report why the work failed."""
    try:
        work()
    except OSError as error:
        report.send(f"!{error}".encode()[:200])
    finally:
        os._exit(70)


def _obey(birth: Birth, where: int) -> None:
    """Be PID 1, after its rows are done or a row has failed."""
    birth.check(where)
    pid1.obey()


def _errno_in(said: str) -> int | None:
    """Return the number in Python's own "[Errno N]", for the library to say why."""
    if said.startswith("[Errno "):
        number = said[7:].partition("]")[0]
        return int(number) if number.isdigit() else None
    return None
