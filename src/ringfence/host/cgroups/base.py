"""What cgroup v1 and v2 have in common: the interface of a tree and of a group, and access to kernel files."""

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
    """What one sandbox may use. All numbers are above zero; the policy has checked them."""

    memory_bytes: int
    processes: int
    cpus: float


class GroupUsage(Struct):
    """What one sandbox has used so far. None: this kernel does not count it."""

    cpu_s: float | None
    memory_peak_bytes: int | None
    processes_peak: int | None
    oom_kills: int | None


class Mechanisms(Struct):
    """The words for `Enforcement`: what holds each limit. None: no cgroup controller does."""

    memory: str | None
    cpu: str | None
    cpu_time: str | None
    processes: str | None


class Group(ABC):
    """The cgroup of one sandbox. Not safe for use from two threads at once."""

    box_id: str

    @abstractmethod
    def join_fds(self) -> list[int]:
        """Write-only descriptors; a process of one thread that writes b"0" to each of them has joined.

        Opened here because the kernel checks the credentials of the opener. The caller closes them. On cgroup v2 the
        first write after a quiet moment costs 5 to 15 ms (an RCU grace period): `into_fd` is the way without it.
        """

    def into_fd(self) -> int | None:
        """v2: a descriptor of the group itself, in which a process can be born. The caller closes it. None: v1."""
        return None

    @abstractmethod
    def set(self, limits: GroupLimits) -> None:
        """Put these limits in place of the ones before. OSError when the kernel refuses one."""

    @abstractmethod
    def cpu_fd(self) -> int | None:
        """A read-only descriptor of the CPU time counter, for the monitor's clock. None: nothing counts it."""

    @abstractmethod
    def usage(self) -> GroupUsage:
        """Read the counters. All None after `remove`."""

    @property
    @abstractmethod
    def can_freeze(self) -> bool:
        """Whether there is a freezer."""

    @abstractmethod
    def freeze(self, timeout_s: float = 2.0) -> bool:
        """Stop every process of the group; False when one did not stop in time (the rest stays stopped)."""

    @abstractmethod
    def is_frozen(self) -> bool:
        """Whether every process of the group stands still."""

    @abstractmethod
    def thaw(self) -> None:
        """Let a frozen group run on. Does nothing to one that runs."""

    @abstractmethod
    def freezer_fd(self) -> int | None:
        """v1's freezer.state or v2's cgroup.freeze, to read and to write; None without a freezer.

        For the monitor: it pauses an idle sandbox, and on v1 a SIGKILL does nothing to a frozen process (D18).
        """

    @abstractmethod
    def kill(self, timeout_s: float = 2.0) -> bool:
        """SIGKILL every process, frozen or not, and those they fork meanwhile. True when the group is empty."""

    @abstractmethod
    def remove(self, timeout_s: float = 2.0) -> bool:
        """Kill, then remove the group. True when nothing is left of it; may be called again at any time."""


class Tree(ABC):
    """Where this library process makes its groups."""

    kind: Kind
    has_memory: bool
    has_cpu: bool
    has_pids: bool
    has_freezer: bool

    @property
    @abstractmethod
    def mechanisms(self) -> Mechanisms:
        """What holds each limit of a group of this tree."""

    @abstractmethod
    def create(self, box_id: str, limits: GroupLimits) -> Group:
        """A new group. OSError when the kernel refuses; then nothing is left of it."""

    @abstractmethod
    def owner_directories(self) -> list[str]:
        """Directories of this process, below which its groups are: the zygote removes them when the library is gone."""

    @property
    def path(self) -> str | None:
        """v2: the directory of this process's groups, worth a `cgroup` note in its record. None: found by name."""
        return None

    moves_zygotes = False  # whether one has to be where it may make groups before it forks

    def adopt(self, zygote_pid: int) -> bool:  # noqa: ARG002  # most trees take it where it is
        """Have a zygote that has just begun moved there. False: it has to be started with `launch_prefix`."""
        return True

    def launch_prefix(self) -> list[str]:
        """What to put before the zygote's argv, so that it starts there. Mostly nothing."""
        return []

    def attach(self, zygote_pid: int) -> None:  # noqa: B027  # most trees need nothing here
        """Tell the tree that a zygote which was adopted, or started so, runs; it is moved to its leaf."""

    @abstractmethod
    def close(self, timeout_s: float = 2.0) -> bool:
        """Kill and remove the groups made through this tree, then the directories above that nobody uses any more.

        Another tree of the same process keeps its groups. True when all of them are gone.
        """


def check_box_id(box_id: str) -> str:
    """`box_id`, when it can be one directory name that is no file of the kernel's; ValueError otherwise."""
    if not box_id or "/" in box_id or "\0" in box_id or box_id.startswith(".") or "." in box_id or box_id == "tasks":
        raise ValueError(f"{box_id!r} cannot name a cgroup: use letters, digits, '-' and '_'")
    return box_id


def quota_us(cpus: float) -> int:
    """CPU time per period for so many CPUs."""
    return max(_MIN_QUOTA_US, round(cpus * CPU_PERIOD_US))


def write(path: str, text: str) -> None:
    """Write one value to a kernel file, in one call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def write_if_there(path: str, text: str) -> None:
    """The same, of a group that another may be removing: the command that ends, its zygote, a sweep."""
    try:
        write(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise


def read(path: str) -> str | None:
    """A kernel file's text; None when it, or the group, is not there."""
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
    """A kernel file that holds one number; None when it is not there or says "max"."""
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
    """The number after `key` in a kernel file of `key number` lines."""
    for line in (read(path) or "").splitlines():
        found, _, value = line.partition(" ")
        if found == key:
            return int(value)
    return None


def make_dirs(parent: str, *names: str) -> str:
    """Make a chain of directories below one that exists; those there already are used. Returns the last."""
    for part in names:
        parent = f"{parent}/{part}"
        try:
            make(parent)
        except FileExistsError:
            continue
    return parent


def make(directory: str) -> None:
    """One group, whatever the caller's umask: one that its owner may not enter, nobody could remove again."""
    os.mkdir(directory, 0o755)
    if os.geteuid() != 0:
        os.chmod(directory, 0o755)


def open_procs(directory: str) -> int:
    """A descriptor through which a process joins the group at `directory`."""
    return os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)


def pids(directory: str) -> list[int]:
    """The processes of one group. A process of a pid namespace that we do not see reads 0 and is left out."""
    return [int(line) for line in (read(f"{directory}/cgroup.procs") or "").split() if line != "0"]


def signal_all(directory: str) -> int:
    """SIGKILL what is in the group now; returns how many there were.

    By pidfd, and only when the process is in the group after the pidfd was had: a pid read from cgroup.procs may
    have ended, and its number may be somebody else's by now.
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
    """Remove empty groups in this order (deepest first); a busy one is tried again until the deadline."""
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
    """The groups directly below one; none when it is gone, or closed to us."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, PermissionError):
        return []


def remove_if_empty(directory: str) -> None:
    """Remove a group that nobody uses; one that is in use, or gone, is left as it is."""
    for _ in range(_EMPTYING_TRIES):
        try:
            os.rmdir(directory)
            return
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
                raise
            if error.errno != errno.EBUSY or not read(f"{directory}/cgroup.procs"):
                return
        time.sleep(0.001)  # a process of ours in it is ending
