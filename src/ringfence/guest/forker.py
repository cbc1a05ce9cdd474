"""Owns the process that every sandbox of one view is forked from: it has the view's root, and never sees guest data.

A child of the monitor, it clones with CLONE_PARENT, so that the monitor is the parent and waiter of all it makes, while
nothing that passed through the monitor is in the memory of what is made (H06). For each sandbox it makes PID 1 in new
namespaces, and the spawner, which joins its cgroup while PID 1 still builds.
"""

from __future__ import annotations

import os
import select
import sys

from . import births, box, counts, fence, init, lean, spawner
from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import NoReturn

    from .shapes import Order, Plan, Template

_MAX_PACKET = 1 << 17
_MAX_FDS = 16
_LATE = (
    *("fnmatch", "re", "zipfile", "zlib"),
    *(f"ringfence.guest.{name}" for name in ("connector", "filesearch", "filestreams", "filewatch", "fileworker")),
    *(f"ringfence.guest.{name}" for name in ("keeping", "packing", "planting", "pycode", "restoring")),
    *(f"ringfence.guest.{name}" for name in ("session", "shell", "stepwise", "zipstream")),
)
_PAGE = 4096
_ROOM = 1 << 18  # what a process takes before it runs anything
_REHEARSALS = 10  # until the interpreter has specialised its instructions

warm = False  # whether there will be several sandboxes, some of which wait for their first job
preloaded = False  # whether modules were imported for the policy's sake, which may have asked to be told of a fork


def run(monitor: socket, request: Template) -> NoReturn:
    """Build the view's root, then make sandboxes until the monitor is gone."""
    k.set_name("rf-forker")
    k.die_with_parent()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fence.stand_back(proc)
        as_root = request["as_root"]
        if as_root:
            k.unshare(k.CLONE_NEWNS)
        else:
            _own_user_namespace(proc)
        if request["foreign"]:
            _import_no_more()
        box.build_template(request["ops"], keep_outer_proc=not as_root)
    except (OSError, ValueError, ImportError) as error:
        monitor.send(lean.dumps(failure(error)))
        os._exit(1)
    monitor.send(b'{"ok":true}')
    Forker(monitor, proc).serve()


def _import_no_more() -> None:
    """From here on a file that is imported would be the image's, run by a process with rights (J19).

    What file workers import late is imported now.
    """
    for name in _LATE:
        __import__(name)
    for found in (sys.meta_path, sys.path_hooks, sys.path):
        found.clear()
    sys.path_importer_cache.clear()


def failure(error: Exception) -> dict[str, object]:
    return {"error": str(error), "errno": error.errno if isinstance(error, OSError) else None}


def _own_user_namespace(proc: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    k.unshare(k.CLONE_NEWUSER | k.CLONE_NEWNS)
    box.write(proc, "self/setgroups", "deny")
    box.write(proc, "self/uid_map", f"0 {uid} 1")
    box.write(proc, "self/gid_map", f"0 {gid} 1")


class Known:
    """A plan. `kind`: the same number for those that differ in limits alone."""

    def __init__(self, plan: Plan, kind: int) -> None:
        self.plan, self.kind = plan, kind
        self.limits = spawner.limits_of(plan["fence"])


class Making:
    """One sandbox from its order until the monitor says that it is gone."""

    def __init__(self, order: Order, known: Known, join: list[int], into: int) -> None:
        self.number = order["box"]
        self.kind, self.limits, plan = known.kind, known.limits, known.plan
        self.owner = order["owner"]
        self.affinity = order["affinity"]
        self.rehearses = warm and order["waits"] and bool(sys.path)  # no path: guests have an own interpreter
        self.plan = plan
        self.join, self.into = join, into
        self.init_pid = 0
        self.init_pidfd = -1
        self.init: socket | None = None
        self.spawner: socket | None = None
        self.spawner_fds: list[int] = []  # pidfd, and in a user namespace the helper's
        self.doors: dict[str, int] = {}  # of an ordinary user's sandbox: PID 1's namespaces by name

    def close(self) -> None:
        for fd in (*self.join, self.into, self.init_pidfd, *self.spawner_fds, *self.doors.values()):
            if fd >= 0:
                os.close(fd)
        for sock in (self.init, self.spawner):
            if sock is not None:
                sock.close()


class Forker:
    def __init__(self, monitor: socket, proc: int) -> None:
        self._monitor = monitor
        self._orders = lean.Receiver(monitor, _MAX_PACKET, _MAX_FDS)
        self._plans: dict[int, Known] = {}  # of policies that share this view
        self._kinds: list[object] = []
        self._proc = proc
        self._us = births.Forker(proc, self._listing)
        self._inits: dict[tuple[int, int, bool, bool], births.InitBirth] = {}
        self._spawners: dict[tuple[int, int, bool], births.SpawnerBirth] = {}
        self._made: dict[int, Making] = {}
        self._poll = select.poll()
        self._cold = warm and bool(sys.path)

    def serve(self) -> NoReturn:
        self._poll.register(self._monitor, select.POLLIN)
        building: dict[int, Making] = {}
        while True:
            ready = self._poll.poll(counts.QUIET_S * 1000 if self._cold else None)
            if not ready:
                self._warm_up()
            for fd, _ in ready:
                if fd == self._monitor.fileno():
                    self._take_order(building)
                elif fd in building:
                    self._hear_init(fd, building)

    def _warm_up(self) -> None:
        """In a quiet moment, what every run would do first: the interpreter's caches are then warm in every fork."""
        from . import pycode

        self._cold = False
        for _ in range(_REHEARSALS):
            pycode.rehearse()
        pycode.forget_early()

    def _take_order(self, building: dict[int, Making]) -> None:
        data, fds = self._orders.receive()
        if not data:
            os._exit(0)
        order: Order = lean.loads(data)
        number = order["box"]
        if order["op"] == "forget":
            self._made.pop(number).close()
        elif order["op"] == "spawner":
            self._replace_spawner(self._made[number])
        elif order["op"] == "protect":
            self._protect_again(self._made.get(number), order["protect"], fds)
        else:
            self._begin(order, fds, building)

    def _begin(self, order: Order, fds: list[int], building: dict[int, Making]) -> None:
        if order["plan"] is not None:
            self._plans[order["plan_id"]] = Known(order["plan"], self._kind_of(order["plan"]))
            fence.prepare(order["plan"]["fence"])
        into = fds.pop() if order["into"] else -1
        listeners = fds.pop() if order["listeners"] else -1
        disk = fds.pop() if order["disk"] else -1
        making = Making(order, self._plans[order["plan_id"]], fds, into)
        if making.rehearses and self._cold:
            self._warm_up()  # nobody waits
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
        """A limit that what we fork has passed already would have the guest's first process fail without a word."""
        if limit is None:
            return
        fd = os.open("self/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            has = int(os.read(fd, 200).split()[5]) * _PAGE
        finally:
            os.close(fd)
        if limit < has + _ROOM:
            raise OSError(f"limits.memory is too small: {limit >> 10} KiB, and a process here starts with {has >> 10}")

    def _kind_of(self, plan: Plan) -> int:
        held = plan["fence"]
        kind = {**plan, "sizes": None, "fence": {**held, "processes": 0, "rlimits": list(held["rlimits"])}}
        if kind not in self._kinds:
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def _make_init(self, making: Making, listeners: int, disk: int) -> None:
        """PID 1, and as root the spawner. What we touch between two forks is copied twice: so nothing is."""
        joins, into = len(making.join), making.into >= 0
        key = (making.kind, joins, into, disk >= 0)
        birth = self._inits.get(key)
        if birth is None:
            birth = births.InitBirth(self._us, making.plan, joins, into=into, with_disk=disk >= 0)
            self._inits[key] = birth
        making.init, inner = lean.pair(lean.SOCK_SEQPACKET)
        outer, spawner_end = lean.pair(lean.SOCK_SEQPACKET)
        one = birth.one
        one.owner, one.listeners, one.disk, one.sizes = making.owner, listeners, disk, making.plan["sizes"]
        birth.fill(inner.fileno())
        birth.fill_spawner(spawner_end.fileno(), making.join, making.affinity, making.limits)
        birth.fill_cgroup(making.into)
        where = self._run(birth)
        if where > birth.end and birth.is_spawner(where):
            _child(lambda: _begin_spawner(birth, where, making), spawner_end)
        if where > birth.end:
            _child(lambda: _obey(birth, where), inner)
        inner.close()
        spawner_end.close()
        making.init_pid, making.init_pidfd = birth.init_pid, birth.made(birth.init_pidfd)
        if making.plan["as_root"]:
            making.spawner = outer
            made = birth.made(birth.spawner_pidfd)
            making.spawner_fds = [made] if made >= 0 else []
        else:
            outer.close()
        birth.check(where)

    def _make_spawner(self, making: Making) -> None:
        """In PID 1's pid namespace, with the monitor as its parent. It goes into the other namespaces by itself."""
        joins, into = len(making.join), making.into >= 0
        key = (making.kind, joins, into)
        birth = self._spawners.get(key)
        if birth is None:
            birth = self._spawners[key] = births.SpawnerBirth(self._us, making.plan, joins, into=into)
        making.spawner, inner = lean.pair(lean.SOCK_SEQPACKET)
        answers, answer = lean.pair(lean.SOCK_SEQPACKET)
        if making.plan["as_root"]:
            birth.fill_init(making.init_pidfd)
        else:
            birth.fill_doors(making.doors, answer.fileno())
        birth.fill(inner.fileno(), making.join, making.affinity, making.limits)
        birth.fill_cgroup(making.into)
        where = self._run(birth)
        if where > birth.end:
            _child(lambda: _begin_spawner(birth, where, making), inner)
        inner.close()
        answer.close()
        try:
            birth.check(where)
            making.spawner_fds = self._spawner_made(birth, answers)
        finally:
            answers.close()

    def _spawner_made(self, birth: births.SpawnerBirth, answers: socket) -> list[int]:
        if birth.helper_pidfd is None:
            return [birth.made(birth.spawner_pidfd)]
        helper = birth.made(birth.helper_pidfd)
        _, fds = lean.recv_fds(answers, 64, 1)
        if not fds:
            os.close(helper)
            raise OSError("the spawner could not be made: its helper ended")
        return [fds[0], helper]

    def _run(self, birth: births.Birth) -> int:
        """Returns in every process that is made; in this one with a row up to its end."""
        if preloaded:
            k.before_fork()
        where = birth.run()
        if where > birth.end:
            return where
        if preloaded:
            k.after_fork_in_parent()
        if where < birth.end and birth.plan["as_root"]:
            k.setns(self._us.pidfd, k.CLONE_NEWPID)  # it may have failed before it came back
        return where

    def _listing(self) -> box.Listing:
        """What /proc holds: PID 1 sees to what was added since."""
        return box.Listing(self._proc)

    def _hear_init(self, fd: int, building: dict[int, Making]) -> None:
        making = building[fd]
        assert making.init is not None
        try:
            word, fds = lean.recv_fds(making.init, 256, _MAX_FDS)
            making.doors = dict(zip(init.doors(making.plan), fds, strict=False))
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

    def _map_user(self, making: Making) -> None:
        owner, pid = making.owner, making.init_pid
        assert making.init is not None
        if making.plan["user_namespace"]:
            box.write(self._proc, f"{pid}/uid_map", f"1000 {owner} 1")
            box.write(self._proc, f"{pid}/gid_map", f"1000 {owner} 1")
        making.init.send(b"mapped")

    def _hand_over(self, making: Making) -> None:
        """Everything is there: the spawner may go in, and the monitor gets both processes and their sockets."""
        assert making.init is not None
        assert making.spawner is not None
        making.spawner.send(b"go")
        fds = [making.init_pidfd, making.init.fileno(), *self._spawner_parts(making)]
        lean.send_fds(self._monitor, lean.dumps({"box": making.number, "init": making.init_pid}), fds)
        making.init.close()
        making.init = None

    def _spawner_parts(self, making: Making) -> list[int]:
        assert making.spawner is not None
        return [making.spawner.fileno(), *making.spawner_fds]

    def _replace_spawner(self, making: Making) -> None:
        for fd in making.spawner_fds:
            os.close(fd)
        making.spawner_fds = []
        making.rehearses = False  # somebody waits for it
        if making.spawner is not None:
            making.spawner.close()
        try:
            self._make_spawner(making)
            assert making.spawner is not None
            making.spawner.send(b"go")
        except OSError as error:
            lean.send_fds(self._monitor, lean.dumps({"box": making.number, **failure(error)}), [])
            return
        answer = lean.dumps({"box": making.number, "spawner": True})
        lean.send_fds(self._monitor, answer, self._spawner_parts(making))

    def _protect_again(self, making: Making | None, paths: list[tuple[str, int, int]], fds: list[int]) -> None:
        """By a process that has run nothing of a guest's and ends. It says "done" or why not, by the descriptor."""
        pid = os.fork() if making is not None and fds else 0
        if pid == 0 and making is not None and fds:
            try:
                _enter_mounts(making)
                for target, device, inode in paths:
                    box.protect_again(target, device, inode)
                os.write(fds[0], b"done")
            except OSError as error:
                os.write(fds[0], str(error).encode()[:200])
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        if pid:
            os.waitpid(pid, 0)

    def _say_failed(self, making: Making, said: dict[str, object]) -> None:
        """What was made of it is for the monitor to end and to reap."""
        fds = [fd for fd in (making.init_pidfd, *making.spawner_fds) if fd >= 0]
        lean.send_fds(self._monitor, lean.dumps({"box": making.number, **said}), fds)


def _enter_mounts(making: Making) -> None:
    """The sandbox's mount namespace, with the rights that its mounts were made with."""
    if making.plan["as_root"]:
        k.setns(making.init_pidfd, k.CLONE_NEWNS)
        return
    k.setns(making.doors["user"], k.CLONE_NEWUSER)
    k.setns(making.doors["mnt"], k.CLONE_NEWNS)


def _child(work: Callable[[], object], report: socket) -> NoReturn:
    """In a new process: never return into the forker's loop, and say why it could not be."""
    try:
        work()
    except OSError as error:
        report.send(f"!{error}".encode()[:200])
    finally:
        os._exit(70)


def _obey(birth: births.Birth, where: int) -> None:
    """PID 1, when its rows are done or one failed."""
    birth.check(where)
    init.obey()


def _begin_spawner(birth: births.Birth, where: int, making: Making) -> None:
    birth.check(where)
    birth.forget_routine()
    if preloaded:
        k.after_fork_in_child()
    spawner.begin(making.plan["fence"], rehearse=making.rehearses)


def _errno_in(said: str) -> int | None:
    """From Python's own "[Errno N]", so that the library can tell why."""
    if said.startswith("[Errno "):
        number = said[7:].partition("]")[0]
        return int(number) if number.isdigit() else None
    return None
