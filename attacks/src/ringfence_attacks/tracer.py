"""Read from outside, by ptrace, what the kernel answered to a guest's system calls: the witness for filters.

The guest announces each attempt by a call that every kernel refuses (`getpriority` with a kind that does not exist),
then makes the attempt. The answer is read from the stopped process, not from what the guest says.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import time

from ringfence.values import Struct, final
from ringfence_attacks.witnesses import descendants, status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from ringfence import Sandbox
    from ringfence.types import Process
    from ringfence_attacks.arena import Arm

_SEIZE, _INTERRUPT, _SYSCALL, _DETACH, _SYSCALL_INFO = 0x4206, 0x4207, 24, 17, 0x420E
_TRACESYSGOOD = 1
_SYSCALL_STOP = 0x85  # SIGTRAP with the bit of TRACESYSGOOD
_ENTRY, _EXIT = 1, 2
_ALL_CHILDREN = 0x40000000  # __WALL
_NR_GETPRIORITY, _NR_EXIT_GROUP = 140, 231
_MARK = 77
_DEADLINE_S = 8.0

_ATTEMPTS = """
{before}
tell(pid=os.getpid())
sys.stdin.readline()
for index, (number, args) in enumerate(attempts):
    for each in ((140, (77, index)), (number, args)):
        try:
            call(each[0], *each[1])
        except OSError:
            pass
os._exit(0)
"""


@final
class Attempt(Struct):
    """A system call that harms nothing, or whose arguments the kernel refuses with another errno than the filter."""

    name: str
    number: int
    args: tuple[int, ...]
    filtered: int = errno.EPERM  # what the filter answers


def host_pid(box: Sandbox, inner: int) -> int:
    """Return the host's pid of the process with the pid `inner` inside. Raises LookupError when there is none."""
    if inner == 1:
        return _init_of(box)
    for pid in inside(box):
        if status_of(pid).get("NSpid", "").split()[-1:] == [str(inner)]:
            return pid
    raise LookupError(f"no process has the number {inner} inside")


def inside(box: Sandbox) -> list[int]:
    """Return the host's pids of all processes inside: descendants of the monitor in PID 1's namespace.

    The monitor has other sandboxes too. An ordinary user cannot always read a process's namespace: a process whose
    namespace cannot be read counts as inside.
    """
    init = _init_of(box)
    own = _pid_namespace(init)
    below = descendants(int(status_of(init)["PPid"]))
    return [pid for pid in below if own is None or _pid_namespace(pid) in (own, None)]


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def monitor_of(box: Sandbox) -> int:
    """Return the pid of the monitor, which is the parent of PID 1."""
    return int(status_of(_init_of(box))["PPid"])


def _init_of(box: Sandbox) -> int:
    """Return the host's pid of the sandbox's PID 1, from private names of the library."""
    wall = getattr(box._box, "_wall", None)  # noqa: SLF001  # no public name leads there
    if wall is not None:
        return int(wall.pid)  # as the container's engine reports it
    held = box._box._init_pidfd  # type: ignore[union-attr]  # noqa: SLF001  # a started sandbox has one
    with open(f"/proc/self/fdinfo/{held}", encoding="utf-8") as file:
        return int(next(line for line in file if line.startswith("Pid:")).split()[1])


def reported_pid(process: Process, wait_s: float = _DEADLINE_S) -> tuple[int, str]:
    """Return the pid that a spawned guest reported, and its output until then. Raises TimeoutError when none came."""
    said = ""
    end = time.monotonic() + wait_s
    for event in process:
        said += getattr(event, "text", "")
        if '"pid": ' in said and said.endswith("\n"):
            return int(said.rpartition('"pid": ')[2].rstrip(" }\n")), said
        if time.monotonic() > end:
            break
    raise TimeoutError(f"the guest did not report its pid: {said[-300:]}")


def answers(arm: Arm, box: Sandbox, attempts: list[Attempt], *, before: str = "") -> dict[str, int]:
    """Return the kernel's answer to each attempt that was made: a result from 0, or a negative errno.

    `before` is what the guest does first.
    """
    script = [(each.number, each.args) for each in attempts]
    process = arm.spawn(_ATTEMPTS.format(before=before), box=box, attempts=script)
    with _Tracer(host_pid(box, reported_pid(process)[0])) as tracer:
        process.write("go\n")
        found = tracer.follow([each.number for each in attempts])
    return {attempts[index].name: result for index, result in found.items()}


class _Tracer:
    """A tracer of one process, as a context manager. At the end a process that is still traced is killed and reaped:
    no other process can do that, and its sandbox, or even its engine, would wait for ever."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.restype = ctypes.c_long
        self._deadline = time.monotonic() + _DEADLINE_S
        self._traces = False

    def __enter__(self) -> Self:
        self._ptrace(_SEIZE, 0, _TRACESYSGOOD)
        self._traces = True
        try:
            self._ptrace(_INTERRUPT, 0, 0)
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Kill and reap the process if it is still traced. Until then no other process can get the same pid."""
        if not self._traces:
            return
        self._traces = False
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            while not _is_over(os.waitpid(self._pid, _ALL_CHILDREN)[1]):
                pass

    def _ptrace(self, request: int, address: int, data: object) -> None:
        word = ctypes.c_long(data) if isinstance(data, int) else data
        if self._libc.ptrace(ctypes.c_long(request), ctypes.c_long(self._pid), ctypes.c_long(address), word) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"ptrace {request:#x}: {os.strerror(number)}")

    def _wait(self) -> int:
        while time.monotonic() < self._deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG | _ALL_CHILDREN)
            if pid:
                return status
            time.sleep(0.0002)
        raise TimeoutError("the traced process did nothing for too long")

    def follow(self, numbers: list[int]) -> dict[int, int]:
        """Let the process run and return the result of each attempt that it made, by the attempt's index."""
        found: dict[int, int] = {}
        index = wanted = None
        while True:
            self._ptrace(_SYSCALL, 0, 0)
            status = self._wait()
            if _is_over(status):
                self._traces = False
                return found
            if os.WSTOPSIG(status) != _SYSCALL_STOP:
                continue
            kind, number, first, second, result = self._info()
            if kind == _ENTRY and number == _NR_EXIT_GROUP:
                self._ptrace(_DETACH, 0, 0)
                self._traces = False
                return found
            if kind == _ENTRY and number == _NR_GETPRIORITY and first == _MARK:
                index, wanted = second, None
            elif kind == _ENTRY:
                wanted = number
            elif kind == _EXIT and index is not None and wanted == numbers[index]:
                found[index], index = result, None

    def _info(self) -> tuple[int, int, int, int, int]:
        """Return (kind, number, two arguments, result) of a stop. Number and arguments are valid on entry to a call,
        the result on exit."""
        buffer = ctypes.create_string_buffer(88)
        self._ptrace(_SYSCALL_INFO, len(buffer), buffer)
        number, first, second = struct.unpack_from("QQQ", buffer, 24)
        return buffer.raw[0], number, first, second, struct.unpack_from("q", buffer, 24)[0]


def _is_over(status: int) -> bool:
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)
