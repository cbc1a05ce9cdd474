"""The interface that cgroup v1 and v2 have in common, of a tree and of a group, and access to kernel files."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod

from ringfence.values import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    DeadTest = Callable[[str], bool]

    Kind = Literal["cgroup v1", "cgroup v2"]

MOUNT = "/sys/fs/cgroup"
BASE = "ringfence"
CPU_PERIOD_US = 100_000
_MIN_QUOTA_US = 1_000  # the kernel refuses less
_SIGKILL = 9
_EMPTYING_TRIES = 20


class GroupLimits(Struct):
    """The limits of a sandbox. All numbers are above zero; the policy has checked that."""

    memory_bytes: int
    processes: int
    cpus: float


class GroupUsage(Struct):
    """The use of a sandbox so far. A field is None if this kernel does not count it."""

    cpu_s: float | None
    memory_peak_bytes: int | None
    processes_peak: int | None
    oom_kills: int | None


class Mechanisms(Struct):
    """The words for `Enforcement`: what enforces each limit. A field is None if no cgroup controller does."""

    memory: str | None
    cpu: str | None
    cpu_time: str | None
    processes: str | None


class Group(ABC):
    """The cgroup of one sandbox. Not safe for use from two threads at once."""

    box_id: str

    @abstractmethod
    def join_fds(self) -> list[int]:
        """Return write-only descriptors. A process of one thread that writes b"0" to each has joined the group.

        They are opened here because the kernel checks the credentials of the opener. The caller closes them. On cgroup
        v2 the first write after a quiet moment costs 5 to 15 ms (an RCU grace period); `into_fd` avoids that.
        """

    def into_fd(self) -> int | None:
        """Return a descriptor of the group, for a clone into the group (v2); None on v1. The caller closes it."""
        return None

    @abstractmethod
    def set(self, limits: GroupLimits) -> None:
        """Replace the limits. Raises OSError when the kernel refuses a limit."""

    @abstractmethod
    def cpu_fd(self) -> int | None:
        """Return a read-only descriptor of the CPU time counter, for the monitor's clock; None without a counter."""

    @abstractmethod
    def usage(self) -> GroupUsage:
        """Return what the counters say now. All fields are None after `remove`."""

    @property
    @abstractmethod
    def can_freeze(self) -> bool:
        """Return whether there is a freezer."""

    @abstractmethod
    def freeze(self, timeout_s: float = 2.0) -> bool:
        """Stop every process of the group. Return False when a process did not stop in time; the rest stays stopped."""

    @abstractmethod
    def is_frozen(self) -> bool:
        """Return whether every process of the group is stopped."""

    @abstractmethod
    def thaw(self) -> None:
        """Let a frozen group run on. Does nothing to a group that runs."""

    @abstractmethod
    def freezer_fd(self) -> int | None:
        """Return v1's freezer.state or v2's cgroup.freeze, open to read and to write; None without a freezer.

        The monitor uses this descriptor: it pauses an idle sandbox, and on v1 a SIGKILL does nothing to a frozen
        process (D18).
        """

    @abstractmethod
    def kill(self, timeout_s: float = 2.0) -> bool:
        """Kill every process, frozen or not, and its new children. Return True when the group is empty."""

    @abstractmethod
    def remove(self, timeout_s: float = 2.0) -> bool:
        """Kill the processes, then remove the group. Return True when the group is gone. Idempotent."""


class Tree(ABC):
    """The place where this library process makes its groups."""

    kind: Kind
    has_memory: bool
    has_cpu: bool
    has_pids: bool
    has_freezer: bool

    @property
    @abstractmethod
    def mechanisms(self) -> Mechanisms:
        """Return what enforces each limit of a group of this tree."""

    @abstractmethod
    def create(self, box_id: str, limits: GroupLimits) -> Group:
        """Return a new group. Raises OSError when the kernel refuses; then nothing of the group is left."""

    @abstractmethod
    def owner_directories(self) -> list[str]:
        """Return the directories that hold this process's groups. The zygote removes them when the library is gone."""

    @property
    def path(self) -> str | None:
        """Return the directory of this process's groups, for a `cgroup` note in the record; None on v1."""
        return None

    moves_zygotes = False  # whether a zygote has to be moved to a place where it may make groups, before it forks

    def adopt(self, zygote_pid: int) -> bool:  # noqa: ARG002  # most trees leave the zygote where it is
        """Move a zygote that has just begun to that place. False: start another zygote with `launch_prefix`."""
        return True

    def launch_prefix(self) -> list[str]:
        """Return what to put before the zygote's argv so that it starts in that place. Mostly nothing."""
        return []

    def attach(self, zygote_pid: int) -> None:  # noqa: B027  # most trees need nothing here
        """Report to the tree that an adopted or prefixed zygote runs. The tree moves that process to its leaf."""

    @abstractmethod
    def close(self, timeout_s: float = 2.0) -> bool:
        """Kill and remove the groups made through this tree, then the directories above that are no longer used.

        Another tree of the same process keeps its groups. Returns True when all groups of this tree are gone.
        """


def check_box_id(box_id: str) -> str:
    """Return `box_id` if it can be a directory name and is no name of a kernel file. Raises ValueError otherwise."""
    if not box_id or "/" in box_id or "\0" in box_id or box_id.startswith(".") or "." in box_id or box_id == "tasks":
        raise ValueError(f"{box_id!r} cannot name a cgroup: use letters, digits, '-' and '_'")
    return box_id


def quota_us(cpus: float) -> int:
    """Return the CPU time per period that so many CPUs have."""
    return max(_MIN_QUOTA_US, round(cpus * CPU_PERIOD_US))


def write(path: str, text: str) -> None:
    """Write a value to a kernel file, in a single call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def write_if_there(path: str, text: str) -> None:
    """Do the same as `write`, but accept that the group is gone: a command's end, its zygote or a sweep removes it."""
    try:
        write(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise


def read(path: str) -> str | None:
    """Return the text of a kernel file, or None when the file or its group does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts).decode()
    except OSError:
        return None
    finally:
        os.close(fd)


def number(path: str) -> int | None:
    """Return the number in a kernel file, or None when the file does not exist or says "max"."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, 64).strip()
    except OSError:
        return None
    finally:
        os.close(fd)
    return int(text) if text.isdigit() else None


def counter(path: str, key: str) -> int | None:
    """Return the number after `key` in a kernel file of `key number` lines, or None."""
    for line in (read(path) or "").splitlines():
        found, _, value = line.partition(" ")
        if found == key:
            return int(value)
    return None


def make_dirs(parent: str, *names: str) -> str:
    """Make a chain of directories below `parent`, using the directories that exist. Return the last."""
    for part in names:
        parent = f"{parent}/{part}"
        try:
            make(parent)
        except FileExistsError:
            continue
    return parent


def make(directory: str) -> None:
    """Make a group that the owner may enter, whatever the umask. Otherwise no process could remove the group."""
    os.mkdir(directory, 0o755)
    if os.geteuid() != 0:
        os.chmod(directory, 0o755)


def open_procs(directory: str) -> int:
    """Return a descriptor through which a process joins the group at `directory`."""
    return os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)


def pids(directory: str) -> list[int]:
    """Return the processes of a group, without processes of a pid namespace that we do not see (the kernel says 0)."""
    return [int(line) for line in (read(f"{directory}/cgroup.procs") or "").split() if line != "0"]


def signal_all(directory: str) -> int:
    """Kill the processes that are in the group now. Return how many there were.

    Signals go by pidfd, and only to a process that is still in the group after its pidfd was opened: a process read
    from cgroup.procs may have ended, and its number may belong to another process by now.
    """
    found = pids(directory)
    handles = []
    for pid in found:
        try:
            handles.append((pid, os.pidfd_open(pid)))
        except OSError:
            continue  # ended
    still = set(pids(directory)) if handles else set()
    for pid, fd in handles:
        try:
            if pid in still:
                _send_kill(fd)
        finally:
            os.close(fd)
    return len(found)


def _send_kill(fd: int) -> None:
    from signal import pidfd_send_signal

    try:
        pidfd_send_signal(fd, _SIGKILL)
    except ProcessLookupError:
        return


def rmdir_until(directories: Iterable[str], deadline: float) -> bool:
    """Remove empty groups in this order (deepest first), trying a busy group again until the deadline.

    Returns whether all of them are gone.
    """
    for directory in directories:
        pause = 0.0005
        while True:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass  # gone, as it should be
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
                continue
            break
    return True


def names(directory: str) -> list[str]:
    """Return the names of the groups directly below `directory`; none when it is gone, or closed to us."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, PermissionError):
        return []


def remove_if_empty(directory: str) -> None:
    """Remove a group that is empty; leave a group that is in use or gone."""
    for _ in range(_EMPTYING_TRIES):
        try:
            os.rmdir(directory)
            return
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
                raise
            if error.errno != errno.EBUSY or not read(f"{directory}/cgroup.procs"):
                return
        time.sleep(0.001)  # one of our processes in the group is ending
