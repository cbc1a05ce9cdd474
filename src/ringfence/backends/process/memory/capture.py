"""Takes the memory of a session that waits for its next cell: one sealed file in memory that copies share.

The session goes on afterwards as if nothing had been. What cannot be carried over is refused by name.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct

from ringfence.backends.process.memory.layout import OURS, Pages, Range, TraceError, identity, ranges, wiped_on_fork
from ringfence.backends.process.memory.tracee import State, Tracee
from ringfence.errors import UnsupportedError
from ringfence.shared import proc
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SEAL = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE
_ADD_SEALS = 1033
_CHUNK = 1 << 18
_PIECE = 1 << 22  # what a thread takes at a time
_MUCH = 1 << 24  # bytes from which on a second thread pays
# Of a guest's making, and each of them an object of ours (O22). A session has some hundreds of each.
_MOST_RUNS = 1 << 17
_MOST_PATHS = 1 << 20  # characters of the paths of open files
_STANDARD = 5  # 0 to 2 and the two of the line: every session has its own
_NR_SIGACTION, _NR_GETITIMER = 13, 36
_TIMERS = {0: "ITIMER_REAL", 1: "ITIMER_VIRTUAL", 2: "ITIMER_PROF"}
_OPEN_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_DIRECTORY | os.O_CLOEXEC
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@final
class OpenFile(Struct):
    """A regular file or folder below the workspace, or a harmless device."""

    fd: int
    path: str
    flags: int
    position: int


@final
class Run(Struct):
    """Pages that follow each other, and where they are in the image."""

    address: int
    size: int
    offset: int
    mappable: bool  # big and in a range of its own kind: copies map it instead of getting it written


class MemoryImage:
    """One session at one moment. `close` gives the memory back when no copy uses it any more."""

    def __init__(self, generation: object) -> None:
        self.generation = generation
        self.fd = -1
        self.identity: tuple[str, int] | None = None  # how a process that maps it tells that
        self.ranges: list[Range] = []
        self.wiped: frozenset[int] = frozenset()  # where ranges begin that a copy has empty
        self.runs: list[Run] = []
        self.state: State | None = None
        self.files: tuple[OpenFile, ...] = ()
        self.cwd = "/"
        self.umask = 0o022
        self.actions: dict[int, bytes] = {}
        self.view: mmap.mmap | None = None
        # Process numbers inside that its memory had. OpenSSL, of which a wheel may bring its own, takes its state for
        # another process's by the number alone: a copy with one of these would draw the same keys (K05).
        self.had: frozenset[int] = frozenset()

    @property
    def size_bytes(self) -> int:
        return sum(run.size for run in self.runs)

    def __del__(self) -> None:
        self.close()  # one that nobody deleted: its memory is the host's

    def close(self) -> None:
        view, self.view = self.view, None
        if view is not None:
            try:
                view.close()
            except BufferError:
                pass  # an interrupt on its way holds a part of it: it goes with that
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def take(
    pid: int, owns: Callable[[int], bool], generation: object, room: int, copy_of: tuple[str, int] | None
) -> MemoryImage:
    """Raises UnsupportedError, with the reason, for what a copy could not have, and for more than `room` bytes.

    `copy_of`: the identity of the image that it was made from.
    """
    image = MemoryImage(generation)
    try:
        with Tracee(pid) as tracee:
            check_owner(pid, owns)
            _refuse_threads(pid)
            image.had = frozenset({number_inside(pid)})
            image.ranges = ranges(pid, copy_of)
            image.wiped = wiped_on_fork(pid)
            _refuse_shared(image.ranges)
            _refuse_stackless(image.ranges)
            image.files = _open_files(pid)
            image.cwd = _cwd(pid)
            image.umask = _umask(pid)
            image.state = tracee.state()
            image.actions = _actions(tracee)
            _refuse_timers(tracee, pid)
            _take_pages(image, tracee, room)
    except (TraceError, OSError) as error:
        image.close()
        raise explain(error) from None
    except BaseException:
        image.close()
        raise
    return image


_FIX = "fork(memory=False) copies the files alone"


def refuse(why: str) -> UnsupportedError:
    return UnsupportedError(why, code="fork", fix=_FIX)


def explain(error: Exception) -> UnsupportedError:
    """Why a process could not be stopped."""
    if isinstance(error, PermissionError):
        return refuse("this host forbids ptrace (kernel.yama.ptrace_scope = 3, or a container without it)")
    if isinstance(error, ProcessLookupError):
        return refuse("it has ended")
    if isinstance(error, TraceError):
        return refuse(str(error))
    return refuse(f"the kernel refused a step: {error}")


def check_owner(pid: int, owns: Callable[[int], bool]) -> None:
    """A session may have ended, and its number be another's by now: it is looked at while it stands still (C08)."""
    if not owns(pid):
        raise refuse("it has ended")


def _refuse_threads(pid: int) -> None:
    count = len(os.listdir(f"/proc/{pid}/task"))
    if count != 1:
        raise refuse(f"it has {count} threads, and a copy would have one")


def _refuse_shared(found: list[Range]) -> None:
    for each in found:
        if each.shared and "w" in each.protection:
            raise refuse(f"it shares writable memory ({each.path or 'anonymous'})")
        if each.inode and each.path.startswith("/memfd:"):
            raise refuse(f"it maps a file in memory ({each.path.removesuffix(' (deleted)')})")


def _refuse_stackless(found: list[Range]) -> None:
    """A guest can map something else over the top of its stack, and live."""
    if not any(each.path == "[stack]" for each in found):
        raise refuse("its stack is not where the kernel put it")


def _open_files(pid: int) -> tuple[OpenFile, ...]:
    found: list[OpenFile] = []
    left = _MOST_PATHS
    for name in os.listdir(f"/proc/{pid}/fd"):
        fd = int(name)
        if fd >= _STANDARD:
            found.append(_open_file(pid, fd))
            left -= len(found[-1].path)
            if left < 0:
                raise refuse(f"the paths of its open files have more than {_MOST_PATHS:,} characters")
    return tuple(found)


def _open_file(pid: int, fd: int) -> OpenFile:
    path = os.readlink(f"/proc/{pid}/fd/{fd}")
    what = os.stat(f"/proc/{pid}/fd/{fd}")
    carried = (stat.S_ISREG(what.st_mode) or stat.S_ISDIR(what.st_mode)) and path.startswith("/workspace")
    if not carried and path not in _DEVICES:
        raise refuse(f"it has {path} open as descriptor {fd}, which is not a file below /workspace")
    if path.endswith(" (deleted)"):
        raise refuse(f"it has a deleted file open as descriptor {fd}")
    fields = proc.fields(f"/proc/{pid}/fdinfo/{fd}")
    return OpenFile(fd, path, int(fields["flags"], 8) & _OPEN_FLAGS, int(fields["pos"]))


def number_inside(pid: int) -> int:
    """What it has for its own number."""
    return int(proc.fields(f"/proc/{pid}/status")["NSpid"].split()[-1])


def _cwd(pid: int) -> str:
    path = os.readlink(f"/proc/{pid}/cwd")
    if path.endswith(" (deleted)"):
        raise refuse("its working directory was removed")
    return path


def _umask(pid: int) -> int:
    return int(proc.fields(f"/proc/{pid}/status")["Umask"], 8)


def _actions(tracee: Tracee) -> dict[int, bytes]:
    """What it does on each signal that it does not leave to the kernel: 32 bytes, as the kernel holds them."""
    return {number: action(tracee, number) for number in handled(tracee.pid)}


def handled(pid: int) -> set[int]:
    """Signals that are caught or ignored."""
    fields = proc.fields(f"/proc/{pid}/status")
    bits = int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def action(tracee: Tracee, number: int) -> bytes:
    tracee.call(_NR_SIGACTION, number, 0, tracee.scratch, 8)
    return tracee.read(tracee.scratch, 32)


def _refuse_timers(tracee: Tracee, pid: int) -> None:
    for which, name in _TIMERS.items():
        tracee.call(_NR_GETITIMER, which, tracee.scratch)
        if any(struct.unpack("4q", tracee.read(tracee.scratch, 32))):
            raise refuse(f"a timer runs in it ({name})")
    try:
        with open(f"/proc/{pid}/timers", "rb") as file:
            if file.read(1):
                raise refuse("a timer runs in it (timer_create)")
    except FileNotFoundError:
        return  # a kernel that does not tell has no checkpoint support either: such timers are rare in a session


def _take_pages(image: MemoryImage, tracee: Tracee, room: int) -> None:
    """Looks at the size before it copies: the image is the host's memory, and no limit of the guest's counts it."""
    pages = Pages(tracee.pid)
    try:
        offset = 0
        for each in image.ranges:
            if each.of_the_kernel or each.first in image.wiped:
                continue
            # What an earlier copy mapped and never wrote to is in no page of its own: it is taken whole.
            whole = each.path == OURS
            for address, size in [(each.first, each.size)] if whole else pages.runs(each):
                image.runs.append(Run(address, size, offset, whole or (each.anonymous and size >= 1 << 17)))
                offset += size
                if offset > room:
                    raise refuse(f"its memory is more than the sandbox's limits leave for a copy ({room >> 20} MiB)")
                if len(image.runs) > _MOST_RUNS:
                    raise refuse(f"its memory is in more than {_MOST_RUNS:,} pieces")
    finally:
        pages.close()
    image.fd = os.memfd_create(OURS.removeprefix("/memfd:"), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    image.identity = identity(image.fd)
    os.ftruncate(image.fd, max(offset, 1))
    _copy(tracee, image)
    fcntl.fcntl(image.fd, _ADD_SEALS, _SEAL)
    image.view = mmap.mmap(image.fd, max(offset, 1), prot=mmap.PROT_READ)


def _copy(tracee: Tracee, image: MemoryImage) -> None:
    """By two threads where there is much: the kernel copies, and the session stands still meanwhile."""
    pieces = iter(
        [
            (run.address + done, run.offset + done, min(_PIECE, run.size - done))
            for run in image.runs
            for done in range(0, run.size, _PIECE)
        ]
    )
    if image.size_bytes < _MUCH:
        _copy_pieces(tracee, image.fd, pieces)
        return
    import threading

    failures: list[Exception] = []

    def help_along() -> None:
        try:
            _copy_pieces(tracee, image.fd, pieces)
        except (TraceError, OSError) as error:
            failures.append(error)

    helper = threading.Thread(target=help_along, name="ringfence-copy")
    helper.start()
    try:
        _copy_pieces(tracee, image.fd, pieces)
    finally:
        helper.join()
    if failures:
        raise failures[0]


def _copy_pieces(tracee: Tracee, fd: int, pieces: Iterator[tuple[int, int, int]]) -> None:
    """Through a buffer that stays in the cache: a written page needs no clearing and no fault, a mapped one both."""
    with mmap.mmap(-1, _CHUNK) as room, memoryview(room) as view:
        first = ctypes.c_char.from_buffer(room)
        try:
            for address, offset, size in pieces:
                done = 0
                while done < size:
                    count = tracee.read_into(ctypes.addressof(first), address + done, min(_CHUNK, size - done))
                    if not count:
                        raise TraceError("its memory cannot be read")
                    written = count if _is_zero(ctypes.addressof(first), count) else 0  # a hole costs nothing
                    while written < count:
                        written += os.pwrite(fd, view[written:count], offset + done + written)
                    done += count
        finally:
            del first  # or the map could not be closed


def _is_zero(address: int, size: int) -> bool:
    """Memory of ours: its first byte is zero, and each byte equals the next."""
    return ctypes.c_ubyte.from_address(address).value == 0 and _memcmp(address, address + 1, size - 1) == 0
