"""The address space of a process, read from /proc: the ranges, and the pages that are the process's own."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
OURS = "/memfd:ringfence-memory"  # the path given here to a range that is mapped from an earlier image
_KERNELS = ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]", "[uprobes]")  # the same for all forks of a zygote
_SPECIAL = (*_KERNELS, "[stack]", "[heap]")
# ioctl(PAGEMAP_SCAN): struct pm_scan_arg is twelve words; page_region three.
_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED, _ZERO = 4, 8, 16, 32
_REGIONS = 4096
_ENTRIES = 1 << 16  # of pagemap, read at a time: a guest may reserve terabytes
# A guest decides the number of ranges and the paths they name (O22). A session has some hundreds of ranges.
_MOST_RANGES = 1 << 15
_MOST_TEXT = 1 << 23  # bytes of /proc/<pid>/maps


class TraceError(Exception):
    """The process did not stay stopped, or is larger than can be copied."""


@final
class Range(Struct):
    """A line of /proc/<pid>/maps."""

    first: int
    last: int
    protection: str
    shared: bool
    offset: int
    inode: int
    path: str

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def bits(self) -> int:
        """The protection as `mmap` takes it."""
        return sum(bit for letter, bit in (("r", 1), ("w", 2), ("x", 4)) if letter in self.protection)

    @property
    def of_the_kernel(self) -> bool:
        return self.path in _KERNELS

    @property
    def special(self) -> bool:
        """Whether a copy neither makes nor removes this range: the kernel's own, the stack, the heap."""
        return self.path in _SPECIAL

    @property
    def anonymous(self) -> bool:
        return not self.inode and not self.special


def identity(fd: int) -> tuple[str, int]:
    """Return device and inode of a file, as /proc/<pid>/maps writes them."""
    what = os.fstat(fd)
    return f"{os.major(what.st_dev):02x}:{os.minor(what.st_dev):02x}", what.st_ino


def maps_of(pid: int) -> Iterator[bytes]:
    """Yield the lines of /proc/<pid>/maps. Raises TraceError for too many lines or too much text.

    The lines are bytes: in text, a carriage return in a file's name would end a line.
    """
    left = _MOST_TEXT
    count = 0
    with open(f"/proc/{pid}/maps", "rb") as file:
        for row in file:
            left, count = left - len(row), count + 1
            if count > _MOST_RANGES or left < 0:
                raise TraceError(f"its memory has more than {_MOST_RANGES:,} ranges, or longer names than are kept")
            yield row


def ranges(pid: int, image: tuple[str, int] | None = None) -> list[Range]:
    """Return the ranges of a process in order. Raises TraceError for too many.

    `image`: the identity of the image that the process is a copy of. A range mapped from the image counts as anonymous,
    the process's own by now. By identity, because a guest may give a file in memory any name.
    """
    found = []
    names: dict[str, str] = {}  # so that the many ranges of one file share one text
    for line in maps_of(pid):
        row = line.decode("utf-8", "surrogateescape")
        where, flags, offset, device, inode, *path = row.rstrip("\n").split(None, 5)
        first, _, last = where.partition("-")
        name = path[0] if path else ""
        if name.startswith("[anon:"):
            name = ""
        mine = (device, int(inode)) == image
        found.append(
            Range(
                int(first, 16),
                int(last, 16),
                flags[:3],
                flags[3] == "s",
                0 if mine else int(offset, 16),
                0 if mine else int(inode),
                OURS if mine else names.setdefault(name, name),
            )
        )
    return found


def wiped_on_fork(pid: int) -> frozenset[int]:
    """Return the starts of the ranges that are empty in a fork's child, such as the state of a random generator.

    libc's own generator has such a range since Linux 6.11 and glibc 2.41. Copies that had the content of the range
    would draw the same random numbers (K05).
    """
    found = set()
    first = 0
    with open(f"/proc/{pid}/smaps", "rb") as file:  # as bytes: a carriage return in a file's name ends no line
        for row in file:
            name, _, rest = row.partition(b" ")
            if name == b"VmFlags:":
                if b"wf" in rest.split():
                    found.add(first)
            elif not name.endswith(b":"):
                first = int(name.partition(b"-")[0], 16)
    return frozenset(found)


class Pages:
    """The pages of a process that are private memory, present or swapped out.

    Pages that were only read are left out: all are the kernel's single page of zeros. Before Linux 6.7 such pages
    cannot be distinguished and are included.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._regions = ctypes.create_string_buffer(24 * _REGIONS)
        self._scans = True

    def close(self) -> None:
        os.close(self._fd)

    def runs(self, of: Range) -> Iterator[tuple[int, int]]:
        """Yield address and size of each run of such pages in a range."""
        if self._scans:
            try:
                yield from self._scanned(of)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTTY, errno.EINVAL):  # before Linux 6.7
                    raise
                self._scans = False
        yield from self._looked_up(of)

    def _scanned(self, of: Range) -> Iterator[tuple[int, int]]:
        start = of.first
        while start < of.last:
            words = (96, 0, start, of.last, 0, ctypes.addressof(self._regions), _REGIONS, 0)
            argument = bytearray(struct.pack("12Q", *words, _FILE | _ZERO, _FILE | _ZERO, _PRESENT | _SWAPPED, 0))
            count = fcntl.ioctl(self._fd, _SCAN, argument)
            reached = struct.unpack("12Q", argument)[4]
            for number in range(count):
                first, last, _ = struct.unpack_from("QQQ", self._regions, 24 * number)
                yield first, last - first
            if reached <= start:
                break
            start = reached

    def _looked_up(self, of: Range) -> Iterator[tuple[int, int]]:
        begun: int | None = None
        address = of.first
        while address < of.last:
            count = min(_ENTRIES, (of.last - address) // PAGE)
            data = os.pread(self._fd, count * 8, address // PAGE * 8)
            if not data:  # the process has ended
                return
            for entry in memoryview(data).cast("Q"):
                private = entry >> 62 and not entry >> 61 & 1  # present or swapped, and no file's
                if private and begun is None:
                    begun = address
                elif not private and begun is not None:
                    yield begun, address - begun
                    begun = None
                address += PAGE
        if begun is not None:
            yield begun, of.last - begun
