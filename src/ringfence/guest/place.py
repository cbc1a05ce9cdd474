"""Builds one sandbox around the monitor and holds its two fixed processes: PID 1 and the spawner."""

from __future__ import annotations

import os
import select

from . import box, init, lean, spawner
from . import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from .shapes import Plan, Request

_ANSWER_S = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc/<pid>/stat
_PF_EXITING = 4  # a flag of /proc/<pid>/stat
_INLINE = 1 << 16


class Place:
    """The inside, as the monitor sees it."""

    def __init__(self, plan: Plan, fds: list[tuple[str, int]], init_pid: int, init_socket: socket) -> None:
        self._plan = plan
        self._join = [fd for name, fd in fds if name == "join"]
        self._thaw = dict(fds).get("thaw", -1)
        self.init_pid = init_pid
        self.init_pidfd = os.pidfd_open(init_pid)
        self._init = init_socket
        self.spawner_pidfd = -1
        self._spawner_inner = 0
        self._start_spawner()

    def _start_spawner(self) -> None:
        ours, theirs = lean.pair(lean.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                spawner.spawner(theirs, self._plan["fence"], self._join)
            except OSError as error:
                theirs.send(lean.dumps({"error": str(error), "errno": error.errno}))
            finally:
                os._exit(70)
        theirs.close()
        ours.settimeout(_ANSWER_S)
        self.spawner_pidfd = os.pidfd_open(pid)
        hello = ours.recv(1 << 12)
        if not hello:
            raise OSError(f"the spawner ended while it fenced itself: {_status_of(pid)}")
        answer = lean.loads(hello)
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"])
        self._spawner_inner = int(answer["pid"])
        self._socket = ours

    def spawn(self, request: Request, fds: list[int], *, one_shot: bool) -> tuple[int, int]:
        """(pidfd, pid inside). A spawner that a guest killed or stopped is replaced, once."""
        body = lean.dumps(request["job"])
        if one_shot:
            self._hand_over(body, fds, become=True)
            return self.spawner_pidfd, self._spawner_inner
        try:
            return self._ask(body, fds)
        except (TimeoutError, ConnectionError):
            return self._ask(body, fds)

    def _ask(self, body: bytes, fds: list[int]) -> tuple[int, int]:
        """A spawner that did not answer is replaced: its late answer would be taken for that of the next job (J17)."""
        try:
            self._hand_over(body, fds, become=False)
            return self._answer()
        except (TimeoutError, ConnectionError):
            self._replace_spawner()
            raise

    def _hand_over(self, body: bytes, fds: list[int], *, become: bool) -> None:
        if len(body) <= _INLINE:
            lean.send_fds(self._socket, lean.dumps({"become": become, "body": body.decode()}), fds)
            return
        memory = os.memfd_create("job", os.MFD_CLOEXEC)
        with open(memory, "wb") as file:
            file.write(body)
            file.flush()
            lean.send_fds(self._socket, lean.dumps({"become": become, "body": None}), [*fds, memory])

    def _answer(self) -> tuple[int, int]:
        data, fds = lean.recv_fds(self._socket, 1 << 12, 1)
        if not data:
            raise ConnectionError("the spawner is gone")
        answer = lean.loads(data)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return fds[0], int(answer["pid"])

    def reap_spawner(self) -> None:
        """End it if it has not ended. While it is not reaped, a PID 1 that was killed cannot end, and nobody knows."""
        if self.spawner_pidfd >= 0:
            _kill(self.spawner_pidfd)
            os.waitid(os.P_PIDFD, self.spawner_pidfd, os.WEXITED)
            os.close(self.spawner_pidfd)
            self.spawner_pidfd = -1

    def _replace_spawner(self) -> None:
        self.reap_spawner()
        self._socket.close()
        self._start_spawner()

    def kill_init(self) -> None:
        """SIGKILL to PID 1: the kernel kills everything inside."""
        _kill(self.init_pidfd)

    def end_all(self) -> None:
        """As kill_init, and where processes were left, wait until they are gone.

        The kernel kills them when PID 1 comes to its own end, a moment after the signal: a process left behind could
        act after the call has returned (L02). Whoever lost its parent is a child of PID 1, so none there means none.
        """
        left = _has_children()
        self.kill_init()
        if left:
            poll = select.poll()
            poll.register(self.init_pidfd, select.POLLIN)
            poll.poll(_ANSWER_S * 1000)

    def init_is_ending(self) -> bool:
        """Whether PID 1 is exiting or gone. Only then does the kernel kill the others, so the answer is exact."""
        try:
            with open("/proc/1/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return True
        return bool(int(fields[6]) & _PF_EXITING)

    def kill_all_but(self, kept: list[int], *, since: float) -> bool:
        """Everything inside that was started from `since` on (seconds since boot) but the trees of `kept`.

        False when something would not die in time.
        """
        self._init.settimeout(_ANSWER_S / 5)
        try:
            self._init.send(lean.dumps({"alone": [self._spawner_inner], "trees": kept, "since": int(since * _TICKS)}))
            return self._init.recv(64) == b"0"
        except OSError:
            return False

    def destroy(self) -> None:
        """Kill everything and reap our children, so that the pid namespace can end.

        On cgroup v1 a frozen process takes no SIGKILL, so it is thawed first (D18).
        """
        if self._thaw >= 0:
            os.write(self._thaw, b"THAWED")
        self.kill_init()
        poll = select.poll()
        poll.register(self.init_pidfd, select.POLLIN)
        while not poll.poll(0):
            try:
                if os.waitid(os.P_ALL, 0, os.WEXITED) is None:
                    break
            except ChildProcessError:
                break


def _has_children() -> bool:
    """Of PID 1, by the sandbox's own /proc. A kernel that does not tell counts as yes."""
    try:
        fd = os.open("/proc/1/task/1/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return bool(os.read(fd, 16))
    finally:
        os.close(fd)


def _kill(pidfd: int) -> None:
    lean.signal_pidfd(pidfd, lean.SIGKILL)


def _status_of(pid: int) -> str:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return "killed, as happens when limits.memory is too small" if code == -lean.SIGKILL else f"status {code}"


def build(plan: Plan, fds: list[tuple[str, int]], proc: int) -> Place:
    """Namespaces, private file systems, PID 1, the guest's uid, the spawner; in this order, each needed by the next."""
    k.set_name("rf-monitor")
    lean.default_signals(lean.SIGCHLD, lean.SIGINT)
    as_root = plan["as_root"]
    owner = plan["owner"] if as_root else 1000
    namespaces = plan["namespaces"]
    k.unshare(namespaces & ~k.CLONE_NEWPID)  # the pid namespace comes last: its first child must be PID 1
    if not as_root:
        box.write(proc, "self/uid_map", "1000 0 1")
        box.write(proc, "self/gid_map", "1000 0 1")
    if namespaces & k.CLONE_NEWUTS:
        lean.set_host_name("ringfence")
    if namespaces & k.CLONE_NEWNET:
        box.bring_up_loopback()
    box.mount_private(plan["sizes"], owner=owner, ops=plan["ops"], idmap=_idmapper(owner, proc))
    k.unshare(namespaces & k.CLONE_NEWPID)
    pid, sock = _start_init(plan, as_root)
    if as_root:
        _enter_user_namespace(plan, pid, sock, proc, owner)
    word = sock.recv(256)
    if word != b"ready":
        said = word.decode("utf-8", "replace").lstrip("!") or _status_of(pid)
        raise OSError(f"PID 1 could not be set up: {said}")
    os.close(proc)
    return Place(plan, fds, pid, sock)


def _start_init(plan: Plan, as_root: bool) -> tuple[int, socket]:
    ours, theirs = lean.pair(lean.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            if as_root:
                init.prepare_as_root(theirs, plan)
            else:
                init.prepare_as_user(plan)
            init.serve(theirs, plan)
        except OSError as error:
            theirs.send(f"!{error}".encode()[:200])
        finally:
            os._exit(70)
    theirs.close()
    return pid, ours


def _enter_user_namespace(plan: Plan, pid: int, sock: socket, proc: int, owner: int) -> None:
    """Map the guest's uid in PID 1's user namespace, join it, and be that uid from here on."""
    word = sock.recv(256)
    if word != b"unshared":
        raise OSError(f"PID 1 could not be set up: {word.decode('utf-8', 'replace').lstrip('!')}")
    os.setgroups([])
    mapped = bool(plan["user_namespace"])
    if mapped:
        box.write(proc, f"{pid}/uid_map", f"1000 {owner} 1")
        box.write(proc, f"{pid}/gid_map", f"1000 {owner} 1")
        pidfd = os.pidfd_open(pid)
        k.setns(pidfd, k.CLONE_NEWUSER)
        os.close(pidfd)
    sock.send(b"mapped")
    init.become(owner, mapped=mapped)


def _idmapper(owner: int, proc: int) -> Callable[[int, int], int]:
    def idmap(uid: int, gid: int) -> int:
        """A user namespace in which files of `uid` belong to the guest: for mount_setattr."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                k.unshare(k.CLONE_NEWUSER)
                os.write(write_end, b"x")
                select.poll().poll()
            finally:
                os._exit(0)
        os.close(write_end)
        try:
            os.read(read_end, 1)
            box.write(proc, f"{pid}/uid_map", f"{uid} {owner} 1")
            box.write(proc, f"{pid}/gid_map", f"{gid} {owner} 1")
            return os.open(f"{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        finally:
            os.close(read_end)
            os.kill(pid, lean.SIGKILL)
            os.waitpid(pid, 0)

    return idmap
