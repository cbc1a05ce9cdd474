"""Owns the spawner: the one fenced process that every guest process of a sandbox is cloned from.

It waits for jobs from the monitor. A job is one packet: JSON, and the descriptors for standard streams and the report.
The spawner runs no guest code itself, except that a one-shot run turns it into the guest.
"""

from __future__ import annotations

import os
import sys

from . import counts, fresh, lean, node, terminal
from . import fence as fencing
from . import kernel as k
from .init import become
from .line import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from typing import NoReturn

    from .shapes import Fence, Handed, Plan, Work

MAX_PACKET = 1 << 17
REPORT_FD = 3

rehearses = False  # whether sandboxes wait here for their first job


def run(sock: socket, plan: Plan, join: list[int], doors: list[int]) -> NoReturn:
    """Join the cgroup, and when PID 1 has built everything, go in, give up all rights and serve jobs."""
    k.set_name("rf-spawner")
    k.die_with_parent()
    k.close_all_but([sock.fileno(), *join, *doors])  # the ends of others' sockets above all: they would never be closed
    fence = plan["fence"]
    for fd in join:
        os.write(fd, b"0")
    if sock.recv(8) != b"go":
        os._exit(0)  # it was not built
    if fence["cgroup_namespace"]:
        k.unshare(k.CLONE_NEWCGROUP)  # after the join: /proc/self/cgroup then reads "/" (B13)
    _go_in(plan, doors)
    os.setsid()
    os.chdir("/workspace")
    os.umask(0o022)
    wire = os.dup(sock.fileno())
    _keep_only(wire)
    limit = fence["processes"]
    fencing.set_limits(fence, processes=limit + counts.OURS + counts.RESERVE)
    fencing.give_up_rights(fence, landlock=True)
    _serve(lean.from_fd(REPORT_FD + 1, lean.SOCK_SEQPACKET), fence, limit)


def run_within(sock: socket, fence: Fence) -> NoReturn:
    """The same where the wall is somebody else's: there is nothing to go into."""
    k.set_name("rf-spawner")
    k.die_with_parent()
    os.setsid()
    os.chdir("/workspace")
    os.umask(0o022)
    _keep_only(os.dup(sock.fileno()))
    limit = fence["processes"]
    fencing.set_limits(fence, processes=limit + counts.OURS + counts.RESERVE)
    fencing.give_up_rights(fence, landlock=True)
    _serve(lean.from_fd(REPORT_FD + 1, lean.SOCK_SEQPACKET), fence, limit)


def become_guest(job: Handed, fds: list[int], fence: Fence, join: int) -> NoReturn:
    """In a fork of guestd itself, where siblings cannot be made (gVisor): give up all rights, then do the job.

    `join`: a descriptor to write 0 to before there is guest code here, which counts it; -1: none.
    """
    limit = fence["processes"]
    k.die_with_parent()
    os.chdir("/workspace")
    os.umask(0o022)
    fencing.set_limits(fence, processes=limit + counts.OURS + counts.RESERVE)
    fencing.give_up_rights(fence, landlock=True)
    _child(job, fds, fence, limit + counts.OURS, join)
    os._exit(125)


def _go_in(plan: Plan, doors: list[int]) -> None:
    """Into PID 1's namespaces, by the rights of the forker: as root by its pidfd, the user namespace last."""
    if not plan["as_root"]:
        for door in doors:
            k.setns(door, 0)
        return
    os.setgroups([])
    k.setns(doors[0], k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS)
    if plan["user_namespace"]:
        k.setns(doors[0], k.CLONE_NEWUSER)
    become(plan["owner"], mapped=plan["user_namespace"])


def _keep_only(wire: int) -> None:
    """Descriptors 0–2 read and write nothing, 4 is the socket to the monitor, all others are closed (D01, D02)."""
    null = lean.high(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(lean.high(wire), REPORT_FD + 1, inheritable=False)
    os.dup2(null, REPORT_FD, inheritable=False)  # kept free for the report of the job to come
    k.close_from(REPORT_FD + 2)


def _serve(sock: socket, fence: Fence, limit: int) -> NoReturn:
    sock.send(lean.dumps({"pid": os.getpid()}))
    if rehearses and sys.path and not lean.readable(sock, counts.QUIET_S):  # no path: guests have an own interpreter
        from . import pycode

        pycode.rehearse()
    while True:
        data, fds = lean.recv_fds(sock, MAX_PACKET, 6)
        if not data:
            os._exit(0)
        job = lean.loads(data)
        if job["become"]:
            sock.close()
            _child(job, fds, fence, limit + counts.OURS - 1)
        _clone(sock, job, fds, fence, limit + counts.OURS)


def _clone(sock: socket, job: Handed, fds: list[int], fence: Fence, processes: int) -> None:
    ends: list[int] = []  # master and slave of its terminal
    try:
        if job["pty"] is not None:
            ends += terminal.make(job["pty"]["cols"], job["pty"]["rows"])
        pid, pidfd = k.clone(k.CLONE_PARENT, hooks=True)
    except OSError as error:
        sock.send(lean.dumps({"errno": error.errno}))
    else:
        if pid == 0:
            sock.close()
            _child(job, [*ends[1:] * 3, *fds[3:]] if ends else fds, fence, processes)
        told = [pidfd] if pidfd >= 0 else []
        lean.send_fds(sock, lean.dumps({"pid": pid, "pidfd": bool(told)}), [*told, *ends[:1]])
        for fd in told:
            os.close(fd)
    for fd in [*fds, *ends]:
        os.close(fd)


def _child(job: Handed, fds: list[int], fence: Fence, processes: int, join: int = -1) -> None:
    """In the new process: streams in place, then the work the job names. Never returns."""
    code = 125
    try:
        code = _work(job, fds, fence, processes, join)
    except BaseException as error:  # noqa: BLE001  # the last frame of this process: say it and end
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _work(handed: Handed, fds: list[int], fence: Fence, processes: int, join: int) -> int:
    text = handed["body"] if handed["body"] is not None else _read_all(fds[-1])
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    os.dup2(fds[3], REPORT_FD, inheritable=False)
    job: Work = lean.loads(text)
    if join >= 0 and job["kind"] not in ("file", "connect"):  # those are ours, and served when the guest's are full
        os.write(join, b"0")
    if job.get("image"):
        os.dup2(fds[4], REPORT_FD + 1, inheritable=False)
    k.close_from(REPORT_FD + (2 if job.get("image") else 1))
    if job["kind"] == "file":
        from . import fileworker

        return fileworker.work(job, REPORT_FD)
    if job["kind"] == "connect":
        from . import connector

        return connector.work(job, REPORT_FD)
    os.setsid() if os.getsid(0) != os.getpid() else None
    if handed["pty"] is not None:
        terminal.take(0)
    fencing.finish_for_guest(fence, processes=processes, dumpable=_stays(job))
    _leave_directory(job)
    if job["kind"] == "exec":
        return _exec(job)
    if "javascript" in (job["kind"], job.get("language")):
        return _exec({**job, "argv": node.argv(job, REPORT_FD)})
    if job.get("language") == "bash" and not job.get("fresh"):
        from . import shell

        return shell.serve(job, REPORT_FD)
    if job["kind"] == "fresh" or job.get("fresh"):
        return _exec({**job, "argv": fresh.argv(job, REPORT_FD)})
    if job["kind"] == "session":
        from . import session

        return session.serve(job, REPORT_FD)
    from . import pycode

    return pycode.run(job, REPORT_FD)


def _stays(job: Work) -> bool:
    """Whether guest code runs in this very process, without an exec; of bash, what tells it what to run."""
    if job["kind"] == "session" and job["language"] != "python":
        return job["language"] == "bash" and not job.get("fresh")
    return job["kind"] in ("python", "session") and not job.get("fresh")


def _read_all(fd: int) -> str:
    with open(fd, encoding="utf-8", closefd=False) as file:
        file.seek(0)
        return file.read()


def _report(job: Work, stage: str, number: int | None) -> None:
    """Why it did not begin: by the line where there is one, else as the whole report."""
    if job["kind"] == "exec":
        os.write(REPORT_FD, lean.dumps({"errno": number, "stage": stage}))
    else:
        Line(REPORT_FD).send({"m": "failed", "stage": stage, "errno": number})


def _leave_directory(job: Work) -> None:
    try:
        os.chdir(str(job["cwd"]))
    except OSError as error:
        _report(job, "cwd", error.errno)
        os._exit(125)


def _exec(job: Work) -> int:
    """execve, looking the program up in the guest's PATH. Returns only when it failed."""
    argv: list[str] = job["argv"]
    env: dict[str, str] = job["env"]
    lean.default_signals(lean.SIGPIPE, lean.SIGXFSZ)  # the two that Python ignores
    program = os.fsencode(argv[0])
    names = [program] if b"/" in program else [os.path.join(d, program) for d in _path_of(env)]
    failure = 2
    for name in names:
        try:
            os.execve(name, [_bytes(a) for a in argv], {_bytes(a): _bytes(b) for a, b in env.items()})
        except OSError as error:
            if error.errno not in (2, 20) or failure == 2:  # ENOENT, ENOTDIR: the next directory may have it
                failure = error.errno if error.errno is not None else 2
    _report(job, "exec", failure)
    return 126 if failure not in (2, 20) else 127


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _path_of(env: dict[str, str]) -> list[bytes]:
    return [_bytes(d) for d in env.get("PATH", "/usr/bin:/bin").split(":") if d]
