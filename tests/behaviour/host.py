"""A separate library process that a test can kill, and everything on this machine that belongs to the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import leftovers

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
UIDS = Path("/run/ringfence/uid")


class Belongings(NamedTuple):
    """Processes, cgroups and locks that would outlive a library process without a cleanup."""

    processes: frozenset[leftovers.Process]
    groups: frozenset[str]
    uids: frozenset[tuple[str, int]]  # path and inode of the lock files that it holds

    def left(self) -> list[str]:
        """Return in words which of the belongings still exist."""
        alive = {row[0] for pid in os.listdir("/proc") if pid.isdigit() and (row := leftovers._stat(pid))}
        found = [f"process {p.pid} {p.name}" for p in self.processes & alive if not leftovers._is_zombie(p.pid)]
        found += [f"cgroup {path}" for path in self.groups if os.path.isdir(path)]
        return found + [f"uid lock {path}" for path, inode in self.uids if _inode(path) == inode]


def _inode(path: str | Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def belongings(pid: int) -> Belongings:
    row = leftovers._stat(str(pid))
    assert row is not None
    owner = f"{pid}-{row[0].started}-"
    mine = [directory for directory in leftovers.owner_groups() if directory.name.startswith(owner)]
    groups = [path for directory in mine for path, _, _ in os.walk(directory)]
    return Belongings(leftovers.descendants(pid), frozenset(groups), frozenset(_locks_of(pid)))


def _locks_of(pid: int) -> list[tuple[str, int]]:
    held = {
        int(fields[5].rpartition(":")[2])
        for line in Path("/proc/locks").read_text().splitlines()
        if (fields := line.split())[1] == "FLOCK" and fields[4] == str(pid)
    }
    files = UIDS.iterdir() if os.access(UIDS, os.R_OK) else ()
    return [(str(path), inode) for path in files if (inode := _inode(path)) in held and inode is not None]


# What programs print is compared. Since 3.12 Python warns who forks beside threads, as some do on purpose; we warn
# where there is no cgroup.
_NO_WARNINGS = ("-W", "ignore:This process:DeprecationWarning", "-W", "ignore:enforced by a weaker mechanism")


class Host:
    """A library process that runs `code`; `line()` waits for the next line of output."""

    def __init__(self, code: str, *, python: str = sys.executable) -> None:
        environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [python, *_NO_WARNINGS, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self, timeout_s: float = 30) -> str:
        """Wait for the end of the process and return the rest of its output."""
        return self.process.communicate(timeout=timeout_s)[0]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()


def named(name: str, of: int | None = None) -> list[int]:
    """Return the pids of library processes below a process, oldest first."""
    found = sorted(leftovers.descendants(of), key=lambda process: (process.started, process.pid))
    return [process.pid for process in found if process.name == name]


def wait_until_gone(what: Belongings, within_s: float = 3.0) -> list[str]:
    deadline = time.monotonic() + within_s
    while (left := what.left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def sweep() -> None:
    """Sweep as the next program that uses the library does."""
    code = "from ringfence.host import state; state.sweep()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": SOURCE}, check=True, timeout=30)
