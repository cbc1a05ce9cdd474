"""Owns the spawner: the fenced process that every guest process of a sandbox is cloned from.

The spawner waits for jobs from the monitor. A job is one packet: JSON, and the descriptors for standard streams and the
report. The spawner runs no guest code itself, except that a one-shot run turns it into the guest.
"""

from __future__ import annotations

import os
import sys

from ringfence.guest.guestd.job import make_terminal, take_terminal
from ringfence.guest.interpreter import exec_commands
from ringfence.guest.interpreter.line import Line
from ringfence.guest.launch import fence as fencing
from ringfence.guest.launch import pid1
from ringfence.guest.launch.syscall_rows import Closing, Hole, room
from ringfence.shared import fast_stdlib, framing, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from typing import NoReturn

    from ringfence.guest.guestd.protocols import FenceForm, PlanForm, ProcessWork, SpawnPacket
    from ringfence.guest.launch.syscall_rows import RowProgram

MAX_PACKET = 1 << 17
REPORT_FD = 3
_WITHOUT_IMAGE = 5
_MAX_FDS = 7  # streams, report, line, image, body

# holes of the program
_SOCK = "the spawner's socket"
_NR_WRITE, _NR_RECVFROM, _NR_CHDIR, _NR_UMASK, _NR_SETSID, _NR_SETGROUPS, _NR_EXIT = 1, 45, 80, 95, 112, 116, 231


class SpawnerRows:
    """The spawner's first steps: join the cgroup and, when PID 1 has built everything, go in and give up all rights.

    The forker writes the steps as rows of its program; `fill` fills in a sandbox. A spawner that was born in its cgroup
    begins at `joined`.
    """

    def __init__(self, program: RowProgram, plan: PlanForm, joins: int, doors: list[object]) -> None:
        """Write the rows. `joins`: the number of cgroups. `doors`: PID 1's namespaces; as root its pidfd."""
        self._program = program
        self._plan = plan
        self._doors = doors
        self.first = program.next
        fence = plan["fence"]
        if joins:
            _call(
                program, "prctl PR_SET_PDEATHSIG", syscalls.NR_PRCTL, syscalls.PR_SET_PDEATHSIG, fast_stdlib.SIGKILL
            )  # this may take long
        for number in range(joins):
            _call(program, "join a cgroup", _NR_WRITE, Hole(_join(number)), b"0", 1)
        self.joined = program.next
        _call(program, "prctl PR_SET_NAME", syscalls.NR_PRCTL, syscalls.PR_SET_NAME, b"rf-spawner")
        _call(program, "prctl PR_SET_PDEATHSIG", syscalls.NR_PRCTL, syscalls.PR_SET_PDEATHSIG, fast_stdlib.SIGKILL)
        # Above all the ends of other processes' sockets, which would never be closed.
        self._closing = Closing(program, "the spawner closes", 1 + len(doors))
        heard = _call(program, "hear the forker", _NR_RECVFROM, Hole(_SOCK), room(8), 8, 0, 0, 0)
        if fence["cgroup_namespace"]:  # after the join: /proc/self/cgroup then reads "/" (B13)
            _call(program, f"unshare {syscalls.CLONE_NEWCGROUP:#x}", syscalls.NR_UNSHARE, syscalls.CLONE_NEWCGROUP)
        self._go_in()
        _call(program, "setsid", _NR_SETSID)
        _call(program, "chdir /workspace", _NR_CHDIR, b"/workspace")
        _call(program, "umask", _NR_UMASK, 0o022)
        pid1.write_streams(program, Hole(_SOCK), REPORT_FD + 1)  # the number below is for the report of the next job
        fencing.write_limits(program, fence)
        fencing.write_rights(program, fence, landlock=True)
        _call(program, "close_range", syscalls.NR_CLOSE_RANGE, REPORT_FD + 2, 0x7FFFFFFF)
        self.last = program.stop()
        program.if_zero(heard, _call(program, "exit", _NR_EXIT, 0))  # PID 1 did not build the sandbox

    def _go_in(self) -> None:
        """Write the entry into PID 1's namespaces, by the forker's rights: as root by pidfd, user namespace last."""
        program = self._program
        plan = self._plan
        if not plan["as_root"]:
            for door in self._doors:
                _call(program, "setns", syscalls.NR_SETNS, door, 0)
            return
        _call(program, "setgroups", _NR_SETGROUPS, 0, 0)
        others = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
        _call(program, f"setns {others:#x}", syscalls.NR_SETNS, self._doors[0], others)
        if plan["user_namespace"]:
            _call(
                program, f"setns {syscalls.CLONE_NEWUSER:#x}", syscalls.NR_SETNS, self._doors[0], syscalls.CLONE_NEWUSER
            )
        pid1.write_become(program, mapped=plan["user_namespace"])

    def fill(self, sock: int, join: list[int], affinity: list[int], limits: dict[str, bytes]) -> None:
        program = self._program
        program.fill(_SOCK, sock)
        for number, fd in enumerate(join):
            program.fill(_join(number), fd)
        doors = [program.filled(door) for door in self._doors]
        self._closing.fill([sock, *doors])
        fencing.fill_limits(program, limits, affinity)


def limits_of(fence: FenceForm) -> dict[str, bytes]:
    """Return the limits for `SpawnerRows.fill`, which are the same for all sandboxes of a plan."""
    return fencing.limits_for(fence, processes=fence["processes"] + framing.OURS + framing.RESERVE)


def _join(number: int) -> str:
    return f"cgroup {number}"


def _call(program: RowProgram, what: str, number: int, *arguments: object) -> int:
    return program.call(number, *arguments, what=what)


def begin(fence: FenceForm, *, rehearse: bool) -> NoReturn:
    """Serve jobs, after the rows are done."""
    if rehearse:
        _rehearse(fence)
    _serve(fast_stdlib.from_fd(REPORT_FD + 1, fast_stdlib.SOCK_SEQPACKET), fence, fence["processes"])


def run_within(sock: socket, fence: FenceForm) -> NoReturn:
    """Be the spawner in a box of another program, where there are no namespaces to enter."""
    syscalls.set_name("rf-spawner")
    syscalls.die_with_parent()
    os.setsid()
    os.chdir("/workspace")
    os.umask(0o022)
    _keep_only(os.dup(sock.fileno()))
    limit = fence["processes"]
    fencing.set_limits(fence, processes=limit + framing.OURS + framing.RESERVE)
    fencing.give_up_rights(fence, landlock=True)
    _serve(fast_stdlib.from_fd(REPORT_FD + 1, fast_stdlib.SOCK_SEQPACKET), fence, limit)


def become_guest(job: SpawnPacket, fds: list[int], fence: FenceForm, join: int) -> NoReturn:
    """Give up all rights and do the job, in a fork of guestd itself: gVisor makes no siblings.

    `join`: a descriptor to write 0 to before guest code runs, by which the kernel counts the process; -1: none.
    """
    limit = fence["processes"]
    syscalls.die_with_parent()
    os.chdir("/workspace")
    os.umask(0o022)
    fencing.set_limits(fence, processes=limit + framing.OURS + framing.RESERVE)
    fencing.give_up_rights(fence, landlock=True)
    _child(job, fds, fence, limit + framing.OURS, join)
    os._exit(125)


def _keep_only(wire: int) -> None:
    """Keep descriptor 4, the socket to the monitor; 0–2 read and write nothing, all others are closed (D01, D02)."""
    null = syscalls.high(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(syscalls.high(wire), REPORT_FD + 1, inheritable=False)
    os.dup2(null, REPORT_FD, inheritable=False)  # kept free for the report of the next job
    syscalls.close_from(REPORT_FD + 2)


def _serve(sock: socket, fence: FenceForm, limit: int) -> NoReturn:
    sock.send(fast_stdlib.dumps({"pid": os.getpid()}))
    while True:
        data, fds = fast_stdlib.recv_fds(sock, MAX_PACKET, _MAX_FDS)
        if not data:
            os._exit(0)
        job = fast_stdlib.loads(data)
        if job["become"]:
            sock.close()
            _child(job, fds, fence, limit + framing.OURS - 1)
        _clone(sock, job, fds, fence, limit + framing.OURS)


def _rehearse(fence: FenceForm) -> None:
    """Do what the first job will do, as far as that can be done twice: a page is copied at its first write."""
    from ringfence.guest.interpreter import runner

    body = fast_stdlib.dumps(
        {"kind": "python", "language": "python", "cwd": "/workspace", "code": "", "env": {}, "args": []}
    )
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    ours, theirs = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET)
    fast_stdlib.send_fds(ours, fast_stdlib.dumps({"become": True, "pty": None, "body": body.decode()}), [null] * 4)
    data, fds = fast_stdlib.recv_fds(theirs, MAX_PACKET, 6)
    ours.close()
    theirs.close()
    job = _take(fast_stdlib.loads(data), fds)
    for fd in (null, *fds):
        os.close(fd)
    os.getsid(0)
    fencing.rehearse(fence, dumpable=_stays(job))
    _leave_directory(job)
    runner.rehearse()


def _clone(sock: socket, job: SpawnPacket, fds: list[int], fence: FenceForm, processes: int) -> None:
    ends: list[int] = []  # master and slave of the job's terminal
    try:
        if job["pty"] is not None:
            ends += make_terminal(job["pty"]["cols"], job["pty"]["rows"])
        if len(fds) > _WITHOUT_IMAGE:
            _pass_numbers(_text(job, fds))
        pid, pidfd = syscalls.clone(syscalls.CLONE_PARENT, hooks=True)
    except OSError as error:
        sock.send(fast_stdlib.dumps({"errno": error.errno}))
    else:
        if pid == 0:
            sock.close()
            _child(job, [*ends[1:] * 3, *fds[3:]] if ends else fds, fence, processes)
        handle = [pidfd] if pidfd >= 0 else []
        try:
            fast_stdlib.send_fds(sock, fast_stdlib.dumps({"pid": pid, "pidfd": bool(handle)}), [*handle, *ends[:1]])
        except OSError as error:  # the guest's user has too many descriptors on the way
            os.kill(pid, fast_stdlib.SIGKILL)
            sock.send(fast_stdlib.dumps({"errno": error.errno}))
        for fd in handle:
            os.close(fd)
    for fd in [*fds, *ends]:
        os.close(fd)


def _child(job: SpawnPacket, fds: list[int], fence: FenceForm, processes: int, join: int = -1) -> None:
    """Put the streams in place and do the job's work, in the new process. Never returns."""
    code = 125
    try:
        code = _work(job, fds, fence, processes, join)
    except BaseException as error:  # noqa: BLE001  # the last frame of this process: say it and end
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _work(handed: SpawnPacket, fds: list[int], fence: FenceForm, processes: int, join: int) -> int:
    job = _take(handed, fds)
    if join >= 0 and job["kind"] not in ("file", "connect"):  # ours, which run even for a guest at its limit
        os.write(join, b"0")
    further = _further(job)
    for number in range(further):
        os.dup2(fds[4 + number], REPORT_FD + 1 + number, inheritable=False)
    syscalls.close_from(REPORT_FD + 1 + further)
    if job["kind"] == "file":
        from ringfence.guest.files import worker

        return worker.work(job, REPORT_FD)
    if job["kind"] == "connect":
        from ringfence.guest.guestd import connector

        return connector.work(job, REPORT_FD)
    os.setsid() if os.getsid(0) != os.getpid() else None
    if handed["pty"] is not None:
        take_terminal(0)
    fencing.finish_for_guest(fence, processes=processes, dumpable=_stays(job), session=job["kind"] == "session")
    _leave_directory(job)
    if job["kind"] == "exec":
        return _exec(job)
    if "javascript" in (job["kind"], job.get("language")):
        return _exec({**job, "argv": exec_commands.node_argv(job, REPORT_FD)})
    if job.get("language") == "bash" and not job.get("fresh"):
        from ringfence.guest.interpreter import bash

        return bash.serve(job, REPORT_FD)
    if job["kind"] == "fresh" or job.get("fresh"):
        return _exec({**job, "argv": exec_commands.python_argv(job, REPORT_FD)})
    if job["kind"] == "session":
        from ringfence.guest.interpreter import session

        return session.serve(job, REPORT_FD)
    from ringfence.guest.interpreter import runner

    return runner.run(job, REPORT_FD)


def _text(handed: SpawnPacket, fds: list[int]) -> str:
    return handed["body"] if handed["body"] is not None else _read_all(fds[-1])


def _pass_numbers(text: str) -> None:
    """Use up process numbers until the next number is one that a copy may have (K05)."""
    avoided = fast_stdlib.loads(text)["image"]
    while avoided:
        pid, pidfd = syscalls.clone(0, hooks=False)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if pidfd >= 0:
            os.close(pidfd)
        if pid + 1 not in avoided:
            return


def _take(handed: SpawnPacket, fds: list[int]) -> ProcessWork:
    """Move the streams to their descriptors. Return the work."""
    text = _text(handed, fds)
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    os.dup2(fds[3], REPORT_FD, inheritable=False)
    job: ProcessWork = fast_stdlib.loads(text)
    return job


def _further(job: ProcessWork) -> int:
    """Return how many descriptors follow the report.

    A session reads the host's messages from one, and a copy has its memory in another.
    """
    return int(job["kind"] == "session") + int(bool(job.get("image")))


def _stays(job: ProcessWork) -> bool:
    """Return whether guest code, or for bash our code that feeds bash, runs in this very process, without an exec."""
    if job["kind"] == "session" and job["language"] != "python":
        return job["language"] == "bash" and not job.get("fresh")
    return job["kind"] in ("python", "session") and not job.get("fresh")


def _read_all(fd: int) -> str:
    with open(fd, encoding="utf-8", closefd=False) as file:
        file.seek(0)
        return file.read()


def _report(job: ProcessWork, stage: str, number: int | None) -> None:
    """Report why the job did not begin: by its line, or as the whole report where the job has no line."""
    if job["kind"] == "exec":
        os.write(REPORT_FD, fast_stdlib.dumps({"errno": number, "stage": stage}))
    else:
        Line(REPORT_FD).send({"m": "failed", "stage": stage, "errno": number})


def _leave_directory(job: ProcessWork) -> None:
    try:
        os.chdir(str(job["cwd"]))
    except OSError as error:
        _report(job, "cwd", error.errno)
        os._exit(125)


def _exec(job: ProcessWork) -> int:
    """Execute the program, which is looked up in the guest's PATH. Returns only on failure."""
    argv: list[str] = job["argv"]
    env: dict[str, str] = job["env"]
    fast_stdlib.default_signals(fast_stdlib.SIGPIPE, fast_stdlib.SIGXFSZ)  # the two signals that Python ignores
    program = os.fsencode(argv[0])
    names = [program] if b"/" in program else [os.path.join(d, program) for d in _path_of(env)]
    failure = 2
    for name in names:
        try:
            os.execve(name, [_bytes(a) for a in argv], {_bytes(a): _bytes(b) for a, b in env.items()})
        except OSError as error:
            if error.errno not in (2, 20) or failure == 2:  # ENOENT, ENOTDIR: the next directory may have the program
                failure = error.errno if error.errno is not None else 2
    _report(job, "exec", failure)
    return 126 if failure not in (2, 20) else 127


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _path_of(env: dict[str, str]) -> list[bytes]:
    return [_bytes(d) for d in env.get("PATH", "/usr/bin:/bin").split(":") if d]
