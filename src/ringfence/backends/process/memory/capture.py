"""Copies the memory of a session that waits for a cell into a sealed file in memory, which all copies share.

The session goes on afterwards as if nothing had happened. A part that no copy could have is refused by name.
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
# A guest decides these numbers, and each run or path is an object of ours (O22). A session has some hundreds of each.
_MOST_RUNS = 1 << 17
_MOST_PATHS = 1 << 20  # characters of the paths of open files
_STANDARD = 5  # 0 to 2, and the two of the session's line: every session has its own
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
    mappable: bool  # big and in anonymous memory: copies map it, smaller runs are written


class MemoryImage:
    """The memory of a session at one moment. `close` frees the file, once no copy maps the pages any more."""

    def __init__(self, generation: object) -> None:
        self.generation = generation
        self.fd = -1
        self.identity: tuple[str, int] | None = None  # by which /proc/<pid>/maps shows this image
        self.ranges: list[Range] = []
        self.wiped: frozenset[int] = frozenset()  # where ranges begin that a copy has empty
        self.runs: list[Run] = []
        self.state: State | None = None
        self.files: tuple[OpenFile, ...] = ()
        self.cwd = "/"
        self.umask = 0o022
        self.actions: dict[int, bytes] = {}
        self.view: mmap.mmap | None = None
        # The process numbers inside that this memory had. OpenSSL, of which a wheel may bring its own, recognizes a
        # forked copy of its state by the number alone: a copy with one of these would draw the same keys (K05).
        self.had: frozenset[int] = frozenset()

    @property
    def size_bytes(self) -> int:
        return sum(run.size for run in self.runs)

    def __del__(self) -> None:
        self.close()  # where the caller did not: the memory is the host's

    def close(self) -> None:
        view, self.view = self.view, None
        if view is not None:
            try:
                view.close()
            except BufferError:
                pass  # an interrupted caller still holds a part of the view; it is freed with that part
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def take(
    pid: int, owns: Callable[[int], bool], generation: object, room: int, copy_of: tuple[str, int] | None
) -> MemoryImage:
    """Copy the memory of session `pid`, which then goes on.

    `copy_of`: the identity of the image that the session was made from.
    Raises UnsupportedError, with the reason, for a part that a copy could not have, and for more than `room` bytes.
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
    """Return the error for a session that cannot be copied."""
    return UnsupportedError(why, code="fork", fix=_FIX)


def explain(error: Exception) -> UnsupportedError:
    """Return the error for a process that could not be stopped, or not be read or changed."""
    if isinstance(error, PermissionError):
        return refuse("this host forbids ptrace (kernel.yama.ptrace_scope = 3, or a container without it)")
    if isinstance(error, ProcessLookupError):
        return refuse("it has ended")
    if isinstance(error, TraceError):
        return refuse(str(error))
    return refuse(f"the kernel refused a step: {error}")


def check_owner(pid: int, owns: Callable[[int], bool]) -> None:
    """Refuse a stopped process that is not the sandbox's: the number of an ended session may be reused (C08)."""
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
    """Refuse a process without a stack. A guest can map something else over the top of its stack and go on."""
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
    """Return the number that a process has inside its sandbox."""
    return int(proc.fields(f"/proc/{pid}/status")["NSpid"].split()[-1])


def _cwd(pid: int) -> str:
    path = os.readlink(f"/proc/{pid}/cwd")
    if path.endswith(" (deleted)"):
        raise refuse("its working directory was removed")
    return path


def _umask(pid: int) -> int:
    return int(proc.fields(f"/proc/{pid}/status")["Umask"], 8)


def _actions(tracee: Tracee) -> dict[int, bytes]:
    """Return the action on each signal that is caught or ignored: 32 bytes, as the kernel represents an action."""
    return {number: action(tracee, number) for number in handled(tracee.pid)}


def handled(pid: int) -> set[int]:
    """Return the signals that a process catches or ignores."""
    fields = proc.fields(f"/proc/{pid}/status")
    bits = int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def action(tracee: Tracee, number: int) -> bytes:
    """Return the action on a signal, as the kernel represents it."""
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
        return  # a kernel without this file does not show such timers; they are rare in a session


def _take_pages(image: MemoryImage, tracee: Tracee, room: int) -> None:
    """Find the pages of the process and copy them, after a size check.

    The image is memory of the host, which no limit of the guest counts.
    """
    pages = Pages(tracee.pid)
    try:
        offset = 0
        for each in image.ranges:
            if each.of_the_kernel or each.first in image.wiped:
                continue
            # Pages that a copy maps from an earlier image and never wrote to are not its own: the range is taken whole.
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
    """Copy the pages into the image, with two threads where there is much: the session is stopped meanwhile."""
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
    """Copy pieces into the image through a small buffer, which stays in the CPU's cache.

    A page written by `pwrite` needs no clearing and no page fault, a mapped page needs both.
    """
    with mmap.mmap(-1, _CHUNK) as room, memoryview(room) as view:
        first = ctypes.c_char.from_buffer(room)
        try:
            for address, offset, size in pieces:
                done = 0
                while done < size:
                    count = tracee.read_into(ctypes.addressof(first), address + done, min(_CHUNK, size - done))
                    if not count:
                        raise TraceError("its memory cannot be read")
                    written = count if _is_zero(ctypes.addressof(first), count) else 0  # zeros stay a hole
                    while written < count:
                        written += os.pwrite(fd, view[written:count], offset + done + written)
                    done += count
        finally:
            del first  # otherwise the map could not be closed


def _is_zero(address: int, size: int) -> bool:
    """Return whether a piece of our own memory is all zeros: the first byte is, and each byte equals the next."""
    return ctypes.c_ubyte.from_address(address).value == 0 and _memcmp(address, address + 1, size - 1) == 0
