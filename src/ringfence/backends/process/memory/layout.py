"""The address space of a process as /proc tells it: which ranges there are, and which pages are its own."""

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
OURS = "/memfd:ringfence-memory"  # how a range of an earlier copy's image is named here
_KERNELS = ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]", "[uprobes]")  # the same for all forks of a zygote
_SPECIAL = (*_KERNELS, "[stack]", "[heap]")
# ioctl(PAGEMAP_SCAN): struct pm_scan_arg is twelve words; page_region three.
_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED, _ZERO = 4, 8, 16, 32
_REGIONS = 4096
_ENTRIES = 1 << 16  # of pagemap, read at a time: a guest may reserve terabytes
# Of a guest's making: how many ranges there are, and what paths they name. A session has some hundreds of them (O22).
_MOST_RANGES = 1 << 15
_MOST_TEXT = 1 << 23  # bytes of the list of them


class TraceError(Exception):
    """The process did something else than stand still, or is more than can be copied."""


@final
class Range(Struct):
    """One line of /proc/<pid>/maps."""

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
        return sum(bit for letter, bit in (("r", 1), ("w", 2), ("x", 4)) if letter in self.protection)

    @property
    def of_the_kernel(self) -> bool:
        return self.path in _KERNELS

    @property
    def special(self) -> bool:
        """Neither made nor removed: the kernel's, the stack, the heap."""
        return self.path in _SPECIAL

    @property
    def anonymous(self) -> bool:
        return not self.inode and not self.special


def identity(fd: int) -> tuple[str, int]:
    """Device and inode of a file, as `maps` tells them."""
    what = os.fstat(fd)
    return f"{os.major(what.st_dev):02x}:{os.minor(what.st_dev):02x}", what.st_ino


def maps_of(pid: int) -> Iterator[bytes]:
    """The lines of /proc/<pid>/maps, one after the other. Raises TraceError for more of them than are kept.

    As bytes: as text, a carriage return in a file's name would end a line.
    """
    left, count = _MOST_TEXT, 0
    with open(f"/proc/{pid}/maps", "rb") as file:
        for row in file:
            left, count = left - len(row), count + 1
            if count > _MOST_RANGES or left < 0:
                raise TraceError(f"its memory has more than {_MOST_RANGES:,} ranges, or longer names than are kept")
            yield row


def ranges(pid: int, image: tuple[str, int] | None = None) -> list[Range]:
    """In order. What it maps from `image`, whose copy it is, counts as anonymous: it is this process's own now.

    Known by its identity: a guest may give a file in memory any name. Raises TraceError for too many.
    """
    found = []
    names: dict[str, str] = {}  # of one file's many ranges: one text for all of them
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
    """Where the ranges begin that a fork's child has empty: what must not be twice, such as a generator's state.

    libc's own is one since Linux 6.11 and glibc 2.41: with it, copies would draw the same random numbers (K05).
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
    """Which pages of a process are private memory, present or swapped out.

    Without those that it only read: all of them are the kernel's one page of zeros. Before Linux 6.7 they cannot be
    told from others.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._regions = ctypes.create_string_buffer(24 * _REGIONS)
        self._scans = True

    def close(self) -> None:
        os.close(self._fd)

    def runs(self, of: Range) -> Iterator[tuple[int, int]]:
        """Address and size of each."""
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
            if not data:  # it has ended
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
