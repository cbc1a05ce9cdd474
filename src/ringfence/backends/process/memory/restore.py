"""Puts a memory image into a fresh session of another sandbox, which goes on where the original was stopped.

The target was made like every other sandbox and keeps its restrictions: this module makes system calls in its name,
under its own filter, and writes to its memory. Big runs are mapped copy-on-write from the image that all copies share.
"""

from __future__ import annotations

from ringfence.backends.process.memory.capture import (
    MemoryImage,
    Run,
    action,
    check_owner,
    explain,
    handled,
    number_inside,
    refuse,
)
from ringfence.backends.process.memory.layout import Pages, Range, TraceError, ranges
from ringfence.backends.process.memory.tracee import Tracee

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMAGE_FD = 5  # the target's descriptor of the image
_NR_OPEN, _NR_CLOSE, _NR_LSEEK, _NR_MMAP, _NR_MUNMAP, _NR_BRK, _NR_SIGACTION = 2, 3, 8, 9, 11, 12, 13
_NR_MADVISE = 28
_NR_DUP3, _NR_CHDIR, _NR_UMASK, _NR_GETRANDOM = 292, 80, 95, 318
_PRIVATE_FIXED, _ANONYMOUS = 0x12, 0x20
_DONTNEED, _WIPE_ON_FORK = 4, 18
_O_CLOEXEC = 0o2000000
_NOWHERE = (1 << 64) - 1
_PIECE = 1 << 16


def put(image: MemoryImage, pid: int, owns: Callable[[int], bool]) -> None:
    """Put the image into session `pid`. Raises UnsupportedError where it cannot; the session must then be ended."""
    assert image.state is not None
    try:
        with Tracee(pid) as tracee:
            check_owner(pid, owns)
            if number_inside(pid) in image.had:
                raise refuse("its copy has the process number of the original, by which libraries tell them apart")
            tracee.keep_clear_of(image.state.registers)
            _make_layout_equal(image, tracee)
            _drop_pages(image, tracee)
            _put_pages(image, tracee)
            _wipe(image, tracee)
            tracee.call(_NR_CLOSE, IMAGE_FD)
            _open_files(image, tracee)
            _set_signals(image, tracee)
            tracee.call(_NR_UMASK, image.umask)
            tracee.become(image.state)
    except (TraceError, OSError) as error:
        raise explain(error) from None


def _key(of: Range) -> tuple[object, ...]:
    return (of.first, of.last, of.protection, of.offset, of.inode, of.path)


def _make_layout_equal(image: MemoryImage, tracee: Tracee) -> None:
    here = ranges(tracee.pid)
    wanted = {_key(each) for each in image.ranges}
    there = {_key(each) for each in here}
    for each in here:
        if _key(each) not in wanted and not each.special:
            tracee.call(_NR_MUNMAP, each.first, each.size)
    _set_heap(image, here, tracee)
    _grow_stack(image, here, tracee)
    opened = ("", -1)  # the ranges of one file follow each other
    for each in image.ranges:
        if _key(each) not in there and not each.special:
            opened = _map(each, opened, tracee)
    if opened[1] >= 0:
        tracee.call(_NR_CLOSE, opened[1])


def _set_heap(image: MemoryImage, here: list[Range], tracee: Tracee) -> None:
    wanted = [each for each in image.ranges if each.path == "[heap]"]
    found = [each for each in here if each.path == "[heap]"]
    if bool(wanted) != bool(found) or (wanted and wanted[0].first != found[0].first):
        raise refuse("its heap is at another address than in a new session")
    if wanted and wanted[-1].last != found[-1].last:
        tracee.call(_NR_BRK, wanted[-1].last)


def _grow_stack(image: MemoryImage, here: list[Range], tracee: Tracee) -> None:
    wanted = next(each for each in image.ranges if each.path == "[stack]")
    found = next(each for each in here if each.path == "[stack]")
    if wanted.last != found.last:
        raise refuse("its stack is at another address than in a new session")
    if wanted.first < found.first:
        tracee.call(_NR_GETRANDOM, wanted.first, 8, 0)  # the kernel writes there: the stack grows down to it


def _map(each: Range, opened: tuple[str, int], tracee: Tracee) -> tuple[str, int]:
    """Map a range in the target. `opened`: the file open there, by path and descriptor. Return the one open now."""
    if each.anonymous:
        flags = _PRIVATE_FIXED | _ANONYMOUS
        tracee.call(_NR_MMAP, each.first, each.size, each.bits, flags, _NOWHERE, 0)
        return opened
    if each.path != opened[0]:
        if opened[1] >= 0:
            tracee.call(_NR_CLOSE, opened[1])
        opened = (each.path, _open(each.path, 0, tracee))
    tracee.call(_NR_MMAP, each.first, each.size, each.bits, _PRIVATE_FIXED, opened[1], each.offset)
    return opened


def _open(path: str, flags: int, tracee: Tracee) -> int:
    tracee.write(tracee.scratch, path.encode("utf-8", "surrogateescape") + b"\0")
    return tracee.call(_NR_OPEN, tracee.scratch, flags, 0)


def _drop_pages(image: MemoryImage, tracee: Tracee) -> None:
    """Empty the pages that the zygote has filled and that are empty in the original."""
    starts = [run.address for run in image.runs]
    pages = Pages(tracee.pid)
    try:
        for each in image.ranges:
            if not each.of_the_kernel and each.first not in image.wiped:
                for address, size in list(pages.runs(each)):
                    for first, last in _between(image.runs, starts, address, address + size):
                        tracee.call(_NR_MADVISE, first, last - first, _DONTNEED)
    finally:
        pages.close()


def _between(runs: list[Run], starts: list[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that no run covers. `runs` is in order, and `starts` holds their addresses."""
    from bisect import bisect_right

    for number in range(max(bisect_right(starts, first) - 1, 0), len(runs)):
        run = runs[number]
        if run.address >= last:
            break
        if run.address > first:
            yield first, run.address
        first = max(first, run.address + run.size)
    if first < last:
        yield first, last


def _put_pages(image: MemoryImage, tracee: Tracee) -> None:
    assert image.view is not None
    protections = {each.first: each for each in image.ranges}
    starts = sorted(protections)
    with memoryview(image.view) as view:
        for run in image.runs:
            if run.mappable:
                bits = _range_of(run, starts, protections).bits
                tracee.call(_NR_MMAP, run.address, run.size, bits, _PRIVATE_FIXED, IMAGE_FD, run.offset)
            else:
                _write(run, view, tracee)


def _range_of(run: Run, starts: list[int], by_start: dict[int, Range]) -> Range:
    from bisect import bisect_right

    return by_start[starts[bisect_right(starts, run.address) - 1]]


def _write(run: Run, view: memoryview, tracee: Tracee) -> None:
    """Write a run into the target. Equal pieces, most of a fork's memory, are left shared with the zygote."""
    for start in range(0, run.size, _PIECE):
        size = min(_PIECE, run.size - start)
        wanted = view[run.offset + start : run.offset + start + size]
        try:
            equal = tracee.read(run.address + start, size) == wanted
        except OSError:
            equal = False
        if not equal:
            tracee.write(run.address + start, wanted)


def _wipe(image: MemoryImage, tracee: Tracee) -> None:
    """Empty the ranges that a fork's child has empty.

    The target's own content goes too: with it a random generator would not notice the copy.
    """
    for each in image.ranges:
        if each.first in image.wiped:
            tracee.call(_NR_MADVISE, each.first, each.size, _DONTNEED)
            tracee.call(_NR_MADVISE, each.first, each.size, _WIPE_ON_FORK)


def _open_files(image: MemoryImage, tracee: Tracee) -> None:
    tracee.write(tracee.scratch, image.cwd.encode("utf-8", "surrogateescape") + b"\0")
    tracee.call(_NR_CHDIR, tracee.scratch)
    for file in image.files:
        fd = _open(file.path, file.flags, tracee)
        tracee.call(_NR_LSEEK, fd, file.position, 0) if file.position else None
        if fd != file.fd:
            tracee.call(_NR_DUP3, fd, file.fd, file.flags & _O_CLOEXEC)
            tracee.call(_NR_CLOSE, fd)


def _set_signals(image: MemoryImage, tracee: Tracee) -> None:
    for number in handled(tracee.pid) | set(image.actions):
        wanted = image.actions.get(number, bytes(32))
        if action(tracee, number) != wanted:
            tracee.write(tracee.scratch, wanted)
            tracee.call(_NR_SIGACTION, number, tracee.scratch, 0, 8)
