"""Forked children for tests: run a function in another process, as another user, and read its messages."""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Say = Callable[[object], None]


class Child:
    """A forked process that speaks JSON lines."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd
        self._rest = b""
        self._status: int | None = None

    def hear(self, timeout_s: float = 20.0) -> Any:
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._fd], [], [], timeout_s)
            assert ready, f"child {self.pid} said nothing for {timeout_s} s"
            part = os.read(self._fd, 65536)
            assert part, f"child {self.pid} ended without a word"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def kill(self) -> int:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def close(self) -> None:
        self.kill()
        os.close(self._fd)


@contextmanager
def child(work: Callable[[Say], None], *, uid: int | None = None, join: Iterable[int] = ()) -> Iterator[Child]:
    """Run `work` in a fork, in the groups whose descriptors are in `join`, as `uid`. Killed at the end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for fd in join:
                os.write(fd, b"0")
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            work(lambda said: void(os.write(theirs, json.dumps(said).encode() + b"\n")))
            status = 0
        except BaseException:  # reported to the test
            os.write(theirs, json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        finally:
            os._exit(status)
    os.close(theirs)
    one = Child(pid, ours)
    try:
        yield one
    finally:
        one.close()


def void(_: object) -> None:
    """Discard a value, in a lambda that must return None."""


def state_of(pid: int) -> str:
    """Return the state of a process: R, S, D, Z …, or "gone"."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
